"""Run code in a child process that is thrown away, so that whatever it breaks cannot break this one.

A helper process imports torch once and never touches the GPU. It forks the children: one spare stands ready with its
CUDA context made, runs one piece of code, and the next takes its place. What a child leaves lies in files: a crash
loses nothing. The helper and its spare leave when this process ends, or after five idle minutes. Runs from several
threads go side by side, each with a helper of its own.
"""

import ast
import atexit
import base64
import contextlib
import ctypes
import io
import json
import linecache
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from dataclasses import dataclass
from pathlib import Path

import psutil

from labkit import machine

IDLE_S, START_LIMIT_S = 300, 120  # for the next request to come; for importing torch from a slow disk
MOST_PRINTED = 32 << 20  # bytes; a child that prints more is stopped
MOST_MEMORY = 0.8  # of what is free on the CPU, and on the GPU, when a child begins
KEPT = 20_000  # characters shown of what was printed, half from each end
CELL = "<isolated cell>"
LEFT = "never began: the helper process that starts children went away"

_helpers, _lock = [], threading.Lock()


@dataclass(frozen=True)
class Result:
    """What became of isolated code: what it printed and displayed (nbformat outputs), its error, the first cause."""

    stdout: str
    outputs: list
    error: str | None
    cause: str | None
    seconds: float
    how_it_ended: str  # "finished", "raised", "crashed: SIGSEGV", "exited with code 3", "timed out after 60 s", ...


def run(source, timeout_s=60.0):
    """Run Python source in a child process -> Result; `timeout_s` seconds, or Ctrl-C (raised here), end the child.

    So does memory: a child gets up to 80 % of what is free when it begins, on the CPU and, through torch, on the GPU.
    """
    result = _run_once(source, timeout_s)
    return _run_once(source, timeout_s) if result.how_it_ended == LEFT else result  # a helper may just have been leaving


def _run_once(source, timeout_s):
    with _borrowed() as helper, tempfile.TemporaryDirectory(prefix="labkit-", ignore_cleanup_errors=True) as name:
        folder, asked, stopped = Path(name), time.monotonic(), "was interrupted"
        for file in ("printed", "pid", "result", "ended"):
            (folder / file).touch()
        (folder / "source").write_text(source, "utf-8")
        try:
            with contextlib.suppress(BrokenPipeError):  # it is just leaving: _wait will find it gone
                os.write(helper.stdin.fileno(), name.encode())
            stopped = _wait(helper, folder, timeout_s)
        finally:
            if stopped:  # kill the child and all that it started; when it has not begun, the helper instead
                try:
                    os.killpg(int((folder / "pid").read_text()), signal.SIGKILL)
                except (OSError, ValueError):
                    _end(helper)
        return _result(folder, stopped, time.monotonic() - asked)


def spare_bytes():
    """Return the GPU memory that spare children hold, in bytes, as they saw it (0 without one, or without a GPU)."""
    return sum(int(os.pread(helper.told.fileno(), 20, 0) or 0) for helper in _helpers if helper.poll() is None)


@contextlib.contextmanager
def _borrowed():
    """Lend an idle helper, or a new one, and take it back if it still lives."""
    with _lock:
        _helpers[:] = [helper for helper in _helpers if helper.poll() is None]
        helper = next((helper for helper in _helpers if not helper.busy), None) or _start()
        helper.busy = True
    try:
        yield helper
    finally:
        helper.busy = False


def keep_one():
    """End helpers that are idle, all but one: each holds a spare child, and a CUDA context in it."""
    with _lock:
        for helper in [helper for helper in _helpers if not helper.busy][1:]:
            _end(helper)


def _start():
    told, path, uuid = tempfile.TemporaryFile(), [*map(str, sys.path)], machine.gpu_uuid()
    code = f"import sys; sys.path[:] = {path}; from labkit import isolate; isolate._help({uuid!r})"
    helper = subprocess.Popen(  # in a session of its own, where Ctrl-C here does not reach it
        [sys.executable, "-u", "-X", "utf8", "-c", code], start_new_session=True, stdin=subprocess.PIPE,
        stdout=told, stderr=subprocess.DEVNULL, env={**os.environ, "MPLBACKEND": "agg"})
    helper.told, helper.busy = told, True
    _helpers.append(helper)
    return helper


def _end(helper):
    helper.stdin.close()  # tells the spare, too
    helper.kill()
    helper.wait()


@atexit.register
def _let_go():
    for helper in _helpers:
        _end(helper)


def _wait(helper, folder, timeout_s):
    """Wait for the child's end; return "" or, if it must be stopped, why."""
    asked, begun, most = time.monotonic(), None, MOST_MEMORY * psutil.virtual_memory().available
    while not (folder / "ended").read_text():
        now = time.monotonic()
        begun = begun or ((folder / "pid").read_text() and now)
        if helper.poll() is not None:
            return "was left alone: its helper process went away" if begun else LEFT
        if not begun and now - asked > START_LIMIT_S:
            return f"did not answer for {now - asked:.0f} s: run it again, or ask python -m labkit doctor"
        if begun and now - begun > timeout_s:
            return f"timed out after {timeout_s:g} s"
        if begun and (folder / "printed").stat().st_size > MOST_PRINTED:
            return f"was stopped: it printed over {MOST_PRINTED >> 20} MiB"
        if begun and _held((folder / "pid").read_text()) > most:
            return f"was stopped: it used over {most / 2**30:.1f} GiB of memory, {MOST_MEMORY:.0%} of what was free"
        time.sleep(0.005)
    return ""


def _held(pid):
    """Return the memory in bytes that a process and those it started hold, 0 once it is gone."""
    try:
        child = psutil.Process(int(pid))
        return sum(process.memory_info().rss for process in (child, *child.children(recursive=True)))
    except psutil.NoSuchProcess:
        return 0


def _result(folder, ended, seconds):
    """Put together the Result from the files that the child and the helper left."""
    told = {"outputs": [], "error": None, "cause": None}
    try:
        told = json.loads((folder / "result").read_text("utf-8"))
    except ValueError:  # the child did not get as far
        code = 0 if ended else os.waitstatus_to_exitcode(int((folder / "ended").read_text()))
        names = {number.value: number.name for number in signal.Signals}
        ended = ended or (f"exited with code {code}" if code >= 0 else f"crashed: {names.get(-code, -code)}")
    if ended:
        told["error"] = f"the child process {ended}"
    printed = (folder / "printed").read_text("utf-8", "replace")
    if (left_out := len(printed) - KEPT) > 0:
        printed = f"{printed[:KEPT // 2]}\n[... {left_out:,} characters left out ...]\n{printed[-KEPT // 2:]}"
    return Result(printed, seconds=seconds, how_it_ended=ended or ("raised" if told["error"] else "finished"), **told)


def _help(uuid):
    """Keep a spare ready, pass it each request, and note how it ended."""
    import matplotlib.pyplot  # noqa: F401
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401
    spare, parent = 0, select.poll()
    parent.register(os.dup(0), 0)  # answers once the parent's end of this stdin is closed

    def leave():
        parent.poll()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(spare, signal.SIGKILL)
        os._exit(0)

    threading.Thread(target=leave, daemon=True).start()
    while True:
        spare, pipe = _fork(uuid)
        request = os.read(0, 4096) if select.select([0], [], [], IDLE_S)[0] else b""  # a folder; b"": time to leave
        os.write(pipe, request)
        os.close(pipe)
        status = os.waitpid(spare, 0)[1]
        if not request:
            return
        with contextlib.suppress(OSError):  # what it started may be gone, and the folder too if the parent gave up
            _tell(Path(os.fsdecode(request), "ended"), str(status))
            os.killpg(spare, signal.SIGKILL)


def _fork(uuid):
    """Fork a spare and return its process id and the pipe that its request goes through."""
    read, write = os.pipe()
    if pid := os.fork():
        os.close(read)
        return pid, write
    try:
        os.setsid()
        os.close(write)
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the helper
        if uuid:
            with contextlib.suppress(RuntimeError):  # a full GPU, say: the cell will hear of it
                import torch
                before = machine.used_bytes(uuid)
                torch.zeros(1, device="cuda")
                os.pwrite(1, b"%020d" % max(0, machine.used_bytes(uuid) - before), 0)  # for spare_bytes()
        if request := os.read(read, 4096):
            _serve(Path(os.fsdecode(request)))
    finally:
        os._exit(0)


def _serve(folder):
    """Run one request and leave what came of it in its folder."""
    printed = os.open(folder / "printed", os.O_WRONLY | os.O_APPEND)
    for fd, to in ((0, os.open(os.devnull, os.O_RDONLY)), (1, printed), (2, printed)):
        os.dup2(to, fd)
    _tell(folder / "pid", str(os.getpid()))
    _bound_memory()
    told = {"outputs": [], "error": None, "cause": None}
    try:
        _execute((folder / "source").read_text("utf-8"), told["outputs"])
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            from labkit import explain
            lines = [f"line {frame.lineno}: {frame.line}\n" for frame in traceback.extract_tb(error.__traceback__)
                     if frame.filename == CELL]  # the cell's own lines that led to it
            told["error"] = "".join(lines + traceback.format_exception_only(error)).strip()[:KEPT]
            with contextlib.suppress(Exception):  # an error that cannot be told
                told["cause"] = explain.first_cause(error)
    if len(json.dumps(told, default=str)) > MOST_PRINTED:
        told["outputs"] = [_display(f"(what it displayed is left out: over {MOST_PRINTED >> 20} MiB)")]
    _tell(folder / "result", json.dumps(told, default=str))


def _tell(file, text):
    """Write to a file that is there: one that the parent has removed, when it gave up, does not come back."""
    with file.open("r+", encoding="utf-8") as told:
        told.write(text)


def _bound_memory():
    """Leave room on the GPU, and let the system, should its memory run out, end this process first."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    if (torch := sys.modules.get("torch")) and torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(min(MOST_MEMORY * free / total, machine.share_of_memory()))


def _execute(source, outputs):
    """Execute a cell as a program of its own and collect what it displays, and its pictures, in `outputs`."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.display = lambda *objects: outputs.extend(map(_display, objects))
    linecache.cache[CELL] = len(source), None, source.splitlines(keepends=True), CELL
    pyplot = sys.modules["matplotlib.pyplot"]
    try:
        tree = ast.parse(source, CELL)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, CELL, "exec"), vars(module))
        if last and (value := eval(compile(ast.Expression(last.value), CELL, "eval"), vars(module))) is not None:
            module.display(value)
        if (torch := sys.modules.get("torch")) and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # what the GPU has yet to complain about
    finally:
        module.display(*map(pyplot.figure, pyplot.get_fignums()))


def _display(value):
    """Return an object as an nbformat display_data output."""
    data, metadata = {"text/plain": repr(value)}, {}
    if isinstance(value, type):
        pass
    elif hasattr(value, "savefig"):
        png = io.BytesIO()
        value.savefig(png, format="png", bbox_inches="tight")
        data["image/png"] = base64.b64encode(png.getvalue()).decode()
    elif hasattr(value, "_repr_mimebundle_"):  # labkit's charts, say
        more = value._repr_mimebundle_()
        more, metadata = more if isinstance(more, tuple) else (more, {})
        data |= more
    elif hasattr(value, "_repr_html_") and (html := value._repr_html_()):
        data["text/html"] = html
    return {"output_type": "display_data", "data": data, "metadata": metadata}
