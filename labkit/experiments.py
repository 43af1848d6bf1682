"""One function per question, each giving one tidy table: measured here, or as recorded on a GPU that was.

Times are microseconds per call (see timing.METHOD). Every function called `name` in EXPERIMENTS can be called by a lab,
`experiments.name()`; `python -m labkit record` calls its `.measure()` and keeps what that returns.
"""

import ast
import functools
import inspect
import json
from dataclasses import replace

from labkit import recordings

EXPERIMENTS = {}


def experiment(fn):
    """Register an experiment: its table is measured live, or comes from the recording."""
    signature = inspect.signature(fn)

    @functools.wraps(fn)
    def table(**params):
        bound = signature.bind(**params)
        bound.apply_defaults()
        return recordings.live_or_recorded(fn.__name__, bound.arguments, lambda: fn(**bound.arguments), table.source)

    table.measure, table.source = fn, inspect.getsource(fn)
    EXPERIMENTS[fn.__name__] = table
    return table


def apart(fn):
    """Run an experiment in a child process: the profiler would slow every later launch of this one."""
    return functools.wraps(fn)(lambda **params: _in_child(fn.__name__, params))


def _in_child(name, params=None):
    """Return the rows of an experiment measured in a child process; RuntimeError with its first line if it fails."""
    from labkit import isolate

    result = isolate.run("import inspect, json\nfrom labkit import experiments\n"
                         f"json.dumps(inspect.unwrap(experiments.{name})(**{params or {}!r}))", timeout_s=300)
    if result.error:
        raise RuntimeError(f"{name} failed in its own process: {result.error}")
    return json.loads(ast.literal_eval(result.outputs[-1]["data"]["text/plain"]))


def _pair(model, x):
    """Return the same step eager and as a graph, {name: callable}, and the graph; to be called in inference mode."""
    from labkit import graphs

    graph = graphs.GraphedCallable(model, x)
    return {"eager": functools.partial(model, x), "graph": functools.partial(graph, x)}, graph


def _compare_pairs(steps, budget_s, target=0):
    """Time many steps, eager and as graphs, all in the same rounds; yields (key, graph, Comparison of the pair) each.

    `steps` lists (key, options of models.build). What drifts while a sweep is measured then drifts under all of its
    points. A step that does not fit on the GPU is left out, and said to be.
    """
    import torch

    from labkit import models, timing

    pairs = {}
    for key, options in steps:
        try:
            pairs[key] = _pair(*models.build(**options))
        except (models.TooLarge, torch.OutOfMemoryError) as error:
            print(f"Left out: {key}: {str(error).splitlines()[0]}")
    with torch.inference_mode():
        everything = timing.compare({(key, how): call for key, (pair, _) in pairs.items() for how, call in pair.items()},
                                    budget_s=budget_s, target=target)
    for key, (pair, graph) in pairs.items():
        yield key, graph, timing.Comparison({how: replace(everything[key, how], name=how) for how in pair})


def _spread(column, spread):
    """Return a spread as three cells of a row: the value, _low and _high."""
    return {column: spread.median, f"{column}_low": spread.low, f"{column}_high": spread.high}


@experiment
def first_win():
    """Time 24 linear layers, 1,024 wide, batch 1, float16, eager and as a graph (copy in, replay, clone out)."""
    (_, graph, both), = _compare_pairs([("mlp", {"kind": "mlp"})], budget_s=4, target=0.02)
    return both.rows("eager", kernels=len(graph.kernel_names))


@experiment
def repeatability():
    """Measure first_win in six fresh processes, one after the other: how far do their speedups agree?"""
    from tqdm import tqdm

    rows = []
    for run in tqdm(range(1, 7), desc="measuring, process", leave=False):
        eager, graph = _in_child("first_win")
        rows.append({"run": run, **{k: v for k, v in graph.items() if k.startswith("speedup")},
                     "eager_wall_us": eager["wall_us"], "graph_wall_us": graph["wall_us"], "stopped_by": graph["stopped_by"]})
    return rows


@experiment
@apart
def launch_trace():
    """Profile 500 launches of one tiny kernel: how long each launch call keeps the CPU (profiler included)."""
    import torch

    from labkit import trace

    x = torch.zeros(64, device="cuda")
    return trace.record(lambda: [x.add_(1) for _ in range(500)]).rows()


@experiment
def launch_cost():
    """Take the cost of launching one kernel apart: the driver's call, then PyTorch operations that launch one."""
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
             **_spread("cost_us", m.enqueue_us), "samples": {"enqueue_us": m.enqueue_us.samples}}
            for what, m in both.measurements.items()]
    return [{"what": "launch call, as the profiler sees it", "layer": "driver", "kernels": 1, **_spread("cost_us", traced)}, *rows]


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
    """Time the same step in fresh processes, with and without one run of PyTorch's profiler before, in turns."""
    rows = [row for run in range(4) for profiled in (False, True) for row in _in_child("_step_after", {"profiled": profiled})]
    return [row | {"how": f"{row['name']}, {'after profiling once' if row['profiled'] else 'never profiled'}"} for row in rows]


def _step_after(profiled):
    """Measure the small network eager and as a bare replay, after one profiled call if asked for."""
    import torch

    from labkit import models, timing, trace

    pair, graph = _pair(*models.build("mlp"))
    with torch.inference_mode():
        if profiled:
            trace.record(pair["eager"])
        both = timing.compare({"eager": pair["eager"], "replay": graph.replay}, budget_s=1.5)
    return [row | {"profiled": profiled} for row in both.rows()]


@experiment
def matmul_crossover():
    """Time one float16 matrix product, square, from tiny to large: CPU time to enqueue it against GPU time."""
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
    """Profile one step of a 24-layer transformer (width 1,024, 128 tokens, batch 1, float16), eager and as a graph."""
    import torch

    from labkit import models, trace

    pair, _ = _pair(*models.build("transformer"))
    with torch.inference_mode():
        return [row for how, call in pair.items() for row in trace.record(call).rows(how=how)]


@experiment
def step_saving():
    """Compare what a graph saves per step with what kernels times launch cost would predict."""
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
    for (kind, layers, batch), graph, both in _compare_pairs(
            [((kind, layers, batch), {"kind": kind, "layers": layers, "batch": batch}) for kind, layers, batch in steps], budget_s=15):
        kernels = len(graph.kernel_names)
        rows.append({"model": kind, "layers": layers, "batch": batch, "kernels": kernels,
                     "launch_us": launch, "driver_launch_us": driver,
                     **_spread("eager_wall_us", both["eager"].wall_us), **_spread("graph_wall_us", both["graph"].wall_us),
                     **_spread("saving_us", both.difference("eager", "graph")), "predicted_saving_us": kernels * launch,
                     **_spread("speedup", both.ratio("eager", "graph")), "samples": _walls(both)})
    return rows


def _walls(both):
    """Return the raw wall times of a comparison, as kept in a recording."""
    return {name: m.wall_us.samples for name, m in both.measurements.items()}


@experiment
def idle_sweep():
    """Sweep layers, width and batch of the transformer (32 tokens, float16): how long is the GPU idle in eager mode?"""
    from labkit import timing

    points = [(layers, width, batch) for layers in (2, 8, 24) for width in (256, 512, 1024, 2048) for batch in (1, 8, 64)]
    rows = []
    for (layers, width, batch), graph, both in _compare_pairs(
            [(point, dict(zip(("kind", "layers", "width", "batch", "tokens"), ("transformer", *point, 32), strict=True)))
             for point in points], budget_s=18):
        gpu, wall = both["eager"].gpu_us, both["eager"].wall_us
        idle = timing.spread([max(0.0, 1 - g / w) for g, w in zip(gpu.samples, wall.samples, strict=True)])
        rows.append({"layers": layers, "width": width, "batch": batch, "kernels": len(graph.kernel_names),
                     **_spread("eager_wall_us", wall), **_spread("graph_wall_us", both["graph"].wall_us),
                     **_spread("gpu_us", gpu), **_spread("idle_share", idle), **_spread("speedup", both.ratio("eager", "graph")),
                     "samples": _walls(both) | {"eager gpu_us": gpu.samples}})
    return rows


@experiment
def graph_contents():
    """List the nodes of the graph of one transformer block and what each waits for."""
    from labkit import models

    _, graph = _pair(*models.build("transformer", layers=1))
    return [{"node": i, "kind": n.kind, "name": n.name, "after": list(n.after), "grid": list(n.grid)}
            for i, n in enumerate(graph.nodes)]


@experiment
def replay_cost():
    """Time the replay of graphs of 1 to 10,000 nodes, each node one tiny addition."""
    import torch

    from labkit import graphs, timing

    x = torch.zeros(64, device="cuda")

    def chain(nodes):
        return graphs.GraphedCallable(lambda: [x.add_(1) for _ in range(nodes)] and None)

    made = {nodes: chain(nodes) for nodes in (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000)}
    both = timing.compare({nodes: graph.replay for nodes, graph in made.items()}, budget_s=8, target=0)
    return [both[nodes].row(nodes=len(graph.nodes)) | {"name": "replay"} for nodes, graph in made.items()]


@experiment
def capture_cost():
    """Compare the one-off cost of a capture, seconds and bytes, with what each replay saves."""
    from labkit import models

    _pair(*models.build("transformer", layers=1))  # the first capture of a process also loads libraries
    rows = []
    for layers, graph, both in _compare_pairs(
            [(layers, {"kind": "transformer", "layers": layers}) for layers in (1, 3, 6, 12, 24, 48)], budget_s=10):
        saving, seconds = both.difference("eager", "graph"), graph.capture_seconds
        rows.append({"layers": layers, "kernels": len(graph.kernel_names), "capture_s": seconds, **_spread("saving_us", saving),
                     "break_even_calls": seconds * 1e6 / saving.median if saving.median > 0 else None,
                     "pool_bytes": graph.pool_bytes, "samples": _walls(both)})
    return rows


@experiment
def grad_pools():
    """Capture a transformer whose weights ask for gradients with autograd on, off, and in inference mode: pool bytes."""
    import torch

    from labkit import graphs, models, timing

    model, x = models.build("transformer", layers=12, batch=8)
    model.requires_grad_(True)
    rows, replays = [], {}
    for how, mode in (("grad on", torch.enable_grad), ("no_grad", torch.no_grad), ("inference_mode", torch.inference_mode)):
        with mode():
            model(x)
            graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
            with torch.cuda.graph(graph, pool=pool):
                out = model(x)
        rows.append({"how": how, "pool_bytes": graphs.pool_bytes(pool), "has_grad_fn": out.grad_fn is not None})
        replays[how] = graph.replay, out
    both = timing.compare({how: replay for how, (replay, _) in replays.items()})
    return [row | {k: v for k, v in both[row["how"]].row().items() if k.startswith(("wall_us", "samples"))} for row in rows]


@experiment
@apart
def same_operations():
    """Check that a replay runs the same kernels as eager mode, in the same order, and returns the same bits."""
    import torch

    from labkit import models, trace

    pair, _ = _pair(*models.build("transformer"))
    with torch.inference_mode():
        equal = torch.equal(pair["eager"](), pair["graph"]())
        eager, graph = (trace.record(call) for call in pair.values())
    names = [[k.name for k in t.kernels if not k.name.startswith(("Memcpy", "Memset"))] for t in (eager, graph)]
    copies = [len(t) - len(n) for t, n in zip((eager, graph), names, strict=True)]
    return [{"check": "outputs equal, bit for bit", "result": equal, "detail": ""},
            {"check": "same kernels, same order", "result": names[0] == names[1],
             "detail": f"{len(names[0])} kernels eager, {len(names[1])} replayed"},
            {"check": "copies around the graph: input in, output out", "result": copies[1] > copies[0],
             "detail": f"{copies[0]} copies eager, {copies[1]} with the graph"}]


@experiment
def warm_up_cold():
    """Try, each in a fresh process, to capture operations that were never called before: cold, and warmed up once."""
    from labkit import isolate

    setups = {"addition": "x = torch.randn(64, 64, device='cuda')\nop = lambda: x + x",
              "matrix product": "x = torch.randn(64, 64, device='cuda')\nop = lambda: x @ x",
              "convolution": "x = torch.randn(1, 8, 32, 32, device='cuda')\nw = torch.randn(8, 8, 3, 3, device='cuda')\n"
                             "op = lambda: torch.conv2d(x, w)",
              "FFT": "x = torch.randn(64, 64, device='cuda')\nop = lambda: torch.fft.fft(x)"}
    rows = []
    for what, setup in setups.items():
        for warm_ups in (0, 1, 3):
            source = (f"import torch\n{setup}\nwith torch.no_grad():\n    for _ in range({warm_ups}):\n        op()\n"
                      "    torch.cuda.synchronize()\n    graph = torch.cuda.CUDAGraph()\n"
                      "    with torch.cuda.graph(graph):\n        op()\n    graph.replay()\n    torch.cuda.synchronize()")
            result = isolate.run(source)
            said = [line.partition("cause: ")[2] for line in (result.cause or "").splitlines() if "cause: " in line]
            rows.append({"what": what, "warm_ups": warm_ups, "captured": result.error is None, "cause": "".join(said)})
    return rows


@experiment
def static_traps():
    """Fall into the traps of static buffers with raw PyTorch: what one would expect, and what came out."""
    import torch

    from labkit import graphs

    def row(trap, expected, got, raised=False):
        rows.append({"trap": trap, "expected": expected, "got": got, "raised": raised})

    rows, x, out = [], torch.zeros(4, device="cuda"), torch.full((4,), -1.0, device="cuda")
    static_x, made_before = x, out.data_ptr()
    _ = x + 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = x + 1
    row("make the output buffer before the capture", "written", "written" if out.data_ptr() == made_before else "never written")
    x = torch.full((4,), 10.0, device="cuda")
    graph.replay()
    row("put a new tensor under the old name, replay", str((x + 1).tolist()), str(out.tolist()))
    static_x.copy_(x)
    graph.replay()
    kept, copy = out, out.clone()
    static_x.fill_(20.0)
    graph.replay()
    row("keep the output, replay again", str(copy.tolist()), str(kept.tolist()))
    static_x.copy_(torch.full((1,), 5.0, device="cuda"))
    graph.replay()
    row("copy an input of the wrong shape in", "an error", str(out.tolist()))
    try:
        graphs.GraphedCallable(lambda t: t + 1, static_x)(torch.full((1,), 5.0, device="cuda"))
    except ValueError as error:
        row("the same, with GraphedCallable", "an error", str(error).partition(":")[0], raised=True)
    return rows


@experiment
def wrapper_cost():
    """Compare the wrapper's cost on the 24 x 1,024 MLP, batch 1, new input each call: by hand, ours, PyTorch's own two."""
    import torch

    from labkit import graphs, models, timing

    (model, x), (again, _) = (models.build("mlp") for _ in range(2))
    ours, buffers = graphs.GraphedCallable(model, x), graphs.GraphedCallable(model, x, clone=False)
    theirs, compiled = torch.cuda.make_graphed_callables(again, (x,)), torch.compile(model, mode="reduce-overhead")
    new = torch.randn_like(x)

    def by_hand():
        ours.inputs[0].copy_(new)
        ours.replay()
        return ours.outputs[0].clone()

    calls = {"make_graphed_callables": lambda: theirs(new), "GraphedCallable": lambda: ours(new),
             "GraphedCallable, clone=False": lambda: buffers(new), "copy, replay, clone by hand": by_hand,
             "bare replay": ours.replay, "torch.compile, reduce-overhead": lambda: compiled(new)}
    with torch.inference_mode():
        try:
            compiled(new)
        except Exception as error:  # no C compiler, or a GPU that Triton does not know
            print(f"Left out: torch.compile: {str(error).splitlines()[0]}")
            del calls["torch.compile, reduce-overhead"]
        both = timing.compare(calls, budget_s=8, target=0)
    by_hand_us = both["copy, replay, clone by hand"].enqueue_us.median
    return [row | {"python_us": row["enqueue_us"] - by_hand_us} for row in both.rows("make_graphed_callables")]
