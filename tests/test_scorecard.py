"""The scorecard: guesses, tables that come in, what surprises, Stop; and its widgets, with whatever a table or claim says as text."""

import asyncio
from dataclasses import replace

import ipywidgets as widgets
import pytest
from made_up import table
from test_claims import launch_cost, pools, replay

from labkit import claims, experiments, machine, recordings, results
from labkit.claims import FAILS, HOLDS, LIMITS, UNKNOWN
from labkit.explorers import scorecard_view
from labkit.explorers.scorecard_model import GUESSES, ScorecardModel

TABLES = {"launch_cost": launch_cost(6, 7), "replay_cost": replay(n1=5.0, n300=20.0), "grad_pools": pools(2.0, 1.0)}


@pytest.fixture
def made(monkeypatch):
    """Put made-up experiments in place of all: each gives its table, or raises what stands there; returns them."""
    made = {name: lambda name=name: TABLES[name] for name in TABLES} | {"capture_cost": lambda: 1 / 0}
    monkeypatch.setattr(experiments, "EXPERIMENTS", made)
    return made


def verdicts(model):
    return {v.claim.id: v.verdict for v in model.verdicts}


def test_it_begins_with_what_is_there_and_says_what_is_missing(made):
    model = ScorecardModel({"launch_cost": TABLES["launch_cost"]}, {})
    assert list(verdicts(model)) == list(claims.CLAIMS) and verdicts(model)["launch-cost"] == HOLDS
    assert set(verdicts(model).values()) == {HOLDS, UNKNOWN} and set(model.wanted()) == {"replay_cost", "grad_pools", "capture_cost"}
    assert model.status == f"1 of {len(claims.CLAIMS)} claims are judged; 0 guessed."


def test_guesses_go_into_the_callers_dictionary_and_out_again(made):
    guesses = {"share": HOLDS}
    model = ScorecardModel({}, guesses)
    model.guess("free", FAILS), model.guess("share", ""), model.guess("micro", "")
    assert guesses == {"free": FAILS} and "1 guessed" in model.status
    assert ScorecardModel({}, guesses).guesses is guesses  # a widget that is made again knows them


@pytest.mark.parametrize("guesses", [{"share": "Holds"}, {"moon": HOLDS}])
def test_a_guess_that_is_none_is_named_with_those_there_are(made, guesses):
    with pytest.raises(ValueError, match=f"{HOLDS}, {LIMITS}, .*none: .*{[*guesses.values()][0]}"):
        ScorecardModel({}, guesses)


def test_what_is_missing_comes_in_one_after_the_other_and_a_failure_costs_only_itself(made):
    tables, seen = {}, []
    model = ScorecardModel(tables, {})
    model.observe(lambda _: seen.append(len(tables)), names="shown")
    asyncio.run(model.fill())
    assert set(tables) == set(TABLES) and model.missing == {"capture_cost": "division by zero"} and not model.busy
    assert sorted(set(seen)) == [1, 2, 3]  # drawn after each
    assert verdicts(model)["replay-cost"] == FAILS and verdicts(model)["free"] == UNKNOWN
    made["capture_cost"] = lambda: table([{"capture_s": 4e-6, "saving_us": 1.0, "pool_bytes": 1.0}])
    asyncio.run(model.fill())
    assert verdicts(model)["free"] == HOLDS and model.missing == {}


def test_stop_keeps_the_table_of_the_experiment_that_runs(made):
    model = ScorecardModel({}, {})
    made["launch_cost"] = lambda: model.stop() or TABLES["launch_cost"]
    asyncio.run(model.fill())
    assert verdicts(model)["launch-cost"] == HOLDS and list(model.tables) == ["launch_cost"] and not model.busy


def test_a_second_press_begins_nothing(made):
    async def twice():
        await asyncio.gather(model.fill(), model.fill())
    model, calls = ScorecardModel({}, {}), []
    made["launch_cost"] = lambda: calls.append(1) or TABLES["launch_cost"]
    asyncio.run(twice())
    assert calls == [1]


def test_recordings_can_be_loaded_where_labs_are_live(made, monkeypatch):
    monkeypatch.setattr(recordings, "recorded", lambda name, source, gpu=None: {"launch_cost": TABLES[name]}[name])
    model = ScorecardModel({}, {})
    asyncio.run(model.fill(recorded=True))
    assert list(model.tables) == ["launch_cost"]  # the others have no recording, and say so
    assert set(model.missing) == {"replay_cost", "grad_pools", "capture_cost"}


def test_the_furthest_from_the_guesses_come_first_and_what_agrees_never(made):
    model = ScorecardModel(TABLES, {})
    assert [v.claim.id for v in model.surprises()] == ["replay-cost", "no-grad"]  # not guessed: the article's word counts
    model.guess("launch-cost", FAILS)
    assert [v.claim.id for v in model.surprises()] == ["launch-cost", "replay-cost", "no-grad"]
    assert [v.claim.id for v in model.surprises(1)] == ["launch-cost"]
    model.guess("replay-cost", FAILS), model.guess("no-grad", LIMITS), model.guess("launch-cost", HOLDS)
    assert model.surprises() == []


def test_a_claim_that_is_new_needs_no_change_here(made, monkeypatch):
    new = claims.CLAIMS["launch-cost"]._replace(id="vllm-new", lab="60", experiments=("grad_pools",))
    monkeypatch.setitem(claims.CLAIMS, "vllm-new", new._replace(rule=lambda table: (True, True, (1, 1, 1), "logs", "It says so.")))
    model = ScorecardModel(TABLES, {"vllm-new": claims.OUTDATED})
    assert verdicts(model)["vllm-new"] == HOLDS and model.surprises(1)[0].claim.id == "vllm-new"
    assert "It says so." in scorecard_view.table(model) and "lab 60" in scorecard_view.table(model)


def test_the_table_links_to_labs_that_are_there_and_shows_number_range_and_origin(made, tmp_path, monkeypatch):
    (tmp_path / "10_measure.ipynb").touch()
    monkeypatch.chdir(tmp_path)
    html = scorecard_view.table(ScorecardModel(TABLES, {"launch-cost": LIMITS}))
    row = html.partition("launch-cost")[2].partition("</tr>")[0]
    assert '<a href="10_measure.ipynb"' in row and "holds with limits" in row and "6 µs" in row and "TEST DATA" in row and "both lie in 5 to 10 µs" in row
    assert "20_" not in html and "<b>≈ holds with limits</b>" in html.partition("no-grad")[2]


def test_markup_in_whatever_comes_is_text(made):
    model = ScorecardModel(TABLES, {})
    model.guesses["launch-cost"] = "<b>guess</b>"
    model.missing = {"capture_cost": "<script>alert(1)</script>"}
    model.verdicts = tuple(replace(v, why="<i>why</i>", provenance={"label": "<u>"}) for v in model.verdicts)
    html = scorecard_view.table(model)
    assert not any(tag in html for tag in ("<script", "<i>", "<u>", "<b>guess"))


def shown(monkeypatch, show, *given):
    kept = []
    monkeypatch.setattr(scorecard_view, "show_widget", lambda widget, words: kept.append(widget))
    monkeypatch.setattr(scorecard_view, "display", lambda html: None)
    show(*given)
    return kept[0]


def all_widgets(widget):
    return [widget, *(inner for child in getattr(widget, "children", ()) for inner in all_widgets(child))]


def test_menus_keep_guesses_and_say_how_to_keep_them_longer(made, monkeypatch):
    model = ScorecardModel({}, {"free": FAILS})
    found = all_widgets(shown(monkeypatch, scorecard_view.guess, model))
    menus = {menu.description: menu for menu in found if isinstance(menu, widgets.Dropdown)}
    assert list(menus) == list(claims.CLAIMS) and menus["free"].value == FAILS and menus["share"].value == ""
    menus["share"].value = LIMITS
    assert model.guesses == {"free": FAILS, "share": LIMITS}
    assert f"guesses = {results.json.dumps(model.guesses)}".replace('"', "&#x27;") in found[-1].value
    assert [value for _, value in menus["free"].options] == ["", *GUESSES]


def test_without_a_gpu_it_fills_in_at_once_and_live_it_waits_for_a_press(made, monkeypatch):
    monkeypatch.setattr(recordings, "recorded", lambda name, source, gpu=None: TABLES[name])
    for fn in made.values():
        fn.source = ""
    for live, names in ((False, 3), (True, 0)):
        monkeypatch.setattr(machine, "mode", lambda live=live: machine.Mode(live, "test"))
        model = ScorecardModel({}, {})
        found = all_widgets(shown(monkeypatch, scorecard_view.scorecard, model))
        assert len(model.tables) == names and any(isinstance(w, widgets.Button) for w in found) == live
        assert ("TEST DATA" in found[-1].value) == (not live)
