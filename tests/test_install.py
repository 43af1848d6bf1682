"""install.py against pretended Pythons, with pip kept away from every index."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from labkit import install

ROOT = Path(__file__).parents[1]
TORCH = "__version__ = '2.11.0+test'\nclass cuda:\n    is_available = staticmethod(lambda: {sees_gpu})\n"
METADATA = "Metadata-Version: 2.1\nName: torch\nVersion: {version}\nRequires-Dist: setuptools<82\n"


@pytest.fixture
def project(tmp_path):
    """Copy what the installation reads into a folder of its own."""
    (tmp_path / "project/labkit").mkdir(parents=True)
    for name in ("pyproject.toml", "constraints.txt", "LICENSE", "labkit/__init__.py", "labkit/install.py"):
        shutil.copy(ROOT / name, tmp_path / "project" / name)
    return tmp_path / "project"


@pytest.fixture
def python(tmp_path):
    """Return a function that makes a Python (itself a virtual environment) with or without a pretended torch."""
    def python(sees_gpu=None, version="2.11.0+test"):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "base"], check=True)
        site = next((tmp_path / "base/lib").glob("python*/site-packages"))
        if sees_gpu is not None:
            (site / f"torch-{version}.dist-info").mkdir()
            (site / f"torch-{version}.dist-info/METADATA").write_text(METADATA.format(version=version))
            (site / "torch.py").write_text(TORCH.format(sees_gpu=sees_gpu))
        return tmp_path / "base/bin/python"
    return python


def offline(project, python, *arguments, start=subprocess.run):
    """Run the installation with an index that pip may not ask."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    return start([python, "-m", "labkit.install", *arguments], cwd=project, text=True, stdout=subprocess.PIPE,
                 stderr=subprocess.STDOUT, env={**env, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull})


def test_a_torch_that_sees_a_gpu_is_kept_and_without_a_network_what_is_missing_is_named(project, python):
    base = python(sees_gpu=True)
    done = offline(project, base)
    assert done.returncode == 0, done.stdout
    assert f"keeping torch 2.11.0+test of {base}: it sees a GPU." in done.stdout
    last = done.stdout.splitlines()[-1]
    assert "going on with what is there. Missing: transformers, jupyterlab" in last and "torch," not in last
    code = "import json, torch, labkit; print(json.dumps([torch.__version__, labkit.__version__]))"
    used = subprocess.run([project / ".venv/bin/python", "-c", code], cwd="/", capture_output=True, text=True)
    assert used.stdout == '["2.11.0+test", "0.1.0"]\n', used.stderr
    pins = (project / ".venv/labkit-constraints.txt").read_text().splitlines()
    assert "torch==2.11.0+test" in pins and not any(pin.startswith("setuptools") for pin in pins)
    assert any(pin.startswith("jupyterlab==") for pin in pins)
    assert not (project / ".venv/labkit-install.json").exists()  # so the next run tries again


def test_with_nothing_there_and_no_network_it_says_so(monkeypatch, capsys):
    for name in ("torch_to_keep", "make_venv", "link", "constraints"):
        monkeypatch.setattr(install, name, lambda *args: None)
    monkeypatch.setattr(install, "ask", lambda *args: [])  # an environment without a single package
    monkeypatch.setattr(subprocess, "run", lambda command, env: subprocess.CompletedProcess(command, 1))
    assert not install.install(["test"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert "Missing: torch, " in last and "pytest" in last and last.endswith("With a network, run this again.")


def test_an_interrupted_start_leaves_no_half_made_environment(project, python):
    running = offline(project, python(), start=lambda *args, **more: subprocess.Popen(
        *args, **more, start_new_session=True))
    assert "making .venv" in running.stdout.readline()
    until = time.monotonic() + 20
    while not (project / ".venv/bin").exists() and time.monotonic() < until:
        time.sleep(0.02)
    os.killpg(running.pid, signal.SIGINT)
    assert "labkit: interrupted. Run it again" in running.communicate(timeout=20)[0]
    assert running.returncode == 130 and not (project / ".venv").exists()


def test_a_finished_installation_is_left_alone_until_something_changes(project, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(install, "ROOT", project)
    monkeypatch.setattr(install, "PYTHON", Path(sys.executable))
    monkeypatch.setattr(install, "STAMP", project / "stamp.json")
    monkeypatch.setattr(install, "install", lambda extras: asked.append(extras) or True)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["install", *arguments])
        install.main()
        return asked
    assert run() == [[]]
    assert run() == [[]] and "up to date" in capsys.readouterr().out
    assert run("--extra", "test") == [[], ["test"]]
    assert run() == [[], ["test"]]  # more is there than asked for
    (project / "constraints.txt").write_text("pandas==3.0\n")
    assert run() == [[], ["test"], ["test"]]


def test_an_environment_stays_with_the_python_that_made_it(project, monkeypatch):
    (project / "stamp.json").write_text(json.dumps({"base": "/bin/sh", "key": "", "extras": []}))
    monkeypatch.setattr(install, "STAMP", project / "stamp.json")
    monkeypatch.setattr(install, "PYTHON", Path(sys.executable))
    monkeypatch.setattr(sys, "argv", ["install", "--extra", "test"])
    monkeypatch.setattr(os, "execv", lambda program, command: sys.exit(" ".join(command)))
    with pytest.raises(SystemExit, match="^/bin/sh -m labkit.install --extra test$"):
        install.main()


@pytest.mark.parametrize("sees_gpu, version, kept, said", [
    (True, "2.11.0+test", "2.11.0+test", "keeping torch"), (False, "2.11.0", None, ""), (None, "", None, ""),
    (True, "2.7.1", None, "older than 2.8")])
def test_which_torch_is_kept(python, project, sees_gpu, version, kept, said):
    code = "from labkit import install; print(repr(install.torch_to_keep()))"
    done = subprocess.run([python(sees_gpu, version), "-c", code], cwd=project, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == repr(kept), done.stderr
    assert said in done.stdout


def test_an_old_python_gets_one_line(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    with pytest.raises(SystemExit, match="Python 3.11 or newer is needed.*make lab PYTHON="):
        install.main()


def test_a_folder_that_is_no_environment_is_not_touched(project, monkeypatch):
    mine = project / ".venv/mine.txt"
    mine.parent.mkdir()
    mine.write_text("precious")
    monkeypatch.setattr(install, "VENV", mine.parent)
    monkeypatch.setattr(install, "PYTHON", mine.parent / "bin/python")
    with pytest.raises(SystemExit, match="is not a Python environment: move it away"):
        install.make_venv()
    assert mine.read_text() == "precious"
