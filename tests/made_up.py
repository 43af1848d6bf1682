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
