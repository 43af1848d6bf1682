"""What the README says exists: commands, files, labs with their minutes, names in code, environment variables."""

import re
from pathlib import Path

import pytest

from labkit import __main__ as cli
from labkit import build

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")


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
