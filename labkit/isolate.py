"""Run code in a child process that is thrown away, so that whatever it breaks cannot break this one.

A helper process imports torch once and never touches the GPU. It forks the children: one spare stands ready with its
CUDA context made, runs one piece of code, and the next takes its place. What a child leaves lies in files: a crash
loses nothing. The helper and its spare leave when this process ends, or after five idle minutes.
"""

import atexit
import base64
import contextlib
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
from dataclasses import dataclass
from pathlib import Path

from labkit import machine

IDLE_S = 300
START_LIMIT_S = 120     # for importing torch from a slow disk
MOST_PRINTED = 32 << 20  # bytes; a child that prints more is stopped
KEPT = 20_000           # characters shown of what was printed, half from each end
CELL = "<isolated cell>"

_helper = None
_one_at_a_time = threading.Lock()


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
    """Run Python source in a child process and return a Result; past `timeout_s` seconds the child is killed.

    Ctrl-C kills the child and is raised here.
    """
    with _one_at_a_time, tempfile.TemporaryDirectory(prefix="labkit-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "source").write_text(source, "utf-8")
        stopped = "interrupted"
        try:
            stopped = _wait(_ask(name), folder, timeout_s)
        finally:
            if stopped:
                _kill(folder)
        return _result(folder, stopped)


def spare_bytes():
    """Return the GPU memory that the spare child holds, in bytes, as it saw it (0 without one, or without a GPU)."""
    told = Path(_helper.folder.name, "spare_bytes") if _helper and _helper.poll() is None else None
    return int(told.read_text() or 0) if told and told.exists() else 0


def _ask(folder):
    """Hand the folder with the source to the helper, started anew if it is gone, and return the helper."""
    for _ in range(2):  # an idle helper may leave just as it is asked
        helper = _start()
        try:
            os.write(helper.stdin.fileno(), folder.encode())
            return helper
        except BrokenPipeError:
            helper.wait()
    raise RuntimeError("the helper of isolated code cannot be reached; restart this kernel")


def _start():
    global _helper
    if _helper is None or _helper.poll() is not None:
        folder = tempfile.TemporaryDirectory(prefix="labkit-helper-", ignore_cleanup_errors=True)
        paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        _helper = subprocess.Popen(  # in a session of its own, where Ctrl-C here does not reach it
            [sys.executable, "-m", "labkit.isolate", folder.name, machine.gpu_uuid() or ""], start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "MPLBACKEND": "agg"})
        _helper.folder = folder
    return _helper


@atexit.register
def _let_go():
    global _helper
    if _helper is not None:
        _helper.stdin.close()  # tells the spare, too
        _helper.kill()
        _helper.wait()
        _helper = None


def _wait(helper, folder, timeout_s):
    """Wait for the child's end; return "" or, if it must be stopped, why."""
    asked = time.monotonic()
    begun = None
    while not (folder / "ended").exists():
        now = time.monotonic()
        begun = begun or ((folder / "pid").exists() and now)
        if helper.poll() is not None:
            return "was lost: its helper is gone (to see why, run: python -m labkit.isolate . '')"
        if not begun and now - asked > START_LIMIT_S:
            return f"never began: importing torch took over {START_LIMIT_S} s"
        if begun and now - begun > timeout_s:
            return f"timed out after {timeout_s:g} s"
        if begun and (folder / "printed").stat().st_size > MOST_PRINTED:
            return f"was stopped: it printed over {MOST_PRINTED >> 20} MiB"
        time.sleep(0.005)
    return ""


def _kill(folder):
    """Kill the child and all that it started; when it has not begun, the helper instead."""
    try:
        os.killpg(int((folder / "pid").read_text()), signal.SIGKILL)
    except (OSError, ValueError):
        _let_go()


def _result(folder, stopped):
    """Put together the Result from the files that the child and the helper left."""
    try:
        told = json.loads(_text(folder / "result"))
        ended = stopped or ("raised" if told["error"] else "finished")
    except ValueError:  # the child did not get as far
        code = 0 if stopped else os.waitstatus_to_exitcode(int(_text(folder / "ended")))
        ended = stopped or (f"exited with code {code}" if code >= 0 else f"crashed: {signal.Signals(-code).name}")
        begun = folder / "pid"
        seconds = time.time() - begun.stat().st_mtime if begun.exists() else 0.0
        told = {"outputs": [], "cause": None, "seconds": seconds}
    if ended not in ("finished", "raised"):
        told["error"] = f"the child process {ended}"
    printed = _text(folder / "printed")
    if (left_out := len(printed) - KEPT) > 0:
        printed = f"{printed[:KEPT // 2]}\n[... {left_out:,} characters left out ...]\n{printed[-KEPT // 2:]}"
    return Result(stdout=printed, how_it_ended=ended, **told)


def _text(path):
    return path.read_text("utf-8", "replace") if path.exists() else ""


# ---- the helper and its children

def _help(folder, uuid):
    """Keep a spare ready, pass it each request, and note how it ended."""
    import matplotlib.pyplot  # noqa: F401
    try:
        import torch  # noqa: F401
    except ImportError:
        pass
    while True:
        spare, pipe = _fork(folder, uuid)
        waited_for = select.select([0], [], [], IDLE_S)[0]
        request = os.read(0, 4096) if waited_for else b""  # a folder; nothing: idle for long, or the parent is gone
        os.write(pipe, request)
        os.close(pipe)
        status = os.waitpid(spare, 0)[1]
        if not request:
            return
        with contextlib.suppress(OSError):  # what it started may be gone, and the folder too if the parent gave up
            Path(os.fsdecode(request), "ended.part").write_text(str(status))
            os.rename(request + b"/ended.part", request + b"/ended")
            os.killpg(spare, signal.SIGKILL)


def _fork(folder, uuid):
    """Fork a spare and return its process id and the pipe that its request goes through."""
    read, write = os.pipe()
    if pid := os.fork():
        os.close(read)
        return pid, write
    try:
        os.setsid()
        os.close(write)
        threading.Thread(target=_leave_with_parent, args=(os.dup(0),), daemon=True).start()
        _warm_up(uuid, Path(folder, "spare_bytes"))
        if request := os.read(read, 4096):
            _serve(Path(os.fsdecode(request)))
    finally:
        os._exit(0)


def _leave_with_parent(lifeline):
    """Kill this child and all that it started once the parent's end of the helper's stdin is closed."""
    poll = select.poll()
    poll.register(lifeline, 0)
    poll.poll()
    os.killpg(0, signal.SIGKILL)


def _warm_up(uuid, told):
    """Make the CUDA context on the GPU, if there is one, and note how much of its memory that takes."""
    if uuid:
        import torch
        before = machine.used_bytes(uuid)
        torch.zeros(1, device="cuda")
        told.write_text(str(max(0, machine.used_bytes(uuid) - before)))


def _serve(folder):
    """Run one request and leave what came of it in its folder."""
    printed = os.open(folder / "printed", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for fd, to in ((0, os.open(os.devnull, os.O_RDONLY)), (1, printed), (2, printed)):
        os.dup2(to, fd)
    sys.stdin = open(0, closefd=False)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    (folder / "pid").write_text(str(os.getpid()))
    start, outputs = time.perf_counter(), []
    error = _execute((folder / "source").read_text("utf-8"), outputs)
    told = {"outputs": outputs, "seconds": time.perf_counter() - start, "error": None, "cause": None}
    if error is not None:
        from labkit import explain
        told |= {"error": _short(error), "cause": explain.first_cause(error)}
    sys.stdout.flush()
    (folder / "result").write_text(json.dumps(told), "utf-8")


def _execute(source, outputs):
    """Execute a cell as a program of its own, collect its displays in `outputs`, and return its exception or None."""
    import ast
    import types
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.display = lambda *objects: outputs.extend(map(_display, objects))
    linecache.cache[CELL] = len(source), None, source.splitlines(keepends=True), CELL
    error = None
    try:
        tree = ast.parse(source, CELL)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, CELL, "exec"), vars(module))
        if last and (value := eval(compile(ast.Expression(last.value), CELL, "eval"), vars(module))) is not None:
            module.display(value)
        torch = sys.modules.get("torch")
        if torch and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # what the GPU has yet to complain about
    except BaseException as raised:
        if not isinstance(raised, SystemExit) or raised.code:
            error = raised
    pyplot = sys.modules["matplotlib.pyplot"]
    outputs.extend(_display(pyplot.figure(number)) for number in pyplot.get_fignums())
    return error


def _display(value):
    """Return an object as an nbformat display_data output."""
    data, metadata = {"text/plain": repr(value)}, {}
    if hasattr(value, "savefig"):
        png = io.BytesIO()
        value.savefig(png, format="png", bbox_inches="tight")
        data["image/png"] = base64.b64encode(png.getvalue()).decode()
    elif hasattr(value, "_repr_mimebundle_"):
        bundle = value._repr_mimebundle_()
        bundle, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        data |= bundle
    elif hasattr(value, "_repr_html_") and (html := value._repr_html_()):
        data["text/html"] = html
    return {"output_type": "display_data", "data": data, "metadata": metadata}


def _short(error):
    """Return an exception in a few lines: the cell's own lines that led to it, then its message."""
    lines = [f"line {f.lineno}: {f.line}\n" for f in traceback.extract_tb(error.__traceback__) if f.filename == CELL]
    return "".join(lines + traceback.format_exception_only(error)).strip()


if __name__ == "__main__":
    _help(*sys.argv[1:])
