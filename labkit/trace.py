"""One profiled call as a Trace: every piece of GPU work in order, with the CPU call that launched it.

Read from the Chrome trace of torch.profiler, where launch and work carry the same correlation number.
"""

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

_GPU_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
_CPU_CALLS = {"cuda_runtime", "cuda_driver"}
_SLOWED = "the profiler ran in this process and slows its launches; restart the kernel before you measure"


@dataclass(frozen=True)
class Kernel:
    """One piece of GPU work and its launch; times in microseconds from the first launch of the call."""

    name: str
    launch_at_us: float
    launch_us: float
    start_us: float
    gpu_us: float


@dataclass(frozen=True)
class Trace:
    """The GPU work of one call, in the order in which the GPU did it. Profiling slows launches, and can show kernels some percent longer."""

    kernels: tuple

    def __len__(self):
        return len(self.kernels)

    @property
    def busy_us(self):
        """Return how long (µs) the GPU worked; where two kernels run at once, it counts once."""
        busy = end = 0.0
        for k in sorted(self.kernels, key=lambda k: k.start_us):
            busy += max(0.0, k.start_us + k.gpu_us - max(end, k.start_us))
            end = max(end, k.start_us + k.gpu_us)
        return busy

    @property
    def span_us(self):
        """Return the time (µs) from the first launch to the end of the last kernel."""
        return max(k.start_us + k.gpu_us for k in self.kernels)

    @property
    def idle_share(self):
        """Return the share of the span in which the GPU had nothing to do, 0 to 1."""
        return 1 - self.busy_us / self.span_us

    def rows(self, **extra):
        """Return one tidy row a kernel, in order, each with `extra`: its place `index`, and the fields of Kernel."""
        return [{**extra, "index": i, **asdict(k)} for i, k in enumerate(self.kernels)]


def record(fn, *, calls_before=3):
    """Profile one call of `fn` (no arguments), after a few that only warm up; returns its Trace.

    Once used, the profiler slows every later launch and replay of its process, so measure elsewhere: timing warns, and
    experiments trace in a child process. Raises NoGPU without a GPU, RuntimeError when the call launched
    nothing, or another profiler is running.
    """
    return record_each({"one call": fn}, calls_before=calls_before)["one call"]


def record_each(calls, *, calls_before=3):
    """Profile one call of each callable of a dict in one session; returns a dict of Traces. It raises what `record` does."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    from labkit import contents, machine, timing

    machine.require_gpu("Tracing")
    if _SLOWED not in timing.disturbances:
        timing.disturbances.append(_SLOWED)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        for name, fn in calls.items():
            for _ in range(calls_before):
                fn()
            torch.cuda.synchronize()
            with record_function(f"labkit: {name}"):
                fn()
                torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        events = [e for e in json.loads(file.read_text())["traceEvents"] if e.get("ph") == "X"]
    return {name: _trace(events, f"labkit: {name}", contents.short_name) for name in calls}


def _trace(events, label, short_name):
    """Pair the GPU work launched inside the span called `label` with its launches; events as in a Chrome trace (us)."""
    span = next((e for e in events if e["name"] == label and e.get("cat") == "user_annotation"), None)
    if span is None:
        raise RuntimeError("the profiler recorded nothing: is another profiler running? Restart the kernel and try again")
    inside = range(int(span["ts"]), int(span["ts"] + span["dur"]) + 1)
    launches = {e["args"]["correlation"]: e for e in events
                if e.get("cat") in _CPU_CALLS and int(e["ts"]) in inside and "correlation" in e.get("args", {})}
    work = [e for e in events if e.get("cat") in _GPU_WORK and e["args"].get("correlation") in launches]
    if not work:
        raise RuntimeError("nothing to trace: the call launched no work on the GPU")
    pairs = sorted(((launches[e["args"]["correlation"]], e) for e in work), key=lambda pair: pair[1]["ts"])
    zero = min(launch["ts"] for launch, _ in pairs)
    return Trace(tuple(Kernel(short_name(e["name"]), round(launch["ts"] - zero, 3), launch["dur"],
                              round(e["ts"] - zero, 3), e["dur"]) for launch, e in pairs))
