"""The claims of the article, in our words, each judged by a rule with stated bounds on what was measured.

A rule is a pure function of a table and returns (does it hold, does it with limits, the number it rests on as
(number, low, high), its unit, why); no verdict is typed in.
"""

import statistics
import textwrap
from collections import namedtuple
from dataclasses import dataclass
from functools import partial

from labkit import vllm_claims

HOLDS, LIMITS, FAILS = "holds", "holds with limits", "does not hold here"
OUTDATED, UNKNOWN = "outdated", "not measured"
VERDICTS = (HOLDS, LIMITS, FAILS, OUTDATED, UNKNOWN)

# What it says, the lab that tests it, the experiments it is judged on, the bounds in words, what it means for a user, the rule, and
# the verdict where it does not hold.
Claim = namedtuple("Claim", "id statement lab experiments bounds meaning rule otherwise", defaults=[FAILS])
SWEEPS = ("sweep_mlp", "sweep_transformer", "sweep_gpt2", "sweep_llama")


@dataclass(frozen=True)
class Verdict:
    """What a table says about a claim: one of five verdicts, the number it rests on with its range, and why."""
    claim: Claim
    verdict: str
    number: float | None
    low: float | None
    high: float | None
    unit: str
    why: str
    provenance: dict

    def __str__(self):
        said = [f"Claim: {self.claim.statement}", f"Verdict: {self.verdict.upper()}. {self.why}",
                f"The rule: {self.claim.bounds}", f"For you: {self.claim.meaning}", f"({self.provenance['label']})"]
        return "\n".join(textwrap.fill(line, 92, subsequent_indent="  ") for line in said)


def judge(id, *tables):
    """Judge the claim `id` on those of its experiments' tables that there are -> Verdict; "not measured" without any.

    Beside tables that were measured here, recorded ones do not count. Where the verdict is another one with all numbers at the
    low, or all at the high ends of their intervals, it says so. Raises ValueError for a claim that there is not, and for tables
    without what its rule looks at.
    """
    if not isinstance(id, str) or id not in CLAIMS:
        raise ValueError(f"there is no claim {id!r}; there are: {', '.join(CLAIMS)}")
    claim, tables = CLAIMS[id], [table for table in tables if table is not None and not table.empty]
    if not tables:
        return Verdict(claim, UNKNOWN, None, None, None, "", f"It needs {' or '.join(claim.experiments)}.", {"label": UNKNOWN})
    table, told = _together(tables)
    try:
        verdict, numbers, unit, why = _ruled(claim, table)
        ends = {_ruled(claim, _at_the_end(table, end))[0] for end in ("low", "high")} - {verdict}
    except KeyError as missing:
        raise ValueError(f"claim {id!r} is judged on {', '.join(claim.experiments)}; the table given has no {missing}") from None
    if ends:
        why += f" Close to a bound: at an end of the intervals the verdict is: {', '.join(sorted(ends))}."
    return Verdict(claim, verdict, *numbers, unit, why, told)


def _together(tables):
    """Return tables as one, only those measured here if there are any, and where it comes from."""
    tables = [table for table in tables if table.attrs["provenance"]["live"]] or tables
    told = tables[0].attrs["provenance"]
    if len(tables) == 1:
        return tables[0], told
    import pandas

    labels = dict.fromkeys(table.attrs["provenance"]["label"] for table in tables)
    return pandas.concat(tables, ignore_index=True), told | {"label": "; ".join(labels)}


def _ruled(claim, table):
    holds, limits, *said = claim.rule(table)
    return HOLDS if holds else LIMITS if limits else claim.otherwise, *said


def _at_the_end(table, end):
    """Return a table with each number that has an interval at one end of it, "low" or "high"."""
    return table.assign(**{name: table[f"{name}_{end}"] for name in table if f"{name}_{end}" in table})


def _small(table, most=4):
    """Return the rows of small batches, and which these are, in words."""
    rows = table[table["batch"] <= most]
    if rows.empty:
        raise KeyError(f"row at batch {most} or less")
    return rows, f"batch {', '.join(map(str, sorted(set(rows['batch']))))}"


def _launch_cost(table, low=5, high=10):
    costs = table[table["kernels"] == 1].groupby("layer")["cost_us"]
    (driver, torch), least, most = costs.median(), costs.min(), costs.max()
    inside = [low <= cost <= high for cost in (driver, torch)]
    return (all(inside), any(inside), (driver, least["driver"], most["driver"]), "µs",
            f"The driver's launch call takes {least['driver']:.1f} to {most['driver']:.1f} µs, by the way one looks at it "
            f"({driver:.1f} is judged); PyTorch's whole cost of one kernel is {least['torch']:.1f} to {most['torch']:.1f} µs, "
            f"by the operation ({torch:.1f} is judged).")


def _eager_steps(table):
    """List the kernel times (µs) of each eager step at batch 1: of a trace, and of each curve of sweeps."""
    steps = []
    if "how" in table:
        kernels = (table["how"] == "eager") & ~table["name"].astype(str).str.startswith(("Memcpy", "Memset"))
        steps += [list(table["gpu_us"][kernels])]
    if "eager_kernel" in table:
        curves = table[table["batch"] == 1].dropna(subset="eager_kernel")
        steps += [[us for us, kernel in zip(*lists, strict=True) if kernel] for lists in zip(curves["eager_gpu_us"], curves["eager_kernel"])]
    if not any(steps):
        raise KeyError("eager step at batch 1")
    return [step for step in steps if step]


def _hundreds(table, low=100, high=1000):
    counts = [len(step) for step in _eager_steps(table)]
    least, most, inside = min(counts), max(counts), sum(low <= count < high for count in counts)
    return (inside == len(counts), least >= low, (statistics.median(counts), least, most), "kernels",
            f"One eager step launches {least:,} kernels." if len(counts) == 1 else
            f"One eager step launches {least:,} to {most:,} kernels; {inside} of {len(counts)} steps launch {low} to {high - 1}.")


def _micro(table, short=10):
    steps = _eager_steps(table)
    times = sorted(us for step in steps for us in step)
    quick, least = sum(us < short for us in times), min(sum(us < short for us in step) / len(step) for step in steps)
    return (quick >= 0.9 * len(times), quick >= 0.5 * len(times),
            (statistics.median(times), times[len(times) // 20], times[-1 - len(times) // 20]), "µs",
            f"{quick:,} of {len(times):,} kernels take less than {short} µs, half less than {statistics.median(times):.1f} µs."
            + f" Of {len(steps)} steps, each has {least:.0%} or more that are so short." * (len(steps) > 1))


def _share(table, low=0.2, high=0.4):
    small, batch = _small(table)
    idle = small["idle_share"]
    inside = idle.between(low, high).mean()
    return (inside >= 0.5, inside >= 0.2, idle.quantile([0.5, 0, 1]), "share",
            f"At {batch} the GPU is idle {idle.min():.0%} to {idle.max():.0%} of the time (median "
            f"{idle.median():.0%}); {inside:.0%} of the {len(idle)} models lie between {low:.0%} and {high:.0%}.")


def _arithmetic(table, close=1.5, order=3):
    small, batch = _small(table)
    ratio = small["predicted_saving_us"] / small["saving_us"]
    holds, limits = (((ratio > 1 / factor) & (ratio < factor)).all() for factor in (close, order))
    return (holds, limits, ratio.quantile([0.5, 0, 1]), "times",
            f"At {batch}, kernels times launch cost is {ratio.min():.2f} to {ratio.max():.2f} times the measured saving.")


def _replay_cost(table, most=15, example=300, hundreds=1000):
    cost = table.set_index("nodes")["enqueue_us"].sort_index()
    near = min(cost.index, key=lambda nodes: abs(nodes - example))
    return (cost.loc[:hundreds].max() <= most, cost.loc[:example].max() <= most, (cost[near], cost.min(), cost.max()), "µs",
            f"A replay of {near:,} nodes costs {cost[near]:.1f} µs of CPU, none of up to {hundreds:,} more than "
            f"{cost.loc[:hundreds].max():.1f} µs; over {cost.index[0]:,} to {cost.index[-1]:,} nodes it is {cost.min():.1f} to {cost.max():.1f} µs.")


def _same_ops(table):
    copies = table["check"].str.contains("copies")  # what a graph adds is no sameness
    checks, more = table[~copies], table[copies]["result"].astype(bool).any()
    good, kernels = checks["result"].astype(bool), checks["check"].str.contains("kernel")
    said = "; ".join(f"{check}: {'yes' if ok else 'no'}" for check, ok in zip(checks["check"], good, strict=True))
    return (good.all(), good[kernels].all(), (good.sum(),) * 3, f"of {len(good)} checks agree",
            f"The same? {said}.{' Around them, the graph copies input and output.' if more else ''}")


def _saving(table, low=1000, high=3000):
    small, batch = _small(table)
    saved = small["saving_us"]
    inside = saved.between(low, high)
    return (inside.all(), inside.any(), saved.quantile([0.5, 0, 1]), "µs",
            f"At {batch} a graph saves {saved.min() / 1e3:.2f} to {saved.max() / 1e3:.2f} ms a step; "
            f"{inside.sum()} of {len(saved)} models lie between {low / 1e3:g} and {high / 1e3:g} ms.")


def _warm_up(table):
    first = table[table["captured"].astype(bool)].groupby("what")["warm_ups"].min()
    most, needed = max(first, default=0), ", ".join(first.index[first > 0]) or "none of them"
    return (most >= 3, most > 0, (most,) * 3, "warm-up calls at most",
            f"Captured cold: {(first == 0).sum()} of {table['what'].nunique()} operations. Warm-up is needed for: "
            f"{needed}; the most that any needed is {most}.")


def _static(table):
    wrong = ~table["raised"].astype(bool) & (table["expected"] != table["got"])
    unused, rebound, kept = (wrong[table["trap"].str.contains(key)].any()
                             for key in ("make the output", "new tensor", "keep the output"))
    return (rebound and kept and not unused, rebound and kept, (int(rebound) + int(kept) + int(unused),) * 3, "of 3 traps say nothing",
            f"A new tensor under the old name is {'ignored without a word' if rebound else 'used'}; an output kept "
            f"without clone is {'overwritten by the next replay' if kept else 'kept'}; an output made beforehand is "
            f"{'never written' if unused else 'written'}.")


def _no_grad(table, same=1.05):
    pools, walls = (table.set_index("how")[column] for column in ("pool_bytes", "wall_us"))
    ratio, slower = pools["grad on"] / pools["no_grad"], walls["grad on"] / walls["no_grad"]
    return (max(ratio, slower) <= same, slower <= same, (ratio, ratio, ratio), "times",
            f"Captured with autograd on, the pool keeps {pools['grad on'] / 2**20:.0f} MiB instead of "
            f"{pools['no_grad'] / 2**20:.0f} MiB, {ratio:.2f} times as much.")


def _free(table, calls=10):
    gained, memory = table[table["saving_us"] > 0], table["pool_bytes"].max() / 2**20
    if never := len(table) - len(gained):
        return False, False, (never,) * 3, f"of {len(table)} models gain nothing", f"{never} of {len(table)} models gain nothing."
    paid = gained["capture_s"] * 1e6 / gained["saving_us"]
    return (paid.max() <= calls, True, paid.quantile([0.5, 0, 1]), "calls",
            f"A capture pays itself back after {paid.min():,.0f} to {paid.max():,.0f} calls, and keeps up to {memory:.0f} MiB in its pool.")


def _fixed_shapes(table):
    found = table[table["trap"].str.contains("wrong shape")]
    if found.empty:
        raise KeyError("row of the wrong shape")
    trap = found.iloc[0]
    silent = not trap["raised"] and trap["expected"] != trap["got"]
    return (bool(trap["raised"]) or silent, False, (int(silent),) * 3, "of 1 wrong shape taken without a word",
            "An input of another shape is refused." if trap["raised"] else
            f"An input of another shape {'is repeated to fit, without a word' if silent else 'gives the right result'}.")


def _fails(table, *names, group=None):
    """Return how many of these operations, or of a group, cannot be captured warm, and how many there are."""
    chosen = table[table["operation"].isin(names) | (table["group"] == group)]
    if chosen.empty:
        raise KeyError(f"rows of {', '.join(names) or group}")
    return int((chosen["captured"] != True).sum()), len(chosen)  # noqa: E712  what is no True is a failure


def _control_flow(table):
    python, _ = _fails(table, "if on a shape")
    gpu, of = _fails(table, "if on a GPU value", "while on a GPU value", "for over a GPU number")
    return (python and gpu == of, gpu > 0, (gpu,) * 3, f"of {of} kinds of branch on a GPU value fail",
            f"An if on a Python value {'fails' if python else 'is baked in without a word'}; {gpu} of {of} branches on a GPU "
            "value fail.")


def _synchronisation(table):
    fails, of = _fails(table[table["operation"] != "event.record"], group="synchronisation")
    return fails == of, fails > 0, (fails,) * 3, f"of {of} ways to wait fail", f"Of {of} ways to wait for the GPU, {fails} fail."


def _allocation(table):
    fails, of = _fails(table, "allocate 256 MiB", "allocate and free in turns")
    return (fails == of, fails > 0, (fails,) * 3, f"of {of} steps that allocate fail",
            f"Of {of} steps that make new tensors, {of - fails} are captured: the memory comes from the graph's own pool.")


def _operations(table, told=("control flow", "synchronisation")):
    failed = table["captured"] != True  # noqa: E712
    fails, of, others = int(failed.sum()), len(table), int((failed & ~table["group"].isin(told)).sum())
    return (others > 0, fails > 0, (fails,) * 3, f"of {of} operations in our list fail",
            f"Of the {of} operations in our own list, {fails} cannot be captured, even after a warm-up; {others} of them are of "
            f"other kinds than {' and '.join(told)}. We put many in because they may fail, so their share says nothing.")


def _when(table, small=4, late=32):
    curve, table = ["model", "layers", "width", "length", "precision"], table[table["skipped"] == ""]
    table = table.assign(gain=table["speedup"] - 1, weights=table["layers"] * table["width"] ** 2)
    early = table[table["batch"] <= small].groupby([*curve, "weights"])["gain"].median().rename("gain").reset_index("weights")
    both = (table[table["batch"] == late].set_index(curve)["gain"] / early["gain"]).dropna()
    if both.empty:
        raise KeyError(f"model that was measured at batch {small} or less and at batch {late}")
    kept = both[early["gain"].reindex(both.index) > 0.1]
    if kept.empty:
        return (False, False, early["gain"].quantile([0.5, 0, 1]), "gained at batch 1 to 4",
                f"None of {len(both)} curves gains more than a tenth at batch 1 to {small}.")
    deeper = early.groupby(["model", "length", "precision", "weights"])["gain"].diff().dropna() > 0
    half, most = (kept <= 0.5).mean(), (kept <= 0.9).mean()
    return (half >= 0.9 and len(deeper) > 0 and deeper.all(), most >= 0.5, kept.quantile([0.5, 0, 1]), "of the gain at batch 1 to 4",
            f"Of {', '.join(kept.index.unique('model'))}: at batch {late}, {(kept <= 0.5).sum()} of {len(kept)} curves keep at most half of "
            f"the gain that they have at batch 1 to {small}, {(kept > 0.9).sum()} more than nine tenths, the median {kept.median():.0%}. Of "
            f"{len(deeper)} pairs with as many weights, the deeper, narrower one gains more at batch 1 to {small} in {deeper.sum()}.")


def _benchmark(table, size, batch, low, high):
    rows = table[(table["size"] == size) & (table["batch"] == batch)].set_index("way")
    ours, once = rows.loc["in rounds"], rows.loc["one loop each"]
    least, r, most = ours[["speedup_low", "speedup", "speedup_high"]]
    side = "lies in that range" if low <= r <= high else "is more than that" if r > high else "is less than that"
    return (low <= r <= high, least <= high and most >= low, (r, least, most), "times as fast",
            f"{ours['model']}, batch {batch}: {r:.2f} times as fast in rounds ({least:.2f} to {most:.2f}), which {side}; "
            f"{once['speedup']:.2f} by one loop each, as the article measures.")


def _benchmark_claim(size, batch, low, high):
    return Claim(f"bench-{size}-{batch}", f"A {size} model at batch {batch} becomes {low:g} to {high:g} times as fast.", "50",
                 ("article_benchmark",), "holds when the speedup lies in that range, with limits when only its interval reaches into it.",
                 "Take no speedup from an article: it depends on how fast your CPU sends and how long your kernels are.",
                 partial(_benchmark, size=size, batch=batch, low=low, high=high))


CLAIMS = {claim.id: claim for claim in (
    Claim("launch-cost", "Launching one kernel costs the CPU 5 to 10 µs.", "10", ("launch_cost",),
          "holds when the driver's call and PyTorch's whole cost, the middle of each, both lie in 5 to 10 µs, with limits when one does.",
          "Count what PyTorch does around a launch too: it is part of the price.", _launch_cost),
    Claim("hundreds", "One forward pass of a language model launches hundreds of kernels.", "10", ("step_trace", *SWEEPS[2:]),
          "holds when each step at batch 1 launches 100 to 999 kernels, with limits when some launch more, not when one launches fewer. "
          "Lab 10 asks its transformer alone, lab 70 the language models of lab 40, too.",
          "Count the kernels of your own model: their number decides how much there is to save. Large ones launch more.", _hundreds),
    Claim("micro", "At batch 1 each kernel takes only microseconds.", "10", ("step_trace", *SWEEPS),
          "holds when 90 % of the kernels of all steps, taken together, take less than 10 µs, with limits when half of them do. Lab 10 "
          "asks its transformer alone, lab 70 the networks of lab 40, too.",
          "Where kernels are this short, the CPU sets the pace. Wider models have longer ones, which take more of the time.",
          _micro),
    Claim("share", "Launch overhead takes 20 to 40 % of inference time at small batch.", "10", ("idle_sweep",),
          "holds when half of the transformers at batch 1 to 4 idle 20 to 40 % of the time, with limits when a fifth do. All that the "
          "GPU waits for counts as launching: Python and PyTorch too, and not the driver's calls alone.",
          "Say what you count: the driver's calls alone are a smaller share of the same step.", _share),
    Claim("arithmetic", "Kernels times launch cost tells what launching costs a step.", "10", ("step_saving",),
          "holds when it is within 1.5 times of the saving of all networks of lab 10 at batch 1 to 4, with limits within 3. The launch cost is what "
          "the simplest operation of PyTorch costs.",
          "A count and one launch cost give the order of magnitude where the CPU sets the pace, and far too much elsewhere.", _arithmetic),
    Claim("replay-cost", "One replay costs about 10 µs of CPU time.", "20", ("replay_cost",),
          "holds when no bare replay of up to 1,000 nodes costs more than 15 µs to enqueue, with limits when none of up to 300 does. Less "
          "than 10 µs is no objection, and larger graphs, of which the article does not speak, are none.",
          "Up to a few hundred nodes, launching a graph costs about as much as one kernel; checks and copies come on top.",
          _replay_cost),
    Claim("same-ops", "The GPU does the same operations, replayed or not.", "20", ("same_operations",),
          "holds when, of one transformer, kernels, by their short names and in order, and results are the same, with limits when only the kernels are.",
          "A graph changes who launches the work, not the work.", _same_ops),
    Claim("saving", "A graph saves 1 to 3 ms a forward pass at small batch.", "20", ("step_saving",),
          "holds when every network of lab 10 at batch 1 to 4 saves 1 to 3 ms, with limits when at least one does.",
          "The saving grows with the number of kernels: expect yours from your own count.", _saving),
    Claim("warm-up", "Warm up three times before the capture.", "20", ("warm_up_cold",),
          "holds when an operation needs more than one warm-up call, of the one and the three that were tried, with limits when one "
          "is enough, not when none is needed.",
          "Always warm up; three is a habit, not a law. What tunes or compiles itself was not tried, and may need more.", _warm_up),
    Claim("static-in-out", "Make input and output before, copy new data in, clone results out.", "20", ("static_traps",),
          "holds when leaving out any of it goes wrong silently, with limits when an output made before is no use.",
          "Copy in and clone out always; the capture makes the output by itself.", _static),
    Claim("no-grad", "A capture can stand outside of no_grad, as in the article's code.", "20", ("grad_pools",),
          "holds when autograd adds at most 5 % to the pool, with limits when more, not when 5 % to the replay, too.",
          "Capture under no_grad: the pool then keeps nothing for a backward pass that never comes.", _no_grad),
    Claim("free", "CUDA graphs are a free gain.", "20", ("capture_cost",),
          "holds when every capture, its three warm-up calls included, pays back in 10 calls, with limits when later, not when a "
          "model gains nothing. The memory that it keeps is told, and not judged.",
          "Capture what you will replay often; each graph costs start-up time and keeps memory.", _free),
    Claim("limit-1", "Input shapes are fixed: other shapes need padding, or graphs of their own.", "30", ("static_traps",),
          "holds when another shape is refused or comes out wrong, not when it comes out right.",
          "Check shapes before you copy in: the graph does not.", _fixed_shapes),
    Claim("limit-2", "There can be no if, else or loop inside a graph.", "30", ("operation_table",),
          "holds when branches on Python and GPU values fail, with limits when only those on GPU values do, not when none does.",
          "Python's branches are baked in silently; use torch.where, or a graph for each case.", _control_flow),
    Claim("limit-3", "The CPU cannot wait for the GPU inside a graph.", "30", ("operation_table",),
          "holds when every way to wait in our list fails, with limits when some do, not when none does.",
          "Synchronise before or after the replay.", _synchronisation),
    Claim("limit-4", "No memory can be allocated during a capture.", "31", ("operation_table",),
          "holds when no step that allocates can be captured, with limits when some cannot, not when all can.",
          "Let the step allocate; count the memory that its pool keeps.", _allocation),
    Claim("limit-5", "Some operations cannot be captured.", "31", ("operation_table",),
          "holds when an operation of our own list fails that neither branches on a GPU value nor is there to wait for the GPU, with limits "
          "when only such do, not when none does.",
          "Look yours up in the table, or ask labkit.diagnose; each one that fails has a way round.", _operations),
    Claim("when", "Graphs matter most at batch 1 to 4, and in models of many layers.", "40", SWEEPS,
          "holds when at batch 32 nine curves in ten keep at most half of their gain (the speedup less 1) at batch 1 to 4, and of any two "
          "with as many weights the deeper, narrower one gains more, with limits when half of the curves lose a tenth of it. A curve "
          "is a model in one precision; one that gains a tenth or less at batch 1 to 4 does not count. Lab 70 asks all curves "
          "that were swept, lab 40 those it draws.",
          "Short kernels keep the gain, to larger batches too. More layers of one width save more time; that alone is no larger speedup.",
          _when),
    _benchmark_claim("small", 1, 1.3, 1.8), _benchmark_claim("large", 1, 1.1, 1.3), _benchmark_claim("large", 32, 1.02, 1.05),
)}
CLAIMS |= {told[0]: Claim(*told) for told in vllm_claims.CLAIMS}
