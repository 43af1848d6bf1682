"""What the README and the page on measuring say exists: commands, files, labs with their minutes, names in code, variables."""

import ast
import re
from pathlib import Path

import pytest

from labkit import __main__ as cli
from labkit import build, experiments, timing

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
METHOD = (build.NOTEBOOKS / "HOW_WE_MEASURE.md").read_text("utf-8")
FILES = dict(re.findall(r"^\[([\w-]+)\]: (\S+)$", METHOD, re.M))


def test_every_link_into_the_repository_leads_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert len(links) > 5 and [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("command", sorted(set(re.findall(r"python -m labkit (\w+)", README))))
def test_commands_exist(command, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main([command, "--help"])
    assert left.value.code == 0 and command in capsys.readouterr().out


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"(?:^|`)(?:PYTHON=\S+ )?make (\w+)", README, re.M))
    named = re.search(r"^\.PHONY: (.*)$", makefile, re.M)[1].split()
    assert {"lab", "test", "record"} <= targets <= set(named)
    assert set(re.findall(r"^python -m labkit (\w+)", README, re.M)) <= set(named)


def test_the_table_of_labs_agrees_with_the_labs():
    rows = dict(re.findall(r"\]\(notebooks/(\w+)\.ipynb\) \| (\d+) \|", README))
    said = {path.stem: re.search(r"\*\*Minutes:\*\* (\d+)", path.read_text("utf-8"))[1] for path in build.solutions()}
    assert rows == said, "the README's table of labs has a row for each, with its minutes"


def test_variables_are_read_somewhere():
    code = "".join(path.read_text("utf-8") for path in (ROOT / "labkit").glob("*.py"))
    variables = set(re.findall(r"LABKIT_\w+", README))
    assert variables and {name for name in variables if f'"{name}"' not in code} == set()


def names_in(path):
    """Return what a file of Python defines: functions, Class.method, and names that stand before a =."""
    found = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Assign):
            found |= {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found |= {node.name, *(f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef))}
    return found


@pytest.mark.parametrize("name, where", sorted(set(re.findall(r"\[`([^`]+)`\]\[([\w-]+)\]", METHOD))))
def test_the_page_on_measuring_names_lines_and_tests_that_exist(name, where):
    path = build.NOTEBOOKS / FILES[where]
    assert path.exists() and (path.suffix != ".py" or name in names_in(path))


def test_the_page_on_measuring_has_no_link_astray_and_the_constants_of_the_clock():
    used = set(re.findall(r"\]\[([\w-]+)\]", METHOD))
    assert used == set(FILES) and len(used) > 10
    constants = re.findall(r"`(_[A-Z_]+) = ([\d.]+)`", METHOD)
    assert len(constants) > 3 and [getattr(timing, name) for name, _ in constants] == [float(value) for _, value in constants]


@pytest.mark.parametrize("line", re.findall(r"^\.venv/bin/python (.*?)(?:\s+#.*)?$", METHOD, re.M))
def test_the_page_on_measuring_has_commands_that_there_are(line, capsys):
    if called := re.search(r"experiments\.(\w+)\(\)", line):
        assert called[1] in experiments.EXPERIMENTS
    else:
        assert (words := line.removeprefix("-m labkit ").split()) and cli.parser().parse_args(words)


def test_what_is_not_mended_is_seen_in_the_recordings_as_the_page_says(capsys):
    exec(re.search(r"```python\n(.*?)```", METHOD, re.S)[1], {})
    lines = capsys.readouterr().out.splitlines()
    most = {word: max(abs(int(re.search(r"([+-]?\d+)%", line)[1])) for line in lines if word in line) for word in ("eager", "matmul", "ceilings")}
    assert most["eager"] > 50 and most["matmul"] > 10 and most["ceilings"] > 10
