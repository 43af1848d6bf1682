"""What is in a graph, what it costs and saves, and how it goes wrong: the experiments of lab 20. Times are in µs."""

from labkit.experiments.registry import apart, as_pair, cells, compare_pairs, experiment, walls


@experiment
def graph_contents():
    """List the nodes of the graph of one transformer block and what each waits for.

    A row for each node: its `kind`, a kernel's `name` and `grid` (blocks), and the nodes it comes `after`.
    """
    from labkit import models

    _, graph = as_pair(*models.build("transformer", layers=1))
    return [{"node": i, "kind": n.kind, "name": n.name, "after": list(n.after), "grid": list(n.grid)}
            for i, n in enumerate(graph.nodes)]


@experiment
def replay_cost():
    """Time the replay of graphs of 1 to 10,000 nodes, each node one tiny addition.

    A row for each graph: its `nodes` and Measurement.row().
    """
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
    """Compare the one-off cost of a capture, seconds and bytes, with what each replay saves.

    A row for each depth: capture_s, pool_bytes, saving_us, and break_even_calls, None where nothing is saved.
    """
    from labkit import models

    as_pair(*models.build("transformer", layers=1))  # the first capture of a process also loads libraries
    rows = []
    for layers, graph, both in compare_pairs(
            [(layers, {"kind": "transformer", "layers": layers}) for layers in (1, 3, 6, 12, 24, 48)], budget_s=10):
        saving, seconds = both.difference("eager", "graph"), graph.capture_seconds
        rows.append({"layers": layers, "kernels": len(graph.kernel_names), "capture_s": seconds, **cells("saving_us", saving),
                     "break_even_calls": seconds * 1e6 / saving.median if saving.median > 0 else None,
                     "pool_bytes": graph.pool_bytes, "samples": walls(both)})
    return rows


@experiment
def grad_pools():
    """Capture a transformer whose weights ask for gradients with autograd on, off, and in inference mode: pool bytes.

    A row for each mode, `how`: pool_bytes, the wall time of a replay, and whether the result has a grad_fn.
    """
    import torch

    from labkit import contents, models, timing

    model, x = models.build("transformer", layers=12, batch=8)
    model.requires_grad_(True)
    rows, replays = [], {}
    for how, mode in (("grad on", torch.enable_grad), ("no_grad", torch.no_grad), ("inference_mode", torch.inference_mode)):
        with mode():
            model(x)
            graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
            with torch.cuda.graph(graph, pool=pool):
                out = model(x)
        rows.append({"how": how, "pool_bytes": contents.pool_bytes(pool), "has_grad_fn": out.grad_fn is not None})
        replays[how] = graph.replay, out
    both = timing.compare({how: replay for how, (replay, _) in replays.items()})
    return [row | {k: v for k, v in both[row["how"]].row().items() if k.startswith(("wall_us", "samples"))} for row in rows]


@experiment
@apart
def same_operations():
    """Check that a replay runs the same kernels as eager mode, in the same order, and returns the same bits.

    A row for each `check`: its `result`, true or false, and a `detail` in words.
    """
    import torch

    from labkit import models, trace

    pair, _ = as_pair(*models.build("transformer"))
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
    """Try, each in a fresh process, to capture operations that were never called before: cold, and warmed up once.

    A row for each operation, `what`, and number of warm_ups (0, 1, 3): whether it was `captured`, and the `cause` if not.
    """
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
    """Fall into the traps of static buffers with raw PyTorch: what one would expect, and what came out.

    A row for each `trap`: what was `expected`, what one `got`, and whether anything was `raised`.
    """
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
    """Compare the wrapper's cost on the 24 x 1,024 MLP, batch 1, new input each call: by hand, ours, PyTorch's own two.

    A row for each way: Measurement.row(), its `speedup` over make_graphed_callables, and python_us, the enqueue_us beyond by hand.
    """
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
