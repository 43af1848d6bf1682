"""notebook.py in a real kernel: banner, `%%gpu` and `%%isolated`, live (the CPU plays the GPU) and recorded."""

import json
import os
import re
import threading
import time
from pathlib import Path

import psutil
import pytest
from jupyter_client.manager import start_new_kernel

from labkit import recordings

ROOT = Path(__file__).parents[1]
PICTURE = {"output_type": "display_data", "data": {"image/png": "AAAA", "text/plain": "a picture"}, "metadata": {}}
PRINTED = "%%gpu\nprint(gpu_only)"
FAILED = "%%isolated --expect \"operation not permitted\"\n1 / 0"


class Notebook:
    """A kernel to run cells in; `run` gives what a reader would see, one string per output."""

    def __init__(self, folder):
        env = os.environ | {"PYTHONPATH": str(ROOT), "LABKIT_MODE": ""}
        self.manager, self.client = start_new_kernel(kernel_name="python3", cwd=str(folder), env=env)
        self.folder = folder
        self.set_up()

    def set_up(self):
        self.run(f"from labkit import machine, recordings\nimport pathlib, os, labkit\n"
                 f"recordings.FOLDER = pathlib.Path({str(self.folder)!r})\nmachine.gpu_uuid = lambda: None")
        self.mode(live=False)

    def mode(self, live):
        reason = "NVIDIA Test, driver 1" if live else "no <GPU> here"
        self.run(f"machine.mode = lambda: machine.Mode({live}, {reason!r}, 'Buy one.')")
        return self.run("labkit.banner()")

    def run(self, source, stop_when=None):
        """Run a cell, and interrupt it once something stands in a file, if one is named."""
        self.outputs = []

        def interrupt():
            while not (stop_when.exists() and stop_when.read_text()):
                time.sleep(0.02)
            self.manager.interrupt_kernel()
        if stop_when:
            threading.Thread(target=interrupt, daemon=True).start()
        reply = self.client.execute_interactive(source, output_hook=self._keep, timeout=60, allow_stdin=False)
        self.status = reply["content"]["status"]
        return "".join(text for _, text in self.outputs)

    def _keep(self, message):
        content, kind = message["content"], message["msg_type"]
        if kind == "stream":
            self.outputs.append((content["name"], content["text"]))
        elif kind == "error":
            self.outputs.append((kind, "\n".join(content["traceback"])))
        elif kind in ("display_data", "execute_result"):
            self.outputs.append((kind, content["data"].get("text/plain", "")))
            self.html, self.metadata = content["data"].get("text/html"), content["metadata"]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recordings")
    outputs = {PRINTED: [{"output_type": "stream", "name": "stdout", "text": "7 from there\n"},
                         {"output_type": "stream", "name": "stderr", "text": "warned\n"}, PICTURE],
               FAILED: [{"output_type": "stream", "name": "stdout", "text": "CUDA error: operation not permitted\n"}],
               "%%gpu\nold": []}
    cells = {recordings.cell_key(source): {"code_hash": recordings.code_hash(source) if source != "%%gpu\nold" else "0",
                                           "outputs": shown} for source, shown in outputs.items()}
    kept = {field: kind() for field, kind in recordings.FIELDS.items()}
    kept |= {"schema": recordings.SCHEMA, "kind": "cells", "cells": cells, "recorded_at": "2026-11-29",
             "machine": {"gpu": "NVIDIA Test"}}
    (folder / "nvidia-test").mkdir()
    (folder / "nvidia-test" / "lab-10_a.json").write_text(json.dumps(kept))
    notebook = Notebook(folder)
    yield notebook
    notebook.client.stop_channels()
    notebook.manager.shutdown_kernel(now=True)


@pytest.fixture
def recorded(kernel):
    kernel.mode(live=False)
    return kernel


@pytest.fixture
def live(kernel):
    kernel.mode(live=True)
    return kernel


LABEL = "RECORDED on NVIDIA Test, 2026-11-29: not measured here"


def test_the_banner_says_the_mode_why_and_the_fix(kernel):
    said = kernel.mode(live=False)
    assert "RECORDED on NVIDIA Test, 2026-11-29" in said and "no <GPU> here" in said and "Buy one." in said
    assert "no &lt;GPU&gt; here" in kernel.html and kernel.status == "ok"
    assert "Cells marked %%gpu" in said
    apps = kernel.run("labkit.banner(cells=False)")
    assert "Cells" not in apps and "2026-11-29. Nothing is measured here" in apps
    assert "LIVE on NVIDIA Test, driver 1. Everything below is measured here, now, unless its label says RECORDED." in kernel.mode(live=True)
    try:
        kernel.run("os.environ |= {'LABKIT_TABLES': 'recorded', 'LABKIT_RECORDING': 'nvidia-none'}")
        said = kernel.mode(live=True)
        assert "now, but for tables: LABKIT_TABLES=recorded is set" in said and "Careful: LABKIT_RECORDING names 'nvidia-none'" in said
    finally:
        kernel.run("del os.environ['LABKIT_TABLES'], os.environ['LABKIT_RECORDING']")


def test_the_banner_stands_without_good_recordings(recorded, tmp_path):
    try:
        recorded.run(f"recordings.FOLDER = pathlib.Path({str(tmp_path)!r})")
        assert "there are no recordings here" in recorded.run("labkit.banner()") and recorded.status == "ok"
        (tmp_path / "nvidia-test").mkdir()
        (tmp_path / "nvidia-test" / "tiny.json").write_text("{")
        assert "tiny.json cannot be read" in recorded.run("labkit.banner()") and recorded.status == "ok"
        said = recorded.run("recordings.load('tiny')")
        assert said.startswith("RecordingError: ") and "\n" not in said and recorded.status == "error"
    finally:
        recorded.set_up()


def test_a_recorded_gpu_cell_shows_what_it_showed_there(recorded):
    recorded.run(PRINTED)
    assert [out for out in recorded.outputs if out[0] != "stderr"] == [
        ("display_data", LABEL), ("stdout", "7 from there\n"), ("display_data", "a picture")]
    assert ("stderr", "warned\n") in recorded.outputs and recorded.status == "ok"
    assert "gpu_only" not in recorded.run("dir()")
    assert LABEL in recorded.run(PRINTED + "  \n\n") and "(measured by an earlier version)" in recorded.run("%%gpu\nold")


def test_an_edited_gpu_cell_says_that_it_needs_a_gpu(recorded):
    said = recorded.run(PRINTED + " + 1")
    assert said == "This cell has no recording (changed, or never recorded): it needs an NVIDIA GPU."
    assert recorded.status == "ok" and recorded.metadata == {"labkit": "label"}


def test_a_live_gpu_cell_is_a_cell_like_any_other(live):
    assert live.run("%%gpu\nlived = 3\nlived * 2") == "6"
    assert live.run("lived") == "3"
    assert live.run("%%gpu \nimport asyncio\nawait asyncio.sleep(0, 'awaited')") == "'awaited'"
    said = live.run("%%gpu\nx = 1\nx / 0")
    assert live.status == "error" and re.search(r"----> 3", re.sub(r"\x1b\[[0-9;]*m", "", said))
    assert "ZeroDivisionError" in said and "notebook.py" not in said
    said = live.run("%%gpu\nimport inspect\ndef f():\n    return 1\nprint(inspect.getsource(f))")
    assert said == "def f():\n    return 1\n\n"


def test_wrong_arguments_are_told(recorded):
    assert "%%gpu takes nothing after it, not 'now'" in recorded.run("%%gpu now\n1") and recorded.status == "error"
    assert "not --fast" in recorded.run("%%isolated --fast\n1")
    assert "--timeout: wants seconds above 0, not 'soon'" in recorded.run("%%isolated --timeout soon\n1")
    assert "No closing quotation" in recorded.run("%%isolated --expect \"x\n1")


def test_a_name_that_is_missing_gets_one_hint_also_after_many_banners(recorded):
    said = recorded.run("nowhere")
    assert said.count("Hint: run the cells above first") == 1 and "only where there is a GPU" in said
    recorded.mode(live=True)
    assert "only where" not in recorded.run("nowhere")
    assert "Hint" not in recorded.run("1 / 0")


def test_an_isolated_cell_runs_elsewhere(live):
    here = int(live.run("mine = 1\nprint(os.getpid())"))
    said = live.run("%%isolated\nimport os\nprint(os.getpid(), 'mine' in dir())\n"
                    "import matplotlib.pyplot as plt\nplt.plot([1])\n'end'")
    pid, seen = said.splitlines()[0].split()
    assert int(pid) != here and seen == "False"
    assert [kind for kind, _ in live.outputs] == ["stdout", "display_data", "display_data"] and live.status == "ok"


def test_an_isolated_cell_that_fails_unasked_raises_shortly(live):
    said = live.run("%%isolated\nprint('before')\nraise RuntimeError('CUDA: operation not permitted when stream is capturing')")
    assert live.status == "error" and "IsolatedError: the child process failed" in said and "Traceback" not in said
    assert said.index("before") < said.index("  cause: ") < said.index("\nline 3: raise")


def test_expect_wants_just_that_failure(live):
    source = "%%isolated --timeout 0.5 --expect {}\n{}"
    for text, code in (("'division by zero'", "1 / 0"), ("'timed out'", "while True: pass"),
                       ("SIGSEGV", "import ctypes; ctypes.string_at(0)")):
        said = live.run(source.format(text, code))
        assert live.status == "ok" and text.strip("'") in said
    assert "but it failed in another way" in live.run(source.format("bang", "1 / 0")) and live.status == "error"
    assert "but it did not fail" in live.run(source.format("bang", "1")) and live.status == "error"
    assert live.run("40 + 2") == "42"


def test_a_recorded_isolated_cell_is_shown_and_its_failure_judged(recorded):
    assert recorded.run(FAILED) == f"{LABEL}CUDA error: operation not permitted\n" and recorded.status == "ok"
    assert "has no recording" in recorded.run(FAILED + " ** 2") and recorded.status == "ok"
    recorded.run("import json; path = recordings.FOLDER / 'nvidia-test' / 'lab-10_a.json'; kept = path.read_text()\n"
                 "_ = path.write_text(kept.replace('operation not permitted', 'all well'))")
    assert "but it failed in another way" in recorded.run(FAILED) and recorded.status == "error"
    recorded.run("_ = path.write_text(kept)")


def test_an_interrupt_ends_the_isolated_cell_and_nothing_else(live):
    told, helper = live.folder / "pid", live.run("from labkit import isolate\nisolate._helpers[0].pid")
    loop = f"%%isolated\nimport os\nopen({str(told)!r}, 'w').write(str(os.getpid()))\nwhile True: pass"
    start = time.monotonic()
    said = live.run(loop, stop_when=told)
    assert live.status == "error" and "KeyboardInterrupt" in said and time.monotonic() - start < 5
    end = time.monotonic() + 5
    while psutil.pid_exists(int(told.read_text())):
        assert time.monotonic() < end
        time.sleep(0.02)
    start = time.monotonic()
    assert live.run("mine = 5\nmine") == "5" and live.run("%%isolated\nprint('again')") == "again\n"
    assert time.monotonic() - start < 1 and live.run("isolate._helpers[0].pid") == helper


def test_a_restarted_kernel_leaves_no_process_behind(live):
    live.run("%%isolated\n1")
    helper = psutil.Process(int(live.run("from labkit import isolate\nprint(isolate._helpers[0].pid)")))
    end = time.monotonic() + 60
    while not helper.children():  # the next spare, which takes the place of the one that ran
        assert time.monotonic() < end
        time.sleep(0.05)
    processes = [helper, *helper.children()]
    live.manager.restart_kernel(now=True)
    live.client.wait_for_ready(timeout=60)
    assert "Cell magic `%%gpu` not found" in live.run("%%gpu\n1")
    live.set_up()
    assert len(processes) == 2
    end = time.monotonic() + 5
    while alive := [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < end, alive
        time.sleep(0.05)
