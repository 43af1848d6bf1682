"""The commands, on small notebooks made here."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import torch

from labkit import __main__ as cli
from labkit import examine, machine
from labkit.explorers import app


@pytest.fixture
def labs(tmp_path, monkeypatch):
    """Make notebooks in a folder of their own, go there, and return a function that adds one."""
    def add(name, *cells):
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        nbformat.write(notebook, tmp_path / "notebooks" / f"{name}.ipynb")
    (tmp_path / "notebooks").mkdir()
    add("00_check_your_machine", "print('hello' + ' there')")
    monkeypatch.chdir(tmp_path)
    return add


def test_run_keeps_a_copy_and_one_page_and_names_the_cell_that_failed(labs, capsys):
    labs("10_measure_launch_overhead", "print('sun' + 'rise')", "1 / 0", "print('sun' + 'set')")
    assert cli.main(["run", "--out", "kept"]) == 1
    told = capsys.readouterr()
    assert "labkit: 10_measure_launch_overhead, cell 2: ZeroDivisionError: division by zero\n" in told.err
    assert "kept/labs.html" in told.out
    page = Path("kept/labs.html").read_text()
    assert "hello there" in page and "sunrise" in page and "sunset" not in page
    copy = nbformat.read("kept/10_measure_launch_overhead.ipynb", as_version=4)
    assert copy.cells[0].outputs[0].text == "sunrise\n" and not copy.cells[2].outputs
    original = nbformat.read("notebooks/10_measure_launch_overhead.ipynb", as_version=4)
    assert not original.cells[0].outputs


def test_pictures_on_the_page_carry_their_words(labs):
    labs("10_picture", "from IPython.display import Image, display\n"
         "display(Image(data=b'x', format='png'), metadata={'image/png': {'alt': 'say \"up\" & <on>'}})")
    assert cli.main(["run", "10", "--out", "kept"]) == 0
    [picture] = re.findall(r"<img [^>]*base64[^>]*>", Path("kept/labs.html").read_text().replace("<on>", "&lt;on&gt;"))
    assert 'say "up" &amp; &lt;on&gt;' in picture.replace("&quot;", '"').replace("'", '"')


def test_run_can_be_interrupted_and_keeps_what_ran(labs, tmp_path):
    labs("10_slow", "from pathlib import Path; print('fir' + 'st')",
         f"Path({str(tmp_path / 'started')!r}).touch(); import time; time.sleep(60)", "print('nev' + 'er')")
    running = subprocess.Popen([sys.executable, "-m", "labkit", "run", "10", "--out", "kept"], start_new_session=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])})
    until = time.monotonic() + 30
    while not Path("started").exists() and time.monotonic() < until:
        time.sleep(0.05)
    os.killpg(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=30)
    assert running.returncode == 130 and "Interrupted: what had run until then is kept." in out
    assert "Traceback" not in err
    page = Path("kept/labs.html").read_text()
    assert "first" in page and "never" not in page


@pytest.mark.parametrize("name, close", [
    ("mesure_launch", "10_measure_launch_overhead"), ("chek_your_machine", "00_check_your_machine"),
    ("zzz", "00_check_your_machine or 10_measure_launch_overhead")])
def test_an_unknown_lab_is_answered_with_the_closest_names(labs, capsys, name, close):
    labs("10_measure_launch_overhead")
    assert cli.main(["run", name]) == 1
    assert capsys.readouterr().err == f"labkit: there is no lab {name!r}; did you mean {close}?\n"
    assert not Path("runs").exists()


def test_a_lab_is_found_by_number_name_or_file(labs):
    labs("10_measure_launch_overhead")
    wanted = [Path("notebooks/10_measure_launch_overhead.ipynb").resolve()]
    for name in ("10", "10_measure_launch_overhead", "notebooks/10_measure_launch_overhead.ipynb"):
        assert cli.find_labs([name], Path("notebooks").resolve()) == wanted
    assert len(cli.find_labs([], Path("notebooks"))) == 2


def test_a_folder_that_cannot_be_written_is_one_line(labs, capsys):
    assert cli.main(["run", "--out", "/proc/nowhere"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def lab_command(monkeypatch, *arguments):
    """Return (command, environment) that `labkit lab` would become."""
    became = []
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(os, "execv", lambda program, command: became.append((command, os.environ)))
    monkeypatch.setattr(machine, "doctor", lambda: [])
    assert cli.main(["lab", *arguments]) == 0
    return became[0]


def test_lab_stays_on_localhost_and_opens_the_first_lab(labs, monkeypatch):
    labs("10_measure_launch_overhead")
    command, _ = lab_command(monkeypatch, "--no-browser")
    assert "--ip=127.0.0.1" in command and "--no-browser" in command
    assert "--LabApp.default_url=/lab/tree/notebooks/00_check_your_machine.ipynb" in command
    assert not any("token" in part or "password" in part for part in command)


@pytest.mark.parametrize("user, allowed", [(0, True), (1000, False)])
def test_lab_starts_as_root_too(labs, monkeypatch, user, allowed):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert ("--allow-root" in lab_command(monkeypatch)[0]) is allowed


def test_a_busy_port_makes_way_for_another(labs):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        running = subprocess.Popen([sys.executable, "-m", "labkit", "lab", "--no-browser", f"--port={port}"], text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   env={**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])})
        told = ""
        for line in running.stdout:
            told += line
            if url := re.search(r"http://127.0.0.1:(\d+)/lab/tree/notebooks/00_check_your_machine.ipynb\?token=", line):
                break
        running.kill()
        running.communicate()
    assert f"The port {port} is already in use, trying another port." in told
    assert url and int(url[1]) != port, told


def test_lab_moves_settings_out_of_a_read_only_home(labs, fresh_machine):
    fresh_machine.setenv("HOME", "/proc/nowhere")
    _, env = lab_command(fresh_machine)
    assert Path(env["JUPYTER_RUNTIME_DIR"]).parent.is_dir()


def test_lab_without_jupyterlab_says_how_to_get_it(labs, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["lab"]) == 1
    assert "jupyterlab is not installed: `make lab` with a network installs it" in capsys.readouterr().err


def test_the_app_is_on_localhost_with_a_token_and_needs_no_clone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command, _ = lab_command(monkeypatch, "--app", "--no-browser", "--port=9000")
    assert command[1:3] == ["-m", "labkit.explorers.app"] and command[-2:] == ["--no-browser", "--port=9000"]
    assert "--Voila.ip=127.0.0.1" in command and "--token" in command and "--app" not in command
    [page] = [part for part in command if part.endswith(".ipynb")]
    assert nbformat.read(page, as_version=4).cells


def test_the_app_gives_its_browser_the_token_and_nobody_else(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(app.webbrowser, "open", opened.append)
    monkeypatch.setattr(app, "Thread", lambda target, args, daemon: SimpleNamespace(start=lambda: target(*args)))
    voila = app.App(connection_dir=str(tmp_path), ip="127.0.0.1", port=9000)
    voila.identity_provider = SimpleNamespace(token="secret", token_generated=True)
    voila.launch_browser()
    page = tmp_path / "open.html"
    assert opened == [page.as_uri()] and "url=http://127.0.0.1:9000/?token=secret" in page.read_text()
    assert page.stat().st_mode & 0o777 == 0o600


def test_the_app_without_voila_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["lab", "--app"]) == 1
    assert "voila is not installed: `make lab` with a network installs it" in capsys.readouterr().err


@pytest.mark.parametrize("status, code", [("ok", 0), ("warning", 0), ("problem", 1)])
def test_the_doctor_fails_only_for_what_is_broken(monkeypatch, capsys, status, code):
    monkeypatch.setattr(machine, "doctor", lambda: [machine.Check("driver", status, "as found", "the fix")])
    assert cli.main(["doctor"]) == code
    assert capsys.readouterr().out.split() == [status, "driver", "as", "found", "->", "the", "fix"]
    assert cli.main(["doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out) == [
        {"name": "driver", "status": status, "found": "as found", "fix": "the fix"}]


def test_recording_without_a_gpu_is_refused(fresh_machine, capsys):
    fresh_machine.setattr(machine, "mode", lambda: machine.Mode(False, "there is none", "Get one."))
    assert cli.main(["record"]) == 1
    assert "needs an NVIDIA GPU: there is none. Get one." in capsys.readouterr().err


def test_an_unknown_option_or_command_is_a_usage_error(capsys):
    for words in (["run", "--fast"], ["dance"], []):
        with pytest.raises(SystemExit) as stop:
            cli.main(words)
        assert stop.value.code == 2
    assert "unknown: --fast" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["notebooks", "notebooks/solutions"])
def test_run_never_writes_over_the_labs(folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "notebooks" / "solutions").mkdir(parents=True)
    lab = tmp_path / "notebooks" / "00_lab.ipynb"
    lab.write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "00", "--out", folder]) == 1
    assert "holds the labs themselves" in capsys.readouterr().err and lab.read_text() == "{}"


def test_run_names_what_is_no_notebook_and_goes_on(tmp_path, monkeypatch, capsys):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "00_broken.ipynb").write_text("no notebook")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "--out", "done"]) == 1
    assert "00_broken.ipynb is no notebook" in capsys.readouterr().err and (tmp_path / "done" / "labs.html").exists()


@pytest.fixture
def diagnosed(tmp_path, monkeypatch, capsys):
    """Return a function that runs `diagnose` in a folder with a module, as if on a GPU; gives (exit status, its lines)."""
    (tmp_path / "mine_to_diagnose.py").write_text("import torch\nwidth = 3\n\n\ndef double(x):\n    return x * 2\n")
    zeros, randn = torch.zeros, torch.randn
    monkeypatch.setattr(machine, "require_gpu", lambda what: None)
    monkeypatch.setattr(torch, "zeros", lambda *args, device, **kwargs: zeros(*args, **kwargs))
    monkeypatch.setattr(torch, "randn", lambda *args, device: randn(*args))
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.chdir(tmp_path)

    def run(*words):
        status = cli.main(["diagnose", *words])
        told = capsys.readouterr()
        return status, told.out + told.err
    yield run
    sys.modules.pop("mine_to_diagnose", None)


def test_diagnosing_without_a_gpu_is_refused(fresh_machine, capsys):
    fresh_machine.setattr(machine, "mode", lambda: machine.Mode(False, "there is none", "Get one."))
    assert cli.main(["diagnose", "mine:call"]) == 1
    assert capsys.readouterr().err == "labkit: A trial capture needs an NVIDIA GPU: there is none. Get one.\n"


@pytest.mark.parametrize("name, wrong", [
    ("nowhere_to_be_found:call", "No module named 'nowhere_to_be_found'"), ("mine_to_diagnose.py:double", "No module named"),
    ("mine_to_diagnose:triple", "no attribute 'triple'"), ("mine_to_diagnose:double.inner", "no attribute 'inner'"),
    ("mine_to_diagnose", "no attribute ''"), (":double", "Empty module name")])
def test_diagnosing_what_cannot_be_imported_is_one_line(diagnosed, name, wrong):
    status, told = diagnosed(name)
    assert status == 1 and told.count("\n") == 1 and wrong in told
    assert told.startswith(f"labkit: {name!r} is no module:callable that can be imported from here (")


def test_diagnosing_what_cannot_be_called_is_one_line(diagnosed):
    assert diagnosed("mine_to_diagnose:width") == (1, "labkit: mine_to_diagnose:width is a int, which cannot be called\n")


@pytest.mark.parametrize("given, wrong", [
    ("8xwide", "'wide'"), ("", "''"), ("8x", "''"), ("8,8", "'8,8'"), ("8x8:float99", "'float99'"), ("8x8:zeros", "dtype"),
    ("8x-8", "negative")])
def test_diagnosing_with_a_wrong_input_is_one_line(diagnosed, given, wrong):
    status, told = diagnosed("mine_to_diagnose:double", "--input", "8", "--input", given)
    assert status == 1 and told.count("\n") == 1 and wrong in told
    assert told.startswith(f"labkit: --input wants a shape and a type, like 1x128:float16, not {given!r} (")


def test_what_is_diagnosed_is_that_callable_with_those_inputs(diagnosed, monkeypatch):
    asked = []

    def diagnose(fn, *inputs, **options):
        asked.append((fn, inputs, options))
        return examine.Diagnosis(len(inputs) == 2, "here", "it waits", nodes={}, largest_difference=0.0, **dict.fromkeys(
            ("eager_us", "graph_us", "speedup"), (1.0, 1.0, 1.0)))
    monkeypatch.setattr(examine, "diagnose", diagnose)
    status, told = diagnosed("mine_to_diagnose:double", "--input=2x3:float16", "--input=4:int64", "--timeout=7", "--here")
    assert status == 0 and told.startswith("Capturable")
    [(fn, inputs, options)] = asked
    assert fn is sys.modules["mine_to_diagnose"].double and options == {"here": True, "timeout_s": 7}
    assert [(tuple(x.shape), x.dtype) for x in inputs] == [((2, 3), torch.float16), ((4,), torch.int64)]
    assert inputs[0].any() and not inputs[1].any()
    status, told = diagnosed("mine_to_diagnose:double")
    assert status == 1 and told.startswith("Not capturable") and "it waits" in told


def test_a_callable_that_cannot_be_sent_is_one_line(diagnosed, monkeypatch):
    monkeypatch.setattr(examine, "_send", lambda *call: 1 / 0)
    status, told = diagnosed("mine_to_diagnose:double")
    assert status == 1 and told.count("\n") == 1
    assert "cannot be sent to a child process (division by zero)" in told and "--here" in told
