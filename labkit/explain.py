"""Why a capture failed: the first cause, your line, what kind of thing it was, the way round. No torch."""

import linecache
import os
import re
import sysconfig
from pathlib import Path

# What a message of torch or CUDA during capture means, and the way round. One place; the first that matches counts.
EXPLANATIONS = (
    (r"unless the CPU tensor is pinned", COPIES := "a copy between CPU and GPU from ordinary (unpinned) memory",
     "copy before the capture, or use pin_memory() and copy_(..., non_blocking=True); where an operation does it inside, "
     "split the call around it: graphs.SplitCallable runs graph, eager, graph"),
    (r"out of memory", "the GPU ran out of memory", "free memory, or capture a smaller batch"),
    (r"set_current_seed", "a random generator is seeded inside the call", "seed it before the replay"),
    (r"CUDA generator|current_seed|Offset increment outside", "a random generator that the graph does not know",
     "pass it as generators=(g,): GraphedCallable registers it before the capture"),
    (r"_NOT_INITIALIZED|Create\(handle\)|CUFFT_INTERNAL_ERROR|CUDNN_STATUS_INTERNAL_ERROR|_ALLOC_FAILED",
     "a library that was never used before sets itself up", "warm up: run the call on the side stream before the capture"),
    (r"cusolver error", "a routine of linear algebra that needs the CPU in between",
     "split the call around it: graphs.SplitCallable runs graph, eager, graph"),
    (r"the graph is empty", "the call launched nothing on the GPU",
     "do the work inside the call, on the current stream of the GPU"),
    (r"legacy stream|StreamCaptureImplicit", "work on the legacy default stream while another stream is captured",
     "launch on torch.cuda.current_stream()"),
    (r"StreamCaptureIsolation|StreamCaptureUnjoined|unjoined", "work on another stream that never rejoins the captured one",
     "let the captured stream wait for it: torch.cuda.current_stream().wait_stream(other)"),
    (r"StreamCaptureWrongThread", "another thread touched the capture", "capture and replay from one thread"),
    (r"not permitted when stream is capturing|StreamCaptureUnsupported|event last recorded in a capturing stream",
     WAITS := "the CPU waits for the GPU, or asks it something",
     "take .item(), .cpu(), print, if on a tensor, nonzero and synchronize out of the call: do them before or after"),
)
# Your own line tells more: what the CPU waits for or copies, and the way round. The first that matches counts.
COPIED = (
    (r"bincount\(", "count into a tensor of known size: torch.zeros(n).scatter_add_(0, x, ones)"),
    (r"\.(cpu|numpy|tolist)\(", "copy into a pinned tensor with non_blocking=True, and read that after the replay"),
    (r"torch\.tensor\(", "make the tensor before the capture, or on the GPU: torch.full((), value, device='cuda')"),
)
ASKED = (
    (r"synchronize\(", "synchronise before or after the replay, not inside the call"),
    (r"\bprint\(", "copy into a pinned tensor with non_blocking=True, and print that after the replay"),
    (r"\bnonzero\(", "its result is as long as it turns out: torch.where keeps the shape, torch.nonzero_static(x, size=n) bounds it"),
    (r"(?<!linalg\.)\bcond\(", "a conditional node needs torch 2.12 and CUDA 12.4 or newer; else torch.where, or a graph for each case"),
    (r"\bequal\(|allclose\(", "compare on the GPU: (a == b).all(), torch.isclose(a, b).all()"),
    (r"to_sparse\(", "it has as many entries as it finds: split the call around it, or stay dense"),
    (r"unique\(", "its result is as long as it turns out: sort, and compare neighbours"),
    (r"masked_select\(|\w\[[^\]]*([<>]|[!=]=)", "keep the shape: torch.where(mask, x, 0) instead of x[mask]"),
    (r"one_hot\(", "say how many classes there are: one_hot(i, classes)"),
    (r"repeat_interleave\(", "say how long the result is: output_size=n"),
    (r"linalg\.(solve|inv|cholesky|lstsq)\b", "use the form that does not look at its own success: solve_ex, inv_ex, cholesky_ex"),
    (r"\.item\(|\b(float|int|range)\(", "use the tensor itself, and it stays on the GPU"),
    (r"\b(if|while|bool|assert|any|all)\b", "compute both and pick with torch.where, or capture one graph for each case and choose outside"),
)
_WRAPPED = re.compile(r"previous error during capture|StreamCaptureInvalidated")


class CaptureError(RuntimeError):
    """A capture that failed, by its first cause: `cause` (the exception), `kind`, `line` (yours), `way_round`.

    repaired: whether stream, memory pool and generators could be put right; if not, the message says to restart.
    """

    def __init__(self, error, repaired=True):
        self.cause = _first(error)
        self.line = user_line(self.cause)
        self.kind, self.way_round = explain(self.cause, self.line)
        self.repaired = repaired
        super().__init__("the capture failed: " + _told(self.cause)
                         + ("" if repaired else "\n  now: this process is marked by the failure; restart the kernel"))


def explain(error, line=""):
    """Return (kind, way round) of an exception raised during capture, at your `line`; an unknown one is told as it is."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, RuntimeError):
        for pattern, kind, way_round in EXPLANATIONS:
            if re.search(pattern, text):
                by_line = {WAITS: ASKED[:-1] + COPIED + ASKED[-1:], COPIES: COPIED}.get(kind, ())
                asked = [better for source, better in by_line if re.search(source, line.partition(": ")[2])]
                return kind, (asked or [way_round])[0]
        if _WRAPPED.search(text):
            return "an earlier error that your code caught itself", "let the first error out, to see it"
    return f"{type(error).__name__} raised by the call", "run the call without capture to see whether it fails there too"


def first_cause(error):
    """Return the first cause of a failed capture in plain words, or None if the error has nothing to do with one."""
    if isinstance(error, CaptureError):
        return str(error)
    first = _first(error)
    known = any(explain(first)[0] == kind for _, kind, _ in EXPLANATIONS)
    began = "it failed: " if first is error and "out of memory" in str(first) else "the capture failed: "
    return began + _told(first) if known or first is not error else None


def _first(error):
    """Follow the chain behind torch's "previous error during capture" to what was raised first."""
    seen = set()  # a chain may bite its own tail
    while _WRAPPED.search(str(error)) and (error.__context__ or error.__cause__) and id(error) not in seen:
        seen.add(id(error))
        error = error.__context__ or error.__cause__
    return error


def _told(cause):
    """Return kind, line, cause and way round in words; of a cause that is not known, all that stands behind it too."""
    line = user_line(cause)
    kind, way_round = explain(cause, line)
    told = f"{kind}\n  where: {line}\n  cause: {_one_line(cause)}\n"
    seen = {id(cause)}
    while kind.startswith(type(cause).__name__) and (cause := cause.__cause__ or cause.__context__) and id(cause) not in seen:
        seen.add(id(cause))
        told += f"  behind it: {_one_line(cause)}\n"
        kind = type(cause).__name__
    return f"{told}  way round: {way_round}"


def _one_line(error):
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def user_line(error):
    """Return "file, line N: source" of the innermost frame that is the user's own code, not a library's; "unknown" without one."""
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), str(Path(__file__).parent), "<frozen")
    found, tb = "unknown", error.__traceback__
    while tb:
        name, number = tb.tb_frame.f_code.co_filename, tb.tb_lineno
        if not name.startswith(libraries) and f"{os.sep}site-packages{os.sep}" not in name:
            source = linecache.getline(name, number).strip()
            short = "cell" if "ipykernel" in name or name.startswith("<") else Path(name).name
            found = f"{short}, line {number}: {source}"
        tb = tb.tb_next
    return found
