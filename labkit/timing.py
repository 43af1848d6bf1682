"""The only clock: how long a call keeps the CPU, how long it keeps the GPU, how long a loop of it takes.

`measure(fn)` times one callable, `compare({name: fn, ...})` several in turn, so that drift hits all alike.
Nothing else in labkit, its labs or its tests times GPU work.

The GPU's time is that between two CUDA events, which resolve about half a microsecond (CUDA Runtime API, cudaEventElapsedTime).
"""

import contextlib
import gc
import math
import os
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from tqdm import tqdm

from labkit import machine, turns

METHOD = {
    "unit": "microseconds per call",
    "enqueue_us": "CPU time until the call returns, GPU idle before (time.perf_counter_ns over a short burst of calls); over "
                  "about 1,000 launches a call it holds waiting for the GPU",
    "gpu_us": "CUDA events around a burst of calls queued behind a spinning kernel, so without the gaps between launches; "
              "gpu_gaps says where the queue ran dry all the same (over about 1,000 launches a call)",
    "wall_us": "steady state: a loop of calls between two torch.cuda.synchronize(), divided by the number of calls",
    "warm_up": "at least 3 calls and 0.1 s of each candidate, then rounds",
    "rounds": "each round samples every candidate once on every clock, in an order that is reversed from round to round, "
              "after one call that does not count",
    "cores": "each round runs on the next of the CPU cores, shuffled, on which a loop of Python takes at most 10 % longer than on "
             "the best (others are slow by nature, or busy with something else); if there is none, on the quickest",
    "statistic": "median over rounds; 95 % interval by resampling blocks of neighbouring rounds, a tenth of the run each "
                 "(so that drift counts), widened by Student's t for ten blocks; a ratio is that of medians, and its interval has more, "
                 "in quadrature, for what one process cannot see (experiments.repeatability shows it): 2 %, and what the ratio would "
                 "change by if the CPU took 10 % longer, where the CPU decides (enqueue_us above wall_us / 1.1)",
    "stop": "after a quarter of the budget, when the interval of every ratio (of a lone candidate: of its wall time) was "
            "narrower than 2 % twice, with half as many rounds again in between; or at the budget; sweeps: at the budget",
    "outside": "garbage collection, allocation of inputs, other measurements on this GPU (a file lock)",
}
CLOCKS = ("enqueue_us", "gpu_us", "wall_us")
_BURST_US, _LOOP_US, _MAX_BURST, _MAX_LOOP = 400.0, 6000.0, 64, 2000
_MOST_GPU_US, _MOST_SPIN = 20_000.0, 2**27
_MIN_ROUNDS, _BLOCKS, _RESAMPLES = 6, 10, 500
_FIRST_CHECK, _LONG_S, _LONG_CALL_S = 20, 5, 0.02
_BETWEEN_PROCESSES, _CPU_VARIES = 0.02, 0.10  # by what a ratio differs between processes: any; and one that the CPU decides
_FEW_BLOCKS = 2.262 / 1.960  # Student's t for ten blocks over the normal quantile
_SPIN_CYCLES_PER_US = 2000  # at 2 GHz; _gpu finds out if it is too few

disturbances = []  # what has slowed this process for good, in words: said as a warning before each measurement


@dataclass(frozen=True)
class Spread:
    """A median with its 95 % interval, and the samples behind it (one a round)."""

    median: float
    low: float
    high: float
    samples: tuple

    @property
    def width(self):
        """Return the width of the interval as a share of the median; infinite where that is 0."""
        return (self.high - self.low) / self.median if self.median else math.inf


@dataclass(frozen=True)
class Measurement:
    """What one callable costs on each clock, in microseconds per call."""

    name: str
    enqueue_us: Spread
    gpu_us: Spread
    wall_us: Spread
    rounds: int
    stopped_by: str  # "interval" or "budget"
    gpu_gaps: bool = False  # whether the GPU caught up with the CPU, so that gpu_us holds gaps between launches

    def row(self, **extra):
        """Return one tidy row: each clock with _low and _high, rounds, what stopped it, and the raw samples."""
        spreads = {clock: getattr(self, clock) for clock in CLOCKS}
        row = {"name": self.name, **extra}
        for clock, spread in spreads.items():
            row |= {clock: spread.median, f"{clock}_low": spread.low, f"{clock}_high": spread.high}
        return row | {"rounds": self.rounds, "stopped_by": self.stopped_by,
                      "gpu_gaps": self.gpu_gaps, "samples": {clock: spread.samples for clock, spread in spreads.items()}}


@dataclass(frozen=True)
class Comparison:
    """Several callables measured in the same rounds."""

    measurements: dict  # name -> Measurement

    def __getitem__(self, name):
        return self.measurements[name]

    def ratio(self, slow, fast, clock="wall_us"):
        """Return how many times as long `slow` takes as `fast`: a Spread, resampled by whole rounds, and see METHOD."""
        a, b = (np.array(getattr(self.measurements[name], clock).samples) for name in (slow, fast))
        within = spread(a, b)
        between = math.hypot(_BETWEEN_PROCESSES, self._on_a_slower_cpu(slow, clock) - self._on_a_slower_cpu(fast, clock))
        below, above = (math.hypot(end - within.median, between * within.median) for end in (within.low, within.high))
        return replace(within, low=within.median - below, high=within.median + above)

    def _on_a_slower_cpu(self, name, clock):
        """Return by what share this clock would show more if the CPU were slower by what a CPU varies: none where the GPU decides."""
        us, enqueue_us = getattr(self[name], clock).median, self[name].enqueue_us.median
        return 0.0 if clock == "gpu_us" else max(us, (1 + _CPU_VARIES) * enqueue_us) / us - 1

    def difference(self, slow, fast, clock="wall_us"):
        """Return how many microseconds `fast` saves against `slow`: a Spread, resampled by whole rounds.

        Its interval is that of one process: unlike that of `ratio`, it allows for nothing that differs between processes.
        """
        a, b = (np.array(getattr(self.measurements[name], clock).samples) for name in (slow, fast))
        return spread(a, b, np.subtract)

    def rows(self, slow=None, **extra):
        """Return one row a callable; with `slow`, each also carries the speedup over it, and its interval."""
        rows = [m.row(**extra) for m in self.measurements.values()]
        for row in rows if slow else ():
            r = self.ratio(slow, row["name"])
            row |= {"speedup": r.median, "speedup_low": r.low, "speedup_high": r.high}
        return rows


def measure(fn, *, name="call", budget_s=3.0):
    """Time one callable that takes no argument; returns a Measurement (microseconds). NoGPU without a GPU."""
    return compare({name: fn}, budget_s=budget_s)[name]


def compare(candidates, *, budget_s=5.0, target=0.02, without_gpu=()):
    """Time callables that take no argument, in interleaved rounds; returns a Comparison.

    Goes on until the 95 % interval of the ratio of the first candidate to each other one is narrower than `target`,
    or until `budget_s` seconds (warm-up apart; times LABKIT_BUDGET, if that is set) are over. Raises NoGPU without a
    GPU, ValueError without a candidate. without_gpu: candidates whose gpu_us nobody needs: theirs is NaN, and saves time.
    """
    if not candidates:
        raise ValueError("compare() needs at least one callable: compare({'eager': f, 'graph': g})")
    machine.require_gpu("Measuring")
    budget_s *= float(os.environ.get("LABKIT_BUDGET", 1))
    with _gpu_to_ourselves(), _core_after_core() as next_core:
        probes = {name: _Probe(fn, name not in without_gpu) for name, fn in candidates.items()}
        rounds, began, spent, stopped_by, narrow, check_at = [], time.perf_counter(), 0.0, "budget", False, _FIRST_CHECK
        bar = tqdm(total=budget_s, desc="measuring", leave=False, disable=budget_s < _LONG_S,
                   bar_format="{desc} {percentage:3.0f}% |{bar}| at most {remaining}")
        while len(rounds) < _MIN_ROUNDS or spent < budget_s:
            next_core()
            names = list(probes) if len(rounds) % 2 else list(reversed(probes))
            samples = {name: probes[name].sample() for name in names}
            rounds.append([samples[name] for name in probes])
            now = time.perf_counter() - began
            bar.update(min(now, budget_s) - min(spent, budget_s))
            spent = now
            if target and len(rounds) >= check_at and spent >= budget_s / 4:
                before, narrow, check_at = narrow, _widest(rounds) < target, len(rounds) * 3 // 2
                if before and narrow:
                    stopped_by = "interval"
                    break
        bar.close()
    clocks = np.array(rounds).transpose(1, 2, 0)  # (candidates, clocks, rounds)
    return Comparison({name: Measurement(name, *map(spread, samples), len(rounds), stopped_by, probes[name].late)
                       for name, samples in zip(probes, clocks, strict=True)})


def stopwatch():
    """Return a function that says how many microseconds ago it was made; the GPU had nothing to do then."""
    torch.cuda.synchronize()
    began = time.perf_counter_ns()
    return lambda: (time.perf_counter_ns() - began) / 1e3


def one_loop_us(fn, calls):
    """Time one loop of calls, once, with no warm-up, turns or interval, as most benchmarks do: µs a call. For comparison only."""
    elapsed = stopwatch()
    for _ in range(calls):
        fn()
    torch.cuda.synchronize()
    return elapsed() / calls


class WaitingClock:
    """The time since it was made, for what waits for requests that are yet to come: seconds, on this GPU alone, on a quiet CPU core.

    Used in a `with`, which holds this GPU's lock and keeps the garbage collector out.
    """

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            stack.enter_context(_gpu_to_ourselves())
            stack.enter_context(_core_after_core())()
            self._held = stack.pop_all()
        torch.cuda.synchronize()
        self.began = time.perf_counter()
        return self

    def __exit__(self, *error):
        self._held.close()

    def now(self):
        """Return the seconds since the start."""
        return time.perf_counter() - self.began

    def wait(self, until):
        """Sleep until so many seconds after the start."""
        time.sleep(max(0.0, until - self.now()))


class _Probe:
    """One candidate, warmed up, with the number of calls that each sample of it takes."""

    def __init__(self, fn, with_gpu=True):
        self.fn, self.with_gpu = fn, with_gpu
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began, calls = time.perf_counter(), 0
        while calls < 3 or time.perf_counter() - began < 0.1:
            last = time.perf_counter()
            fn()
            torch.cuda.synchronize()
            calls += 1
        tries = 1 if time.perf_counter() - last > _LONG_CALL_S else 3  # a long call says enough by itself
        enqueue, wall = min(self._enqueue(1) for _ in range(tries)), min(self._wall(tries) for _ in range(tries))
        self.burst = int(min(max(1, _BURST_US / enqueue), max(1, _MOST_GPU_US / wall), _MAX_BURST))
        self.loop = int(min(max(tries, _LOOP_US / wall), _MAX_LOOP))
        self.spin = int((self.burst * enqueue * 1.5 + 100) * _SPIN_CYCLES_PER_US)
        self.late = False

    def sample(self):
        """Return (enqueue_us, gpu_us, wall_us), per call; the core may be new to us, so one call goes first."""
        self.fn()
        return self._enqueue(self.burst), self._gpu(self.burst) if self.with_gpu else math.nan, self._wall(self.loop)

    def _enqueue(self, calls):
        fn = self.fn
        torch.cuda.synchronize()
        began = time.perf_counter_ns()
        for _ in range(calls):
            fn()
        return (time.perf_counter_ns() - began) / 1e3 / calls

    def _gpu(self, calls):
        fn = self.fn
        while True:
            torch.cuda.synchronize()
            torch.cuda._sleep(self.spin)
            self.start.record()
            for _ in range(calls):
                fn()
            self.late = self.start.query()  # the spinning was over before all was queued: there may be gaps
            self.end.record()
            self.end.synchronize()
            if not self.late or self.spin >= _MOST_SPIN:
                return self.start.elapsed_time(self.end) * 1e3 / calls
            self.spin *= 2

    def _wall(self, calls):
        fn = self.fn
        torch.cuda.synchronize()
        began = time.perf_counter_ns()
        for _ in range(calls):
            fn()
        torch.cuda.synchronize()
        return (time.perf_counter_ns() - began) / 1e3 / calls


def _widest(rounds):
    """Return the widest interval that decides whether to go on, as a share of its median."""
    first, *others = np.array(rounds)[:, :, CLOCKS.index("wall_us")].T
    return max(spread(first, other).width for other in others) if others else spread(first).width


def spread(a, b=None, combine=np.divide):
    """Return the Spread of samples in time order, in their unit; with `b`, of the two medians combined, resampled together.

    The same samples give the same interval: where blocks begin is drawn with a fixed seed.
    """
    a, b = np.asarray(a, dtype=float), None if b is None else np.asarray(b, dtype=float)
    length = max(1, len(a) // _BLOCKS)
    starts = np.random.default_rng(0).integers(0, len(a) - length + 1, (_RESAMPLES, -(-len(a) // length)))
    picks = (starts[:, :, None] + np.arange(length)).reshape(_RESAMPLES, -1)[:, :len(a)]
    point, resampled, samples = np.median(a), np.median(a[picks], axis=1), a
    if b is not None:
        point, resampled = combine(point, np.median(b)), combine(resampled, np.median(b[picks], axis=1))
        samples = combine(a, b)
    low, high = point + _FEW_BLOCKS * (np.percentile(resampled, [2.5, 97.5]) - point)
    return Spread(float(point), float(min(low, point)), float(max(high, point)), tuple(round(float(s), 4) for s in samples))


@contextlib.contextmanager
def _gpu_to_ourselves():
    """Hold this GPU's file lock and keep the garbage collector out, whatever happens inside."""
    collecting = gc.isenabled()
    with turns.turn():
        try:
            others = machine.other_processes()
            for why in (*disturbances, *([f"other processes use this GPU: {', '.join(others)}"] if others else ())):
                print(f"Times may be too long: {why}.")
            gc.collect()
            gc.disable()
            yield
        finally:
            if collecting:
                gc.enable()


@contextlib.contextmanager
def _core_after_core():
    """Give a function that moves this thread to the next quiet CPU core; afterwards it may run where it could before.

    Processes land on different cores, and on one that shares its silicon with a neighbour the CPU's part takes half as long
    again. A core is quiet if a loop of Python takes at most a tenth longer on it than on the best; if none is, the quickest serves.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield lambda: None
        return
    allowed, shuffle, turns, best = os.sched_getaffinity(0), np.random.default_rng(0).permutation, [], math.inf

    def next_core():
        nonlocal best
        tried = {}
        for _ in allowed:
            turns[:] = turns or list(shuffle(sorted(allowed)))
            core = int(turns.pop())
            _move_to({core})
            tried[core] = min(_loop_ns() for _ in range(3))
            best = min(best, tried[core])
            if tried[core] <= 1.1 * best:
                return
        _move_to({min(tried, key=tried.get)})

    try:
        yield next_core
    finally:
        _move_to(allowed)


def _move_to(cores):
    with contextlib.suppress(OSError):  # a container may forbid it, or take cores away meanwhile
        os.sched_setaffinity(0, cores)


def _loop_ns():
    """Time a loop that does nothing but keep a CPU core busy."""
    began = time.perf_counter_ns()
    for _ in range(5000):
        pass
    return time.perf_counter_ns() - began
