"""How time depends on batch size, and what it must depend on: the experiments of lab 40. Times are in µs (timing.METHOD)."""

import threading

from labkit import recordings
from labkit.experiments.registry import EXPERIMENTS, as_pair, cells, experiment, in_child, walls

PRECISIONS, BATCHES = ("float32", "float16", "bfloat16"), (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CHAINS = (6, 20, 40, 80, 160)  # links of three kernels each
INPUTS, TRACE = ("model", "layers", "width", "length", "precision"), ("launch_at_us", "launch_us", "start_us", "gpu_us")
_at_work = threading.Lock()  # held while something runs beside
_sweeping = threading.Lock()  # held while a sweep yields points, so that two explorers take turns


@experiment
def sweep_mlp():
    """Sweep the batch of linear layers: 24 of width 1,024, and 6 of width 2,048, which have as many weights.

    A row for each batch of a curve: see sweep_points.
    """
    return _sweep("mlp", [(24, 1024, 1), (6, 2048, 1)])


@experiment
def sweep_transformer():
    """Sweep the batch of transformer blocks, 64 tokens: 24 of width 512, and 6 of width 1,024, which have as many weights.

    A row for each batch of a curve: see sweep_points.
    """
    return _sweep("transformer", [(24, 512, 64), (6, 1024, 64)])


@experiment
def sweep_gpt2():
    """Sweep the batch of a decode step of GPT-2 small, 128 and 1,024 tokens of context.

    A row for each batch of a curve: see sweep_points.
    """
    return _sweep("gpt2", [(12, 768, 128), (12, 768, 1024)])


@experiment
def sweep_llama():
    """Sweep the batch of a decode step in the shape of Llama 3, with 0.3, 1.5 and 8 billion weights, 128 tokens of context.

    A row for each batch of a curve: see sweep_points.
    """
    return _sweep("llama", [(12, 768, 128), (16, 2048, 128), (32, 4096, 128)])


def _sweep(model, sizes):
    """Return the rows of all batches of all (layers, width, length), in three precisions, with their traces."""
    curves = [{"model": model, **dict(zip(INPUTS[1:], (*size, precision)))} for size in sizes for precision in PRECISIONS]
    return _traced(_in_common_rounds(curves))


def sweep_points(model, layers, width, length, precision, batches=BATCHES):
    """Measure a step, eager and as a graph, at one batch after the other: yields a row as soon as it is measured.

    A row has the wall times of both, their `speedup`, gpu_us of the graph, enqueue times, `kernels`, the `bytes` that a step must
    move and the `flops` of its matrix products.
    Then a child process profiles them all, and each measured row comes again with its traces; until then, sentences come.
    A batch that does not fit has its reason in `skipped`. length: tokens of a transformer step, context of a decode step
    (gpt2, llama). Raises ValueError for an unknown model, size or precision, NoGPU without a GPU.
    """
    while _at_work.locked() or not _sweeping.acquire(blocking=False):
        yield "Something else has to end first."
    try:
        rows, curve = [], dict(zip(INPUTS, (model, layers, width, length, precision)))
        steps = _steps(**curve)
        for batch in batches:
            rows.append(curve | {"batch": batch} | _measured(steps, (batch,), length)[batch])
            yield rows[-1]
        del steps
        fitting = [row for row in rows if not row["skipped"]]
        yield from (yield from beside(lambda: _traced(fitting), "Each point is profiled once, in a process of its own."))
    finally:
        _sweeping.release()


def beside(work, words):
    """Run `work` in a thread beside us: yields `words` until it is done, then returns its result, or raises its error."""
    ended = []

    def run():
        with _at_work:
            try:
                ended.append((work(), None))
            except BaseException as error:  # else those who wait would never hear of the end
                ended.append((None, error))

    threading.Thread(target=run, daemon=True).start()
    yield words
    while not ended:
        yield words
    result, error = ended[0]
    if error:
        raise error
    return result


def get_ready():
    """Import, in a thread, what the first step of a language model waits for: on a slow disk it takes 10 seconds."""
    def load():
        with _at_work:
            from transformers.models.gpt2 import modeling_gpt2  # noqa: F401
            from transformers.models.llama import modeling_llama  # noqa: F401

            from labkit import decode  # noqa: F401

    threading.Thread(target=load, daemon=True).start()


def curves(*wanted):
    """Return the rows of some curves, each (model, layers, width, length, precision): measured here, or as recorded.

    One batch takes one to three seconds. Raises RecordingError for a curve that is not among the recorded ones.
    """
    if recordings.tables_are_live():
        rows = _in_common_rounds([dict(zip(INPUTS, curve)) for curve in wanted])
        return recordings.table(_traced(rows), recordings.provenance("sweep"))
    rows, _ = recorded_sweeps()
    keys = list(zip(*(rows[name] for name in INPUTS)))
    if missing := set(wanted) - set(keys):
        raise recordings.RecordingError(f"not recorded: {sorted(missing)}; there are: {sorted(set(keys))}")
    return rows[[key in wanted for key in keys]]


def recorded_sweeps():
    """Return all recorded sweeps as one table, wherever this runs, and the launch constants of the same GPU."""
    import pandas

    tables = {name: recordings.recorded(name, table.source) for name, table in EXPERIMENTS.items()
              if name.startswith("sweep_") or name == "launch_constants"}
    constants = tables.pop("launch_constants")
    rows = pandas.concat(tables.values(), ignore_index=True)
    rows.attrs = constants.attrs
    return rows, constants


def _in_common_rounds(curves):
    """Return the rows of all batches of some curves; the batches of one share their rounds, so that what drifts hits all alike."""
    from tqdm import tqdm

    rows = []
    for curve in tqdm(curves, desc="measuring", unit="curve", leave=False):
        steps = _steps(**curve)
        found = _measured(steps, BATCHES, curve["length"], budget_s=8, target=0)
        for batch, numbers in found.items():
            if numbers["skipped"] and len(found) > 1:  # beside the others there was no room for it: is there, alone?
                numbers = _measured(steps, (batch,), curve["length"])[batch]
            rows.append(curve | {"batch": batch} | numbers)
        del steps, found
    return rows


def _traced(rows):
    """Return rows with the traces of those that were measured, from one child process."""
    import torch

    rows = list(rows)
    torch.cuda.empty_cache()
    points = [{name: row[name] for name in (*INPUTS, "batch")} for row in rows if not row["skipped"]]
    found = iter(in_child(_traces, {"points": points}, 120 + 10 * len(points)) if points else ())
    return [row if row["skipped"] else row | next(found) for row in rows]


def _steps(model, layers, width, length, precision):
    """Return a function that makes the step of a batch: its callable and one input."""
    import torch

    from labkit import decode, models

    if precision not in PRECISIONS:
        raise ValueError(f"precision is one of {', '.join(PRECISIONS)}, not {precision!r}")
    dtype = getattr(torch, precision)
    if model in models.KINDS:
        return lambda batch: models.build(model, layers=layers, width=width, batch=batch, tokens=length, dtype=dtype)
    whole = []  # built with the first step, so that what does not fit is said of the steps

    def step_at(batch):
        if not whole:
            whole.append(models.language_model(model, layers=layers, width=width, dtype=dtype))
        return decode.decode_step(whole[0], batch, length)

    return step_at


def _measured(steps, batches, length, budget_s=0.8, target=0.02):
    """Measure the steps of some batches in common rounds: {batch: the numbers of its row, or why there are none in `skipped`}."""
    import torch

    from labkit import graphs, models, timing

    torch.cuda.empty_cache()
    made, found = {}, {}
    for batch in batches:
        try:
            call, x = steps(batch)
            made[batch] = call, x, *as_pair(call, x)
        except (models.TooLarge, torch.OutOfMemoryError, graphs.CaptureError) as error:
            first = error.__cause__ or error
            if not isinstance(first, (models.TooLarge, torch.OutOfMemoryError)):
                raise
            found[batch] = {"skipped": str(first).partition(". ")[0]}
            del first  # its traceback holds this frame, and so all that was made
    with torch.inference_mode():
        calls = {(batch, how): call for batch, (*_, pair, _) in made.items() for how, call in pair.items()}
        try:
            measured = timing.compare(calls, budget_s=budget_s, target=target,
                                      without_gpu={key for key in calls if key[1] == "eager"}).measurements if calls else {}
        except torch.OutOfMemoryError as error:
            made, found = {}, {batch: {"skipped": str(error).partition(". ")[0]} for batch in batches}
    for batch, (call, x, _, graph) in made.items():
        eager, graphed = (measured[batch, how] for how in ("eager", "graph"))
        both = timing.Comparison({"eager": eager, "graph": graphed})
        found[batch] = {
            "skipped": "", "kernels": len(graph.kernel_names), **cells("speedup", both.ratio("eager", "graph")),
            **cells("eager_wall_us", eager.wall_us), **cells("graph_wall_us", graphed.wall_us), **cells("gpu_us", graphed.gpu_us),
            **cells("eager_enqueue_us", eager.enqueue_us), **cells("graph_enqueue_us", graphed.enqueue_us),
            **_work(call, x, length), "rounds": eager.rounds, "stopped_by": eager.stopped_by, "samples": walls(both),
            **{f"{how}_{part}": None for how in both.measurements for part in (*TRACE, "kernel")}}
    return {batch: found[batch] for batch in batches}


def _work(call, x, length):
    """Return the bytes a step must move at least (weights, cache, input, output) and the FLOPs of its matrix products."""
    weights = {id(m.weight): m.weight for m in call.modules() if type(m).__name__ in ("Linear", "Conv1D")}.values()
    numbers, each = sum(w.numel() for w in weights), next(iter(weights)).itemsize
    tokens, moved, products = x.shape[:-1].numel(), 2 * x.nbytes, numbers
    if layers := getattr(getattr(call, "cache", None), "layers", None):  # a decode step: one token attends to all of the cache
        moved = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        products += 2 * len(layers) * length * call.model.config.hidden_size
    elif x.ndim == 3:
        products += 2 * len(call) * length * x.shape[-1]
    return {"bytes": numbers * each + moved, "flops": 2 * tokens * products}


def _traces(points):
    """Profile the step of each point, eager and as a graph; returns one dict of lists each: µs, and 1 for kernels, 0 for copies."""
    import torch

    from labkit import graphs, models, trace

    curve, found = None, []
    for point in points:
        if curve != (curve := {name: point[name] for name in INPUTS}):
            steps = None  # the model before goes, before the next one comes
            steps = _steps(**curve)
        torch.cuda.empty_cache()
        found.append({})
        try:
            pair, _ = as_pair(*steps(point["batch"]))
            with torch.inference_mode():
                taken = trace.record_each(pair, calls_before=2)
        except (models.TooLarge, torch.OutOfMemoryError, graphs.CaptureError):  # a child has a little less room
            pair = _ = None
            continue
        for how, traced in taken.items():
            found[-1] |= {f"{how}_{part}": [round(getattr(k, part), 2 if part == "gpu_us" else 1) for k in traced.kernels] for part in TRACE}
            found[-1][f"{how}_kernel"] = [int(not k.name.startswith(("Memcpy", "Memset"))) for k in traced.kernels]
        del pair, _
    return found


@experiment
def launch_constants():
    """Time chains of a matrix product, an addition and a GELU, as a graph and launched by hand: what each kernel adds.

    A row for each chain, by `how`: its `nodes`, its three times, and kernels_us, how long its kernels work by a profile.
    """
    import torch

    from labkit import timing

    rows, calls = [], {}
    for links, worked in zip(CHAINS, in_child(_chain_kernels)):
        pair, graph = as_pair(*_chain(links))
        calls |= {("graph", links): pair["graph"], ("by hand", links): pair["eager"]}
        rows += [{"how": how, "nodes": len(graph.kernel_names), "links": links, "kernels_us": worked[how]} for how in worked]
    with torch.inference_mode():
        both = timing.compare(calls, budget_s=6, target=0)
    for row in rows:
        found = both[row["how"], row.pop("links")]
        row |= {**cells("wall_us", found.wall_us), **cells("gpu_us", found.gpu_us), **cells("enqueue_us", found.enqueue_us),
                "gpu_gaps": found.gpu_gaps, "samples": {"wall_us": found.wall_us.samples, "gpu_us": found.gpu_us.samples}}
    return rows


def _chain(links):
    """Return a call of `links` times what steps are made of: a matrix product with weights of its own, an addition, a GELU."""
    import torch
    from torch.nn import functional as F

    weights = torch.randn(links, 1024, 1024, device="cuda", dtype=torch.float16).div(32).unbind()

    def chain(x):
        for weight in weights:
            x = F.gelu((x @ weight).add_(1))
        return x

    return chain, torch.randn(1, 1024, device="cuda", dtype=torch.float16)


def _chain_kernels():
    """Return how long the kernels of each chain work together (µs), by a profile of its graph and of its launches by hand."""
    import torch

    from labkit import trace

    with torch.inference_mode():
        traces = [trace.record_each(as_pair(*_chain(links))[0]) for links in CHAINS]
    return [{"graph": sum(k.gpu_us for k in traced["graph"].kernels), "by hand": sum(k.gpu_us for k in traced["eager"].kernels)}
            for traced in traces]


@experiment
def ceilings():
    """Measure what this GPU can do at most: bytes read a second by a large sum, FLOPs a second of a large matrix product.

    A row for each of them, `what`, and each `precision`: per_second, by gpu_us.
    """
    import torch

    from labkit import timing

    big = torch.ones(min(2**31, torch.cuda.mem_get_info()[0] // 8), device="cuda", dtype=torch.float16)
    calls, work = {("read", "float16"): big.sum}, {("read", "float16"): big.nbytes}
    for precision in PRECISIONS:
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=getattr(torch, precision)) for _ in range(2))
        calls["multiply", precision], work["multiply", precision] = (lambda a=a, b=b: a @ b), 2 * 8192**3
    both = timing.compare(calls, budget_s=6, target=0)
    rates = {key: timing.spread([work[key] / us * 1e6 for us in m.gpu_us.samples]) for key, m in both.measurements.items()}
    return [{"what": what, "precision": precision, **cells("per_second", rate), "samples": {"per_second": rate.samples}}
            for (what, precision), rate in rates.items()]
