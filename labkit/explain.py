"""Why a capture failed: the first cause, your line, what kind of thing it was, the way round. No torch."""

import linecache
import os
import re
import sysconfig
from pathlib import Path

# What a message of torch or CUDA during capture means, and the way round. One place; the first that matches counts.
EXPLANATIONS = (
    (r"unless the CPU tensor is pinned", "a copy between CPU and GPU from ordinary (unpinned) memory",
     "copy before the capture, or use pin_memory() and copy_(..., non_blocking=True)"),
    (r"out of memory", "the GPU ran out of memory", "free memory, or capture a smaller batch"),
    (r"CUDA generator|current_seed|Offset increment outside", "a random generator that the graph does not know",
     "pass it as generators=(g,): GraphedCallable registers it before the capture"),
    (r"_NOT_INITIALIZED|Create\(handle\)|CUFFT_INTERNAL_ERROR|CUDNN_STATUS_INTERNAL_ERROR|_ALLOC_FAILED",
     "a library that was never used before sets itself up", "warm up: run the call on the side stream before the capture"),
    (r"the graph is empty", "the call launched nothing on the GPU",
     "do the work inside the call, on the current stream of the GPU"),
    (r"legacy stream|StreamCaptureImplicit", "work on the legacy default stream while another stream is captured",
     "launch on torch.cuda.current_stream()"),
    (r"StreamCaptureIsolation|StreamCaptureUnjoined|unjoined", "work on another stream that never rejoins the captured one",
     "let the captured stream wait for it: torch.cuda.current_stream().wait_stream(other)"),
    (r"StreamCaptureWrongThread", "another thread touched the capture", "capture and replay from one thread"),
    (r"not permitted when stream is capturing|StreamCaptureUnsupported", "the CPU waits for the GPU, or asks it something",
     "take .item(), .cpu(), print, if on a tensor, nonzero and synchronize out of the call: do them before or after"),
)
_WRAPPED = re.compile(r"previous error during capture|StreamCaptureInvalidated")


class CaptureError(RuntimeError):
    """A capture that failed, by its first cause: `cause` (the exception), `kind`, `line` (yours), `way_round`."""

    def __init__(self, error, repaired=True):
        self.cause = _first(error)
        self.kind, self.way_round = explain(self.cause)
        self.line = user_line(self.cause)
        self.repaired = repaired
        super().__init__(_told(self.cause, self.kind, self.line, self.way_round)
                         + ("" if repaired else "\n  now: this process is marked by the failure; restart the kernel"))


def explain(error):
    """Return (kind, way round) of an exception raised during capture; an unknown one is told as what it is."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, RuntimeError):
        for pattern, kind, way_round in EXPLANATIONS:
            if re.search(pattern, text):
                return kind, way_round
        if _WRAPPED.search(text):
            return "an earlier error that your code caught itself", "let the first error out, to see it"
    return f"{type(error).__name__} raised by the call", "run the call without capture to see whether it fails there too"


def first_cause(error):
    """Return the first cause of a failed capture in plain words, or None if the error has nothing to do with one."""
    if isinstance(error, CaptureError):
        return str(error)
    first = _first(error)
    kind, way_round = explain(first)
    known = any(kind == k for _, k, _ in EXPLANATIONS)
    return _told(first, kind, user_line(first), way_round) if known or first is not error else None


def _first(error):
    """Follow the chain behind torch's "previous error during capture" to what was raised first."""
    while _WRAPPED.search(str(error)) and (error.__context__ or error.__cause__):
        error = error.__context__ or error.__cause__
    return error


def _told(cause, kind, line, way_round):
    said = str(cause).strip().splitlines()
    return (f"the capture failed: {kind}\n  where: {line}\n  cause: {type(cause).__name__}: {said[0] if said else ''}\n"
            f"  way round: {way_round}")


def user_line(error):
    """Return "file:line: source" of the innermost frame that is the user's own code, not a library's."""
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
