"""Lab 60 without a GPU: the loop that it shows is the packaged one, and exercise 1 takes any right answer."""

import ast

import pytest

torch = pytest.importorskip("torch")
import made_up  # noqa: E402
import served  # noqa: E402
import test_serving_steps  # noqa: E402
import vllm_cases  # noqa: E402
from alone import alone, prompts_of  # noqa: E402
from test_serving import Clock  # noqa: E402

import labkit  # noqa: E402
from labkit import architectures, batching, build, charts, check, experiments, serving  # noqa: E402
from labkit.batching import Request  # noqa: E402

SOURCES = build.code_cells(build.NOTEBOOKS / "solutions" / "60_serve_with_captured_batches.ipynb")


def cell(*words):
    [source] = [source for source in SOURCES if all(word in source for word in words)]
    return source


@pytest.mark.parametrize("trace", [batching.poisson_trace(150, 10, (3, 14), (1, 12), seed=3), [Request(0.0, 4, 1)] * 9,
                                   [Request(0.0, 3, 2), Request(7.0, 5, 3)]], ids=["random", "only a prefill each", "a pause"])
def test_the_loop_that_is_shown_does_what_the_packaged_one_does(trace):
    shown = {"batching": batching}
    exec(cell("def serve(decoder, trace, prompts, clock):"), shown)
    model = architectures.tiny_model("llama", "cpu")
    decoder, prompts = serving.BatchedDecoder(model, 40, 5, [1, 2, 4]), prompts_of(trace)
    packaged, steps = batching.serve(decoder, trace, prompts, Clock()), dict(decoder.steps)
    decoder.steps.clear()
    mine = shown["serve"](decoder, trace, prompts, Clock())
    assert mine == packaged and decoder.steps == steps and not decoder.running  # the same tokens, at the same times
    assert [one.tokens for one in mine] == [alone(model, ids, r.output_tokens) for r, ids in zip(trace, prompts)]


COUNTS = {1: 40, 2: 5, 3: 90, 4: 3, 5: 4, 6: 80, 7: 1, 9: 30}


@pytest.mark.parametrize("sizes, answer", [
    (..., check.NOT_ATTEMPTED), ([1, 3, 6, 9], check.CORRECT), ((9, 6, 3, 1), check.CORRECT), ({3, 6, 9, 1}, check.CORRECT),
    ([1, 3, 6], "the largest batch"), ([1, 3, 6, 7, 9], "at most four"), ([9], "more is padded"), ([1, 3, 6, 100], "more is padded"),
    ("1, 3, 6, 9", "a list of whole numbers"), ([], "a list of whole numbers"), ([0, 3, 6, 9], "a list of whole numbers"), (None, "a list of whole numbers")])
def test_any_choice_that_pads_little_is_right(sizes, answer, capsys):
    bound = 1.1 * batching.wasted_share(batching.best_sizes(COUNTS, 4), COUNTS)
    exec(cell("def judged(sizes):"), {"check": check, "batching": batching, "counts": COUNTS, "bound": bound, "sizes": sizes})
    assert answer in capsys.readouterr().out


def test_the_solution_of_exercise_1_is_one_of_them(capsys):
    import pandas
    ways = pandas.DataFrame([{"way": "every size", "rate": 24, "batches": [list(pair) for pair in COUNTS.items()]}] * 2)
    given = {"check": check, "batching": batching, "ways": ways, "busiest": 24}
    exec(cell("bound = 1.1"), given)
    exec(cell("def judged(sizes):"), given)
    assert f"{check.CORRECT}: sizes" in capsys.readouterr().out and given["counts"][3] == 180


@pytest.mark.parametrize("left_out", [(), ("default",), ("enforce_eager",), ("neither", "default, V1 model runner"),
                                      ("graphs, not compiled", "default, at most 16 sequences")])
def test_all_that_is_not_recorded_runs_on_made_up_tables(monkeypatch, capsys, left_out):
    of_vllm = vllm_cases.vllm((1, 4, 16, 64, 128))
    of_vllm = of_vllm[~of_vllm.configuration.isin(left_out)]
    for name, rows in (("ways", served.ways()), ("step_cost", served.steps()), ("pools", served.pools()), ("prefill", served.prefill())):
        monkeypatch.setattr(experiments, f"serving_{name}", lambda rows=rows: made_up.table(rows))
    monkeypatch.setattr(experiments, "of_vllm", lambda name: {
        "vllm_table": of_vllm, "vllm_flags": vllm_cases.flags(False, False).assign(enforce_eager=True, model="m")}[name])
    shown = []
    names = {"display": shown.append}
    for source in SOURCES:
        if not source.startswith("%%"):
            *rest, last = ast.parse(source).body
            exec(compile(ast.Module(rest, []), "lab", "exec"), names)
            shown.append(eval(compile(ast.Expression(last.value), "lab", "eval"), names) if isinstance(last, ast.Expr) else exec(
                compile(ast.Module([last], []), "lab", "exec"), names))
    said = capsys.readouterr().out
    assert said.count(check.CORRECT) == 2 and sum(isinstance(one, charts.Chart) for one in shown) >= 5
    assert said.count("Verdict: ") + said.count("is not judged: ") == 8 and ("is not judged: " in said) == bool(
        {*left_out} - {"default, V1 model runner", "default, at most 16 sequences"})
    assert ("Not measured here, so there is nothing to compare" in said) == bool({*left_out} & {"default", "enforce_eager"})
    assert "a pool for each: 19 graphs, 1,133 MiB in pools, that is 62.5 MB a size; 1,152 MiB less are free" in said
    assert ("default, V1 model runner" in left_out) or "its own table: 700 steps FULL, 12 steps PIECEWISE, 8 steps NONE; 20.0% of the tokens are padding" in said


def test_what_is_recorded_runs_where_graphs_are_pretended(monkeypatch, capsys):
    monkeypatch.setattr("labkit.timing.WaitingClock", test_serving_steps.Clock)
    monkeypatch.setattr("labkit.graphs.GraphedCallable", test_serving_steps.Static)
    monkeypatch.setattr("labkit.buckets.GraphedCallable", test_serving_steps.Static)
    names, real = {"batching": batching, "labkit": labkit}, serving.PiecewisePrefill
    exec(cell("def serve(decoder, trace, prompts, clock):"), names)

    def captured(model, sizes):
        made = real(model, sizes)
        with torch.inference_mode():
            made.chains |= {size: made._captured(size) for size in sorted(sizes, reverse=True)}
        return made

    monkeypatch.setattr(serving, "PiecewisePrefill", captured)
    for source in SOURCES:
        if source.startswith("%%gpu"):
            exec(source.removeprefix("%%gpu").replace('"cuda"', '"cpu"'), names)
    said = capsys.readouterr().out
    assert "12 of 12 requests got just the tokens that they get alone" in said and "6 in use, 6 run, eager" in said
    assert "padded: [[-1.25" in said and "writes as alone: True" in said
    assert "3 graphs a size, for 2 layers; three prompts in one pass" in said


def test_nothing_in_the_lab_needs_torch_but_its_recorded_cells():
    for source in SOURCES:
        assert source.startswith("%%gpu") or "torch" not in source
