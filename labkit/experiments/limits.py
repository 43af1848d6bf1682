"""What the five limitations forbid, and what the ways round them cost: the experiments of labs 30 and 31. Times are in µs."""

import threading
from concurrent.futures import ThreadPoolExecutor

from labkit import contents, isolate, operations
from labkit.experiments.registry import answer_of, cells, experiment


@experiment
def padding_cost():
    """Time a causal transformer (12 layers, width 1,024, batch 1) at many lengths: eager, its own graph, a padded one.

    A row for each `length` (tokens): the `size` it is padded to, the share of padding, and the three wall times.
    """
    import torch

    from labkit import buckets, graphs, models, timing

    model, x = models.build("causal", layers=12, tokens=512)
    bucketed = buckets.BucketedGraphs(model, x, (64, 128, 256, 512), dim=1, out_dim=1)
    calls = {}
    for length in (40, 64, 72, 128, 136, 200, 256, 264, 384, 512):
        part = x[:, :length].contiguous()
        own = graphs.GraphedCallable(model, part)
        calls |= {(length, "eager"): lambda part=part: model(part), (length, "graph"): lambda part=part, own=own: own(part),
                  (length, "padded"): lambda part=part: bucketed(part)}
    with torch.inference_mode():
        both = timing.compare(calls, budget_s=12, target=0)
    rows = []
    for length in dict.fromkeys(length for length, _ in calls):
        size, times = bucketed.size_for(length), {how: both[length, how].wall_us for how in ("eager", "graph", "padded")}
        rows.append({"length": length, "size": size, "padding_share": 1 - length / size,
                     **{k: v for how, spread in times.items() for k, v in cells(f"{how}_wall_us", spread).items()},
                     "samples": {how: spread.samples for how, spread in times.items()}})
    return rows


@experiment
def bucket_pools():
    """Capture one graph for each of eight lengths of a causal transformer: bytes kept, by pools and order of capture.

    A row for each capture, by `how`: the `graphs` so far and the pool_bytes of all of them.
    """
    import torch

    from labkit import graphs, models

    model, x = models.build("causal", layers=12, tokens=1024)
    sizes, rows = (16, 32, 64, 128, 256, 512, 768, 1024), []
    for how, order, shared in (("one pool, largest first", sizes[::-1], True), ("one pool, smallest first", sizes, True),
                               ("a pool for each", sizes[::-1], False)):
        made = []
        for size in order:
            pool = made[0].pool if made and shared else None
            made.append(graphs.GraphedCallable(model, x[:, :size].contiguous(), pool=pool))
            total = sum(map(contents.pool_bytes, {graph.pool for graph in made}))
            rows.append({"how": how, "size": size, "graphs": len(made), "pool_bytes": total})
        del made
        torch.cuda.empty_cache()
    return rows


@experiment
def branch_cost():
    """Time a step that takes one of two networks, by a number on the GPU: eager, both with torch.where, a graph each.

    A row for each way: Measurement.row() and its `speedup` over the first.
    """
    import torch

    from labkit import graphs, models

    (one, x), (other, _) = (models.build("mlp", layers=12) for _ in range(2))
    flag = torch.ones((), device="cuda")
    known = {True: graphs.GraphedCallable(one, x), False: graphs.GraphedCallable(other, x)}
    both = graphs.GraphedCallable(lambda t: torch.where(flag > 0, one(t), other(t)), x)
    return _walls_of({"eager, if on the GPU's number": lambda: one(x) if flag > 0 else other(x),
                      "one graph, torch.where on both": lambda: both(x),
                      "a graph each, the CPU reads the number": lambda: known[bool(flag > 0)](x),
                      "a graph each, the CPU knows": lambda: known[True](x)})


@experiment
def sync_cost():
    """Time 24 layers whose middle is scaled by its own largest value, read by the CPU, or kept on the GPU.

    A row for each way: Measurement.row() and its `speedup` over the first.
    """
    from labkit import graphs, models

    (first, x), (second, _) = (models.build("mlp", layers=12) for _ in range(2))

    def read(t):
        middle = first(t)
        return second(middle / middle.abs().max().item())

    def kept(t):
        middle = first(t)
        return second(middle / middle.abs().max())

    split = graphs.SplitCallable([first, lambda t: t / t.abs().max().item(), second], x, eager=(1,))
    whole = graphs.GraphedCallable(kept, x)
    return _walls_of({"eager, the CPU reads it": lambda: read(x), "eager, it stays on the GPU": lambda: kept(x),
                      "graph, eager, graph": lambda: split(x), "one graph, it stays on the GPU": lambda: whole(x)})


def _walls_of(calls):
    """Time calls in common rounds; one row each with its wall time and the speedup over the first."""
    import torch

    from labkit import timing

    with torch.inference_mode():
        both = timing.compare(calls, budget_s=4, target=0)
    return both.rows(next(iter(calls)))


@experiment
def kept_memory():
    """Follow the GPU memory that stays reserved when graphs are made, share a pool, and are thrown away.

    A row for each event, `what`: reserved_bytes beyond those at the beginning.
    """
    import torch

    from labkit import graphs, models

    model, x = models.build("transformer", layers=12, batch=8)
    rows, pool = [], torch.cuda.graph_pool_handle()

    def tell(what):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        rows.append({"what": what, "reserved_bytes": torch.cuda.memory_reserved() - start})

    with torch.inference_mode():
        model(x)
    torch.cuda.empty_cache()
    start = torch.cuda.memory_reserved()
    with torch.inference_mode():
        model(x)
    tell("after an eager step")
    kept = [graphs.GraphedCallable(model, x, pool=pool)]
    tell("with one graph")
    kept.append(graphs.GraphedCallable(model, x, pool=pool))
    tell("and a second one in the same pool")
    kept.append(graphs.GraphedCallable(model, x[:4]))
    tell("and a third one, batch 4, in a pool of its own")
    kept.clear()
    tell("when all three are thrown away")
    return rows


@experiment
def operation_table():
    """Try to capture each operation of operations.csv, each in a fresh process, and a way round each that fails.

    A row for each operation: what operations.capture_trial() says of it, and of the way round.
    """
    from tqdm import tqdm

    tried, threads, stop = operations.listed(), ThreadPoolExecutor(4), threading.Event()
    try:
        rows = threads.map(lambda one: _operation(one, stop), tried)
        return list(tqdm(rows, total=len(tried), desc="capturing", leave=False))
    finally:
        stop.set()
        threads.shutdown(cancel_futures=True)
        isolate.keep_one()


def _operation(one, stop=None):
    """Return the row of one operation; once `stop` is set, nothing more is tried."""
    before, code, instead = one["before"], one["code"], one["instead"]
    found = _attempt(before, code)
    row = {"group": one["group"], "operation": one["operation"], "code": "; ".join(filter(None, (before, code))), **found}
    row.pop("same", None)
    right = found["captured"] and found["difference"] < 1e-3
    row["result"] = ("captured" if right else "captured, but wrong" if found["captured"] else
                     "fails" if "repaired" in found else "no answer")
    if found.get("difference") == float("inf"):  # which a recording cannot hold
        row["difference"] = None
    if not right and not (stop and stop.is_set()):
        asked = {"options": instead} if instead.startswith("generators=") else {"split": not instead}
        way = _attempt(before, code if "options" in asked or not instead else instead, like=code, **asked)
        row |= {"instead": instead or "split: a graph in front, the operation by hand", "instead_captured": way["captured"],
                "instead_difference": way.get("difference"), "same": "yes" if way.get("same") else "no"}
    return row


def _attempt(before, code, **asked):
    """Try one operation in a child; a child that did not come back is told as what became of it."""
    result = isolate.run("import json\nfrom labkit import operations\n"
                         f"json.dumps(operations.capture_trial({before!r}, {code!r}, **{asked!r}))")
    if result.error:
        said = result.error.strip().splitlines()
        return {"captured": False, "cold": False, "kind": result.how_it_ended, "cause": said[-1], "way_round": ""}
    return answer_of(result)
