"""Lab 50 without a GPU: its cells run on tables as its experiments make them, and what it captures by hand shows what it says."""

import ast
import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
import made_up  # noqa: E402
import test_decoding_steps  # noqa: E402

import labkit  # noqa: E402
from labkit import build, charts, check, experiments, models, recordings  # noqa: E402
from labkit.experiments import decoding_steps, registry  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
SOURCES = build.code_cells(build.NOTEBOOKS / "solutions" / "50_decode_an_llm.ipynb")
gpu = test_decoding_steps.gpu
TRIED = [  # architecture, static_equals, captures, captured_equals, decodes
    ("llama", True, True, True, True), ("mistral", True, True, False, True), ("mpt", True, False, None, True),
    ("roberta", False, True, False, True), ("rwkv", False, None, None, False), ("crashes", None, None, None, False)]


def run(source, names):
    """Run a cell, and return what it shows last."""
    *rest, last = ast.parse(source).body
    exec(compile(ast.Module(rest, []), "lab", "exec"), names)
    if not isinstance(last, ast.Expr):
        return exec(compile(ast.Module([last], []), "lab", "exec"), names)
    return eval(compile(ast.Expression(last.value), "lab", "eval"), names)


def stand_in(monkeypatch, name, rows):
    """Let an experiment give these rows, measured or as recorded."""
    def of_another(*_):
        table = made_up.table(rows)
        table.attrs["provenance"]["label"] = "RECORDED on another"
        return table

    recorded = recordings.recorded
    monkeypatch.setitem(registry.EXPERIMENTS, name, lambda: made_up.table(rows))
    registry.EXPERIMENTS[name].source = name
    monkeypatch.setattr(recordings, "recorded", lambda which, *rest: (of_another if which == name else recorded)(which, *rest))


def test_all_that_is_not_recorded_runs_on_tables_as_they_are_measured(gpu, monkeypatch, capsys):
    monkeypatch.setattr(decoding_steps, "SPAN", dict.fromkeys(decoding_steps.LANGUAGE, (128, 200)))
    for name in ("ladder_gpt2", "ladder_llama_1b", "ladder_llama_8b", "generate_speed"):
        rows = registry.EXPERIMENTS[name].measure()
        json.dumps(build.scrub(rows), allow_nan=False)  # as it is recorded
        stand_in(monkeypatch, name, rows)
    rows = [dict(zip(("architecture", "static_equals", "captures", "captured_equals", "decodes"), row), cause="", why_not="") for row in TRIED]
    for name, made in (("architecture_table", rows), ("architecture_speeds", [{"architecture": "llama", "speedup": 3.21}]),
                       ("streamed_text", [{"how": how, "at_us": 1e5, "text": "Sky", "model": "M", "question": "Why?"} for how in ("eager", "graph")])):
        stand_in(monkeypatch, name, made)
    names = {"display": print}
    shown = [run(source, names) for source in SOURCES if not source.startswith("%%")]
    said = capsys.readouterr().out
    assert said.count(check.CORRECT) == 2 and said.count("Verdict: ") == 3 and "the same text: True" in said
    assert sum(isinstance(one, charts.Chart) for one in shown) == 3
    assert "captured, keys read once (reading again gone): " in str(names["rungs"](names["single"]))
    assert said.count("\nRECORDED on another\n") == 3  # before the guess, the captures and the best rung
    assert f"\n{made_up.LABEL}, together with\nRECORDED on another\n" in said
    assert "RECORDED on another" in str(names["rungs"](names["single"])) and made_up.LABEL not in str(names["rungs"](names["single"]))
    captures = next(one for one in shown if "whence" in getattr(one, "columns", ()))
    assert {(model, told) for (model, *_), told in captures.whence.items()} == {
        ("GPT-2", "TEST"), ("Llama 1B", "RECORDED"), ("Llama 8B", "RECORDED")}
    assert list(names["best"].longest) == [["a kernel", 1, 2.0]] and "steps: beside its kernels, " in said
    assert dict(zip(names["tried"].architecture, names["tried"].by_hand)) == {
        "llama": "captured, same tokens", "mistral": "captured, wrong tokens", "mpt": "not captured", "roberta": "wrong before any graph",
        "rwkv": "failed before a capture", "crashes": "failed before a capture"}


def test_on_a_gpu_that_is_too_small_the_lab_runs_through_and_says_what_is_recorded(monkeypatch, capsys):
    def no_room():
        raise models.TooLarge("a llama needs 16 GiB")

    def never():
        raise AssertionError("this takes too long to measure in a lab")

    tried = ("streamed_text", "prefill_cost", "ladder_gpt2", "generate_speed", "article_benchmark")
    for name in (*tried, "ladder_llama_1b", "ladder_llama_8b", "architecture_table", "architecture_speeds"):
        table = (lambda: no_room()) if name in tried else (lambda: never())
        table.source = registry.EXPERIMENTS[name].source
        monkeypatch.setitem(registry.EXPERIMENTS, name, table)
        monkeypatch.setattr(experiments, name, never)  # the lab is to ask by other ways
    names = {"display": print}
    for source in SOURCES:
        source.startswith("%%") or run(source, names)
    said = capsys.readouterr().out
    assert said.count(check.CORRECT) == 2 and said.count("Verdict: ") == 3
    for name in tried:
        assert said.count(f"{name} is not measured here, but shown as recorded: a llama needs 16 GiB\n") == 1


def test_what_is_captured_by_hand_falls_into_the_trap_and_a_window_is_wrong_without_an_error(monkeypatch, capsys):
    monkeypatch.setattr(labkit, "GraphedCallable", test_decoding_steps.Taped, raising=False)
    names = {"__name__": "lab"}
    for source in SOURCES:
        if source.startswith("%%gpu"):
            run(source.partition("\n")[2].replace('"cuda"', '"cpu"'), names)
    first, trap, cured, window = (dict(line.split(": ", 1) for line in part.strip().splitlines()) for part in
                                  capsys.readouterr().out.replace("generate():", "|wanted:").split("|")[1:])
    rows = [{key: ast.literal_eval(text[:text.index("]") + 1].strip()) for key, text in part.items() if "[" in text} for part in (first, trap, cured, window)]
    assert rows[0]["by hand"] == rows[0]["wanted"] == rows[2]["replayed"]
    assert rows[1]["replayed"][:7] == rows[1]["wanted"][3:] != rows[1]["wanted"][:7]  # three steps late
    assert rows[3]["GraphedDecoder"] == rows[3]["wanted"] != rows[3]["captured"] and len(rows[3]["captured"]) == 16
