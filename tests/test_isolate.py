"""isolate.py: whatever isolated code does, the answer comes back and this process is untouched (here on the CPU)."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from labkit import isolate, machine


@pytest.fixture(scope="module", autouse=True)
def helpers_end():
    """End the helpers after the last test here, and close the file that each of them wrote to."""
    yield
    isolate._let_go()
    for helper in isolate._helpers:
        helper.told.close()


@pytest.fixture(autouse=True)
def helper(monkeypatch):
    """Let isolated code run on the CPU, with a helper that is already there."""
    monkeypatch.setattr(machine, "gpu_uuid", lambda: None)
    isolate.run("pass")


ENV = os.environ | {"PYTHONPATH": str(Path(isolate.__file__).parents[1]), "LABKIT_MODE": "recorded"}


def gone(pid, within_s=5.0):
    """Say whether a process ends within some seconds."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_prints_of_all_kinds_and_the_last_expression_come_back():
    result = isolate.run("import os, sys\nprint('one')\nprint('two', file=sys.stderr)\nos.system('echo three')\n6 * 7")
    assert result.stdout == "one\ntwo\nthree\n"
    assert [output["data"]["text/plain"] for output in result.outputs] == ["42"]
    assert (result.error, result.cause, result.how_it_ended) == (None, None, "finished")


def test_torch_is_there_at_once_also_three_times_in_a_row():
    source = "import os, sys\nprint('torch' in sys.modules, os.getppid())\nimport torch\ntorch.ones(2).sum().item()"
    told = set()
    for _ in range(3):
        start = time.monotonic()
        run = isolate.run(source)
        assert time.monotonic() - start < 1
        told.add((run.stdout, run.outputs[0]["data"]["text/plain"]))
    assert told == {(f"True {isolate._helpers[0].pid}\n", "2.0")}


def test_every_run_is_a_process_of_its_own_with_names_of_its_own():
    assert isolate.run("import os\nx = 1\nprint(os.getpid())").stdout != isolate.run("import os\nprint(os.getpid())").stdout
    assert "NameError" in isolate.run("x").error
    assert isolate.run("def f(): return g()\ndef g(): return 5\nf()").outputs[0]["data"]["text/plain"] == "5"


def test_pictures_come_back_shown_or_not_and_also_after_an_error():
    source = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.figure()\nplt.show()\nraise ValueError('late')"
    result = isolate.run(source)
    assert [list(output["data"]) for output in result.outputs] == [["text/plain", "image/png"]] * 2
    assert result.error.endswith("ValueError: late")


def test_rich_displays_come_back():
    bundle = "{'image/png': 'AAAA'}, {'image/png': {'width': 7}}"
    result = isolate.run("import pandas\ndisplay(pandas.DataFrame({'a': [1]}))\nclass Chart:\n"
                         f"    def _repr_mimebundle_(self): return {bundle}\nChart()")
    assert "<table" in result.outputs[0]["data"]["text/html"]
    assert (result.outputs[1]["data"]["image/png"], result.outputs[1]["metadata"]) == ("AAAA", {"image/png": {"width": 7}})


def test_an_error_is_told_in_the_lines_of_the_cell():
    error = isolate.run("import json\ndef f():\n    json.loads('{')\n\nf()").error
    assert error.splitlines()[:2] == ["line 5: f()", "line 3: json.loads('{')"]
    assert "JSONDecodeError" in error and "decoder.py" not in error


def test_the_first_cause_behind_a_failed_capture_is_found():
    result = isolate.run("try:\n    raise RuntimeError('operation not permitted when stream is capturing')\nfinally:\n"
                         "    raise RuntimeError('operation failed due to a previous error during capture')")
    assert "not permitted when stream is capturing" in result.cause and "line 2" in result.cause
    assert "previous error" in result.error


@pytest.mark.parametrize("source, ended", [
    ("import ctypes\nctypes.string_at(0)", "crashed: SIGSEGV"),
    ("import os\nos.abort()", "crashed: SIGABRT"),
    ("import os\nos._exit(3)", "exited with code 3"),
    ("import os\nos._exit(0)", "exited with code 0"),
    ("raise SystemExit(4)", "raised"),
    ("input()", "raised"),
    ("def f(:", "raised"),
    ("raise SystemExit", "finished"),
])
def test_however_it_ends_what_was_printed_stays(source, ended):
    result = isolate.run(f"print('before')\n{source}")
    assert result.how_it_ended == ended
    assert bool(result.error) == (ended != "finished")
    assert result.stdout == ("" if "f(:" in source else "before\n")
    assert isolate.run("1 + 1").outputs


def test_an_endless_loop_meets_the_time_limit():
    result = isolate.run("print('in'); x = 0\nwhile True: x += 1", timeout_s=0.4)
    assert (result.stdout, result.how_it_ended) == ("in\n", "timed out after 0.4 s")
    assert 0.4 <= result.seconds < 2 and "timed out" in result.error
    assert isolate.run("1").error is None


def test_much_output_is_cut_and_endless_output_stopped(monkeypatch):
    result = isolate.run("print('x' * 100_000, 'end')")
    assert len(result.stdout) < 21_000 and "characters left out" in result.stdout and result.stdout.endswith("end\n")
    monkeypatch.setattr(isolate, "MOST_PRINTED", 1 << 20)
    assert "printed over 1 MiB" in isolate.run("while True: print('y' * 1000)").error


def test_what_isolated_code_starts_ends_with_it():
    source = "import subprocess\nprint(subprocess.Popen(['sleep', '60']).pid)"
    assert gone(int(isolate.run(source).stdout))
    assert gone(int(isolate.run(source + "\nwhile True: pass", timeout_s=0.4).stdout))


def test_ctrl_c_ends_the_child_and_is_raised_here(tmp_path):
    told, helper = tmp_path / "pid", isolate._helpers[0]

    def interrupt():
        while not (told.exists() and told.read_text()):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        isolate.run(f"import os\nopen({str(told)!r}, 'w').write(str(os.getpid()))\nwhile True: pass")
    assert gone(int(told.read_text()))
    start = time.monotonic()
    assert isolate.run("1").error is None and time.monotonic() - start < 1
    assert isolate._helpers[0] is helper and helper.poll() is None


def test_a_helper_that_died_is_started_again():
    isolate._helpers[0].kill()
    isolate._helpers[0].wait()
    assert isolate.run("print('back')").stdout == "back\n"


def test_runs_from_several_threads_go_side_by_side():
    with ThreadPoolExecutor(3) as threads:
        begun = time.monotonic()
        results = list(threads.map(lambda i: isolate.run(f"import time\ntime.sleep(0.4)\nprint({i})"), range(3)))
        results = list(threads.map(lambda i: isolate.run(f"import time\ntime.sleep(0.4)\nprint({i})"), range(3)))
    assert [result.stdout for result in results] == ["0\n", "1\n", "2\n"] and len(isolate._helpers) <= 3
    assert time.monotonic() - begun < 60


def test_a_child_that_takes_all_memory_is_stopped(monkeypatch):
    monkeypatch.setattr(isolate, "MOST_MEMORY", 1e-3)
    result = isolate.run("held = []\nwhile True: held.append(bytearray(2**24))")
    assert "was stopped: it used over" in result.how_it_ended and "GiB of memory" in result.error


def test_no_temporary_folder_stays(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    isolate.run("1")
    isolate.run("while True: pass", timeout_s=0.1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("busy", ["import time; time.sleep(60)", "import re; re.match('(a+)+$', 'a' * 64 + 'b')"],
                         ids=["asleep", "in C, where no thread of its own can run"])
def test_helper_and_child_leave_when_the_parent_is_killed(tmp_path, busy):
    told = tmp_path / "pids"
    source = f"import os\nopen({str(told)!r}, 'w').write(f'{{os.getpid()}} {{os.getppid()}}')\n{busy}"
    parent = subprocess.Popen([sys.executable, "-c", f"from labkit import isolate; isolate.run({source!r})"], env=ENV)
    while not (told.exists() and len(told.read_text().split()) == 2):
        assert parent.poll() is None
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    assert all(gone(int(pid)) for pid in told.read_text().split())


def test_the_helper_leaves_when_idle(tmp_path):
    code = ("import sys; sys.modules['torch'] = None; from labkit import isolate; isolate.IDLE_S = 0.1; "
            "isolate._help('')")
    helper = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, cwd=tmp_path, env=ENV)
    assert helper.wait(timeout=60) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_a_device_assert_in_the_child_stays_there(monkeypatch):
    import torch
    monkeypatch.undo()
    isolate._let_go()
    isolate.run("1")
    result = isolate.run("import torch\ntorch.zeros(3, device='cuda')[torch.tensor([7], device='cuda')]")
    assert "device-side assert" in result.error
    assert torch.ones(2, device="cuda").sum().item() == 2
    start = time.monotonic()
    assert isolate.run("import torch\nprint(torch.ones(2, device='cuda').sum().item())").stdout == "2.0\n"
    assert time.monotonic() - start < 1


@pytest.mark.gpu
def test_a_broken_capture_in_the_child_names_its_first_cause(monkeypatch):
    monkeypatch.undo()
    result = isolate.run("import torch\nx = torch.ones(2, device='cuda')\ngraph = torch.cuda.CUDAGraph()\n"
                         "with torch.cuda.graph(graph):\n    x.sum().item()")
    assert "x.sum().item()" in result.cause and "line 5" in result.cause


@pytest.mark.gpu
def test_the_spares_memory_is_counted(monkeypatch):
    monkeypatch.undo()
    isolate._let_go()
    isolate.run("1")
    end = time.monotonic() + 30
    while not isolate.spare_bytes() and time.monotonic() < end:
        time.sleep(0.1)
    assert 50e6 < isolate.spare_bytes() < 5e9
