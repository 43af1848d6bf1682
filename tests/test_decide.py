"""Should this model use graphs: every rule at, above and below its bounds, on made-up measurements; where numbers come from."""

import asyncio
import json
import sys
from types import SimpleNamespace

import pytest
from made_up import sweep_row, table

from labkit import __main__ as cli
from labkit import charts, decide, examine, machine, recordings
from labkit.decide import CALLS, CANNOT, GAIN, MEMORY, OFF, STAY, UNKNOWN, UNSURE, USE, WRONG, Decision, Point
from labkit.explorers.decide_model import DecideModel


def point(low=2.0, high=3.0, batch=1, eager=300.0, **more):
    middle = (low + high) / 2
    spans = {"speedup": (middle, low, high), "eager_us": (eager, eager * 0.9, eager * 1.1), "graph_us": (100.0, 95.0, 105.0)}
    return Point(batch, **spans | {"kernels": 7, "off": 0.0} | more)


@pytest.mark.parametrize("low, high, advice", [
    (GAIN, 2.0, USE), (GAIN - 0.001, 2.0, UNSURE), (1.0, GAIN, UNSURE), (1.0, GAIN - 0.001, STAY), (0.5, 0.6, STAY), (5.0, 6.0, USE)])
def test_the_interval_decides(low, high, advice):
    assert point(low, high).advice == advice


def test_wrong_results_failures_and_gaps_come_before_any_speedup():
    assert point(off=OFF).advice == point(off=None).advice == USE
    assert point(off=OFF * 1.01).advice == point(off=float("nan")).advice == WRONG
    assert Point(1, kernels=7, risks=("captured, but it then failed",)).advice == WRONG
    assert Point(1, failure="the CPU waits").advice == CANNOT and Point(1, skipped="no room").advice == UNKNOWN


@pytest.mark.parametrize("calls, said", [(1, "1 call"), (CALLS, f"{CALLS:,} calls"), (CALLS + 1, "only for steps that run this often")])
def test_calls_until_a_capture_is_paid_back(calls, said):
    one = point(capture_seconds=200e-6 * calls)
    assert one.break_even == calls and Decision("m", (one,), "made up").rows()["paid back after"][0].endswith(said)


def test_a_capture_that_saves_nothing_is_never_paid_back():
    slow = point(eager=100.0, capture_seconds=0.1)
    assert slow.break_even is None and Decision("m", (slow,), "made up").rows()["paid back after"] == ["never"]


def test_where_the_speedup_may_be_none_a_capture_may_never_be_paid_back():
    said = [Decision("m", (point(low, capture_seconds=0.1),), "made up").rows()["paid back after"][0] for low in (1.001, 1.0)]
    assert said == ["500 calls", "500 calls, or never"]


def test_a_large_pool_is_pointed_out():
    at, above = (Decision("m", (point(pool_bytes=int(share * 2**30)),), "made up", memory_bytes=2**30).rows()["pool"][0]
                 for share in (MEMORY, MEMORY + 0.01))
    assert "memory" not in at and "11% of this GPU's memory" in above


@pytest.mark.parametrize("target, eager, graph", [
    (94.0, "missed", "missed"), (95.0, "missed", "too close to say"), (105.0, "missed", "met"), (269.0, "missed", "met"),
    (270.0, "too close to say", "met"), (330.0, "met", "met")])
def test_a_target_is_met_by_the_whole_interval_or_not(target, eager, graph):
    answer = Decision("m", (point(),), "made up", latency_us=target)
    assert f"eager: {eager}; a graph: {graph}" in str(answer)
    said = {("missed", "missed"): "neither met", ("missed", "met"): "only a graph met", ("too close to say", "met"): "a graph met, and eager perhaps,",
            ("met", "met"): "both met"}.get((eager, graph))
    assert answer.recommendation.endswith(f"; in the one process that measured, {said} {charts.time(target)} at batch 1." if said else "times as fast.")
    assert "of the one process that measured" in str(answer)


@pytest.mark.parametrize("target, eager, said", [
    (99.0, (80.0, 70.0, 90.0), "eager met, and a graph perhaps,"), (94.0, (80.0, 70.0, 90.0), "only eager met"), (94.0, (99.0, 95.0, 100.0), "neither met")])
def test_a_target_where_eager_is_the_quicker_one(target, eager, said):
    assert f"measured, {said} {charts.time(target)}" in Decision("m", (point(0.5, 0.6, eager_us=eager),), "made up", latency_us=target).recommendation


def test_a_graph_that_is_wrong_meets_no_target():
    answer = Decision("m", (point(off=1.0),), "made up", latency_us=400.0)
    assert "only eager met" in answer.recommendation and "eager: met; a graph: not to be used" in str(answer)
    assert "only eager met" in Decision("m", (Point(1, eager_us=(1.0, 1.0, 1.0), failure="it waits"),), "made up", latency_us=400.0).recommendation


def test_torch_compile_gives_more_only_where_its_whole_interval_lies_above():
    at, above = (point(compiled={"seconds": 9.0, "compiled": (4.0, low, 5.0)}) for low in (3.0, 3.001))
    assert not at.better_compiled and "torch.compile gives more at batch 1" in Decision("m", (above,), "made up").recommendation
    assert "compiled 4.00 (3.00 to 5.00) times as fast as eager; compiling took 9 s" in str(Decision("m", (at,), "made up"))


def test_the_recommendation_is_one_sentence_and_names_every_batch():
    points = (point(batch=1), point(batch=8), point(0.9, 1.0, batch=32), Point(64, failure="it waits"), Point(512, skipped="no room"))
    assert Decision("m", points, "made up").recommendation == (
        "Use a graph at batch 1 and 8, 2.50 times as fast; stay eager at batch 32, 0.95 times as fast; "
        "cannot be captured at batch 64; not measured at batch 512.")


def test_a_page_shows_the_rules_and_lets_no_markup_in():
    html = Decision("<i>m</i>", (Point(1, failure="<script>x</script>", risks=("<b>",)),), "made up <u>")._repr_html_()
    assert all(rule in html for rule in decide.RULES.values()) and not {"<script>", "<b>m", "<i>", "<u>"} & {*html.split()}
    assert "<script" not in html and "&lt;script&gt;" in html and "&lt;u&gt;" in html


# ---- looked up

@pytest.fixture
def recorded(monkeypatch):
    rows = [sweep_row("gpt2", 12, 768, length, precision, 2**k) for length in (128, 1024) for precision in ("float32", "float16") for k in range(4)]
    rows.append(sweep_row("gpt2", 12, 768, 128, "float16", 512, memory=1))
    tables = {"sweep_gpt2": table(rows), "capture_cost": table([{"kernels": 24, "capture_s": 0.01}, {"kernels": 9000, "capture_s": 9.0}])}
    monkeypatch.setattr(recordings, "recorded", lambda name, source, gpu=None: tables[name])
    monkeypatch.setattr(recordings, "tables_are_live", lambda: False)
    return tables


def test_what_was_recorded_is_looked_up_and_labelled(recorded):
    [one] = (answer := decide.decide("gpt2", (4,))).points
    row = recorded["sweep_gpt2"].query("length == 128 and precision == 'float16' and batch == 4").iloc[0]
    assert one.speedup == (row.speedup, row.speedup_low, row.speedup_high) and one.eager_us[0] == row.eager_wall_us
    assert "Not recorded" not in one.note and "TEST DATA" in str(answer) and one.compiled == {"failed": "not recorded: needs a GPU"}
    assert "recorded graph of 24 kernels" in one.note and one.capture_seconds == 0.01


def test_the_nearest_is_named_exactly_and_what_did_not_fit_stays_so(recorded):
    first, large = decide.decide("gpt2", (3, 700), length=600, layers=6, precision="float16").points
    assert "see the notes" in decide.decide("gpt2", (4,), layers=6).recommendation
    assert "see the notes" not in decide.decide("gpt2", (4, 4)).recommendation and len(decide.decide("gpt2", (4, 4)).points) == 1
    assert "at batch 4, " in Decision("m", (first, first), "made up").recommendation  # of two that were asked for
    assert first.batch == 4 and "layers 12 for 6, length 1024 for 600, batch 4 for 3" in first.note
    [large] = decide.decide("gpt2", (700,)).points
    assert large.advice == UNKNOWN and large.skipped == "out of memory" and "batch 512 for 700" in large.note


def test_the_cost_of_a_capture_is_taken_from_a_graph_of_like_size_only(recorded):
    recorded["capture_cost"] = recorded["capture_cost"].query("kernels > 24")
    [one] = decide.decide("gpt2", (4,)).points
    assert one.capture_seconds is None and one.break_even is None and "capture costs is not recorded" in one.note


@pytest.mark.parametrize("model", ["causal", "module:callable"])
def test_what_is_not_recorded_needs_a_gpu(recorded, fresh_machine, model):
    fresh_machine.setattr(machine, "mode", lambda: machine.Mode(False, "there is none", "Get one."))
    with pytest.raises(machine.NoGPU, match=f"Measuring {model} .recorded are gpt2, .* needs an NVIDIA GPU: there is none"):
        decide.decide(model, (1,), inputs=("Bx2",) * (":" in model))


@pytest.mark.parametrize("model, options, why", [
    ("moon", {}, "'moon' is none of ours"), ("gpt2", {"inputs": ("1x2",)}, "and nothing else, takes inputs"), ("a:b", {}, "takes inputs"),
    ("gpt2", {"batches": (0,)}, "whole numbers"), ("gpt2", {"batches": (1.5,)}, "whole numbers"), ("gpt2", {"precision": "int8"}, "precision"),
    ("gpt2", {"batches": ()}, "one at least"), ("gpt2", {"layers": 0}, "whole numbers"), ("gpt2", {"width": -1}, "whole numbers"),
    ("gpt2", {"length": 0}, "whole numbers"), *(("gpt2", {"latency_us": us}, "a time above 0") for us in (0, -1, "2000", float("nan"))),
    ("a:b", {"inputs": ("1x2",), "batches": (1, 2)}, "write B for it"), ("a:b", {"inputs": ("Bx2",), "layers": 2}, "layers and width are those")])
def test_what_cannot_be_asked_for_is_refused(recorded, model, options, why):
    with pytest.raises(ValueError, match=why):
        decide.decide(model, **options)


# ---- measured, as if on a GPU

@pytest.fixture
def measured(monkeypatch):
    """Return the list of what children were asked, and the answers they give, by trial: a dict, or an error to raise."""
    asked, answers = [], {"trial_capture": {"speedup": [3.0, 2.0, 4.0], "eager_us": [3.0, 2.0, 4.0], "graph_us": [1.0, 1.0, 1.0], "off": 0.0,
                                            "risks": ["it draws"]}, "trial_compile": {"seconds": 5.0, "compiled": [2.0, 1.0, 3.0]}}

    def in_child(trial, what, timeout_s):
        asked.append((trial.__name__, what, timeout_s))
        if isinstance(answer := answers[trial.__name__], Exception):
            raise answer
        return json.loads(json.dumps(answer))
    monkeypatch.setattr(decide, "in_child", in_child)
    monkeypatch.setattr(machine, "require_gpu", lambda what: None)
    monkeypatch.setattr(machine, "describe", lambda: SimpleNamespace(gpu="Made-up", memory_gib=80))
    monkeypatch.setattr(recordings, "tables_are_live", lambda: True)
    return asked, answers


def test_each_batch_is_captured_and_compiled_in_children(measured):
    asked, answers = measured
    one, two = decide.points("mine:step", (1, 8), inputs=("Bx2",), timeout_s=7)
    assert [(name, what["batch"], seconds) for name, what, seconds in asked] == [
        (name, batch, 7) for batch in (1, 8) for name in ("trial_capture", "trial_compile")]
    assert one.advice == USE and one.risks == ("it draws",) and one.compiled == answers["trial_compile"] and two.batch == 8


def test_what_a_child_cannot_do_is_said_and_costs_nothing_else(measured):
    asked, answers = measured
    answers["trial_compile"] = RuntimeError("trial_compile failed in its own process: it timed out after 7 s")
    [one] = decide.points("mlp", (1,))
    assert one.advice == USE and "timed out after 7 s" in str(Decision("mlp", (one,), "made up"))
    answers["trial_capture"] = {"skipped": "a mlp needs 900 GiB"}
    [one] = decide.points("mlp", (1,))
    assert one.advice == UNKNOWN and "900 GiB" in str(Decision("mlp", (one,), "made up")) and len(asked) == 3
    answers["trial_capture"] = RuntimeError("trial_capture failed in its own process: line 3: json.dumps(...)\nAcceleratorError: lost\nMore.")
    assert next(decide.points("mlp", (1,))).skipped == "AcceleratorError: lost"
    answers["trial_capture"] = {"failure": "the CPU waits for the GPU"}
    assert next(decide.points("mlp", (1,), compiled=False)).advice == CANNOT


def test_a_trial_hands_on_what_the_capture_doctor_finds(monkeypatch):
    found = {"capturable": True, "nodes": {"kernel": 2}, "kernels": 2, "capture_seconds": 0.1, "pool_bytes": 5, "risks": ["r"],
             "largest_difference": 0.5, "speedup": (2.0, 1.9, 2.1)}
    monkeypatch.setattr(decide, "_made", lambda batch, **what: ("fn", ()))
    monkeypatch.setattr(examine, "examine", lambda fn, inputs: found)
    told = decide.trial_capture(1)
    assert Point(1, **told).advice == WRONG and told["pool_bytes"] == 5 and set(told) == {"kernels", "capture_seconds", "pool_bytes", "risks", "off", "speedup"}


def test_a_step_that_fails_without_a_capture_too_says_nothing_about_graphs(monkeypatch):
    monkeypatch.setattr(examine, "_risks", lambda fn, inputs: fn(*inputs))
    monkeypatch.setattr(decide, "_made", lambda batch, **what: (lambda x: x.nothing, (1,)))
    assert Point(1, **(told := decide.trial_capture(1))).advice == UNKNOWN and "it fails without a capture, too: AttributeError" in told["skipped"]


def test_a_step_that_cannot_be_made_is_a_reason():
    assert "ModuleNotFoundError" in decide.trial_capture(1, path=[*sys.path], kind="callable", model="moon:x", size=(None, None, 1), precision="float16",
                                                         inputs=())["skipped"]


def test_a_config_of_transformers_gives_its_decode_step(tmp_path, monkeypatch):
    import torch
    import transformers

    from labkit import models
    transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0).save_pretrained(tmp_path)
    monkeypatch.setattr(models, "require_room", lambda what, needed: None)
    for path in (tmp_path, tmp_path / "config.json"):
        assert decide.kind_of(str(path)) == "config"
    model = decide._from_config(str(tmp_path), torch.float32, "cpu")
    assert model.config.n_layer == 2 and next(model.parameters()).device.type == "cpu" and not model.training


# ---- the page

def test_the_page_asks_one_question_and_grows_by_a_batch(measured):
    seen, asked = [], measured[0]
    model = DecideModel(model="mine:step ", inputs="Bx2", batches=(1, 8))

    def look(change):
        seen.append(change["new"] and [point.batch for point in change["new"].points])
        model.model, model.batches = "mlp", (512,)  # typed while it measures: that is the next question
    model.observe(look, names="decision")
    asyncio.run(model.answer())
    assert seen == [[1], [1, 8]] and {what["model"] for _, what, _ in asked} == {"mine:step"} and model.status == "Done: 2 of 2 batches."
    model.target_ms = -1
    asyncio.run(model.answer())
    assert model.decision is None and model.status == "No answer: a target is a time above 0, not -1000.0" and not model.busy


@pytest.mark.parametrize("batches, inputs, why", [((1, 8), "1x2", "write B for it"), ((), "Bx2", "one at least")])
def test_what_cannot_be_asked_for_is_said_on_the_page(measured, batches, inputs, why):
    model = DecideModel(model="mine:step", inputs=inputs, batches=batches)
    asyncio.run(model.answer())
    assert why in model.status and not measured[0]


def test_stop_keeps_the_batch_that_is_measured(measured):
    model = DecideModel(model="mlp", batches=(1, 8))
    model.observe(lambda change: model.stop(), names="decision")
    asyncio.run(model.answer())
    assert len(model.decision.points) == 1 and model.status == "Done: 1 of 2 batches."


def test_a_time_that_is_none_is_refused_in_plain_words(capsys):
    for word in ("0", "soon", "nan"):
        with pytest.raises(SystemExit):
            cli.main(["decide", "gpt2", "--latency-us", word])
        assert f"a time is a number above 0, not '{word}'" in capsys.readouterr().err


def test_the_command_answers_from_recordings_and_refuses_in_one_line(monkeypatch, capsys):
    monkeypatch.setenv("LABKIT_MODE", "recorded"), machine.mode.cache_clear()
    assert cli.main(["decide", "gpt2", "--batch", "1", "--latency-us", "3000"]) == 0
    assert "RECORDED on NVIDIA H200" in (told := capsys.readouterr().out) and "3 ms or less" in told
    assert cli.main(["decide", "moon"]) == 1 and capsys.readouterr().err.startswith("labkit: 'moon' is none of ours (mlp, ")
    machine.mode.cache_clear()
