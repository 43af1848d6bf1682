"""What help() says: every public name of labkit has a docstring, which names the errors that its own lines raise."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import labkit
from labkit import experiments

HOUSE = Path(labkit.__file__).parent
FILES = sorted(HOUSE.rglob("*.py"))
FUNCTIONS, DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef), (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def public(node, path=""):
    """Yield (dotted name, its tree) for the functions, classes and methods below a module or class whose names are public."""
    for child in node.body:
        if isinstance(child, DEFINITIONS) and not child.name.startswith("_"):
            yield f"{path}{child.name}", child
            if isinstance(child, ast.ClassDef):
                yield from public(child, f"{path}{child.name}.")


def raised(node, caught=()):
    """Yield the names of the errors that a function's own lines raise and let out: not those of functions inside it."""
    if isinstance(node, ast.Raise) and node.exc:
        error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        name = ast.unparse(error).rpartition(".")[2]
        if name[0].isupper() and not {name, "Exception", "BaseException"} & set(caught):  # small letters: what was raised elsewhere
            yield name
    inside = [handler.type for handler in getattr(node, "handlers", ()) if handler.type]
    inside = {ast.unparse(kind).rpartition(".")[2] for given in inside for kind in (given.elts if isinstance(given, ast.Tuple) else [given])}
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, (*DEFINITIONS, ast.Lambda)):
                yield from raised(child, {*caught, *inside} if isinstance(node, ast.Try) and field == "body" else caught)


def is_command(path, node):
    """Say whether a function is a command, whose docstring is what --help says: there main() puts each Refusal in one line."""
    return path.name == "__main__.py" and (node.name == "main" or [arg.arg for arg in node.args.args] == ["args"])


def lacking(text, path=Path("room.py")):
    """List what a room's public names lack: a docstring, or in it an error that they raise."""
    found = [] if ast.get_docstring(ast.parse(text)) or not text.strip() else ["the file: a docstring"]
    for name, node in public(ast.parse(text)):
        doc, made = ast.get_docstring(node), node
        if not doc:
            found.append(f"{name}: a docstring")
            continue
        if not re.match(r"[A-Z`]", doc) or not re.search(r"[.?:]\s*(\n|$)", doc.partition("\n\n")[0]):
            found.append(f"{name}: a docstring that begins with a sentence")
        if isinstance(node, ast.ClassDef):  # what its __init__ raises, the class says
            made = next((child for child in node.body if isinstance(child, FUNCTIONS) and child.name == "__init__"), None)
        errors = set() if made is None or isinstance(node, FUNCTIONS) and is_command(path, node) else set(raised(made))
        found += [f"{name}: that it raises {error}" for error in sorted(errors) if not re.search(rf"\b{error}\b", doc)]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(HOUSE).as_posix())
def test_public_names_have_docstrings_that_name_what_they_raise(path):
    assert lacking(path.read_text("utf-8"), path) == []


@pytest.mark.parametrize("text, lacks", [
    ('def f():\n    return 1', "f: a docstring"),
    ('def f():\n    """return one"""', "f: a docstring that begins with a sentence"),
    ('class A:\n    """Be."""\n    def b(self):\n        pass', "A.b: a docstring"),
    ('def f():\n    """Give."""\n    raise ValueError("x")', "f: that it raises ValueError"),
    ('def f():\n    """Give."""\n    try:\n        pass\n    except OSError:\n        raise house.Refused("x") from None', "f: that it raises Refused"),
    ('class A:\n    """Be."""\n    def __init__(self):\n        raise TypeError', "A: that it raises TypeError")])
def test_what_is_lacking_is_found(text, lacks):
    assert lacking(f'"""A room."""\n{text}') == [lacks]


@pytest.mark.parametrize("text", [
    'def _f():\n    raise ValueError("x")', 'def f():\n    """Give, or ValueError."""\n    raise ValueError("x")',
    'def f():\n    """Give."""\n    try:\n        raise ValueError("x")\n    except (OSError, ValueError):\n        return 1',
    'def f():\n    """Give."""\n    def later():\n        raise ValueError("x")\n    return later',
    'def f(error):\n    """Give."""\n    raise error'])
def test_what_is_not_lacking_is_let_be(text):
    assert lacking(f'"""A room."""\n{text}') == []


def test_help_on_what_labkit_exports_says_something():
    for name in labkit.__all__:
        said = inspect.getdoc(getattr(labkit, name))
        assert said and (said[0].isupper() or said.startswith("labkit")), name


@pytest.mark.parametrize("name", experiments.EXPERIMENTS)
def test_an_experiment_says_what_a_row_is(name):
    said = inspect.getdoc(experiments.EXPERIMENTS[name])
    assert re.search(r"\n\nA row for each? ", said), "say it below the first line: A row for each ..."
