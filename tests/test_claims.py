"""Every rule at, above and below its bounds, on made-up tables; and every verdict comes from numbers."""

import pytest
from made_up import LABEL, step, table
from vllm_cases import CASES

from labkit import build, check, claims, experiments, recordings
from labkit.claims import FAILS, HOLDS, LIMITS, UNKNOWN


def launch_cost(driver, torch):
    return table([{"what": "call", "layer": "driver", "kernels": 1, "cost_us": driver},
                  {"what": "x + x", "layer": "torch", "kernels": 1, "cost_us": torch},
                  {"what": "many", "layer": "torch", "kernels": 9, "cost_us": 500.0}])


def kernels(count, work=3.0, long=0):
    made = step(count, work=work)
    made.loc[made["index"] < long, "gpu_us"] = 50.0
    made.loc[len(made)] = made.iloc[0].to_dict() | {"how": "eager", "name": "Memcpy DtoD"}  # a copy is no kernel
    return made


def swept(*counts, us=3.0, batch=1):  # steps of sweeps at batch 1, with so many kernels each, and one copy; and one that was not traced
    rows = [{"model": "m", "batch": batch, "eager_gpu_us": [us] * n + [99.0], "eager_kernel": [1] * n + [0]} for n in counts]
    return table([*rows, {**rows[0], "batch": 512}, {"model": "m", "batch": 1, "eager_gpu_us": None, "eager_kernel": None}])


def idle(*shares):
    return table([{"batch": 4, "idle_share": s} for s in shares] + [{"batch": 64, "idle_share": 0.3}])


def saving(*pairs):
    return table([{"batch": 1, "predicted_saving_us": p, "saving_us": s} for p, s in pairs]
                 + [{"batch": 32, "predicted_saving_us": 1e6, "saving_us": 1.0}])


def replay(**costs):
    return table([{"nodes": int(n[1:]), "enqueue_us": us} for n, us in costs.items()])


def same(kernels, bits, copies=True):
    return table([{"check": "outputs equal, bit for bit", "result": bits, "detail": ""},
                  {"check": "same kernels, same order", "result": kernels, "detail": ""},
                  {"check": "copies around the graph: input in, output out", "result": copies, "detail": ""}])


def warm(**first):  # the number of warm-up calls at which each operation first captures; 9: never
    return table([{"what": op, "warm_ups": n, "captured": n >= need}
                  for op, need in first.items() for n in (0, 1, 3)])


def traps(preallocated, rebound, kept):
    names = ("make the output before the capture", "put a new tensor under the old name", "keep the output, replay again")
    return table([{"trap": n, "expected": 1.0, "got": 0.0 if sprung else 1.0, "raised": False}
                  for n, sprung in zip(names, (preallocated, rebound, kept), strict=True)])


def pools(grad, without, slower=1.0):
    return table([{"how": "grad on", "pool_bytes": grad, "wall_us": 100.0 * slower},
                  {"how": "no_grad", "pool_bytes": without, "wall_us": 100.0}])


def capture(calls, saving=100.0):
    return table([{"capture_s": c * 100e-6, "saving_us": saving, "pool_bytes": 2**21} for c in calls])


def wrong_shape(got, raised):
    return table([{"trap": "copy an input of the wrong shape in", "expected": "an error", "got": got, "raised": raised}])


BRANCHES = ("if_on_a_GPU_value", "while_on_a_GPU_value", "for_over_a_GPU_number")


def operations(**captured):  # by name, with _ for a blank; what is not named is as on a real GPU
    real = {"if_on_a_shape": True, "if_on_a_GPU_value": False, "while_on_a_GPU_value": False, "for_over_a_GPU_number": False, "item": False, "print": False,
            "event.record": True, "allocate_256_MiB": True, "allocate_and_free_in_turns": True}
    groups = dict.fromkeys(("item", "print", "event.record"), "synchronisation") | dict.fromkeys(
        ("if_on_a_shape", *BRANCHES), "control flow")
    return table([{"group": groups.get(name, "other"), "operation": name.replace("_", " "), "captured": ok}
                  for name, ok in (real | captured).items()])


def sweep(*kept, deeper=5.0, width=32, late=32, flat=0.09):
    """A speedup of 5 at batch 1 to 4, of the deeper model of each pair one more than `deeper`; what share each keeps at batch 32.

    One more gains `flat` at each batch.
    """
    curve = {"length": 1, "precision": "float16"}
    rows = [{**curve, "model": f"{i}", "layers": layers, "width": wide, "batch": batch, "skipped": "", "speedup": 1 + gain}
            for i, part in enumerate(kept) for layers, wide, most in ((6, 64, 4.0), (24, width, deeper))
            for batch, gain in ((1, most), (4, most), (late, most * part), (512, 0.0))]
    flat = {**rows[0], "model": "gains little", "speedup": 1 + flat}
    return table([*rows, flat, {**flat, "batch": 32}, {**flat, "batch": 64, "skipped": "out of memory", "speedup": None}])


def benchmark(speedup, by=0.1, **of):
    row = {"size": "small", "model": "M", "batch": 1} | of
    return table([{**row, "way": "one loop each", "speedup": 9.0, "speedup_low": 9.0, "speedup_high": 9.0},
                  {**row, "way": "in rounds", "speedup": speedup, "speedup_low": speedup - by, "speedup_high": speedup + by}])


@pytest.mark.parametrize("id, made, verdict", [
    ("bench-small-1", benchmark(1.8), HOLDS), ("bench-small-1", benchmark(1.89), LIMITS), ("bench-small-1", benchmark(1.91), FAILS),
    ("bench-large-1", benchmark(1.1, size="large"), HOLDS), ("bench-large-1", benchmark(1.01, size="large"), LIMITS),
    ("bench-large-1", benchmark(0.99, size="large"), FAILS),
    ("bench-large-32", benchmark(1.03, size="large", batch=32), HOLDS), ("bench-large-32", benchmark(1.14, size="large", batch=32), LIMITS),
    ("bench-large-32", benchmark(1.5, size="large", batch=32), FAILS),
    *CASES,
    ("when", sweep(*[0.5] * 9, 1.0), HOLDS), ("when", sweep(*[0.5] * 8, 1.0, 1.0), LIMITS),
    ("when", sweep(0.5, 0.1, deeper=3.9), LIMITS), ("when", sweep(0.5, 0.1, width=64), LIMITS),  # with no pair to compare
    ("when", sweep(0.9, 0.9, 1.0, 1.1), LIMITS),
    ("when", sweep(0.9, 0.91, 1.0), FAILS),
    ("when", sweep(0.9, 0.91, 1.0, flat=0.11), FAILS), ("when", sweep(0.9, 1.0), LIMITS), ("when", sweep(0.9, 1.0, flat=0.11), FAILS),
    ("limit-1", wrong_shape("[5, 5]", False), HOLDS), ("limit-1", wrong_shape("refused", True), HOLDS),
    ("limit-1", wrong_shape("an error", False), FAILS),
    ("limit-2", operations(), LIMITS), ("limit-2", operations(if_on_a_shape=False), HOLDS),
    ("limit-2", operations(if_on_a_GPU_value=True), LIMITS),
    ("limit-2", operations(**dict.fromkeys(BRANCHES[1:], True)), LIMITS), ("limit-2", operations(**dict.fromkeys(BRANCHES, True)), FAILS),
    ("limit-3", operations(), HOLDS), ("limit-3", operations(print=True), LIMITS),
    ("limit-3", operations(print=True, item=True), FAILS),
    ("limit-4", operations(), FAILS), ("limit-4", operations(allocate_256_MiB=False), LIMITS),
    ("limit-4", operations(allocate_256_MiB=False, allocate_and_free_in_turns=False), HOLDS),
    ("limit-5", operations(sort=False), HOLDS), ("limit-5", operations(sort=False, **{f"op{i}": True for i in range(80)}), HOLDS),
    ("limit-5", operations(), LIMITS), ("limit-5", operations(**dict.fromkeys((*BRANCHES, "item", "print"), True)), FAILS),
    ("launch-cost", launch_cost(5, 10), HOLDS), ("launch-cost", launch_cost(4.9, 10), LIMITS),
    ("launch-cost", launch_cost(6, 10.1), LIMITS), ("launch-cost", launch_cost(4.9, 10.1), FAILS),
    ("hundreds", kernels(99), FAILS), ("hundreds", kernels(100), HOLDS), ("hundreds", kernels(999), HOLDS),
    ("hundreds", kernels(1000), LIMITS), ("hundreds", swept(100, 999), HOLDS), ("hundreds", swept(100, 1000), LIMITS),
    ("hundreds", swept(99, 1000), FAILS),
    ("micro", kernels(100, long=10), HOLDS), ("micro", kernels(100, long=11), LIMITS),
    ("micro", kernels(100, long=50), LIMITS), ("micro", kernels(100, long=51), FAILS),
    ("micro", swept(9, us=9.9), HOLDS), ("micro", swept(9, us=10.0), FAILS),
    ("share", idle(0.2, 0.4, 0.9, 0.9), HOLDS), ("share", idle(0.3, 0.9, 0.9, 0.9, 0.9), LIMITS),
    ("share", idle(0.3, 0.9, 0.9, 0.9, 0.9, 0.9), FAILS), ("share", idle(0.19, 0.41), FAILS),
    ("arithmetic", saving((149, 100), (67, 100)), HOLDS), ("arithmetic", saving((151, 100), (100, 100)), LIMITS),
    ("arithmetic", saving((34, 100),), LIMITS), ("arithmetic", saving((301, 100), (100, 100)), FAILS),
    ("arithmetic", saving((66, 100), (100, 100)), LIMITS), ("arithmetic", saving((33, 100), (100, 100)), FAILS),
    ("replay-cost", replay(n1=6, n300=9, n1000=15, n1001=40), HOLDS),
    ("replay-cost", replay(n1=6, n300=15, n1000=15.1), LIMITS), ("replay-cost", replay(n1=15.1, n300=6, n1000=6), FAILS),
    ("replay-cost", replay(n1=6, n300=15.1, n1000=15), FAILS),
    ("same-ops", same(True, True), HOLDS), ("same-ops", same(True, False), LIMITS),
    ("same-ops", same(False, True), FAILS), ("same-ops", same(True, True, copies=False), HOLDS),
    ("saving", saving((0, 1000), (0, 3000)), HOLDS), ("saving", saving((0, 999), (0, 3000)), LIMITS),
    ("saving", saving((0, 999), (0, 3001)), FAILS),
    ("warm-up", warm(matmul=3), HOLDS), ("warm-up", warm(matmul=1, fft=0), LIMITS),
    ("warm-up", warm(matmul=0), FAILS),
    ("warm-up", warm(solve=9, fft=0), FAILS),
    ("static-in-out", traps(False, True, True), HOLDS), ("static-in-out", traps(True, True, True), LIMITS),
    ("static-in-out", traps(True, False, True), FAILS), ("static-in-out", traps(False, True, False), FAILS),
    ("no-grad", pools(105, 100), HOLDS), ("no-grad", pools(106, 100), LIMITS),
    ("no-grad", pools(900, 100, 1.05), LIMITS), ("no-grad", pools(900, 100, 1.06), FAILS),
    ("no-grad", pools(100, 100, 1.06), FAILS),
    ("free", capture([1, 10]), HOLDS), ("free", capture([1, 11]), LIMITS), ("free", capture([5], saving=0.0), FAILS)])
def test_each_rule_at_and_around_its_bounds(id, made, verdict):
    judged = claims.judge(id, made)
    assert judged.verdict == verdict, judged
    assert judged.low <= judged.number <= judged.high and judged.unit and judged.why.endswith(".")


def test_every_claim_is_judged_above():
    marks = test_each_rule_at_and_around_its_bounds.pytestmark[0].args[1]
    assert {id for id, _, _ in marks} == set(claims.CLAIMS), "each claim needs tables above, and each table a claim"
    for id in claims.CLAIMS:
        verdicts = {verdict for name, _, verdict in marks if name == id}
        assert len(verdicts) == (2 if id == "limit-1" else 3), f"of {id}, the tables above give {verdicts} only"


@pytest.mark.parametrize("id", claims.CLAIMS)
def test_every_claim_is_judged_in_its_lab(id):
    code = "\n".join(cell for path in build.solutions() if path.name.startswith(claims.CLAIMS[id].lab) for cell in build.code_cells(path))
    assert f'"{id}"' in code and "check.claim(" in code


def test_an_overlap_of_bounds_and_words():
    for claim in claims.CLAIMS.values():
        assert claim.bounds.startswith("holds") and claim.lab[:2] in ("10", "20", "30", "31", "40", "50", "60")
        assert claim.experiments and {*claim.experiments} <= {*experiments.EXPERIMENTS}


def test_without_its_table_a_claim_is_not_measured():
    for given in (None, kernels(3)[:0]):
        judged = claims.judge("hundreds", given)
        assert judged.verdict == UNKNOWN and "step_trace" in str(judged)


def test_an_unknown_claim_and_a_wrong_table_are_named():
    with pytest.raises(ValueError, match="no claim 'speed'; there are: launch-cost"):
        claims.judge("speed")
    with pytest.raises(ValueError, match="judged on capture_cost; the table given has no 'saving_us'"):
        claims.judge("free", kernels(3))


def test_a_verdict_is_printed_with_its_rule_and_label(capsys):
    check.claim("hundreds", kernels(340))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 92
    assert "Verdict: HOLDS. One eager step launches 340 kernels." in out and "The rule: holds when each step" in out
    assert out.endswith(f"({LABEL})\n")


def test_on_the_recorded_gpu_the_driver_s_calls_alone_take_the_share_that_the_article_says():  # as lab 10 does
    table = recordings.recorded("step_saving", experiments.EXPERIMENTS["step_saving"].source)
    small = table[table["batch"] <= 4]
    assert (small["kernels"] * small["driver_launch_us"] / small["eager_wall_us"]).between(0.2, 0.4).all()


def test_when_says_what_it_cannot_judge():
    slow = sweep(0.5)
    slow["speedup"] = 1.05
    verdict = claims.judge("when", slow)
    assert verdict.verdict == FAILS and "None of 3 curves gains more than a tenth" in verdict.why and "nan" not in str(verdict)
    assert verdict.low <= verdict.number <= verdict.high
    alone = sweep(0.5, late=64)
    with pytest.raises(ValueError, match="no 'model that was measured at batch 4 or less and at batch 32'"):
        claims.judge("when", alone[alone["batch"] != 32])


def test_when_counts_curves_that_lose_nothing_and_none_that_gain_little():
    why = claims.judge("when", sweep(0.5, 0.9, 0.91)).why
    assert "2 of 6 curves keep at most half" in why and "2 more than nine tenths" in why and "Of 3 pairs" in why


def test_a_claim_is_judged_on_all_tables_that_there_are():
    for id, one, other in (("when", sweep(0.5), sweep(1.0)), ("hundreds", kernels(240), swept(1000)), ("micro", kernels(90), swept(11, us=10.0))):
        alone, both = claims.judge(id, one, None), claims.judge(id, one, other[:0], other)
        assert (alone.verdict, both.verdict) == (HOLDS, LIMITS) and both.provenance["label"] == LABEL
    assert "240 to 1,000 kernels; 1 of 2 steps" in claims.judge("hundreds", kernels(240), swept(1000)).why


def test_what_is_measured_here_is_not_judged_with_recorded_tables():
    here, recorded, other = sweep(0.5), sweep(1.0), sweep(1.0)
    here.attrs["provenance"] = here.attrs["provenance"] | {"live": True, "label": "LIVE"}
    other.attrs["provenance"] = other.attrs["provenance"] | {"label": "another"}
    assert (judged := claims.judge("when", recorded, here)).verdict == HOLDS and judged.provenance["label"] == "LIVE"
    assert claims.judge("when", recorded, other).provenance["label"] == f"{LABEL}; another"


@pytest.mark.parametrize("low, high, said", [(5.0, 10.0, ""), (4.9, 10.0, "verdict is: holds with limits."), (5.0, 10.1, "verdict is: holds with limits."),
                                             (4.9, 10.1, "verdict is: holds with limits.")])
def test_a_verdict_that_rests_on_where_in_the_interval_a_number_lies_says_so(low, high, said):
    made = launch_cost(7, 7).assign(cost_us_low=[low, 7, 500.0], cost_us_high=[7, high, 500.0])
    judged = claims.judge("launch-cost", made)
    assert judged.verdict == HOLDS and judged.why.endswith(said) and ("Close to a bound" in judged.why) == bool(said)


def test_small_batches_are_named_as_they_are():
    assert claims.judge("share", idle(0.3)).why.startswith("At batch 4 the GPU")
    with pytest.raises(ValueError, match="no 'row at batch 4 or less'"):
        claims.judge("share", idle(0.3).query("batch > 4"))


def test_the_list_of_operations_is_counted_and_called_ours():
    assert "Of the 9 operations in our own list, 5 cannot" in claims.judge("limit-5", operations()).why


def test_a_capture_that_may_save_nothing_says_so():
    made = capture([5]).assign(saving_us_low=0.0, saving_us_high=100.0)
    assert (why := claims.judge("free", made).why).endswith("the verdict is: does not hold here.") and "inf" not in why
