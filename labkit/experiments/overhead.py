"""What a launch costs, and what it makes of a step: the experiments of labs 00 and 10. Times are in µs (timing.METHOD)."""

from labkit.experiments.registry import apart, as_pair, cells, compare_pairs, experiment, in_child, walls


@experiment
def first_win():
    """Time 24 linear layers, 1,024 wide, batch 1, float16, eager and as a graph (copy in, replay, clone out).

    A row for each of the two: Measurement.row(), its `speedup` over eager, and the graph's `kernels`.
    """
    (_, graph, both), = compare_pairs([("mlp", {"kind": "mlp"})], budget_s=4, target=0.02)
    return both.rows("eager", kernels=len(graph.kernel_names))


@experiment
def repeatability():
    """Measure first_win in six fresh processes, one after the other: how far do their speedups agree?

    A row for each process, `run`: its `speedup` with its interval, and the medians eager_wall_us and graph_wall_us.
    """
    from tqdm import tqdm

    rows = []
    for run in tqdm(range(1, 7), desc="measuring, process", leave=False):
        eager, graph = in_child(first_win)
        rows.append({"run": run, **{k: v for k, v in graph.items() if k.startswith("speedup")},
                     "eager_wall_us": eager["wall_us"], "graph_wall_us": graph["wall_us"], "stopped_by": graph["stopped_by"]})
    return rows


@experiment
@apart
def launch_trace():
    """Profile 500 launches of one tiny kernel: how long each launch call keeps the CPU (profiler included).

    A row for each launch: Trace.rows().
    """
    import torch

    from labkit import trace

    x = torch.zeros(64, device="cuda")
    return trace.record(lambda: [x.add_(1) for _ in range(500)]).rows()


@experiment
def launch_cost():
    """Take the cost of launching one kernel apart: the driver's call, then PyTorch operations that launch one.

    A row for each call, `what`: `cost_us` of CPU time, its `layer` (driver or torch), and the `kernels` it launches.
    """
    import torch
    from torch.nn import functional as F

    from labkit import graphs, timing

    x = torch.randn(64, 64, device="cuda", dtype=torch.float16)
    traced = timing.spread([row["launch_us"] for row in launch_trace.measure()])
    calls = {"x.add_(1)": lambda: x.add_(1), "x + x": lambda: x + x, "x @ x": lambda: x @ x,
             "F.linear(x, x)": lambda: F.linear(x, x), "F.gelu(x)": lambda: F.gelu(x),
             "F.layer_norm(x, (64,))": lambda: F.layer_norm(x, (64,)), "torch.softmax(x, -1)": lambda: torch.softmax(x, -1)}
    kernels = {what: len(graphs.GraphedCallable(call).kernel_names) for what, call in calls.items()}
    driver = {"cuLaunchKernel, called directly": _bare_launch(graphs.GraphedCallable(calls["x.add_(1)"]))}
    with torch.inference_mode():
        both = timing.compare(driver | calls, budget_s=6, target=0)
    rows = [{"what": what, "layer": "driver" if what in driver else "torch", "kernels": kernels.get(what, 1),
             **cells("cost_us", m.enqueue_us), "samples": {"enqueue_us": m.enqueue_us.samples}}
            for what, m in both.measurements.items()]
    return [{"what": "launch call, as the profiler sees it", "layer": "driver", "kernels": 1, **cells("cost_us", traced)}, *rows]


def _bare_launch(graph):
    """Return a call that launches the first kernel of a graph through the driver alone, with the same arguments."""
    import torch
    from cuda.bindings import driver

    node = driver.cuGraphGetNodes(driver.CUgraph(graph.raw_graph), 1)[1][0]
    p = driver.cuGraphKernelNodeGetParams(node)[1]
    kernel = p.func if int(p.func) else driver.CUfunction(int(p.kern))
    stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
    shape = (p.gridDimX, p.gridDimY, p.gridDimZ, p.blockDimX, p.blockDimY, p.blockDimZ, p.sharedMemBytes, stream)

    def launch(graph=graph):  # the graph owns the arguments
        return driver.cuLaunchKernel(kernel, *shape, p.kernelParams, 0)

    status, = launch()
    if int(status):
        raise RuntimeError(f"the driver did not launch the kernel: {status.name}")
    return launch


@experiment
def profiler_cost():
    """Time the same step in fresh processes, with and without one run of PyTorch's profiler before, in turns.

    A row for each process and each of eager and a bare replay: Measurement.row(), and whether it was `profiled` before.
    """
    rows = [row for run in range(4) for profiled in (False, True) for row in in_child(_step_after, {"profiled": profiled})]
    return [row | {"how": f"{row['name']}, {'after profiling once' if row['profiled'] else 'never profiled'}"} for row in rows]


def _step_after(profiled):
    """Measure the small network eager and as a bare replay, after one profiled call if asked for."""
    import torch

    from labkit import models, timing, trace

    pair, graph = as_pair(*models.build("mlp"))
    with torch.inference_mode():
        if profiled:
            trace.record(pair["eager"])
        both = timing.compare({"eager": pair["eager"], "replay": graph.replay}, budget_s=1.5)
    return [row | {"profiled": profiled} for row in both.rows()]


@experiment
def matmul_crossover():
    """Time one float16 matrix product, square, from tiny to large: CPU time to enqueue it against GPU time.

    A row for each `size`: Measurement.row().
    """
    import torch

    from labkit import timing

    def product(size):
        a, b, out = (torch.randn(size, size, device="cuda", dtype=torch.float16) for _ in range(3))
        return lambda: torch.mm(a, b, out=out)

    sizes = (16, 64, 256, 512, 1024, 1536, 2048, 3072, 4096, 8192)
    both = timing.compare({size: product(size) for size in sizes}, budget_s=8, target=0)
    return [both[size].row(size=size) | {"name": "matmul"} for size in sizes]


@experiment
@apart
def step_trace():
    """Profile one step of a 24-layer transformer (width 1,024, 128 tokens, batch 1, float16), eager and as a graph.

    A row for each kernel, copy or fill, by `how`: Trace.rows().
    """
    import torch

    from labkit import models, trace

    pair, _ = as_pair(*models.build("transformer"))
    with torch.inference_mode():
        return [row for how, call in pair.items() for row in trace.record(call).rows(how=how)]


@experiment
def step_saving():
    """Compare what a graph saves per step with what kernels times launch cost would predict.

    A row for each model: wall times, saving_us, the `kernels`, and predicted_saving_us: those times launch_us.
    """
    import torch

    from labkit import graphs, timing

    x = torch.randn(64, 64, device="cuda", dtype=torch.float16)
    with torch.inference_mode():
        launches = timing.compare({"torch": lambda: x.add_(1),
                                   "driver": _bare_launch(graphs.GraphedCallable(lambda: x.add_(1)))})
    launch, driver = launches["torch"].enqueue_us.median, launches["driver"].enqueue_us.median
    steps = (("mlp", 24, 1), ("transformer", 6, 1), ("transformer", 12, 1), ("transformer", 18, 1), ("transformer", 24, 1),
             ("transformer", 24, 8), ("transformer", 24, 32))
    rows = []
    for (kind, layers, batch), graph, both in compare_pairs(
            [((kind, layers, batch), {"kind": kind, "layers": layers, "batch": batch}) for kind, layers, batch in steps], budget_s=15):
        kernels = len(graph.kernel_names)
        rows.append({"model": kind, "layers": layers, "batch": batch, "kernels": kernels,
                     "launch_us": launch, "driver_launch_us": driver,
                     **cells("eager_wall_us", both["eager"].wall_us), **cells("graph_wall_us", both["graph"].wall_us),
                     **cells("saving_us", both.difference("eager", "graph")), "predicted_saving_us": kernels * launch,
                     **cells("speedup", both.ratio("eager", "graph")), "samples": walls(both)})
    return rows


@experiment
def idle_sweep():
    """Sweep layers, width and batch of the transformer (32 tokens, float16): how long is the GPU idle in eager mode?

    A row for each point: wall times, gpu_us of eager, and idle_share: 1 less gpu_us over wall time, 0 to 1.
    """
    from labkit import timing

    points = [(layers, width, batch) for layers in (2, 8, 24) for width in (256, 512, 1024, 2048) for batch in (1, 8, 64)]
    rows = []
    for (layers, width, batch), graph, both in compare_pairs(
            [(point, dict(zip(("kind", "layers", "width", "batch", "tokens"), ("transformer", *point, 32), strict=True)))
             for point in points], budget_s=18):
        gpu, wall = both["eager"].gpu_us, both["eager"].wall_us
        idle = timing.spread([max(0.0, 1 - g / w) for g, w in zip(gpu.samples, wall.samples, strict=True)])
        rows.append({"layers": layers, "width": width, "batch": batch, "kernels": len(graph.kernel_names),
                     **cells("eager_wall_us", wall), **cells("graph_wall_us", both["graph"].wall_us),
                     **cells("gpu_us", gpu), **cells("idle_share", idle), **cells("speedup", both.ratio("eager", "graph")),
                     "samples": walls(both) | {"eager gpu_us": gpu.samples}})
    return rows
