"""From each solution notebook make the learner's copy, and keep both in one canonical form.

Cells tagged `instructor` or `solution` stay out of the learner's copy; those tagged `this-machine` keep no outputs.
Inside a cell, the lines from `# solution` to `# end of solution` give way to one stub line, or to nothing right below
a line that is a stub already (`answer = ...`).
"""

import ast
import getpass
import json
import math
import os
import platform
import re
from pathlib import Path

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
    """Write every learner's copy and bring the solutions into canonical form; return the paths that changed.

    With `execute`, the solutions are run first, in RECORDED mode, and keep the outputs.
    """
    changed = []
    for path in solutions():
        notebook = execute_recorded(path) if execute else _read(path)
        changed += [p for p, text in _texts(path, notebook).items() if write(p, text)]
    return changed


def check():
    """Return one line for everything that `build` would change, or that has no business in the folder."""
    wanted = {}
    for path in solutions():
        wanted |= _texts(path, _read(path))
    made_by_nobody = set(NOTEBOOKS.glob("*.ipynb")) - wanted.keys()
    stale = [p for p, text in wanted.items() if not p.exists() or p.read_bytes() != text.encode()]
    return ([f"{p.relative_to(NOTEBOOKS)} is not what its solution makes: run python -m labkit build" for p in stale]
            + [f"{p.relative_to(NOTEBOOKS)} has no solution notebook: delete it" for p in sorted(made_by_nobody)])


def solutions():
    """Return the paths of the solution notebooks, sorted."""
    return sorted((NOTEBOOKS / "solutions").glob("*.ipynb"))


def code_cells(path):
    """Return the sources of a notebook's code cells, in order."""
    return [cell.source for cell in _read(path).cells if cell.cell_type == "code"]


def _texts(path, notebook):
    """Return {path: canonical text} of a solution and its learner's copy."""
    return {path: canonical(notebook), NOTEBOOKS / path.name: canonical(learner_copy(notebook, path.stem))}


def learner_copy(notebook, name=""):
    """Return a notebook without its solutions, instructor cells, outputs and execution counts; cell ids stay."""
    copy = _copy(notebook)
    copy.cells = [c for c in copy.cells if not {"instructor", "solution"} & set(c.metadata.get("tags", ()))]
    for cell in copy.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
            try:
                cell.source = stubbed(cell.source)
                ast.parse(code_of(cell.source))
            except (BuildError, SyntaxError) as error:
                raise BuildError(f"{name}, cell {cell.id}: {error}") from None
    return copy


def stubbed(source):
    """Return a cell's source with its solution blocks replaced by stubs; unpaired markers are a BuildError."""
    kept, inside = [], False
    for line in source.split("\n"):
        marker = line.strip()
        if marker in ("# solution", "# end of solution"):
            if inside == (marker == "# solution"):
                raise BuildError(f"{marker!r} without its other half")
            inside = not inside
            if inside and not (kept and re.search(r"(^|=)\s*\.\.\.\s*(#.*)?$", kept[-1])):
                kept.append(line[:len(line) - len(line.lstrip())] + STUB)
        elif not inside:
            kept.append(line)
    if inside:
        raise BuildError("'# solution' without '# end of solution'")
    return "\n".join(kept)


def canonical(notebook):
    """Return a notebook as text, the same for the same content: fixed metadata, plain outputs, sorted keys."""
    import nbformat
    copy = _copy(notebook)
    copy.metadata, copy.nbformat, copy.nbformat_minor = nbformat.from_dict(METADATA), 4, 5
    for cell in copy.cells:
        cell.metadata = nbformat.from_dict({k: v for k, v in cell.metadata.items() if k == "tags" and v})
        if cell.cell_type == "code":
            about_here = "this-machine" in cell.metadata.get("tags", ())  # what it says is true on one machine only
            cell.outputs = nbformat.from_dict([] if about_here else plain_outputs(cell.outputs))
            for output in cell.outputs:
                if output.output_type == "execute_result":
                    output.execution_count = cell.execution_count
    nbformat.validate(copy)
    return nbformat.writes(copy, version=nbformat.NO_CONVERT).rstrip("\n") + "\n"


def execute_recorded(path):
    """Return a notebook executed in RECORDED mode, its code cells counted from 1."""
    notebook = execute(path, LABKIT_MODE="recorded")
    for count, cell in enumerate((c for c in notebook.cells if c.cell_type == "code" and c.source.strip()), 1):
        cell.execution_count = count
    return notebook


def execute(path, **environment):
    """Return a notebook run from top to bottom in a fresh kernel beside its file; a cell that raises: BuildError."""
    from nbclient import NotebookClient, exceptions
    notebook = _read(path)
    client = NotebookClient(notebook, kernel_name="python3", timeout=900, record_timing=False,
                            resources={"metadata": {"path": str(path.parent)}})
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    try:
        return client.execute(env={**os.environ, "PYTHONPATH": paths, **environment})
    except exceptions.CellExecutionError as error:
        raise BuildError(f"{path.stem}: {error.ename}: {(error.evalue.splitlines() or [''])[0]}") from None
    except (exceptions.DeadKernelError, exceptions.CellTimeoutError) as error:
        raise BuildError(f"{path.stem}: {str(error).splitlines()[0]}") from None


def plain_outputs(outputs):
    """Return outputs as they may be published: scrubbed, no progress bars, no live widgets, streams in one piece."""
    plain = []
    for output in map(scrub, outputs):
        if WIDGET in output.get("data", ()):
            continue
        if output["output_type"] == "stream":
            output["text"] = re.sub(r"[^\n]*\r(?!\n)", "", output["text"])
            if plain and plain[-1].get("name") == output["name"]:
                output["text"] = plain.pop()["text"] + output["text"]
        if "execution_count" in output:
            output["execution_count"] = None
        plain.append(output)
    return [output for output in plain if output.get("text") != ""]


def scrub(value):
    """Return a value as plain JSON: paths keep their last part, this host and user lose their names, NaN is None."""
    if isinstance(value, dict):
        return {str(k): v if str(k).startswith("image/") else scrub(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [scrub(v) for v in value]
    if isinstance(value, str):
        return _scrub_text(value)
    if hasattr(value, "item"):  # a number of numpy or torch
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _scrub_text(text):
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    text = re.sub(r"(?<![\w/.:<+])(?:/[\w.+@-]+){2,}", lambda m: ".../" + m[0].rpartition("/")[2], text)
    text = re.sub(r"\b[A-Za-z]:(?:\\[\w.+@ -]+)+", lambda m: ".../" + m[0].rpartition("\\")[2], text)
    host, user = platform.node(), _user()
    for private, instead in ((host, "this-host"), (host.partition(".")[0], "this-host"), (user, "user")):
        if len(private) > 2 and private.lower() not in EVERYDAY_NAMES:
            text = re.sub(rf"(?<![\w-]){re.escape(private)}(?![\w-])", instead, text)
    return text


def _user():
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container whose user id has no name
        return ""


def _read(path):
    """Return a notebook as it is in its file; one without cell ids is a BuildError, as ids must be stable."""
    import nbformat
    try:
        raw = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise BuildError(f"{path.name} is no notebook: {error}") from None
    if any("id" not in cell for cell in raw["cells"]):
        raise BuildError(f"{path.name} has cells without ids: open and save it in JupyterLab 4, then build again")
    return nbformat.reads(json.dumps(raw), as_version=nbformat.NO_CONVERT)


def _copy(notebook):
    import nbformat
    return nbformat.from_dict(json.loads(json.dumps(notebook)))


def write(path, text):
    """Write a text if the file differs, in one stroke, and say whether it did."""
    if path.exists() and path.read_bytes() == text.encode():
        return False
    part = path.with_suffix(".part")
    try:
        part.write_bytes(text.encode())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return True
