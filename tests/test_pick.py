"""Picking a point of a table, and texts side by side, without a browser."""

import re

import ipywidgets as widgets
import pytest
from made_up import table

from labkit import charts
from labkit.explorers import pick_view, race_view
from labkit.explorers.pick_model import PickModel

BY = ["model", "context", "batch"]


@pytest.fixture
def ladder():
    return table([{"model": model, "context": context, "batch": batch, "rung": rung, "wall_us": us * batch}
                  for model, contexts in (("small", (128,)), ("large", (8192, 128))) for context in contexts
                  for batch in (1, 8, 32) if (context, batch) != (8192, 32) for rung, us in (("eager", 100.0), ("captured", 20.0))])


def draw(rows):
    return charts.bars(rows, "rung", "wall_us")


def test_it_begins_with_the_first_point_or_with_what_is_wished(ladder):
    assert PickModel(ladder, BY).picked == {"model": "small", "context": 128, "batch": 1}
    model = PickModel(ladder, BY, model="large", batch=8)
    assert model.picked == {"model": "large", "context": 128, "batch": 8} and list(model.rows["wall_us"]) == [800, 160]


def test_numbers_move_to_the_nearest_that_was_measured_and_options_follow(ladder):
    model = PickModel(ladder, BY, model="large", context=128, batch=32)
    model.pick(context=5000)
    assert model.picked == {"model": "large", "context": 8192, "batch": 8} and model.options["batch"] == (1, 8)
    model.pick(model="small")
    assert model.picked == {"model": "small", "context": 128, "batch": 8} and model.options["context"] == (128,)
    model.pick(model="unheard of", batch=3)
    assert model.picked == {"model": "small", "context": 128, "batch": 1}


@pytest.mark.parametrize("by, message", [(["model", "width"], "no width here"), (BY, "no rows here")])
def test_tables_that_do_not_fit_are_refused(ladder, by, message):
    with pytest.raises(ValueError, match=message):
        PickModel(ladder if "width" in by else ladder[:0], by)
    with pytest.raises(ValueError, match="no column to pick by is called size; there are: model"):
        PickModel(ladder, BY, size=3)


def test_moving_a_control_changes_the_chart_and_the_other_controls(ladder):
    model = PickModel(ladder, BY)
    view = pick_view.view(model, draw)
    menu, context, batch, chart = view.children
    assert isinstance(menu, widgets.Dropdown) and isinstance(batch, widgets.SelectionSlider) and context.disabled
    before = chart.value
    batch.value = 32
    assert model.picked["batch"] == 32 and chart.value != before and "3.2 ms" in re.search('alt="([^"]*)"', chart.value)[1]
    menu.value = "large"
    assert context.options == (128, 8192) and not context.disabled and model.picked == {"model": "large", "context": 128, "batch": 32}
    context.value = 8192
    assert batch.value == 8 and batch.options == (1, 8)


def test_a_page_without_widgets_gets_the_first_chart(ladder, capsys, monkeypatch):
    shown = []
    monkeypatch.setattr(pick_view, "show_widget", lambda widget, words: shown.append(words))
    monkeypatch.setattr(pick_view, "display", shown.append)
    pick_view.pick(ladder, BY, draw)
    assert "eager (100 µs)" in shown[0] and isinstance(shown[1], charts.Chart)


def test_a_race_shows_each_token_when_it_came_and_its_text_without_animations(monkeypatch):
    shown = []
    monkeypatch.setattr(race_view, "display", lambda what, **_: shown.append(what))
    race_view.race(table([{"how": how, "at_us": 1e5 * i * slow, "token": i, "text": text, "model": "M", "question": "Why <b>?"}
                          for how, slow in (("eager", 4), ("graph", 1)) for i, text in enumerate(["The ", "sky &", " sea"], 1)]))
    html, words = shown[0]["text/html"], shown[0]["text/plain"]
    assert re.findall(r"labkit-wait ([\d.]+)s", html) == ["0.400", "0.800", "1.200", "0.100", "0.200", "0.300"]
    assert "sky &amp;" in html and "Why &lt;b&gt;?" in html and "visibility:hidden" not in html.replace(race_view.HIDE, "")
    assert words.splitlines()[:2] == ["eager: 3 tokens in 1.20 s, 2 a second", "graph: 3 tokens in 0.30 s, 10 a second"]
    assert "TEST DATA" in words and "TEST DATA" in html
