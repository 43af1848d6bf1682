"""The claims of the article, in our words, each judged by a rule with stated bounds on what was measured.

A rule is a pure function of tables. It returns (verdict, number, low, high, unit, why); no verdict is typed in.
"""

from dataclasses import dataclass
from typing import Callable

HOLDS, LIMITS, FAILS = "holds", "holds with limits", "does not hold here"
OUTDATED, UNKNOWN = "outdated", "not measured"


@dataclass(frozen=True)
class Claim:
    """One claim: what it says, the lab and experiments that test it, the bounds, and what it means for a user."""
    id: str
    statement: str
    lab: str
    experiments: tuple
    bounds: str
    meaning: str
    rule: Callable


@dataclass(frozen=True)
class Verdict:
    """What tables say about a claim: one of five verdicts, the number it rests on with its range, and why."""
    claim: Claim
    verdict: str
    number: float | None
    low: float | None
    high: float | None
    unit: str
    why: str
    provenance: dict

    def __str__(self):
        said = f"Claim: {self.claim.statement}\nVerdict: {self.verdict.upper()}. {self.why}"
        said += f"\nThe rule: {self.claim.bounds}"
        return f"{said}\nFor you: {self.claim.meaning}\n({self.provenance['label']})" if self.provenance else said


def judge(id, *tables):
    """Judge the claim `id` on the tables of its experiments, in their order; "not measured" when one is missing."""
    if id not in CLAIMS:
        raise ValueError(f"there is no claim {id!r}; there are: {', '.join(CLAIMS)}")
    claim = CLAIMS[id]
    if len(tables) < len(claim.experiments) or any(table is None or table.empty for table in tables):
        why = f"It is judged on: {', '.join(claim.experiments)}."
        return Verdict(claim, UNKNOWN, None, None, None, "", why, {})
    try:
        found = claim.rule(*tables)
    except KeyError as missing:
        raise ValueError(f"claim {id!r} is judged on {', '.join(claim.experiments)}; "
                         f"the table given has no {missing}") from None
    return Verdict(claim, *found, tables[0].attrs["provenance"])


def _launch_cost(table, low=5, high=10):
    kernels = table[table["kernels"] == 1]
    driver = kernels[kernels["layer"] == "driver"]["cost_us"].max()
    torch = kernels[kernels["layer"] == "torch"]["cost_us"].median()
    inside = [low <= cost <= high for cost in (driver, torch)]
    why = f"The driver's launch call takes {driver:.1f} µs, PyTorch's whole cost of one kernel is {torch:.1f} µs."
    return HOLDS if all(inside) else LIMITS if any(inside) else FAILS, driver, driver, torch, "µs", why


def _eager_kernels(table):
    return table[(table["how"] == "eager") & ~table["name"].str.startswith(("Memcpy", "Memset"))]


def _hundreds(table, low=100, high=1000):
    count = len(_eager_kernels(table))
    return (HOLDS if low <= count < high else LIMITS if count >= high else FAILS, count, count, count, "kernels",
            f"One eager step launches {count:,} kernels.")


def _micro(table, short=10):
    times = _eager_kernels(table)["gpu_us"]
    share = (times < short).mean()
    return (HOLDS if share >= 0.9 else LIMITS if share >= 0.5 else FAILS, times.median(), times.quantile(0.05),
            times.quantile(0.95), "µs", f"{(times < short).sum()} of {len(times)} kernels take less than {short} µs; "
            f"half of them less than {times.median():.1f} µs.")


def _share(table, low=0.2, high=0.4):
    idle = table[table["batch"] <= 4]["idle_share"]
    inside = idle.between(low, high).mean()
    why = (f"At batch 1 to 4 the GPU is idle {idle.min():.0%} to {idle.max():.0%} of the time "
           f"(median {idle.median():.0%}); {inside:.0%} of the {len(idle)} models tried lie between "
           f"{low:.0%} and {high:.0%}.")
    verdict = HOLDS if inside >= 0.5 else LIMITS if inside >= 0.2 else FAILS
    return verdict, idle.median(), idle.min(), idle.max(), "share", why


def _arithmetic(table, close=1.5, order=3):
    ratio = table[table["batch"] <= 4]
    ratio = ratio["predicted_saving_us"] / ratio["saving_us"]
    within = [((ratio > 1 / factor) & (ratio < factor)).all() for factor in (close, order)]
    return (HOLDS if within[0] else LIMITS if within[1] else FAILS, ratio.median(), ratio.min(), ratio.max(), "times",
            f"Kernels times launch cost is {ratio.min():.2f} to {ratio.max():.2f} times the measured saving.")


def _replay_cost(table, most=15, hundreds=300):
    table = table.sort_values("nodes")
    over = table[table["enqueue_us"] > most]["nodes"]
    reach = table[table["nodes"] < over.min()]["nodes"].max() if len(over) else table["nodes"].max()
    near = table.loc[(table["nodes"] - hundreds).abs().idxmin()]
    least, top = table["enqueue_us"].min(), table["enqueue_us"].max()
    why = (f"A replay of {near.nodes:,.0f} nodes costs {near.enqueue_us:.1f} µs of CPU; over "
           f"{table.nodes.min():,} to {table.nodes.max():,} nodes it is {least:.1f} to {top:.1f} µs.")
    return HOLDS if not len(over) else LIMITS if reach >= hundreds else FAILS, near.enqueue_us, least, top, "µs", why


def _same_ops(table):
    good, kernels = table["result"].astype(bool), table["check"].str.contains("kernel")
    if not kernels.any():
        raise KeyError("row that compares kernels")
    said = "; ".join(f"{check}: {'yes' if ok else 'no'}" for check, ok in zip(table["check"], good, strict=True))
    verdict, count = HOLDS if good.all() else LIMITS if good[kernels].all() else FAILS, int(good.sum())
    return verdict, count, count, len(good), "checks", f"{said[0].upper()}{said[1:]}."


def _saving(table, low=1000, high=3000):
    saved = table[table["batch"] <= 4]["saving_us"]
    inside = saved.between(low, high)
    verdict = HOLDS if inside.all() else LIMITS if inside.any() else FAILS
    return (verdict, saved.median(), saved.min(), saved.max(), "µs",
            f"At batch 1 to 4 a graph saves {saved.min() / 1e3:.2f} to {saved.max() / 1e3:.2f} ms a step; "
            f"{inside.sum()} of {len(saved)} models lie between {low / 1e3:g} and {high / 1e3:g} ms.")


def _warm_up(table):
    worked = table[table["captured"].astype(bool)].groupby("what")["warm_ups"].min()
    needed = worked[worked > 0]
    most = int(needed.max()) if len(needed) else 0
    why = (f"Captured cold: {len(worked) - len(needed)} of {table['what'].nunique()} operations. " + (
        f"Warm-up is needed for: {', '.join(needed.index)}; the most that any needed is {most}." if most else
        "None of them needed a warm-up."))
    return HOLDS if most >= 3 else LIMITS if most else FAILS, most, 0, most, "warm-up calls", why


def _static(table):
    wrong = ~table["raised"].astype(bool) & (table["expected"] != table["got"])
    unused, rebound, kept = (bool(wrong[table["trap"].str.contains(key)].any())
                             for key in ("preallocated", "new tensor", "keep"))
    why = (f"A new tensor under the old name is {'ignored without a word' if rebound else 'used'}; an output kept "
           f"without clone is {'overwritten by the next replay' if kept else 'kept'}; an output made beforehand is "
           f"{'never written' if unused else 'written'}.")
    verdict, count = FAILS if not (rebound and kept) else LIMITS if unused else HOLDS, int(wrong.sum())
    return verdict, count, count, len(table), "traps", why


def _no_grad(table, same=1.05, much=3):
    pools = table.set_index("how")["pool_bytes"]
    ratio = pools["grad on"] / pools["no_grad"]
    return (HOLDS if ratio <= same else LIMITS if ratio <= much else FAILS, ratio, ratio, ratio, "times",
            f"Captured with autograd on, the pool keeps {pools['grad on'] / 2**20:.0f} MiB instead of "
            f"{pools['no_grad'] / 2**20:.0f} MiB, {ratio:.2f} times as much.")


def _free(table, calls=10):
    paid = table["break_even_calls"]
    never = (table["saving_us"] <= 0).sum()
    verdict = FAILS if never else HOLDS if paid.max() <= calls else LIMITS
    why = (f"{never} of {len(table)} models gain nothing." if never else
           f"A capture pays itself back after {paid.min():,.0f} to {paid.max():,.0f} calls, and keeps "
           f"{table['pool_bytes'].min() / 2**20:.0f} to {table['pool_bytes'].max() / 2**20:.0f} MiB of GPU memory.")
    return verdict, paid.median(), paid.min(), paid.max(), "calls", why


_LAUNCH, _CAPTURE = "10_measure_launch_overhead", "20_capture_and_replay"
CLAIMS = {claim.id: claim for claim in (
    Claim("launch-cost", "Launching one kernel costs the CPU 5 to 10 µs.", _LAUNCH, ("launch_cost",),
          "holds when the driver's call and PyTorch's whole cost both lie in 5 to 10 µs, with limits when one does.",
          "Count what PyTorch does around a launch too: it is part of the price.", _launch_cost),
    Claim("hundreds", "One forward pass of a language model launches hundreds of kernels.", _LAUNCH, ("step_trace",),
          "holds at 100 to 999 kernels a step, with limits at 1,000 or more, not below 100.",
          "Count the kernels of your own model: their number decides how much there is to save.", _hundreds),
    Claim("micro", "At batch 1 each kernel takes only microseconds.", _LAUNCH, ("step_trace",),
          "holds when 90 % of the kernels take less than 10 µs, with limits when half of them do.",
          "Where kernels are this short, the CPU sets the pace.", _micro),
    Claim("share", "Launch overhead takes 20 to 40 % of inference time at small batch.", _LAUNCH, ("idle_sweep",),
          "holds when half of the models at batch 1 to 4 leave the GPU idle 20 to 40 % of the time, with limits when "
          "a fifth do.",
          "Measure your own step: the share depends on the model, the batch and both processors.", _share),
    Claim("arithmetic", "Kernels times launch cost tells what launching costs a step.", _LAUNCH, ("step_saving",),
          "holds when the product is within 1.5 times of the measured saving for all models at batch 1 to 4, with "
          "limits within 3 times.",
          "A count and one launch cost are enough for a first estimate.", _arithmetic),
    Claim("replay-cost", "One replay costs about 10 µs of CPU time, whatever the graph holds.", _CAPTURE,
          ("replay_cost",),
          "holds when no graph costs more than 15 µs to enqueue, with limits when those up to 300 nodes do not.",
          "A graph's launch is nearly the price of one kernel's.", _replay_cost),
    Claim("same-ops", "The GPU does the same operations, replayed or not.", _CAPTURE, ("same_operations",),
          "holds when kernels and results are the same, with limits when only the kernels are.",
          "A graph changes who launches the work, not the work.", _same_ops),
    Claim("saving", "A graph saves 1 to 3 ms a forward pass at small batch.", _CAPTURE, ("step_saving",),
          "holds when every model at batch 1 to 4 saves 1 to 3 ms, with limits when at least one does.",
          "The saving grows with the number of kernels: expect yours from your own count.", _saving),
    Claim("warm-up", "Warm up three times before the capture.", _CAPTURE, ("warm_up_cold",),
          "holds when an operation captures only after three warm-up calls, with limits when fewer are enough, not "
          "when none is needed.",
          "Always warm up, on a side stream; three is a habit, not a law.", _warm_up),
    Claim("static-in-out", "Make input and output beforehand, copy new data in, clone results out.", _CAPTURE,
          ("static_traps",),
          "holds when leaving out any of it goes wrong silently, with limits when only making the output beforehand "
          "is of no use.",
          "Copy in and clone out always; the capture makes the output by itself.", _static),
    Claim("no-grad", "The capture itself needs no no_grad around it.", _CAPTURE, ("grad_pools",),
          "holds when the pool with autograd on is at most 1.05 times the one without, with limits up to 3 times.",
          "Capture under no_grad: the pool then keeps nothing for a backward pass that never comes.", _no_grad),
    Claim("free", "CUDA graphs are a free gain.", _CAPTURE, ("capture_cost",),
          "holds when every capture pays itself back within 10 calls, with limits when later, not when a model gains "
          "nothing.",
          "Capture what you will replay often; each graph costs start-up time and keeps memory.", _free),
)}
