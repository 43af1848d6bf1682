"""The list of operations is sound as written, and each row tells what became of its try (children are played here)."""

import ast
import builtins
import json
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from labkit import isolate, operations
from labkit.experiments import limits

LISTED = operations.listed()
TABLES = sorted(Path(operations.__file__).parent.glob("recordings/*/operation_table.json"))
TRIED = [(one["operation"], one["before"], one["code"]) for one in LISTED]
TRIED += [(f"instead of {one['operation']}", "", f"dict({one['instead']})" if "generators=" in one["instead"] else one["instead"])
          for one in LISTED if one["instead"]]


def test_many_operations_each_named_once_and_each_line_whole():
    assert len({one["operation"] for one in LISTED}) == len(LISTED) >= 60
    for one in LISTED:
        assert one.keys() == {"group", "operation", "before", "code", "instead"} and None not in one.values(), one
        assert one["group"] and one["operation"] and one["code"], one
        assert all(value == value.strip() for value in one.values()), one


def test_each_group_stands_together():
    groups = [one["group"] for one in LISTED]
    assert groups == [group for group in dict.fromkeys(groups) for _ in range(groups.count(group))]


def test_each_way_round_is_another_way():
    assert not [one for one in LISTED if one["instead"] == one["code"]]


@pytest.fixture(scope="module")
def given():
    """Return the names that expressions are written with; making what they stand for would need a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        for library in ("torch", "torch.nn", "torch.nn.attention"):
            patch.setitem(sys.modules, library, MagicMock())
        return operations.table_names().keys()


@pytest.mark.parametrize("before, code", [pytest.param(before, code, id=name) for name, before, code in TRIED])
def test_it_compiles_and_uses_names_that_there_are(before, code, given):
    trees = [ast.parse(before), ast.parse(code, mode="eval")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    made = {node.arg for node in nodes if isinstance(node, ast.arg)}
    made |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    assert used and used <= given | made | set(dir(builtins))


@pytest.mark.skipif(not TABLES, reason="no operation_table is recorded yet")
@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.parent.name)
def test_what_was_recorded_is_what_is_listed(path):
    rows = json.loads(path.read_text("utf-8"))["rows"]
    told = [(row["group"], row["operation"], row["code"]) for row in rows]
    assert told == [(one["group"], one["operation"], "; ".join(filter(None, (one["before"], one["code"])))) for one in LISTED]
    instead = {one["operation"]: one["instead"] for one in LISTED if one["instead"]}
    for row in rows:
        if row["result"] != "captured":
            assert row["instead"] == instead.get(row["operation"], row["instead"]), row
            assert row["operation"] in instead or row["instead"].startswith("split"), row


class Died(Exception):
    """How the child ended."""


@pytest.fixture
def tries(monkeypatch):
    """Run here what is meant for a child; attempt() gives, or raises, what stands in a dict; returns it, and what was asked."""
    answers, asked = {}, []

    def attempt(before, code, options="", split=False, like=""):
        assert like in ("", asked[0][1] if asked else "") and options in ("", "generators=(generator,)")
        asked.append((before, code, split))
        if isinstance(answer := answers[before, code, split], Died):
            raise answer
        return answer

    def run(source, timeout_s=60.0):
        *begin, last = source.splitlines()
        exec("\n".join(begin), given := {})
        try:
            shown = [isolate._display(eval(last, given))]
        except Died as how:
            return isolate.Result("", [], f"the child process {how}", None, 0.1, str(how))
        return isolate.Result("", shown, None, None, 0.1, "finished")

    monkeypatch.setattr(operations, "capture_trial", attempt)
    monkeypatch.setattr(isolate, "run", run)
    return answers, asked


WAITS = {"captured": False, "cold": False, "kind": "it waits", "cause": "RuntimeError: no", "way_round": "wait less",
         "repaired": True}
RIGHT = {"captured": True, "cold": True, "kernels": 1, "difference": 0.0}


def row_of(code, before="", instead=""):
    return limits._operation({"group": "mine", "operation": "this", "before": before, "code": code, "instead": instead})


def test_a_captured_operation_is_a_row_and_nothing_else_is_tried(tries):
    answers, asked = tries
    answers["", "x * 2", False] = RIGHT
    assert row_of("x * 2", instead="x + 1") == {
        "group": "mine", "operation": "this", "code": "x * 2", "result": "captured", **RIGHT}
    assert asked == [("", "x * 2", False)]


def test_a_failing_operation_is_told_with_its_way_round(tries):
    answers, asked = tries
    answers |= {("n = 1", "x + x.item()", False): WAITS, ("n = 1", "x + 1", False): RIGHT | {"difference": 0.25, "same": True}}
    assert row_of("x + x.item()", before="n = 1", instead="x + 1") == {
        "group": "mine", "operation": "this", "code": "n = 1; x + x.item()", "result": "fails", **WAITS,
        "instead": "x + 1", "instead_captured": True, "instead_difference": 0.25, "same": "yes"}
    assert asked == [("n = 1", "x + x.item()", False), ("n = 1", "x + 1", False)]


def test_a_generator_is_registered_as_its_way_round_says(tries):
    answers, asked = tries
    answers["", "draw(generator)", False] = WAITS
    row = row_of("draw(generator)", instead="generators=(generator,)")
    assert asked == [("", "draw(generator)", False)] * 2 and row["instead"] == "generators=(generator,)"
    assert row["same"] == "no" and not row["instead_captured"]


def test_without_a_way_round_the_call_is_split_around_the_operation(tries):
    answers, asked = tries
    one = ("m = 'it', \"so\"", "m(x) + '\\n'")
    answers |= {(*one, False): WAITS, (*one, True): RIGHT}
    row = row_of(one[1], before=one[0])
    assert asked == [(*one, False), (*one, True)]
    assert row["instead"] == "split: a graph in front, the operation by hand"
    assert (row["result"], row["instead_captured"], row["instead_difference"]) == ("fails", True, 0.0)


@pytest.mark.parametrize("difference", [0.5, float("nan")])
def test_a_replay_that_is_off_counts_as_wrong_and_its_way_round_is_tried(tries, difference):
    answers, asked = tries
    answers |= {("", "x", False): RIGHT | {"difference": difference}, ("", "x + 1", False): RIGHT}
    row = row_of("x", instead="x + 1")
    assert row["result"] == "captured, but wrong" and row["instead_captured"] and len(asked) == 2


@pytest.mark.parametrize("how", ["crashed: SIGSEGV", "timed out after 60 s"])
def test_a_child_that_did_not_come_back_is_told_as_what_became_of_it(tries, how):
    answers, _ = tries
    answers |= {("", "abort()", False): Died(how), ("", "abort()", True): Died(how)}
    row = row_of("abort()")
    assert (row["result"], row["kind"], row["cause"]) == ("no answer", how, f"the child process {how}")
    assert (row["captured"], row["cold"], row["instead_captured"], row["instead_difference"]) == (False, False, False, None)


def test_the_table_has_a_row_for_each_operation_in_order(tries):
    answers, _ = tries
    answers |= {(one["before"], one["code"], False): RIGHT for one in LISTED}
    rows = limits.operation_table.measure()
    assert [(row["group"], row["operation"]) for row in rows] == [(one["group"], one["operation"]) for one in LISTED]
    assert {row["result"] for row in rows} == {"captured"} and json.loads(json.dumps(rows)) == rows
