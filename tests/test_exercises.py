"""Exercises of all labs: checks take any right way and name what is off about wrong ones, and solutions say why."""

import ast
import functools
import itertools
import re

import pytest
from wrong_answers import RIGHT, WRONG

from labkit import build, check, machine, progress
from labkit.recordings import code_of

WHY = "**Why:** "
LAB_OF = {name: lab for lab, names in progress.exercises(build.NOTEBOOKS).items() for name in names}


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    monkeypatch.setattr(machine, "mode", lambda: machine.Mode(False, "pretended"))


def names_in(source):
    """Return (names that some code makes, names that it uses)."""
    nodes = list(ast.walk(ast.parse(source)))
    made = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    made |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    made |= {(name.asname or name.name) for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)) for name in node.names}
    return made, {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


@functools.cache
def exercise(name):
    """Run what the check of an exercise needs of its solution -> (the check's code, all names that are there then)."""
    cells = [code_of(source) for source in build.code_cells(build.NOTEBOOKS / "solutions" / f"{LAB_OF[name]}.ipynb")]
    at = next(i for i, source in enumerate(cells) if re.search(rf'check\.(value|function)\("{name}"', source))
    if name == "normalise":  # the cell that asks is the cell that checks, and captures: here on the CPU, uncaptured
        import torch
        code = cells[at].replace(', device="cuda"', "").partition("def captured")
        return "def captured" + code[2], {"torch": torch, "check": check, "GraphedCallable": lambda fn, t: fn}
    needed, chosen = names_in(cells[at])[1], []
    for source in reversed(cells[:at]):
        if source.startswith("\n"):  # what a %%magic ran in: not here
            continue
        made, used = names_in(source)
        if made & needed:
            chosen.insert(0, source)
            needed |= used
    space = {}
    for source in chosen:
        exec("\n".join(line for line in source.splitlines() if not line.startswith("labkit.banner()")), space)
    return cells[at], space


def said_of(name, answer, capsys):
    """Give an answer to an exercise and return what its check says."""
    code, space = exercise(name)
    space = dict(space)
    exec(answer if answer.startswith("def ") else f"{name} = {answer}", space)
    capsys.readouterr()
    exec(code, space)
    return next(line for line in capsys.readouterr().out.splitlines() if re.match(rf"\S+ [a-z ]+: {name}\b", line))


@pytest.mark.parametrize("name", LAB_OF)
def test_every_exercise_is_tried_with_three_wrong_answers_and_another_right_one(name):
    wrong = WRONG.get(name, ())
    enough = len({hint for _, hint in wrong}) >= 2 and len({answer for answer, _ in wrong}) >= 3 and RIGHT.get(name)
    assert enough, f"write wrong answers of {name} into tests/wrong_answers.py, with what each must hear, and another right way"


@pytest.mark.parametrize("name, answer, hint", [(name, *wrong) for name, several in WRONG.items() for wrong in several])
def test_a_wrong_answer_hears_what_is_off(name, answer, hint, capsys):
    said = said_of(name, answer, capsys)
    assert said.startswith(f"{check.NOT_YET}: {name}. Hint: ") and hint in said


@pytest.mark.parametrize("name, answer", [(name, right) for name, several in RIGHT.items() for right in several])
def test_another_right_way_is_correct(name, answer, capsys):
    assert said_of(name, answer, capsys) == f"{check.CORRECT}: {name}"


@pytest.mark.parametrize("name", LAB_OF)
def test_below_its_check_the_solution_says_why_in_a_few_words(name):
    cells = build.read(build.NOTEBOOKS / "solutions" / f"{LAB_OF[name]}.ipynb").cells
    below = next(after for cell, after in itertools.pairwise(cells)
                 if cell.cell_type == "code" and name in progress.CHECKED.findall(cell.source))
    assert below.cell_type == "markdown" and below.source.startswith(WHY), f"write why this is the answer below the check of {name}"
    assert below.id.startswith(f"lab{LAB_OF[name][:2]}-why-") and 10 <= len(below.source.split()) <= 90


@pytest.mark.parametrize("path", build.solutions(), ids=lambda path: path.stem)
def test_only_solutions_say_why(path):
    whys = [cell for cell in build.read(path).cells if WHY.strip() in cell.source]
    assert whys and all(cell.metadata.tags == ["solution"] for cell in whys)
    learners = (build.NOTEBOOKS / path.name).read_text("utf-8")
    assert WHY.strip() not in learners and not [cell.id for cell in whys if f'"{cell.id}"' in learners]
