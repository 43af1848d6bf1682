"""Predict what a step takes, eager and as a graph, from its trace and a few constants of the machine: a queue. No GPU needed."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Constants:
    """What a machine adds to the work of its kernels, in microseconds."""

    gap_us: float  # between two kernels of a graph
    hand_gap_us: float  # between two kernels launched by hand, when the GPU is behind
    fixed_us: float  # of a graph's call, beside its kernels and gaps
    call_us: float  # that a graph's call keeps the CPU, however small it is


def fit(table):
    """Fit the Constants to the two kinds of chain of experiments.launch_constants(): as a graph, and launched by hand."""
    graph, hand = (table[table["how"] == how].sort_values("nodes") for how in ("graph", "by hand"))
    gap, fixed = _line(graph["nodes"], graph["wall_us"] - graph["kernels_us"])
    hand_gap, _ = _line(hand["nodes"], hand["gpu_us"] - hand["kernels_us"])
    return Constants(gap, hand_gap, fixed, float(graph["enqueue_us"].iloc[0]))


def _line(x, y):
    """Return slope and offset of the straight line nearest to the points."""
    return map(float, np.polyfit(x, y, 1))


def graph_us(kernels_us, constants):
    """Return what one replay takes (µs): its kernels, a gap for each, a fixed cost; or the CPU's part, if that is longer."""
    return max(constants.call_us, constants.fixed_us + sum(kernels_us) + constants.gap_us * len(kernels_us))


def eager_us(launches, kernels, constants, calls=10):
    """Return what one of `calls` eager calls in a row takes (µs): each kernel waits for its launch and for the one before."""
    cpu = gpu = 0.0
    for _ in range(calls):
        for launch, work in zip(launches, kernels, strict=True):
            cpu += launch
            gpu = max(cpu, gpu + constants.hand_gap_us) + work
    return gpu / calls


def launches_us(row):
    """Return how long the CPU is busy with each launch of a traced row (µs): the profiler's rhythm, at the pace without it.

    The profiler slows launches, so only their proportions are taken from the trace; together they take `eager_enqueue_us`.
    """
    at = np.sort(row["eager_launch_at_us"])
    lasts = np.diff(at, append=2 * at[-1] - at[-2] if len(at) > 1 else 1.0)
    return (lasts / lasts.sum() if lasts.any() else 1 / len(at)) * row["eager_enqueue_us"] * np.ones(len(at))


def predict(row, constants, cpu=1.0, gpu=1.0, layers=1):
    """Predict (eager_us, graph_us) of a traced row, were CPU and GPU so many times as fast, and layers so many times as many.

    Raises ValueError for a row that was not traced, or a factor that cannot be.
    """
    if not isinstance(row.get("eager_gpu_us"), list):
        raise ValueError("a prediction needs one traced row of a sweep, like curve.loc[1], not a whole curve")
    if min(cpu, gpu) <= 0 or layers < 1 or layers != int(layers):
        raise ValueError(f"cpu and gpu must be above 0 and layers a whole number from 1, not {cpu}, {gpu} and {layers}")
    scaled = Constants(constants.gap_us / gpu, constants.hand_gap_us / gpu, constants.fixed_us / gpu, constants.call_us / cpu)
    launches, eager, graph = (np.tile(times, layers) for times in (
        launches_us(row) / cpu, np.divide(row["eager_gpu_us"], gpu), np.divide(row["graph_gpu_us"], gpu)))
    return eager_us(launches, eager, scaled), graph_us(graph, scaled)


def add_predictions(table, constants):
    """Return a sweep with predicted_eager_us, predicted_graph_us, predicted_speedup, and the errors eager_error, graph_error.

    An error is a share, above 0 where the prediction is too long. Rows without a trace get NaN.
    """
    both = [predict(row, constants) if known else (np.nan, np.nan) for known, (_, row) in zip(traced(table), table.iterrows())]
    eager, graph = np.array(both, dtype=float).reshape(-1, 2).T
    walls = table.reindex(columns=["eager_wall_us", "graph_wall_us"]).astype(float)  # a sweep of which nothing fitted has none
    added = table.assign(predicted_eager_us=eager, predicted_graph_us=graph, predicted_speedup=eager / graph,
                         eager_error=eager / walls["eager_wall_us"] - 1, graph_error=graph / walls["graph_wall_us"] - 1)
    added.attrs = table.attrs
    return added


def traced(table):
    """Say of each row of a sweep whether it has a trace; a sweep of which nothing fitted, or was traced, has not one."""
    times = table.reindex(columns=["eager_gpu_us"])["eager_gpu_us"]
    return times.map(lambda each: isinstance(each, list) and len(each) > 0).astype(bool)
