"""Made-up tables for tests of charts, claims and explorers. Nothing here was measured, and its label says so."""

import pandas as pd

LABEL = "TEST DATA, made up: not measured anywhere"


def table(rows):
    """Return rows as a table that says it is test data."""
    made = pd.DataFrame(rows)
    made.attrs["provenance"] = {"live": False, "gpu": "made up", "date": "2000-01-01", "experiment": "test",
                                "stale": False, "label": LABEL}
    return made


def interval(row, *columns, by=0.03):
    """Add _low and _high to the named columns of a row."""
    for column in columns:
        row |= {f"{column}_low": row[column] * (1 - by), f"{column}_high": row[column] * (1 + by)}
    return row


def pair(eager=600.0, graph=100.0):
    """One eager and one graph row, as first_win gives them."""
    clocks = ("enqueue_us", "gpu_us", "wall_us")
    rows = [{"name": "eager", "enqueue_us": eager - 10, "gpu_us": 90.0, "wall_us": eager},
            {"name": "graph", "enqueue_us": 11.0, "gpu_us": 90.0, "wall_us": graph}]
    return table([interval(row | {"speedup": eager / graph}, *clocks, "speedup") for row in rows])


def step(kernels=170, apart=10.0, launch=4.0, work=3.0):
    """One step: eager kernels launched one by one, and the same kernels back to back behind one graph launch."""
    eager = [{"how": "eager", "index": i, "name": f"kernel_{i}", "launch_at_us": apart * i, "launch_us": launch,
              "start_us": apart * i + launch + 1, "gpu_us": work} for i in range(kernels)]
    graph = [row | {"how": "graph", "launch_at_us": 0.0, "launch_us": 9.0, "start_us": 20.0 + work * i}
             for i, row in enumerate(eager)]
    return table(eager + graph)


def nodes(count, branches=()):
    """A chain of graph nodes; at each number in `branches` the node runs beside the one before it."""
    rows = [{"node": i, "kind": "kernel", "name": "vectorized_elementwise_kernel", "after": [i - 1] if i else [],
             "grid": [1, 1, 1]} for i in range(count)]
    for i in branches:
        rows[i]["after"], rows[i + 1]["after"] = [i - 2], [i - 1, i]
    return table(rows)


def sweep():
    """An idle sweep over 2 x 2 x 3 points, with one of them missing."""
    rows = []
    for layers in (2, 24):
        for width in (256, 1024):
            for batch in (1, 4, 16):
                graph, eager = layers * width * batch / 100, layers * 150.0 + layers * width * batch / 100
                rows.append(interval({"layers": layers, "width": width, "batch": batch, "kernels": layers * 14,
                                      "eager_wall_us": eager, "graph_wall_us": graph, "gpu_us": graph * 0.95,
                                      "idle_share": 1 - graph * 0.95 / eager, "speedup": eager / graph}, "speedup"))
    return table(rows[:-1])


GRIDS = {"mlp": ((6, 1024, 1), (6, 4096, 1), (24, 1024, 1)), "transformer": ((6, 512, 64), (24, 1024, 64)),
         "gpt2": ((12, 768, 128), (12, 768, 1023)), "llama": ((12, 768, 128), (32, 4096, 2047))}


def sweep_row(model, layers, width, length, precision, batch, traced=True, memory=10**9):
    """One point of a batch sweep: more launches than work at small batches, too large for `memory` at large ones."""
    row = {"model": model, "layers": layers, "width": width, "length": length, "precision": precision, "batch": batch}
    kernels, size = layers * 4, 4 if precision == "float32" else 2
    traces = [f"{how}_{part}" for how in ("eager", "graph") for part in ("launch_at_us", "launch_us", "start_us", "gpu_us", "kernel")]
    work, clocks = 1.5 + width * width * batch / 4e7 * size, ("eager_wall_us", "graph_wall_us", "eager_enqueue_us",
                                                              "graph_enqueue_us", "gpu_us", "speedup")
    if batch * width * layers * length > memory:
        return row | {"skipped": "out of memory", "kernels": float("nan"), "bytes": float("nan"), "flops": float("nan"),
                      **interval(dict.fromkeys(clocks, float("nan")), *clocks), **dict.fromkeys(traces)}
    eager, graph = max(9.0, work) * kernels + 20, (work + 0.4) * kernels + 8
    row |= {"skipped": "", "kernels": kernels, "bytes": layers * width * width * size + 0.0,
            "flops": 2.0 * layers * width * width * batch, "rounds": 20, "stopped_by": "target", **dict.fromkeys(traces)}
    row |= dict(zip(clocks, (eager, graph, kernels * 9.0, 9.0 + kernels / 100, work * kernels, eager / graph)))
    if traced:
        at, starts = [9.0 * i for i in range(kernels)], [max(9.0, work) * i + 8 for i in range(kernels)]
        row |= dict(zip(traces, (at, [4.0] * kernels, starts, [work] * kernels, [1] * kernels, [0.0] * kernels, [9.0] * kernels,
                                 [20 + (work + 0.4) * i for i in range(kernels)], [work] * kernels, [1] * kernels)))
    return interval(row, *clocks)


def batch_sweep(model="gpt2", precisions=("float32", "float16"), memory=10**9):
    """The sweep of one model over its grid, precisions and batches 1 to 512, with predictions a little off."""
    made = table([sweep_row(model, *point, precision, 2**k, memory=memory) for point in GRIDS[model] for precision in precisions
                  for k in range(10)])
    for how, off in (("eager", 1.06), ("graph", 0.98)):
        made[f"predicted_{how}_us"], made[f"{how}_error"] = made[f"{how}_wall_us"] * off, off - 1
    return made.assign(predicted_speedup=made["predicted_eager_us"] / made["predicted_graph_us"])


def ceilings():
    """Measured ceilings: what can be read a second, and multiplied in each precision."""
    rows = [{"what": "read", "precision": "float32", "per_second": 8e12}]
    rows += [{"what": "multiply", "precision": name, "per_second": 5e13 * (1 + 9 * (name != "float32"))}
             for name in ("float32", "float16", "bfloat16")]
    return table([interval(row, "per_second") for row in rows])


def sources(**options):
    """Two GPUs that sweeps were recorded on, the second with less memory; both made up."""
    from labkit.explorers.sweep_model import Recorded
    return {gpu: Recorded({model: batch_sweep(model, memory=memory) for model in GRIDS}, ceilings(), **options)
            for gpu, memory in (("Made-up A", 10**10), ("Made-up B", 10**8))}
