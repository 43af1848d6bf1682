"""Progress: what checks said is kept and counted, whatever happens to its file, and no lab ever fails for it."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from labkit import __main__ as cli
from labkit import build, check, progress

ROOT = Path(__file__).parents[1]


@pytest.fixture
def labs(tmp_path, monkeypatch):
    """Be in a folder with two labs, of two exercises and one."""
    for lab, names in (("00_begin", ["one", "two"]), ("10_go_on", ["three"])):
        cells = [{"cell_type": "code", "source": [f'check.value("{name}", {name}, 1)\n']} for name in names]
        (tmp_path / f"{lab}.ipynb").write_text(json.dumps({"cells": cells}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_checks_say_is_counted_and_what_was_correct_stays_so(labs, capsys):
    check.value("one", 1, 1)
    check.value("one", 7, 1)
    check.value("one", ..., 1)
    check.function("two", lambda x: x + 2, [(1, 2)])
    assert progress.bars() == ("00 begin  █████░░░░░  1 of 2 correct; not yet: two\n"
                               "10 go on  ░░░░░░░░░░  0 of 1 correct\n"
                               "all       ███░░░░░░░  1 of 3 correct")
    assert cli.main(["progress", str(labs)]) == 0
    assert capsys.readouterr().out.endswith(progress.bars() + "\n")


def test_a_stub_leaves_no_file(labs):
    check.value("one", ..., 1)
    assert not (labs / progress.FILE).exists() and "0 of 3" in progress.bars()


def test_a_damaged_file_costs_only_what_is_damaged(labs):
    check.value("one", 1, 1)
    with (labs / progress.FILE).open("ab") as file:
        file.write(b'\xff\xfe{"exercise": "two", "ver')  # the disk was full
    check.value("three", 1, 1)
    with (labs / progress.FILE).open("a") as file:
        file.write('[1]\nnull\n{"exercise": {}, "verdict": []}\n{"exercise": "two", "verdict": "perfect"}\n')
    assert progress.verdicts(labs) == {"one": "correct", "three": "correct"}


def test_notebooks_side_by_side_lose_nothing(labs):
    code = "from labkit import check\nfor i in range(100): check.value(f'{NAME}{i}', 1, 1)"

    def learner(name):
        subprocess.run([sys.executable, "-c", code.replace("{NAME}", name)], cwd=labs, check=True, stdout=subprocess.DEVNULL,
                       env={**os.environ, "PYTHONPATH": str(ROOT)})

    with ThreadPoolExecutor(3) as at_once:
        list(at_once.map(learner, "abc"))
    assert len(progress.verdicts(labs)) == 300


@pytest.mark.parametrize("obstacle", ["a folder", "no folder", "a full disk"])
def test_a_place_that_takes_nothing_never_fails_a_lab(labs, capsys, monkeypatch, obstacle):
    if obstacle == "a folder":
        (labs / progress.FILE).mkdir()
    elif obstacle == "no folder":
        monkeypatch.setattr(progress, "FILE", "not/here.jsonl")
    else:
        (labs / progress.FILE).symlink_to("/dev/full")  # every write: no space left on device
    check.value("one", 1, 1)
    assert capsys.readouterr().out == "✓ correct: one\n"
    if obstacle == "a full disk":  # from /dev/full one reads for ever
        (labs / progress.FILE).unlink()
    assert "0 of 3 correct" in progress.bars()


def test_a_folder_that_is_gone_never_fails_a_lab(tmp_path, capsys, monkeypatch):
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    check.value("one", 1, 1)
    assert capsys.readouterr().out == "✓ correct: one\n"


def test_nothing_is_kept_outside_labs_or_of_the_solutions(labs, monkeypatch):
    (labs / "solutions").mkdir()
    (labs / "00_begin.ipynb").rename(labs / "solutions/00_begin.ipynb")
    (labs / "10_go_on.ipynb").unlink()
    for folder in (labs, labs / "solutions"):
        monkeypatch.chdir(folder)
        check.value("one", 1, 1)
        assert not (folder / progress.FILE).exists()
    assert progress.bars(labs) == "There are no labs here."


def test_a_notebook_that_is_none_is_left_out(labs):
    (labs / "00_begin.ipynb").write_text("<<<<<<< HEAD")
    assert list(progress.exercises(labs)) == ["10_go_on"]


def test_a_copy_of_a_lab_beside_it_counts_once(labs):
    for name in ("00_begin-Copy1", "00_begin_old"):
        (labs / f"{name}.ipynb").write_text((labs / "00_begin.ipynb").read_text())
    assert progress.bars().splitlines()[-1].endswith("0 of 3 correct")


def test_the_command_counts_the_labs_that_one_is_among(labs, capsys):
    check.value("one", 1, 1)
    assert cli.main(["progress"]) == 0
    assert "1 of 3 correct" in capsys.readouterr().out


def test_every_lab_here_has_exercises_and_no_two_share_a_name():
    labs = progress.exercises(build.NOTEBOOKS)
    names = [name for lab in labs.values() for name in lab]
    assert len(labs) == len(build.solutions()) and all(labs.values()) and len(names) == len(set(names)) > 15
    assert labs == progress.exercises(build.NOTEBOOKS / "solutions")
