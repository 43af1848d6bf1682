"""The claims about vLLM beyond their bounds: what they say, and what they say where something is missing."""

import pytest
from vllm_cases import flags, taken, vllm

from labkit import claims, experiments, vllm_claims
from labkit.claims import judge


def test_each_names_the_version_that_it_was_tried_with():
    for id, *_ in vllm_claims.CLAIMS:
        judged = judge(id, flags(False) if id == "vllm-flag" else vllm())
        assert "vLLM 0.0.made-up" in judged.why and "nan" not in str(judged)
        assert claims.CLAIMS[id].lab == "60" and {*claims.CLAIMS[id].experiments} <= {*experiments.EXPERIMENTS}


def test_outdated_is_said_only_of_what_once_was_so():
    assert {id for id, claim in claims.CLAIMS.items() if claim.otherwise == claims.OUTDATED} == {"vllm-sizes", "vllm-prefill"}
    assert all("else outdated" in claim.bounds for claim in claims.CLAIMS.values() if claim.otherwise == claims.OUTDATED)


def test_what_graphs_alone_are_worth_is_said_beside_what_the_flag_changes():
    why = judge("vllm-eager", vllm()).why
    assert "Without the flag a step is 5.31 (2.55 to 11.06) times as fast; with graphs alone, 4.20 (2.02 to 8.74) times as fast" in why


def test_a_flag_is_judged_without_what_it_says_nothing_of():
    table = vllm()
    judged = judge("vllm-eager", table[table["configuration"] != "neither"])
    assert judged.verdict == claims.HOLDS and "with graphs alone, not measured." in judged.why
    judged = judge("vllm-budget", table[table["configuration"] != "enforce_eager"])
    assert judged.verdict == claims.HOLDS and judged.why.endswith("+0.00 are in use with them.")


def test_numbers_come_from_the_rows():
    assert judge("vllm-memory", vllm()).number == pytest.approx(0.4 * 2**30 / 1e6 / 51)
    assert judge("vllm-prefill", vllm(default={"replays_prefill": 9})).number == 9
    assert "Graphs alone take 0.40 GiB, and +0.19 are in use with them; graphs and the compiler together -0.10, where the graphs take 0.40." in judge("vllm-budget", taken(0.19, 0.99, -0.1)).why
    assert 'says "Graph capturing finished in 4 secs, took 0.40 GiB".' in judge("vllm-log", vllm()).why
    assert "a table of 900 steps" in judge("vllm-metrics", vllm(default={"graph_use": {"FULL": 900}})).why
    assert "no table of graph use by default, but one of 720 steps in the configuration 'default, V1 model runner'." in judge("vllm-metrics", vllm()).why
    assert "no table of graph use by default either." in judge("vllm-metrics", vllm(every={"graph_use": {}})).why


@pytest.mark.parametrize("id, left_out, missing", [
    ("vllm-eager", "enforce_eager", "enforce_eager"), ("vllm-sizes", "default", "default"),
    ("vllm-budget", "neither", "neither"), ("vllm-metrics", "default", "default")])
def test_a_configuration_that_was_left_out_is_named(id, left_out, missing):
    table = vllm()
    with pytest.raises(ValueError, match=f"no .*rows of vLLM's configuration '{missing}'"):
        judge(id, table[table["configuration"] != left_out])


@pytest.mark.parametrize("id, changed, missing", [
    ("vllm-budget", {"every": {"taken_gib": None}}, "memory that vLLM has taken"), ("vllm-sizes", {"default": {"captured_sizes": []}}, "captured size"),
    ("vllm-memory", {"every": {"graphs_gib": None}}, "configuration whose graphs take memory"),
    ("vllm-budget", {"graphs_not_compiled": {"graphs_gib": None}}, "memory that graphs take")])
def test_what_was_not_told_is_named(id, changed, missing):
    with pytest.raises(ValueError, match=missing):
        judge(id, vllm(**changed))
    with pytest.raises(ValueError, match="what the article types"):
        judge("vllm-flag", flags())
