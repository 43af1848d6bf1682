"""Results that are sent to others: made, read back, refused when broken or hostile, compared, held against each other."""

import copy
import json
import os
import platform
import random

import pytest

from labkit import __main__ as cli
from labkit import claims, experiments, results
from labkit.results import ResultsError


@pytest.fixture(scope="module")
def tables():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABKIT_TABLES", "recorded")
        return results.gather(results.sent())[0]


@pytest.fixture(scope="module")
def sent(tables):
    return results.collect(tables)


@pytest.fixture
def document(sent):
    return copy.deepcopy(sent)


@pytest.fixture
def kept(tmp_path):
    def keep(document, name="a.json"):
        (tmp_path / name).write_text(document if isinstance(document, str) else json.dumps(document))
        return tmp_path / name
    return keep


def test_what_is_sent_is_small_and_comes_back_as_it_was(sent, kept):
    path = kept(sent)
    assert results.read(path) == sent and path.stat().st_size < 200_000
    assert set(sent["tables"]) == set(results.TABLES) and set(sent["verdicts"]) == set(claims.CLAIMS)
    assert {v["verdict"] for v in sent["verdicts"].values()} <= {claims.HOLDS, claims.LIMITS, claims.FAILS}


def test_what_is_sent_names_neither_host_nor_user_nor_path(sent):
    text = json.dumps(sent)
    assert "/" not in text and platform.node() not in text and os.path.expanduser("~") not in text


def test_a_point_that_was_skipped_is_not_sent(tables, sent):
    swept = tables["sweep_llama"]
    assert len(sent["tables"]["sweep_llama"]) == (swept["skipped"] == "").sum()


@pytest.mark.parametrize("text, why", [
    ("", "cannot be read"), ("[1, 2", "cannot be read"), ("[" * 100_000, "cannot be read"), ("[]", "does not hold results"),
    ('{"kind": "labkit results"}', "schema that is no number"), ("NaN", "NaN is no number"), ('"é"', "does not hold results"),
    ('{"kind": "labkit results", "schema": 2}', "has schema 2, and this labkit reads 1: update labkit"),
    ('{"kind": "labkit results", "schema": 0}', "has schema 0, and this labkit reads 1: export it anew"),
    ('{"kind": "labkit results", "schema": 1, "live": true}', "machine, verdicts or tables are not there")])
def test_files_that_are_no_results_are_named(kept, text, why):
    with pytest.raises(ResultsError, match=f"a.json is left out: .*{why}"):
        results.read(kept(text))


def change(*keys, to):
    def do(document):
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = to
    return do


SWEEP = "tables", "sweep_gpt2"


@pytest.mark.parametrize("do, why", [
    (change("machine", "gpu", to="<script>alert(1)</script>"), "its machine has 'gpu'"),
    (change("machine", "gpu", to="$\\frac$"), "its machine has 'gpu'"), (change("machine", "gpu", to=7), "which GPU"),
    (change("machine", "gpu", to="x" * 121), "its machine has 'gpu'"), (change("machine", "gpu", to="a\u202eb"), "its machine has 'gpu'"),
    (change("machine", "hostname", to="box"), "its machine has 'hostname'"), (change("machine", "gpu", to=" "), "which GPU"),
    (change("machine", "torch", to=["2.11"]), "its machine has 'torch'"), (change("made_at", to="yesterday"), "its date is none"),
    (change("live", to="yes"), "machine, verdicts or tables"), (change("verdicts", "moon", to={}), "judges 'moon'"),
    (change("verdicts", "share", to="holds"), "verdict on share is none"),
    (change("verdicts", "share", "verdict", to="holds <b>"), "verdict on share is none"),
    (change("verdicts", "share", "number", to="many"), "verdict on share is none"),
    (change("verdicts", "share", "number", to=10**400), "verdict on share is none"),
    (change("tables", "sweep_moon", to=[]), "table 'sweep_moon' is unknown"), (change(*SWEEP, to=[]), "has no rows"),
    (change(*SWEEP, to=[{}] * 2001), "more than 2,000"), (change(*SWEEP, 0, to={"a": 1}), "other columns"),
    (change(*SWEEP, 0, "speedup", to=True), "other columns"), (change(*SWEEP, 0, "speedup", to="3"), "speedup is not within"),
    (change(*SWEEP, 0, "speedup", to=1e9), "speedup is not within"), (change(*SWEEP, 0, "model", to={"a": 1}), "other columns"),
    (change(*SWEEP, 0, "speedup", to=None), "speedup is not within")])
def test_what_could_do_harm_is_refused_by_name(document, kept, do, why):
    do(document)
    with pytest.raises(ResultsError, match=f"a.json is left out: .*{why}"):
        results.read(kept(document))


def test_the_same_row_twice_and_a_huge_file_are_refused(document, kept):
    document["tables"]["launch_cost"].append(document["tables"]["launch_cost"][0])
    with pytest.raises(ResultsError, match="'launch_cost' has the same row twice"):
        results.read(kept(document))
    with pytest.raises(ResultsError, match="it is 3 MiB large, and results take at most 2"):
        results.read(kept(" " * 3 * 2**20))


def test_mangled_files_are_read_or_refused_and_nothing_else(document, kept):
    chance, text = random.Random(5), json.dumps(document)
    bits = ["{", "]", '"', ",", "null", "-1e999", "true", "\\u0000", "<img src=x>", "\x00", "9" * 400, "[]"]
    refused = 0
    for _ in range(300):
        at, cut = chance.randrange(len(text)), chance.randrange(12)
        path = kept(text[:at] + chance.choice(bits) + text[at + cut:])
        try:
            found = results.read(path)
        except ResultsError:
            refused += 1
        else:
            assert "<img" not in json.dumps(found)
    assert refused > 250


def test_a_folder_is_read_and_duplicates_are_named(document, kept, tmp_path):
    kept(document), kept(document, "b.json"), kept("{", "c.json"), kept("{", "not-read.txt")
    document["machine"]["torch"] = "2.13.0"
    kept(document, "d.json")
    found, reasons = results.read_all([tmp_path, tmp_path / "none.json"])
    assert list(found) == ["NVIDIA H200", "NVIDIA H200, torch 2.13.0"]
    assert [reason.partition(":")[0] for reason in reasons] == [f"{name}.json is left out" for name in ("b", "c", "none")]
    assert "the same as a.json" in reasons[0]


def test_two_runs_agree_when_their_intervals_touch_and_disagree_when_not(document):
    after = copy.deepcopy(document)
    assert results.disagreements(document, after) == (306, [])
    row = after["tables"]["sweep_gpt2"][3]
    old, width = row["speedup_high"], row["speedup_high"] - row["speedup_low"]
    row |= {"speedup_low": old, "speedup": old, "speedup_high": old + width}
    assert results.disagreements(document, after)[1] == []
    row |= {"speedup_low": old + 0.01, "speedup": old + 0.01}
    [(where, before, now)] = results.disagreements(document, after)[1]
    assert where == "sweep_gpt2: model gpt2, layers 12, width 768, length 128, precision float32, batch 8"
    assert before[2] == old and now[1] == old + 0.01
    assert len(results.disagreements(after, document)[1]) == 1


def test_runs_on_other_machines_or_without_a_speedup_in_common_are_not_held_against_each_other(document):
    other = copy.deepcopy(document)
    other["machine"] |= {"gpu": "NVIDIA L4", "driver": "1"}
    with pytest.raises(ResultsError, match=r"not two runs on one machine \(gpu: NVIDIA H200 and NVIDIA L4\)"):
        results.disagreements(document, other)
    with pytest.raises(ResultsError, match="no speedup in common"):
        results.disagreements(document, document | {"tables": {"launch_cost": document["tables"]["launch_cost"]}})


def test_side_by_side_shows_what_was_measured_and_leaves_out_what_was_not(document):
    other = copy.deepcopy(document)
    other["machine"]["gpu"] = "NVIDIA L4"
    del other["tables"]["sweep_llama"], other["tables"]["launch_cost"]
    table = results.side_by_side({"one": document, "two": other})
    cost, llama = (next(name for name in table.index if word in name) for word in ("PyTorch", "llama"))
    row = next(r for r in results.first_curve(document["tables"]["sweep_llama"]) if r["batch"] == 1)
    assert table.loc[llama, "one"] == f"{row['speedup']:.3g}"
    assert table.loc[[cost, llama], "two"].isna().all() and table.loc["torch", "two"] == other["machine"]["torch"]


def test_one_table_that_fails_costs_no_other(monkeypatch):
    monkeypatch.setenv("LABKIT_TABLES", "recorded")

    def fails():
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setitem(experiments.EXPERIMENTS, "first_win", fails)
    tables, missing = results.gather(["first_win", "ceilings"])
    assert list(tables) == ["ceilings"] and missing == {"first_win": "out of memory"}
    with pytest.raises(ResultsError, match="nothing to show: out of memory"):
        results.gather(["first_win"])
    with pytest.raises(ResultsError, match="no experiment is called moon"):
        results.gather(["moon"])


def test_an_interrupted_gathering_keeps_what_is_there(monkeypatch):
    monkeypatch.setenv("LABKIT_TABLES", "recorded")

    def stop():
        raise KeyboardInterrupt

    monkeypatch.setitem(experiments.EXPERIMENTS, "sweep_mlp", stop)
    tables, missing = results.gather(["first_win", "sweep_mlp", "ceilings"])
    assert list(tables) == ["first_win"] and missing == {"sweep_mlp": "interrupted", "ceilings": "interrupted"}


# ---- the commands

@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LABKIT_TABLES", "recorded")
    return tmp_path


def test_export_never_writes_over_an_earlier_file(here, capsys):
    assert cli.main(["export"]) == cli.main(["export"]) == 0
    first, second = sorted(here.glob("results-nvidia-h200-*.json"), key=lambda path: len(path.name))
    assert first.read_text() == second.read_text() and results.read(first)
    assert f"Written: {first.name}" in capsys.readouterr().out


def test_check_answers_with_its_exit_status(here, document, capsys):
    row = document["tables"]["sweep_mlp"][0]
    (here / "now.json").write_text(json.dumps(document))
    assert cli.main(["report", "--check", "now.json", "now.json"]) == cli.main(["report", "--check", "now.json"]) == 0
    document["machine"]["driver"] = "999.0"
    row |= {name: value * 3 for name, value in row.items() if name.startswith("speedup")}
    (here / "then.json").write_text(json.dumps(document))
    assert cli.main(["report", "--check", "now.json", "then.json"]) == 1
    told = capsys.readouterr().out.splitlines()[-2:]
    assert told[0].startswith("sweep_mlp: model mlp, layers 24, width 1024, length 1, precision float32, batch 1: speedup ")
    assert told[1] == "1 of 306 speedups lie outside of each other's intervals; changed: driver 580.159.04 -> 999.0."
    assert cli.main(["report", "--check", "a", "b", "c"]) == 1 and "before and after" in capsys.readouterr().err


def test_compare_prints_writes_a_board_and_names_what_it_leaves_out(here, document, capsys):
    (here / "sent").mkdir()
    (here / "sent" / "a.json").write_text(json.dumps(document))
    document["machine"]["gpu"], document["verdicts"]["share"]["verdict"] = "NVIDIA L4", claims.HOLDS
    (here / "sent" / "b.json").write_text(json.dumps(document))
    (here / "sent" / "c.json").write_text("{}")
    assert cli.main(["compare", "sent", "--out", "new/board.html"]) == 0
    told = capsys.readouterr()
    assert "NVIDIA H200" in told.out and "NVIDIA L4" in told.out and "c.json is left out" in told.err
    assert "share: does not hold here (NVIDIA H200); holds (NVIDIA L4)" in told.out
    assert "c.json is left out" in (here / "new" / "board.html").read_text()
    assert cli.main(["compare", "none"]) == 1 and "no results to compare" in capsys.readouterr().err
