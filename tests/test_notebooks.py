"""The labs themselves: they run to the end in recorded mode, say what they stored, and follow the rules for cells."""

import copy
import functools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import nbformat
import pytest
from nbval.plugin import get_sanitize_patterns

from labkit import build, check, recordings

ROOT = Path(__file__).parents[1]
SOLUTIONS = build.solutions()
LEARNERS = sorted(build.NOTEBOOKS.glob("*.ipynb"))
MAGICS = ("%%gpu", "%%isolated")
TAGS = {"instructor", "solution", "this-machine", "hide-input", "nbval-check-output"}
ANSWERS = (check.NOT_ATTEMPTED, check.NOT_YET, check.CORRECT)

solutions = pytest.mark.parametrize("path", SOLUTIONS, ids=lambda path: path.stem)
learners = pytest.mark.parametrize("path", LEARNERS, ids=lambda path: path.stem)


def read(path):
    return nbformat.read(path, as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_of(outputs):
    """Return all that outputs say in words."""
    return "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs)


def answers(cells):
    """Return the answers that the checks in cells printed, in order."""
    lines = "\n".join(text_of(cell.outputs) for cell in cells).splitlines()
    return [answer for line in lines for answer in ANSWERS if line.startswith(answer)]


def nbval(paths, *options, timeout_s, **environment):
    """Run nbval on notebooks, comparing the cells that are tagged for it; returns (exit status, what it printed)."""
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", ROOT, "-p", "no:cacheprovider", "-q",
               "--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout=600", *options, *paths]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s,
                          env={**os.environ, "PYTHONPATH": paths, **environment})
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that gives a notebook as it ran in recorded mode, where there is no torch, as on Binder."""
    no_torch = tmp_path_factory.mktemp("no_torch")
    (no_torch / "torch.py").write_text("raise ImportError('recorded labs do without torch')")
    how = {"LABKIT_MODE": "recorded", "PYTHONPATH": os.pathsep.join(map(str, (no_torch, ROOT)))}
    peak = nbformat.v4.new_code_cell("print(open('/proc/self/status').read())" if Path("/proc/self/status").exists() else "print()")

    @functools.cache
    def ran(path):
        notebook = read(path)
        notebook.cells.append(peak)
        return build.execute(path, notebook, **how)
    return ran


def test_there_are_labs_each_with_a_learners_copy():
    assert SOLUTIONS and [path.name for path in SOLUTIONS] == [path.name for path in LEARNERS]


@solutions
def test_a_solution_runs_and_every_check_is_correct(path, run):
    given = answers(code(run(path)))
    assert len(given) >= 2 and set(given) == {check.CORRECT}


@solutions
def test_every_recorded_cell_shows_its_recording(path, run):
    labelled = [cell.id for cell in code(run(path)) if "not measured here" in text_of(cell.outputs)]
    recorded = [cell.id for cell in code(run(path)) if recordings.is_recorded(cell.source)]
    assert labelled and not {*recorded} - {*labelled}
    assert recorded or path.stem[0] in "47"  # all their numbers come from tables


@solutions
def test_binder_has_memory_for_three_labs_at_once(path, run):
    if not (peak := re.search(r"VmHWM:\s*(\d+) kB", text_of(run(path).cells[-1].outputs))):
        pytest.skip("this system does not say how much memory a process took")
    assert int(peak[1]) < 300 * 1024  # three, and the server's 124 MiB (see test_packaging), are 1 GiB


@learners
def test_a_learners_copy_runs_and_nothing_is_attempted_yet(path, run):
    cells = code(run(path))
    solved = code(run(build.NOTEBOOKS / "solutions" / path.name))
    asked = answers(cell for cell in solved if not recordings.is_recorded(cell.source))  # a stub has no recording
    assert answers(cells) == [check.NOT_ATTEMPTED] * len(asked)


# ---- rules for cells

@solutions
def test_magics_stand_on_the_first_line_and_are_ours(path):
    for cell in code(read(path)):
        for number, line in enumerate(cell.source.splitlines()):
            if re.match(r"\s*(%|!)", line):
                assert number == 0 and line.split()[0] in MAGICS, f"{cell.id}: {line}"


@solutions
def test_no_cell_hides_from_nbval(path):
    for cell in read(path).cells:
        assert set(cell.metadata.get("tags", ())) <= TAGS, cell.id
        if cell.cell_type == "code":
            assert not re.search(r"(?i)#\s*(nbval|pytest)_", cell.source), f"{cell.id}: use tags"
            assert not cell.source.rstrip().endswith(";"), f"{cell.id}: nbval shows what ; hides, write _ ="


@solutions
def test_a_solution_is_stored_executed_with_something_to_compare(path):
    cells = code(read(path))
    assert not [cell.id for cell in cells if cell.source.strip() and cell.execution_count is None]
    assert not [cell.id for cell in cells for output in cell.outputs if output.output_type == "error"]
    compared = [cell for cell in cells if "nbval-check-output" in cell.metadata.get("tags", ())]
    assert compared and not [cell.id for cell in compared if not text_of(cell.outputs).strip()]


@solutions
def test_a_lab_opens_with_the_banner_and_asks_at_least_two_guesses(path):
    sources = [cell.source for cell in code(read(path))]
    assert "banner()" in sources[0]
    assert sum(source.count("check.guess(") for source in sources) >= 2


def test_no_two_cells_share_one_recording():
    count = Counter(recordings.cell_key(source) for path in SOLUTIONS for source in build.code_cells(path)
                    if recordings.is_recorded(source))
    shared = {key for key, times in count.items() if times > 1}
    for path in recordings.FOLDER.glob("*/lab-*.json"):
        cells = json.loads(path.read_text())["cells"]
        assert not [key for key in shared & cells.keys() if cells[key]["outputs"]], "make the text of these cells differ"


# ---- nbval

def changed(path, folder):
    """Return a copy of a lab that ends with its first compared cell, whose stored output has been changed."""
    notebook = read(path)
    for number, cell in enumerate(notebook.cells):
        if "nbval-check-output" in cell.metadata.get("tags", ()):
            output = cell.outputs[0]
            if "text" in output:
                output.text = output.text[::-1]
            else:
                output.data["text/plain"] = output.data["text/plain"][::-1]
            notebook.cells = notebook.cells[:number + 1]
            nbformat.write(notebook, folder / path.name)
            return folder / path.name
    raise AssertionError(f"{path.stem} has no cell that nbval compares")


def test_nbval_sees_one_changed_output(tmp_path):
    assert SOLUTIONS, "no labs"
    status, told = nbval([changed(SOLUTIONS[0], tmp_path)], timeout_s=150, LABKIT_MODE="recorded")
    assert status == 1 and re.search(r"^1 failed", told, re.MULTILINE) and "Cell outputs differ" in told, told


def test_nbval_finds_the_stored_outputs():
    assert SOLUTIONS, "no labs"
    status, told = nbval(SOLUTIONS, timeout_s=170, LABKIT_MODE="recorded")
    assert status == 0, told
    cells = sum(bool(cell.source.strip()) for path in SOLUTIONS for cell in code(read(path)))
    assert f"{cells} passed" in told, told


def test_sanitising_makes_live_and_recorded_alike_and_keeps_the_words():
    patterns = get_sanitize_patterns((ROOT / "tests" / "sanitize.cfg").read_text())

    def sanitised(text):
        for regex, replacement in patterns:
            text = re.sub(regex, replacement, text)
        return text
    here = "A step launches 340 kernels.  GPU idle: 91.2 %, at 0x7fcA.\nLIVE on NVIDIA H200."
    there = ("A step launches 1,338 kernels. GPU idle: 9e-1 %, at 0x12.\n"
             "RECORDED on NVIDIA GeForce RTX 4090, 2026-11-29: not measured here (measured by an earlier version).")
    assert sanitised(here) == sanitised(there) != sanitised(there.replace("launches", "saves"))
    plain = "Here: 0.2 ms. The rule: holds when it holds."
    for said in (plain.replace("The rule", "Close to a bound: at an end of the intervals the verdict is: holds. The rule"),
                 f"prefill_cost is not measured here, but shown as recorded: it needs 16.1 GiB. Choose less.\n{plain}",
                 f"vLLM is not installed here: as recorded.\n{plain}"):
        assert sanitised(said) == sanitised(plain) != sanitised(said.replace("ms", "s"))
    assert "shown" in sanitised(f"prefill_cost is not measured here, but shown as recorded: No module named 'typo'\n{plain}")


@pytest.mark.gpu
@solutions
def test_live_a_solution_says_what_it_stored(path, tmp_path):
    notebook = copy.deepcopy(read(path))
    for cell in code(notebook):  # live, cells carry no label
        cell.outputs = [o for o in cell.outputs if o.get("metadata", {}).get("labkit") != "label"]
    nbformat.write(notebook, tmp_path / path.name)
    sanitise = f"--nbval-sanitize-with={ROOT / 'tests' / 'sanitize.cfg'}"
    status, told = nbval([tmp_path / path.name], sanitise, timeout_s=900, LABKIT_MODE="")
    assert status == 0, told
