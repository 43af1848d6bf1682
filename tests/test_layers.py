"""The house rules of imports: rooms import only rooms below them, and few of them know torch or widgets."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A room may import those named before it in the table, at the top of its file or inside a function.
FLOORS = re.findall(r"^\| `(\w+)[./]", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.M)
NEVER_TORCH = ("install", "explain", "launch_model", "batching", "recordings", "claims", "results", "charts", "progress", "check", "build", "guide", "record", "hub")
FILES = sorted(path for path in (ROOT / "labkit").rglob("*.py") if path != ROOT / "labkit" / "__init__.py")


def imported(path):
    """Return (name, whether at the top of the file) for all that a file imports, with labkit's rooms as labkit.<room>."""
    tree = ast.parse(path.read_text("utf-8"))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively: write from labkit import ..."
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {(name, node in tree.body) for name in names}
    return found


def room(path):
    return path.relative_to(ROOT / "labkit").parts[0].removesuffix(".py")


def named(path):
    return path.relative_to(ROOT / "labkit").as_posix()


@pytest.mark.parametrize("path", FILES, ids=named)
def test_rooms_import_only_what_stands_below_them(path):
    rooms = {name.split(".")[1] for name, _ in imported(path) if name.startswith("labkit.")} - {"__version__", room(path)}
    assert rooms <= set(FLOORS[:FLOORS.index(room(path))])


@pytest.mark.parametrize("path", [p for p in FILES if room(p) in NEVER_TORCH or p.name.endswith("_model.py")], ids=named)
def test_these_never_import_torch_not_even_lazily(path):
    assert not {name for name, _ in imported(path) if name.split(".")[0] in ("torch", "transformers")}


@pytest.mark.parametrize("path", [p for p in FILES if p.name != "notebook.py" and not p.name.endswith("_view.py")], ids=named)
def test_only_views_and_the_notebook_room_know_ipython_and_widgets(path):
    assert not {name for name, _ in imported(path) if name.split(".")[0] in ("IPython", "ipywidgets", "ipykernel")}


@pytest.mark.parametrize("path", FILES, ids=named)
def test_no_room_that_recorded_labs_need_imports_torch_at_its_top(path):
    if room(path) not in ("timing", "watch", "graphs", "buckets", "models", "sharing", "decoding", "decode", "serving", "trace"):
        assert not {name for name, at_top in imported(path) if at_top and name.split(".")[0] in ("torch", "transformers")}


def run(code):
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return answer.stdout.split()


def test_import_labkit_is_quick_and_loads_nothing_heavy():
    code = ("import sys, time; start = time.perf_counter(); import labkit; print(time.perf_counter() - start);"
            "print(*{'torch', 'pandas', 'numpy', 'matplotlib', 'IPython'} & set(sys.modules))")
    runs = [run(code) for _ in range(3)]
    assert min(float(seconds) for seconds, *_ in runs) < 0.3
    assert not runs[0][1:]


def test_recorded_labs_need_no_torch():
    needed = ("machine", "explain", "isolate", "recordings", "experiments", "claims", "results", "charts", "report", "notebook", "check",
              "build")
    rooms = [name for name in needed if (ROOT / "labkit" / f"{name}.py").exists() or (ROOT / "labkit" / name).is_dir()]
    models = [f"explorers.{p.stem}" for p in FILES if p.parent.name == "explorers" and p.stem != "app"]
    imports = "; ".join(f"import labkit.{name}" for name in rooms + models)
    assert run(f"import sys; sys.modules['torch'] = None; {imports}; print('fine')") == ["fine"]


@pytest.mark.parametrize("path", sorted((ROOT / "tests").glob("test_gpu*.py")), ids=lambda path: path.name)
def test_what_gpu_tests_ask_of_rooms_is_there(path):  # as where no GPU is, nothing else would tell
    pytest.importorskip("torch")
    tree = ast.parse(path.read_text("utf-8"))
    rooms = {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
             and (node.module or "").startswith("labkit") for alias in node.names}
    asked = {(rooms[node.value.id], node.attr) for node in ast.walk(tree) if isinstance(node, ast.Attribute)
             and isinstance(node.value, ast.Name) and node.value.id in rooms}
    modules = {name: importlib.import_module(name) for name, _ in asked if importlib.util.find_spec(name)}
    assert not [f"{name}.{word}" for name, word in asked if name in modules and not hasattr(modules[name], word)]
