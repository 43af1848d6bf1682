"""Checks take any right answer, name what is off about a wrong one, and know an untouched stub when they see it."""

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from labkit import check


class Device:
    """Stands for a tensor: something that only knows tolist()."""

    def __init__(self, values):
        self.values = values

    def tolist(self):
        return self.values


def said(capsys, call, *args, **kwargs):
    call(*args, **kwargs)
    return capsys.readouterr().out


@pytest.mark.parametrize("guess, words", [
    (..., "Not guessed yet"), (None, "Not guessed yet"), (340, "That is it."), (250, "Close."),
    (150, "Too low by a factor of 2.3."), (30, "Too low by a factor of 11"), (0, "340 away"),
    (34_000, "Too high by a factor of 100"), ("many", "is no number: write one without quotes"), (Device(340), "That is it.")])
def test_guess_is_kind_about_any_guess(capsys, guess, words):
    out = said(capsys, check.guess, guess, 340, "kernels")
    assert "Measured: 340 kernels." in out and words in out


def test_a_guess_has_nothing_to_be_compared_with_where_nothing_was_measured(capsys):
    assert said(capsys, check.guess, 3, float("nan"), "times") == "Not measured here, so there is nothing to compare a guess with.\n"


def test_guess_in_words(capsys):
    assert "That is it." in said(capsys, check.guess, " GPU", "gpu")


@pytest.mark.parametrize("answer, expected", [
    (100, 100.0), (101.9, 100), (np.float32(100), 100), (np.array([100]), 100), (Device(100.0), 100),
    ((1, 2), [1, 2]), (np.array([1.0, 2.0]), (1, 2)), (Device([[1], [2]]), [[1], [2]]), (" Graph", "graph"),
    (True, True), (np.bool_(False), False), (0, 0), (Fraction(200, 2), 100), (Decimal("99.5"), 100), ({"a": 1, "b": Fraction(2)}.values(), [1, 2]),
    ({1: "a", 2: "b"}.keys(), [1, 2])])
def test_any_right_answer_is_correct(capsys, answer, expected):
    assert said(capsys, check.value, "x", answer, expected) == "✓ correct: x\n"


@pytest.mark.parametrize("answer, expected, off", [
    (103, 100, "too large"), (-100, 100, "sign"), (0.1, 100, "factor of 1,000: which unit"), (float("nan"), 1, "nan is not it"),
    (True, 1, "should be a number, and is True or False"), (1, True, "should be True or False, and is a number"),
    ("many", 100, "should be a number, and is a word"), ([1, 2], [1, 2, 3], "should have 3 items, and has 2"),
    ([1.01, 2, 4], [1, 2, 3], "item 3 of 3: 4 is too large"), ("eager", "graph", "eager is not it"), (3, [3], "a list")])
def test_a_wrong_answer_hears_what_is_off(capsys, answer, expected, off):
    out = said(capsys, check.value, "x", answer, expected)
    assert out.startswith("✗ not yet: x. Hint: ") and off in out


def test_own_hints_come_first(capsys):
    hints = {50: "that is half", (lambda a: a > 1000): "in microseconds, please", (lambda a: a.oops): "never said"}
    assert "that is half." in said(capsys, check.value, "x", 50, 100, hints=hints)
    assert "in microseconds, please." in said(capsys, check.value, "x", 100_000, 100, hints=hints)
    assert "too small" in said(capsys, check.value, "x", 60, 100, hints=hints)


@pytest.mark.parametrize("answer", [..., None])
def test_untouched_answers_are_not_attempted(capsys, answer):
    assert said(capsys, check.value, "x", answer, 1) == "○ not attempted: x\n"


def stub(a, b):
    ...


def half_stub(a, b):
    total = ...
    return total + 1


def honest_stub(a, b):
    raise NotImplementedError


@pytest.mark.parametrize("fn", [stub, half_stub, honest_stub, ..., None])
def test_untouched_functions_are_not_attempted(capsys, fn):
    assert said(capsys, check.function, "add", fn, [((1, 2), 3)]) == "○ not attempted: add\n"


def test_functions_are_judged_on_every_case(capsys):
    cases = [((1, 2), 3), ((2, 2), 4)]
    assert said(capsys, check.function, "add", lambda a, b: a + b, cases) == "✓ correct: add\n"
    out = said(capsys, check.function, "add", lambda a, b: a + 2, [*cases, ((1, 5), 6)], hints={3: "b is not used"})
    assert out == "✗ not yet: add. Hint: add(1, 5) gave 3: b is not used.\n"
    assert "add(2, 2) returned nothing" in said(capsys, check.function, "add", lambda a, b: 3 if a == 1 else None,
                                                cases).lower()
    assert "raised ZeroDivisionError" in said(capsys, check.function, "add", lambda a, b: a / 0, cases)


def test_a_function_cannot_change_the_cases(capsys):
    values = [3, 1]
    said(capsys, check.function, "f", lambda v: v.sort() or v, [((values,), [1, 3])])
    assert values == [3, 1]


def test_expected_errors_are_shown_kindly(capsys):
    with check.expect_error("stream is capturing"):
        try:
            raise ValueError("operation not permitted when stream is capturing\nsecond line")
        except ValueError as first:
            raise RuntimeError("previous error during capture") from first
    assert capsys.readouterr().out == ("As expected, this fails. ValueError: operation not permitted when stream is "
                                       "capturing\n")


def test_no_error_or_another_one_fails():
    with pytest.raises(AssertionError, match="nothing was raised"), check.expect_error("capture"):
        pass
    with pytest.raises(AssertionError, match="not: else"), check.expect_error("capture"):
        raise ValueError("else")
    with pytest.raises(KeyboardInterrupt), check.expect_error("capture"):
        raise KeyboardInterrupt


def test_a_call_is_written_as_one_would_type_it(capsys):
    out = said(capsys, check.function, "f", lambda *_: 7.0, [((2e9, 4096, "x", [1.5]), 1.0)])
    assert "f(2e+09, 4096, 'x', [1.5]) gave 7" in out
