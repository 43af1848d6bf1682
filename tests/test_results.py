"""Results that are sent to others: made, read back, refused when broken or hostile, compared, held against each other."""

import copy
import json
import os
import platform
import random
import sys

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
    assert {v["verdict"] for v in sent["verdicts"].values()} <= {claims.HOLDS, claims.LIMITS, claims.FAILS, claims.OUTDATED}


def test_what_is_sent_names_neither_host_nor_user_nor_path(sent):
    text = json.dumps(sent)
    assert "/" not in text and platform.node() not in text and os.path.expanduser("~") not in text


def test_a_point_that_was_skipped_is_not_sent(tables, sent):
    swept = tables["sweep_llama"]
    assert len(sent["tables"]["sweep_llama"]) == (swept["skipped"] == "").sum()


@pytest.mark.parametrize("text, why", [
    ("", "cannot be read"), ("[1, 2", "cannot be read"), ("[" * 100_000, "cannot be read"), ("[]", "does not hold results"),
    ('{"kind": "labkit results"}', "'schema' is a required property"), ("NaN", "NaN is no number"), ('"é"', "does not hold results"),
    ('{"kind": "labkit results", "schema": 2}', "has schema 2, and this labkit reads 1: update labkit"),
    ('{"kind": "labkit results", "schema": 0}', "has schema 0, and this labkit reads 1: export it anew"),
    ('{"kind": "labkit results", "schema": 1e999}', "schema is not what it should be"),
    ('{"kind": "labkit results", "schema": 1, "live": true}', "'measured_from' is a required property")])
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
    *((change("machine", "gpu", to=gpu), "machine.gpu .*could be markup") for gpu in (
        "<script>alert(1)</script>", "$\\frac$", "a\u202eb", "a\n", "&lt;", " ", "")),
    (change("machine", "gpu", to=7), "machine.gpu"), (change("machine", "gpu", to="x" * 121), "machine.gpu .* too long"),
    (change("machine", "hostname", to="box"), "machine .*'hostname'"), (change("machine", to={}), "'gpu' is a required"),
    (change("machine", "torch", to=["2.11"]), "machine.torch .* no number, short text or null"),
    (change("measured_from", to="yesterday"), "measured_from .* not a 'date'"), (change("live", to="yes"), "live is not"),
    (change("verdicts", "moon", to={}), "verdicts.moon"), (change("verdicts", "share", to="holds"), "verdicts.share"),
    (change("verdicts", "share", "verdict", to="holds <b>"), "verdicts.share.verdict .* none of those"),
    *((change("verdicts", "share", "number", to=number), "verdicts.share.number") for number in ("many", 10**400, True, 1e301)),
    (change("tables", "sweep_moon", to=[]), "tables .*'sweep_moon'"), (change(*SWEEP, to=[]), "sweep_gpt2 .* no rows"),
    (change(*SWEEP, to=[{}] * 2001), "sweep_gpt2"), (change(*SWEEP, 0, to={"a": 1}), "sweep_gpt2.0"),
    *((change(*SWEEP, 0, "speedup", to=speedup), "sweep_gpt2.0.speedup") for speedup in (True, "3", None)),
    (change(*SWEEP, 0, "model", to={"a": 1}), "sweep_gpt2.0.model"),
    (change(*SWEEP, 0, "speedup", to=1e9), "speedup is not within its interval"),
    (change(*SWEEP, 0, "speedup_low", to=-1.0), "sweep_gpt2.0.speedup_low"),
    *((change(*SWEEP, 0, "batch", to=batch), "sweep_gpt2.0.batch") for batch in ("x", None, 0, 1.5, 10**200)),
    (change(*SWEEP, 0, "width", to="big"), "sweep_gpt2.0.width"), (change("pad", to=[[]]), "the file .*'pad'")])
def test_what_could_do_harm_is_refused_by_name(document, kept, do, why):
    do(document)
    with pytest.raises(ResultsError, match=f"a.json is left out: .*{why}"):
        results.read(kept(document))


def test_the_same_row_twice_and_a_huge_file_are_refused(document, kept):
    document["tables"]["launch_cost"].append(document["tables"]["launch_cost"][0])
    with pytest.raises(ResultsError, match="launch_cost has the same row twice"):
        results.read(kept(document))
    with pytest.raises(ResultsError, match="it is larger than 2 MiB"):
        results.read(kept(" " * 3 * 2**20))


def test_mangled_files_are_read_or_refused_and_nothing_else(document, kept):
    chance, text = random.Random(5), json.dumps(document)
    bits = ["{", "]", '"', ",", "null", "-1e999", "true", "\\u0000", "<img src=x>", "\x00", "9" * 400, "[]"]
    refused = 0
    for _ in range(80):
        at, cut = chance.randrange(len(text)), chance.randrange(12)
        path = kept(text[:at] + chance.choice(bits) + text[at + cut:])
        try:
            found = results.read(path)
        except ResultsError:
            refused += 1
        else:
            assert "<img" not in json.dumps(found)
    assert refused > 60


def test_a_claim_that_only_another_version_judges_is_no_reason_to_refuse(document, kept):
    document["verdicts"]["moon"] = document["verdicts"]["share"]
    assert results.read(kept(document)) == document and "moon" not in results.apart({"a": document, "b": document})


def test_a_folder_is_read_and_what_is_left_out_is_named(document, kept, tmp_path):
    kept(document), kept(document, "b.json"), kept("{", "c.json"), kept("no results", "list.txt"), kept("{", ".part")
    os.mkfifo(tmp_path / "e.json")
    (tmp_path / "f.json").mkdir()
    document["machine"]["torch"] = "2.13.0"
    kept(document, "d.json")
    found, reasons = results.read_all([tmp_path, tmp_path / "a.json", tmp_path / "none.json"])
    assert list(found) == ["NVIDIA H200 (a)", "NVIDIA H200 (d)"]  # one path named twice is one file
    assert [reason.partition(":")[0] for reason in reasons] == [
        f"{name} is left out" for name in ("b.json", "c.json", "e.json", "f.json", "list.txt", "none.json")]
    assert "the same as a.json" in reasons[0] and reasons[2].endswith("it is no file")


def test_names_never_cost_results_and_there_is_an_end(document, kept, tmp_path, monkeypatch):
    for number, gpu in enumerate(["NVIDIA H200 (a, 2)", "NVIDIA H200 (a)", "NVIDIA H200 (a)"]):
        (tmp_path / str(number)).mkdir()
        document["machine"] |= {"gpu": gpu, "torch": f"2.{number}"}
        kept(document, f"{number}/a.json")
    document["machine"] |= {"gpu": "NVIDIA H200", "torch": "9"}
    kept(document, "a.json"), kept(document | {"older_code": True}, "b.json")
    found, reasons = results.read_all([*tmp_path.glob("[0-9]"), tmp_path])
    assert len(found) == 5 and not reasons
    monkeypatch.setattr(results, "MOST_FILES", 1)
    found, reasons = results.read_all([tmp_path])
    assert len(found) == 1 and reasons == ["1 files are left out: 1 are looked at"]
    kept("a picture", "IMG_1.png")
    assert len(results.read_all([tmp_path])[0]) == 1  # whatever else lies there


def test_file_names_cannot_do_harm(document, kept, tmp_path):
    kept(document, "a.json")
    document["machine"]["torch"] = "2.13.0"
    kept(document, "<img src=x>$.json")
    assert "NVIDIA H200 (_img src_x__)" in results.read_all([tmp_path])[0]


def test_two_runs_agree_when_their_intervals_touch_and_disagree_when_not(document):
    after = copy.deepcopy(document)
    count = sum(len(rows) for name, rows in document["tables"].items() if name != "launch_cost")
    assert results.disagreements(document, after) == (count, 0, [])
    row = after["tables"]["sweep_gpt2"][3]
    old, width = row["speedup_high"], row["speedup_high"] - row["speedup_low"]
    row |= {"speedup_low": old, "speedup": old, "speedup_high": old + width}
    assert results.disagreements(document, after)[2] == []
    row |= {"speedup_low": old + 0.01, "speedup": old + 0.01}
    [(where, before, now)] = results.disagreements(document, after)[2]
    assert where == "sweep_gpt2: model gpt2, layers 12, width 768, length 128, precision float32, batch 8"
    assert before[2] == old and now[1] == old + 0.01
    assert len(results.disagreements(after, document)[2]) == 1
    after["tables"]["sweep_mlp"].pop()
    assert results.disagreements(document, after)[:2] == (count - 1, 1)


def test_runs_on_other_machines_or_without_a_speedup_in_common_are_not_held_against_each_other(document):
    other = copy.deepcopy(document)
    other["machine"] |= {"gpu": "NVIDIA L4", "driver": "1"}
    with pytest.raises(ResultsError, match=r"not two runs on one machine \(gpu: NVIDIA H200 and NVIDIA L4\)"):
        results.disagreements(document, other)
    with pytest.raises(ResultsError, match="no speedup in common"):
        results.disagreements(document, document | {"tables": {"launch_cost": document["tables"]["launch_cost"]}})


def test_side_by_side_shows_what_was_measured_and_leaves_out_what_was_not(document):
    other = copy.deepcopy(document)
    other["measured_from"], other["live"], other["older_code"] = "2020-01-01", True, True
    del other["tables"]["sweep_llama"], other["tables"]["launch_cost"]
    table = results.side_by_side({"one": document, "two": other})
    cost, llama = (next(values for name, values in table.items() if word in name) for word in ("PyTorch", "Llama"))
    row = results.first_curve(document["tables"]["sweep_llama"])[0]
    assert llama[0].startswith(f"{row['speedup']:.2f} ({row['speedup_low']:.2f} to ") and llama[1] == ""
    assert table["one launch, by PyTorch"][1] == "" and table["one launch, by PyTorch"][0].endswith(" µs") and cost
    assert table["measured"][1] == f"2020-01-01 to {document['measured_until']}, live, by an earlier version"


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
    row, driver = document["tables"]["sweep_mlp"][0], document["machine"]["driver"]
    (here / "now.json").write_text(json.dumps(document))
    assert cli.main(["report", "--check", "now.json", "--after", "now.json"]) == 0
    document["machine"]["driver"] = "999.0"
    row |= {name: value * 3 for name, value in row.items() if name.startswith("speedup")}
    (here / "then.json").write_text(json.dumps(document))
    assert cli.main(["report", "--check", "now.json", "--after", "then.json"]) == 1
    told = capsys.readouterr().out.splitlines()[-2:]
    assert told[0].startswith("sweep_mlp: model mlp, layers 24, width 1024, length 1, precision float32, batch 1: speedup ")
    assert told[1].startswith("1 of ") and told[1].endswith(f"do not overlap; changed: driver {driver} -> 999.0.")


def test_check_takes_no_empty_name_for_none(here, document, monkeypatch, capsys):
    (here / "now.json").write_text(json.dumps(document))
    monkeypatch.setattr(cli.recordings, "tables_are_live", lambda: True)
    monkeypatch.setattr(cli.results, "gather", lambda names: pytest.fail("it measures"))
    assert cli.main(["report", "--check", ""]) == cli.main(["report", "--check", "now.json", "--after", ""]) == 2
    assert capsys.readouterr().err.count("it is no file") == 2


def test_check_says_nothing_of_two_runs_where_something_is_not_installed(here, document, monkeypatch):
    (here / "now.json").write_text(json.dumps(document))
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    assert cli.main(["report", "--check", "now.json", "--after", "now.json"]) == 2
    assert cli.main(["compare", "now.json"]) == 1


def test_check_never_takes_a_recording_for_a_measurement(here, document, capsys):
    (here / "now.json").write_text(json.dumps(document))
    assert cli.main(["report", "--check", "now.json"]) == cli.main(["report", "--check", "no.json"]) == 2
    assert "--check measures here, and nothing is measured" in capsys.readouterr().err


def test_an_interrupted_or_partly_failed_run_never_counts_as_agreement(here, document, capsys, monkeypatch):
    (here / "now.json").write_text(json.dumps(document))
    tables = {"sweep_mlp": experiments.sweep_mlp()}
    monkeypatch.setattr(cli.recordings, "tables_are_live", lambda: True)
    monkeypatch.setattr(cli.results, "gather", lambda names: (tables, missing))
    for missing, status in (({"sweep_gpt2": "interrupted"}, 130), ({"sweep_gpt2": "out of memory"}, 2), ({}, 0)):
        assert cli.main(["report", "--check", "now.json"]) == status
        assert "that were measured before are not in the second run" in capsys.readouterr().out
    missing = {"sweep_gpt2": "interrupted"}
    assert cli.main(["export"]) == cli.main(["report"]) == 130 and len(list(here.glob("re*-nvidia-h200-*"))) == 2


def test_where_nothing_can_be_written_is_said_before_anything_is_measured(here, capsys, monkeypatch):
    monkeypatch.setattr(cli.results, "gather", lambda names: pytest.fail("measured for nothing"))
    (here / "file").touch()
    for out, why in ((".", "is no file"), ("file/x.json", "nothing can be written in"), ("/dev/null", "is no file")):
        assert cli.main(["export", "--out", out]) == cli.main(["report", "--out", out]) == 1
        assert capsys.readouterr().err.count(why) == 2
    assert cli.main(["compare", "file", "--out", "a.json"]) == 1 and "the page is HTML" in capsys.readouterr().err
    assert cli.main(["report", "--after", "a.json"]) == 1 and "goes with --check" in capsys.readouterr().err


def test_a_file_that_ends_in_part_is_written_like_any_other(here):
    (here / "x.part").write_text("precious")
    assert cli.main(["export", "--out", "x"]) == cli.main(["export", "--out", "y.part"]) == 0
    assert (here / "x.part").read_text() == "precious" and results.read("y.part") == results.read("x")


def test_compare_prints_writes_a_board_and_names_what_it_leaves_out(here, document, capsys):
    (here / "sent").mkdir()
    (here / "sent" / "a.json").write_text(json.dumps(document))
    document["machine"]["gpu"], document["verdicts"]["share"]["verdict"] = "NVIDIA L4", claims.HOLDS
    (here / "sent" / "b.json").write_text(json.dumps(document))
    (here / "sent" / "c.json").write_text("{}")
    (here / "sent" / "d.txt").write_text("later")
    (here / "sent" / ".e.json.part").write_text("{")
    assert cli.main(["compare", "sent", "--out", "new/board.html"]) == 0
    told = capsys.readouterr()
    assert "NVIDIA H200" in told.out and "NVIDIA L4" in told.out and "c.json is left out" in told.err
    assert "d.txt is left out" in told.err and "part" not in told.err and "--out" not in told.out
    assert "share: does not hold here (NVIDIA H200); holds (NVIDIA L4)" in told.out
    assert "c.json is left out" in (here / "new" / "board.html").read_text()
    assert cli.main(["compare", "sent"]) == 0 and "drawn: --out PAGE.html" in capsys.readouterr().out
    assert cli.main(["compare", "none"]) == 1 and "no results to compare" in capsys.readouterr().err
