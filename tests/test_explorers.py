"""The idle explorer: the model without widgets, the view without a browser."""

import subprocess
import sys
import time

import pytest
from made_up import LABEL, sweep, table

from labkit.explorers.idle_model import IdleModel
from labkit.explorers.search_model import matching


def test_the_model_needs_no_widgets():
    code = "import sys, labkit.explorers.idle_model; print({'ipywidgets', 'IPython', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_inputs_move_to_the_nearest_measured_point():
    model = IdleModel(sweep())
    model.layers, model.width, model.batch = 20, 300, 5
    assert (model.layers, model.width, model.batch) == (24, 256, 4)


def test_outputs_follow_the_inputs():
    table = sweep()
    model = IdleModel(table)
    for row in table.itertuples():
        model.layers, model.width, model.batch = row.layers, row.width, row.batch
        assert f"launches {row.kernels} kernels" in model.summary and f"idle {row.idle_share:.0%}" in model.summary
        assert f"{row.speedup:.2f} times" in model.summary
        assert model.bars == (("eager", row.eager_wall_us, pytest.approx(1 - row.idle_share)),
                              ("graph", row.graph_wall_us, pytest.approx(0.95)))


def test_a_point_that_was_not_measured_says_so():
    model = IdleModel(sweep())
    model.layers, model.width, model.batch = 24, 1024, 16
    assert "not measured" in model.summary and model.bars == ()


def test_the_wrong_table_is_refused():
    with pytest.raises(ValueError, match="needs experiments.idle_sweep"):
        IdleModel(sweep().drop(columns="gpu_us"))


def test_the_picture_is_labelled():
    assert IdleModel(sweep()).picture().provenance["label"] == LABEL


def test_a_slider_moves_the_words_and_the_bars_at_once():
    from labkit.explorers import idle_view

    model = IdleModel(sweep())
    *sliders, said = idle_view.view(model).children
    before = said.value
    started = time.perf_counter()
    sliders[2].value = 4
    assert time.perf_counter() - started < 0.1
    assert model.batch == 4 and said.value != before and model.summary in said.value and LABEL in said.value
    model.layers = 2
    assert sliders[0].value == 2


def test_explore_shows_the_widgets_then_a_picture(monkeypatch):
    from labkit.explorers import idle_view, sweep_view

    shown = []
    for room in (sweep_view, idle_view):
        monkeypatch.setattr(room, "display", lambda thing, *rest, **options: shown.append(thing))
    idle_view.explore(sweep())
    assert "application/vnd.jupyter.widget-view+json" in shown[0] and "kernels" in shown[0]["text/plain"]
    assert shown[1].png and LABEL in str(shown[1])


def test_a_search_shows_the_rows_that_hold_all_words():
    found = table([{"operation": "svd", "result": "fails", "note": "linear algebra"},
                   {"operation": "<b>add</b>", "result": "captured", "note": None}])
    assert list(matching(found, ["operation", "result", "note"], "LINEAR fails").operation) == ["svd"]
    assert len(matching(found, ["operation"], "")) == 2 and matching(found, ["operation", "note"], "svd add").empty
    code = ("import sys; sys.path.insert(0, 'tests'); from made_up import table\nfrom labkit.explorers import search_view as s\n"
            "t = table([{'a': 'x' * 90}, {'a': '<script>'}])\ns.search(t, ['a'])\n"
            "print(s._html(t, ['a'], 'x'), s._html(t, ['a'], 'zzz'))\nprint(s._html(t, ['a'], 'scr'))")
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "1 of 2 rows" in said and "No row holds all of these words" in said and "x" * 90 in said and "&lt;script&gt;" in said and "TEST DATA" in said
    assert "A search in 2 rows, which stand below." in said
