"""Checks for guesses and exercises: they say not attempted, not yet (and what is off) or correct, and never scold."""

import copy
import math
import numbers
import textwrap
from collections.abc import KeysView, ValuesView
from contextlib import contextmanager, suppress

from labkit import claims, progress

NOT_ATTEMPTED, NOT_YET, CORRECT = "○ not attempted", "✗ not yet", "✓ correct"


def guess(guess, actual, unit="", what="Measured"):
    """Print a guess beside what was measured (or say `what` it is instead); any guess is fine, also none."""
    guess, actual, unit = _plain(guess), _plain(actual), unit and f" {unit}"
    if actual != actual:  # NaN, of what was left out
        print("Not measured here, so there is nothing to compare a guess with.")
        return
    measured = f"{what}: {_said(actual)}{unit}."
    if _is_number(actual) and not _is_number(guess) and guess is not ... and guess is not None:
        print(f"{measured} Your guess, {guess!r}, is no number: write one without quotes, unit or comma.")
    elif guess is ... or guess is None:
        print(f"{measured} Not guessed yet: put a guess in place of ... and run both cells again.")
    else:
        print(f"Your guess: {_said(guess)}{unit}. {measured} {_distance(guess, actual)}")


def _distance(guess, actual):
    if _same(guess, actual, 0.0):
        return "That is it."
    if not (_is_number(guess) and _is_number(actual)):
        return "Not what was measured: good to know."
    if guess * actual <= 0:
        return f"You were {_said(abs(guess - actual))} away."
    factor, side = max(guess / actual, actual / guess), "low" if abs(guess) < abs(actual) else "high"
    return "Close." if factor <= 1.5 else f"Too {side} by a factor of {factor:,.{1 if factor < 10 else 0}f}."


def value(name, answer, expected, rel=0.02, hints=None):
    """Check a number (within `rel`), a word, a truth value, or a list or tensor of those.

    `hints` maps a wrong answer, or a function of the answer that is true for wrong ones, to what to say.
    """
    _say(name, *_judged(_plain(answer), _plain(expected), rel, hints))


def function(name, fn, cases, rel=0.02, hints=None):
    """Check a function on `cases`, a list of (arguments, expected); a stub that returns nothing is not attempted."""
    for i, (args, expected) in enumerate(cases):
        args = args if isinstance(args, tuple) else (args,)
        call = f"{name}({', '.join(map(_as_typed, map(_plain, args)))})"
        try:
            answer = _plain((fn or ...)(*copy.deepcopy(args)))
        except Exception as error:  # using the ... of a stub raises an error that says "ellipsis"
            if not isinstance(error, NotImplementedError) and "ellipsis" not in str(error).lower():
                return _say(name, NOT_YET, f"{call} raised {type(error).__name__}: {error}")
            answer = ...
        verdict, why = _judged(answer, _plain(expected), rel, hints)
        if verdict == NOT_ATTEMPTED and i > 0:
            verdict, why = NOT_YET, f"{call} returned nothing"
        elif verdict == NOT_YET:
            why = f"{call} gave {_said(answer)}: {why}"
        if verdict != CORRECT:
            return _say(name, verdict, why)
    _say(name, CORRECT)


@contextmanager
def expect_error(fragment):
    """Expect an error whose message, or that of one behind it, holds `fragment`: print it, else AssertionError."""
    try:
        yield
    except Exception as error:
        behind = error
        while behind:
            if fragment.lower() in f"{type(behind).__name__}: {behind}".lower():
                return print(f"As expected, this fails. {type(behind).__name__}: {_first_line(behind)}")
            behind = behind.__cause__ or behind.__context__
        raise AssertionError(f"expected an error that says {fragment!r}, not: {_first_line(error)}") from error
    raise AssertionError(f"expected an error that says {fragment!r}, but nothing was raised")


def claim(id, table=None):
    """Print what a table says about one of the article's claims; ValueError as for claims.judge."""
    print(claims.judge(id, table))


def _say(name, verdict, hint=""):
    if verdict != NOT_ATTEMPTED:
        progress.note(name, progress.DONE if verdict == CORRECT else progress.TRIED)
    end = "" if hint.endswith(("?", "!", ".")) else "."
    print(f"{verdict}: {name}{hint and '. Hint: ' + hint + end}")


def _judged(answer, expected, rel, hints):
    """Return which of the three answers to give, and a hint for a wrong one."""
    if answer is ... or answer is None:
        return NOT_ATTEMPTED, ""
    if _same(answer, expected, rel):
        return CORRECT, ""
    return NOT_YET, _hint(answer, hints, rel) or _off(answer, expected, rel)


def _plain(value):
    """Turn tensors, arrays and their scalars, fractions, and what a dict holds into Python numbers and lists."""
    with suppress(Exception):  # a class, a tensor without data, a list that holds itself
        plain = value.tolist() if hasattr(value, "tolist") else value
        if isinstance(plain, numbers.Number) and not isinstance(plain, (int, float, complex)):
            return float(plain)
        return [_plain(item) for item in plain] if isinstance(plain, (list, tuple, range, KeysView, ValuesView)) else plain
    return value


def _is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def _same(answer, expected, rel):
    if isinstance(expected, list):
        return isinstance(answer, list) and len(answer) == len(expected) and all(
            _same(a, e, rel) for a, e in zip(answer, expected, strict=True))
    answer = answer[0] if isinstance(answer, list) and len(answer) == 1 else answer  # a tensor of one number
    if _is_number(expected):
        return _is_number(answer) and math.isclose(answer, expected, rel_tol=rel, abs_tol=1e-12)
    answer, expected = (v.strip().casefold() if isinstance(v, str) else v for v in (answer, expected))
    return type(answer) is type(expected) and answer == expected


def _hint(answer, hints, rel):
    for wrong, hint in (hints or {}).items():
        with suppress(Exception):  # a hint's test that does not fit this kind of answer
            if wrong(answer) if callable(wrong) else _same(answer, _plain(wrong), rel):
                return hint
    return ""


def _off(answer, expected, rel):
    """Say what is off about a wrong answer without giving the right one away."""
    kinds = {bool: "True or False", int: "a number", float: "a number", str: "a word", list: "a list"}
    want, got = (kinds.get(type(v), f"something else ({type(v).__name__})") for v in (expected, answer))
    if want != got:
        return f"this should be {want}, and is {got}"
    if want == "a list" and len(answer) != len(expected):
        return f"this should have {len(expected)} items, and has {len(answer)}"
    if want == "a list":
        i, a, e = next((i, a, e) for i, (a, e) in enumerate(zip(answer, expected)) if not _same(a, e, rel))
        return f"the first that is off is item {i + 1} of {len(expected)}: {_off(a, e, rel)}"
    if want != "a number" or not _is_number(answer):
        return f"{_said(answer)} is not it"
    for power in (1e3, 1e6, 1e9, 1e-3, 1e-6, 1e-9):
        if math.isclose(answer * power, expected, rel_tol=0.05):
            return f"off by a factor of {max(power, 1 / power):,.0f}: which unit is asked for?"
    return "the sign is off" if answer * expected < 0 else (
        f"{_said(answer)} is too {'small' if answer < expected else 'large'}")


def _said(value):
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if _is_number(value) else textwrap.shorten(str(value), 200, placeholder=" ...")


def _as_typed(value):
    """Write an argument as one would type it: 2e9, not 2,000,000,000."""
    if isinstance(value, float):
        return f"{value:g}"
    return repr(value) if isinstance(value, (int, str)) else _said(value)


def _first_line(error):
    return str(error).strip().partition("\n")[0]
