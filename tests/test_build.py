"""build.py: what a learner's copy leaves out, what stubs look like, and that the form is canonical."""

import json
import platform

import nbformat
import pytest

from labkit import build, machine


def lab(*cells, **metadata):
    """Make a notebook of cells given as source, (source, tags) or a ready cell, with stable ids."""
    made = []
    for i, cell in enumerate(cells):
        source, tags = cell if isinstance(cell, tuple) else (cell, [])
        new = nbformat.v4.new_markdown_cell if source.startswith("#!") else nbformat.v4.new_code_cell
        made.append(new(source, id=f"cell-{i}", metadata={"tags": tags}))
    return nbformat.v4.new_notebook(cells=made, metadata=metadata)


@pytest.fixture
def labs(tmp_path, monkeypatch):
    """A notebooks folder with one solution; returns its path."""
    monkeypatch.setattr(build, "NOTEBOOKS", tmp_path)
    path = tmp_path / "solutions" / "10_tiny.ipynb"
    path.parent.mkdir()
    nbformat.write(lab("n = ...\n# solution\nn = 3\n# end of solution", "print(n)"), path)
    return path


@pytest.mark.parametrize("solution, stub", [
    ("x = 1", "x = 1"),
    ("n = ...\n# solution\nn = 3\n# end of solution\ncheck(n)", "n = ...\ncheck(n)"),
    ("n = ...  # microseconds\n# solution\nn = 3\n# end of solution", "n = ...  # microseconds"),
    ("def f(x):\n    '''Say more ...'''\n    # solution\n    return x\n    # end of solution\n\nf(1)",
     "def f(x):\n    '''Say more ...'''\n    ...  # your code here\n\nf(1)"),
    ("with g:\n    # solution\n    y = m(x)\n    z = y\n    # end of solution", "with g:\n    ...  # your code here"),
    ("# solution\nn = 3\n# end of solution\nm = 4", "...  # your code here\nm = 4"),
    ("a = ...\n# solution\na = 1\n# end of solution\nb = ...\n# solution\nb = 2\n# end of solution", "a = ...\nb = ..."),
    ("x = f(...)\n# solution\nn = 3\n# end of solution", "x = f(...)\n...  # your code here"),
    ("# solution: think first\nn = 3", "# solution: think first\nn = 3"),
])
def test_solution_blocks_become_valid_stubs(solution, stub):
    assert build.stubbed(solution) == stub
    compile(stub, "cell", "exec")


@pytest.mark.parametrize("source", ["# solution\nn = 3", "n = 3\n# end of solution",
                                    "# solution\n# solution\nn = 3\n# end of solution"])
def test_markers_without_their_other_half_are_refused_by_cell(source):
    with pytest.raises(build.BuildError, match="10_tiny, cell cell-1: '# (end of )?solution' without"):
        build.learner_copy(lab("1", source), "10_tiny")


def test_a_stub_that_is_no_python_is_refused():
    source = "x = [\n# solution\n1]\n# end of solution"
    with pytest.raises(build.BuildError, match="10_tiny, cell cell-0"):
        build.learner_copy(lab(source), "10_tiny")


def test_a_learners_copy_has_no_outputs_no_answers_and_the_same_ids():
    notebook = lab("#! Title", ("secret = 1", ["solution"]), ("#! For teachers", ["instructor"]),
                   "%%gpu\nn = ...\n# solution\nn = 3\n# end of solution", ("print(1)", ["nbval-check-output"]), ("#! Why", ["solution"]))
    notebook.cells[4].outputs = [nbformat.v4.new_output("stream", text="1\n")]
    notebook.cells[4].execution_count = 7
    before = json.dumps(notebook)
    copy = build.learner_copy(notebook)
    assert [cell.id for cell in copy.cells] == ["cell-0", "cell-3", "cell-4"]
    assert copy.cells[1].source == "%%gpu\nn = ..."
    assert (copy.cells[2].outputs, copy.cells[2].execution_count) == ([], None)
    assert json.dumps(notebook) == before


def test_the_form_is_canonical():
    one, two = lab("1", kernelspec={"name": "my-env", "display_name": "Mine"}, widgets={"x": 1}), lab("1")
    one.cells[0].metadata |= {"execution": {"iopub.execute_input": "2026-11-29"}, "collapsed": True}
    text = build.canonical(one)
    assert text == build.canonical(two) == build.canonical(nbformat.reads(text, as_version=4))
    assert text.endswith("}\n") and json.loads(text)["metadata"] == build.METADATA
    assert json.loads(text)["cells"][0]["id"] == "cell-0"


def test_outputs_are_fit_to_be_published():
    outputs = [nbformat.v4.new_output("stream", name="stderr", text=" 0%|\r 50%|\r100%|#\ndone\n"),
               nbformat.v4.new_output("stream", name="stderr", text="more\n"),
               nbformat.v4.new_output("display_data", {build.WIDGET: {"model_id": "1f"}, "text/plain": "IntSlider()"}),
               nbformat.v4.new_output("display_data", {"image/png": "AA/bb/cc/dd==", "text/plain": "at /a/b/c"}),
               nbformat.v4.new_output("stream", name="stdout", text="only a bar\r")]
    plain = build.plain_outputs(outputs)
    assert [output.get("text") for output in plain] == ["100%|#\ndone\nmore\n", None]
    assert plain[1]["data"]["image/png"] == "AA/bb/cc/dd=="
    assert plain[1]["data"]["text/plain"] == "at .../c"


@pytest.mark.parametrize("text, clean", [
    ("File /usr/lib/python3.11/site-packages/torch/x.py:3", "File .../x.py:3"),
    ("\x1b[32m/home/ada/lab/cell.py\x1b[0m", ".../cell.py"),
    ("see https://docs.nvidia.com/cuda/api/x.html", "see https://docs.nvidia.com/cuda/api/x.html"),
    ("<b>a</b></td></tr> 1/2/3 text/plain and/or/not /s", "<b>a</b></td></tr> 1/2/3 text/plain and/or/not /s"),
    ("void at::native::elementwise<4, at::add/*x*/>", "void at::native::elementwise<4, at::add/*x*/>"),
    ("the square root", "the square root"),
])
def test_paths_go_and_all_else_stays(text, clean):
    assert build.scrub({"a": [text]}) == {"a": [clean]}


def test_host_and_user_lose_their_names(monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "box-17.example.org")
    monkeypatch.setenv("USER", "ada")
    assert build.scrub("ada@box-17 box-17.example.org adam box-177") == "user@this-host this-host adam box-177"


def test_build_writes_once_and_check_sees_every_difference(labs):
    learner = build.NOTEBOOKS / labs.name
    assert len(build.check()) == 2
    assert build.build() == [labs, learner]
    assert (build.build(), build.check()) == ([], [])
    assert json.loads(learner.read_text())["cells"][0]["source"] == ["n = ..."]
    learner.write_bytes(learner.read_bytes().replace(b"n = ...", b"n = 3  "))
    (build.NOTEBOOKS / "99_old.ipynb").write_text("{}")
    assert build.check() == ["10_tiny.ipynb is not what its solution makes: run python -m labkit build",
                             "99_old.ipynb has no solution notebook: delete it"]
    assert build.build() == [learner]
    labs.write_text(labs.read_text() + "\n")
    assert build.check()[0].startswith("solutions/10_tiny.ipynb")


def test_cells_without_ids_are_refused(labs):
    raw = json.loads(labs.read_text())
    del raw["cells"][0]["id"]
    labs.write_text(json.dumps(raw))
    with pytest.raises(build.BuildError, match="10_tiny.ipynb has cells without ids"):
        build.check()
    labs.write_text("<<<<<<< HEAD")
    with pytest.raises(build.BuildError, match="10_tiny.ipynb is no notebook"):
        build.check()


@pytest.mark.parametrize("live, mode", [(True, "recorded"), (False, None)])  # without a GPU nothing need be forced
def test_execute_keeps_recorded_outputs_in_canonical_form(labs, monkeypatch, live, mode):
    monkeypatch.setattr(machine, "mode", lambda: machine.Mode(live, "pretended"))
    monkeypatch.delenv("LABKIT_MODE", raising=False)
    nbformat.write(lab("import os\nprint(os.environ.get('LABKIT_MODE'), os.getcwd())", "", "#! words", "40 + 2"), labs)
    build.build(execute=True)
    cells = [cell for cell in json.loads(labs.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [1, None, 2]
    assert cells[0]["outputs"][0]["text"] == [f"{mode} .../solutions\n"]
    assert cells[2]["outputs"][0]["execution_count"] == 2
    assert build.check() == []
    before = labs.read_bytes()
    nbformat.write(lab("1 / 0"), labs)
    broken = labs.read_bytes()
    with pytest.raises(build.BuildError, match="^10_tiny, cell 1: ZeroDivisionError: division by zero$"):
        build.build(execute=True)
    assert labs.read_bytes() == broken != before


def test_the_labs_here_are_built():
    assert build.check() == []
