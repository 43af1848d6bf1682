"""From each solution notebook make the learner's copy, and keep both in one canonical form.

Cells tagged `instructor` or `solution` stay out of the learner's copy; those tagged `this-machine` keep no
outputs, those tagged `hide-input` are closed.
Inside a cell, the lines from `# solution` to `# end of solution` give way to one stub line, or to nothing right below
a line that is a stub already (`answer = ...`).
"""

import ast
import json
import math
import os
import platform
import re
import subprocess
from copy import deepcopy
from pathlib import Path

from labkit import machine
from labkit.recordings import code_of

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
STUB = "...  # your code here"
METADATA = {"kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
            "language_info": {"name": "python"}}
WIDGET = "application/vnd.jupyter.widget-view+json"
EVERYDAY_NAMES = {"root", "user", "ubuntu", "admin", "jovyan", "localhost"}  # names that give nobody away


class BuildError(Exception):
    """A notebook that cannot be built or run, and where the trouble is."""


def build(execute=False):
    """Write what differs from the solutions as they are, or (`execute`) as they run now; return the paths written."""
    return [path for path, text in _wanted(execute) if write(path, text)]


def check():
    """Return one line for everything that `build` would change, or that has no business in the folder."""
    wanted = dict(_wanted())
    stray = sorted(set(NOTEBOOKS.glob("*.ipynb")) - wanted.keys())
    return ([f"{path.relative_to(NOTEBOOKS)} is not what its solution makes: run python -m labkit build"
             for path, text in wanted.items() if write(path, text, only_look=True)]
            + [f"{path.name} has no solution notebook: delete it" for path in stray])


def _wanted(run=False):
    """Yield (path, canonical text) of every solution, as it is or as it runs in RECORDED mode, and its learner's copy."""
    given = {"LABKIT_MODE": "recorded"} if run and machine.mode().live else {}  # only beside a GPU: else banners tell the true reason
    for path in solutions():
        notebook = execute(path, **given) if run else read(path)
        yield path, canonical(notebook)
        yield NOTEBOOKS / path.name, canonical(learner_copy(notebook, path.stem))


def solutions():
    """Return the paths of the solution notebooks, sorted."""
    return sorted((NOTEBOOKS / "solutions").glob("*.ipynb"))


def code_cells(path):
    """Return the sources of a notebook's code cells, in order."""
    return [cell.source for cell in read(path).cells if cell.cell_type == "code"]


def learner_copy(notebook, name=""):
    """Return a notebook without its solutions, instructor cells, outputs and execution counts; cell ids stay.

    BuildError names the cell whose markers have no other half, or that is no Python then.
    """
    copy = deepcopy(notebook)
    copy.cells = [c for c in copy.cells if not {"instructor", "solution"} & set(c.metadata.get("tags", ()))]
    for cell in blank(copy):
        try:
            cell.source = stubbed(cell.source)
            ast.parse(code_of(cell.source))
        except (BuildError, SyntaxError) as error:
            raise BuildError(f"{name}, cell {cell.id}: {error}") from None
    return copy


def blank(notebook):
    """Take the outputs and execution counts out of a notebook and return its code cells."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in cells:
        cell.outputs, cell.execution_count = [], None
    return cells


def stubbed(source):
    """Return a cell's source with its solution blocks replaced by stubs; unpaired markers are a BuildError."""
    block = r"^( *)# solution *\n(?:(?! *# (?:end of )?solution *$).*\n)* *# end of solution *$"
    source = re.sub(block, rf"\1{STUB}", source, flags=re.MULTILINE)
    if alone := re.search(r"^ *(# (?:end of )?solution) *$", source, re.MULTILINE):
        raise BuildError(f"{alone[1]!r} without its other half")
    below_a_stub = rf"^((?:.*=)? *\.\.\. *(?:#.*)?)\n *{re.escape(STUB)}$"
    return re.sub(below_a_stub, r"\1", source, flags=re.MULTILINE)


def canonical(notebook):
    """Return a notebook as text, the same for the same content: fixed metadata, plain outputs, sorted keys."""
    import nbformat
    copy = deepcopy(notebook)
    copy.metadata, copy.nbformat, copy.nbformat_minor = nbformat.from_dict(METADATA), 4, 5
    for cell in copy.cells:
        cell.metadata = nbformat.from_dict({k: v for k, v in cell.metadata.items() if k == "tags" and v})
        if "hide-input" in cell.metadata.get("tags", ()):  # a check holds the answer: closed until clicked open
            cell.metadata["jupyter"] = {"source_hidden": True}
        if cell.cell_type == "code":
            about_here = "this-machine" in cell.metadata.get("tags", ())  # what it says is true on one machine only
            cell.outputs = nbformat.from_dict([] if about_here else plain_outputs(cell.outputs))
            for output in cell.outputs:
                if output.output_type == "execute_result":
                    output.execution_count = cell.execution_count
    nbformat.validate(copy)
    return nbformat.writes(copy, version=nbformat.NO_CONVERT).rstrip("\n") + "\n"


def execute(path, notebook=None, **environment):
    """Run a notebook (else the file's) in a fresh kernel beside its file and return it; trouble is a BuildError."""
    from nbclient import NotebookClient, exceptions
    from tqdm import tqdm
    notebook, number = notebook or read(path), 0
    blank(notebook)
    client = NotebookClient(notebook, kernel_name="python3", timeout=None, record_timing=False)
    client.reset_execution_trackers()
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    try:
        with client.setup_kernel(cwd=str(path.parent), env={**os.environ, "PYTHONPATH": paths, **environment},
                                 stderr=subprocess.DEVNULL):
            for number, cell in enumerate(tqdm(notebook.cells, desc=path.stem, unit="cell"), 1):
                client.execute_cell(cell, number - 1)
            client.set_widgets_metadata()
    except (exceptions.CellExecutionError, exceptions.DeadKernelError) as error:
        said = f"{error.ename}: {error.evalue}" if hasattr(error, "ename") else "the kernel died (out of memory?)"
        raise BuildError(f"{path.stem}, cell {number}: {said.splitlines()[0]}") from None
    return notebook


def plain_outputs(outputs):
    """Return outputs as they may be published: scrubbed, no progress bars, no live widgets, streams in one piece."""
    plain = []
    for output in map(scrub, outputs):
        if output["output_type"] == "stream":
            output["text"] = re.sub(r"[^\n]*\r(?!\n)", "", output["text"])
            if plain and plain[-1].get("name") == output["name"]:
                output["text"] = plain.pop()["text"] + output["text"]
        if "execution_count" in output:
            output["execution_count"] = None
        if WIDGET not in output.get("data", ()):
            plain.append(output)
    return [output for output in plain if output.get("text") != ""]


def scrub(value):
    """Return a value as plain JSON: paths keep their last part, this host and user lose their names, NaN is None."""
    if isinstance(value, dict):
        return {str(k): v if str(k).startswith("image/") else scrub(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [scrub(v) for v in value]
    if hasattr(value, "item"):  # a number of numpy or torch
        value = value.item()
    if not isinstance(value, str):
        return None if isinstance(value, float) and not math.isfinite(value) else value
    value = re.sub(r"\x1b\[[0-9;]*m", "", value)
    value = re.sub(r"(?<![\w/.:<+])(?:/[\w.+@-]+){2,}", lambda m: ".../" + m[0].rpartition("/")[2], value)
    host, user = platform.node(), os.environ.get("USER", "")
    for private, instead in ((host, "this-host"), (host.partition(".")[0], "this-host"), (user, "user")):
        if len(private) > 2 and private.lower() not in EVERYDAY_NAMES:
            value = re.sub(rf"(?<![\w-]){re.escape(private)}(?![\w-])", instead, value)
    return value


def read(path):
    """Return a notebook as it is in its file; one without cell ids is a BuildError, as ids must be stable."""
    import nbformat
    try:
        raw = json.loads(path.read_text("utf-8"))
        ids = [cell.get("id") for cell in raw["cells"]]
        notebook = nbformat.reads(json.dumps(raw), as_version=nbformat.NO_CONVERT)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BuildError(f"{path.name} is no notebook: {str(error).strip().partition(chr(10))[0]}") from None
    if None in ids:
        raise BuildError(f"{path.name} has cells without ids: open and save it in JupyterLab 4, then build again")
    if len(set(ids)) < len(ids):
        raise BuildError(f"{path.name} has two cells with one id: give each its own")
    return notebook


def write(path, text, only_look=False):
    """Write a text, in one stroke, where the file differs, and say whether it does."""
    differs = not path.exists() or path.read_bytes() != text.encode()
    if differs and not only_look:
        part = path.with_name(f".{path.name}.part")
        try:
            part.write_bytes(text.encode())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    return differs
