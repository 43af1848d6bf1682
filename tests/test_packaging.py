"""Names and versions agree everywhere, and what is packaged can be installed, built and put on Binder."""

import contextlib
import importlib.metadata
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

import conftest
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import labkit
from labkit import machine

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DIRECT = {need.name: need for need in map(Requirement, PROJECT["dependencies"])}
EXTRA = {need.name: need for need in map(Requirement, PROJECT["optional-dependencies"]["test"])}
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#")
TORCH_CUDA = re.compile(r"nvidia-(?!ml-py)|triton$|cuda-toolkit")


def lines(path):
    bare = [line.split("#")[0].strip() for line in (ROOT / path).read_text().splitlines()]
    return [line for line in bare if line]


@pytest.mark.parametrize("need", [*DIRECT.values(), *EXTRA.values()], ids=str)
def test_every_dependency_is_pinned_within_its_range(need):
    assert need.specifier.contains(PINS[need.name])


def test_the_pins_are_exact_sorted_out_and_free_of_platforms():
    assert PINS["torch"] == "2.13.0" and PINS["transformers"].startswith("5.2")
    for name, version in PINS.items():
        assert name == canonicalize_name(name) and re.fullmatch(r"[\w.]+", version)
        assert not TORCH_CUDA.match(name)
    assert len(PINS) == len(lines("constraints.txt"))


def test_what_the_dependencies_pull_in_is_pinned_too():
    """Walk the requirements of all that labkit asks for, as installed here; each pin must admit the oldest Python."""
    seen, waiting = set(), [*DIRECT.values(), *EXTRA.values()]
    while waiting:
        need = waiting.pop()
        name, extras = canonicalize_name(need.name), ["", *sorted(need.extras)]
        if (name, *extras) in seen or TORCH_CUDA.match(name):
            continue
        seen.add((name, *extras))
        try:
            more = map(Requirement, importlib.metadata.requires(name) or ())
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform
        waiting += [need for need in more
                    if not need.marker or any(need.marker.evaluate({"extra": extra}) for extra in extras)]
        assert name in PINS, name
        python = SpecifierSet(importlib.metadata.metadata(name)["Requires-Python"] or "")
        assert importlib.metadata.version(name) != PINS[name] or python.contains("3.11.0"), (name, python)
    assert len(seen) > 80


def test_conda_installs_the_project_under_the_same_pins():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, _, pip = environment["dependencies"]
    assert environment["channels"] == ["conda-forge"]
    assert python.split("=")[1] in SpecifierSet(PROJECT["requires-python"])
    assert pip == {"pip": ["--constraint constraints.txt", "--editable ."]}


def test_binder_asks_for_what_recorded_labs_need_under_the_same_pins():
    constraint, *names = lines("binder/requirements.txt")
    assert constraint == "-c ../constraints.txt"
    without_gpu = DIRECT.keys() - {"torch", "transformers", "nbval", "nvidia-ml-py", "cuda-bindings", "cloudpickle", "voila"}
    assert set(names) == without_gpu | {"notebook"} and PINS.keys() >= set(names)
    assert lines("binder/runtime.txt")[0].removeprefix("python-") in SpecifierSet(PROJECT["requires-python"])


def test_repo2docker_accepts_binder():
    program = Path(sys.executable).parent / "jupyter-repo2docker"
    done = subprocess.run([program, "--no-build", "--debug", "."], cwd=ROOT, capture_output=True, text=True)
    made = done.stdout + done.stderr
    assert done.returncode == 0, made
    assert 'pip install --no-cache-dir -r "binder/requirements.txt"' in made and "RUN ./binder/postBuild" in made
    assert 'R2D_ENTRYPOINT="${REPO_DIR}/binder/start"' in made
    assert "python=3.12" in made


def test_binder_opens_the_first_lab(tmp_path):
    """Binder runs binder/start with the command of its server, which leaves room for three labs (see test_notebooks) in 1 GiB."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--ServerApp.port={port}", "--IdentityProvider.token=t"]
    with subprocess.Popen([ROOT / "binder" / "start", *server], cwd=ROOT, stderr=subprocess.DEVNULL,
                          env={**os.environ, "JUPYTER_CONFIG_DIR": str(tmp_path)}) as started:
        try:
            for _ in range(300):
                time.sleep(0.1)
                with contextlib.suppress(urllib.error.URLError):  # it has yet to start
                    opened = urllib.request.urlopen(f"http://127.0.0.1:{port}/?token=t", timeout=20)
                    break
            status = Path(f"/proc/{started.pid}/status")
            peak = re.search(r"VmHWM:\s*(\d+) kB", status.read_text()) if status.exists() else None
        finally:
            started.terminate()
    first = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))[0]
    assert opened.status == 200 and f"/lab/tree/notebooks/{first}" in opened.url
    assert peak is None or int(peak[1]) < 124 * 1024, peak[0]


def test_a_wheel_carries_every_room_recording_and_list(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "labkit", source / "labkit", ignore=shutil.ignore_patterns("__pycache__"))
    (source / "labkit/recordings/some-gpu").mkdir(parents=True)
    (source / "labkit/recordings/some-gpu/some.json").write_text("{}")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path]
    subprocess.run([*pip, source], check=True)
    inside = set(zipfile.ZipFile(next(tmp_path.glob(f"labkit-{labkit.__version__}-*.whl"))).namelist())
    files = [file for ending in ("py", "json", "csv", "ipynb", "html", "yaml", "md") for file in (source / "labkit").rglob(f"*.{ending}")]
    wanted = {str(file.relative_to(source)) for file in files}
    assert len(wanted) > 10 and wanted <= inside, wanted - inside


@pytest.mark.parametrize("target, command", [
    *((name, f"-m labkit {name}") for name in ("lab", "doctor", "run", "record", "build")),
    ("test", '-m pytest `.*import xdist.* && echo --numprocesses=2 --dist loadfile --no-loadscope-reorder`')])
def test_make_passes_arguments_on(target, command):
    told = subprocess.run(["make", "-n", target, "ARGS=--some"], cwd=ROOT, capture_output=True, text=True).stdout
    assert re.search(rf"\.venv/bin/python {command} --some$", told, re.MULTILINE), told
    assert ("--extra test" in told) is (target == "test")


def test_ci_runs_make_test_and_the_citation_names_this_version():
    assert lines(".ci/run")[-2:] == ["export LABKIT_BROWSER=required", "make test"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == labkit.__version__


def test_gpu_tests_stay_out_of_make_test(monkeypatch):
    """They measure time, so none runs beside another."""
    monkeypatch.setattr(machine, "mode", lambda: machine.Mode(True, "pretended"))
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    assert conftest.no_gpu_tests() == "measures time and must run alone: .venv/bin/python -m pytest -m gpu"
    monkeypatch.delenv("PYTEST_XDIST_WORKER")
    assert conftest.no_gpu_tests() is None
