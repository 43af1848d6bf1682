"""Lab 60 without a GPU: the loop that it shows is the packaged one, and exercise 1 takes any right answer."""

import pytest

torch = pytest.importorskip("torch")
from alone import alone, prompts_of  # noqa: E402
from test_serving import Clock  # noqa: E402

from labkit import architectures, batching, build, check, serving  # noqa: E402
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


def test_nothing_in_the_lab_needs_torch_but_its_recorded_cells():
    for source in SOURCES:
        assert source.startswith("%%gpu") or "torch" not in source
