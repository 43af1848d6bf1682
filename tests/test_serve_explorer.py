"""The serving explorer without a browser: what it computes from made-up tables, and what its widgets do."""

import re

import ipywidgets as widgets
import pytest
import served
from made_up import LABEL, table

from labkit import batching, charts
from labkit.explorers import serve_view
from labkit.explorers.serve_model import POLICIES, ServeModel


@pytest.fixture(scope="module")
def tables():
    return table(served.ways()), table(served.steps()), table(served.pools())


@pytest.fixture
def model(tables):
    return ServeModel(*tables)


def test_it_begins_busy_with_the_powers_of_two(model):
    assert (model.policy, model.graphs, model.rate) == ("powers of two", 6, 32) and model.row["sizes"] == [1, 2, 4, 8, 16, 32]
    assert model.options("rate") == (4, 12, 32) and model.options("graphs") == (1, 2, 3, 4, 5, 6)


def test_the_numbers_are_those_of_the_ingredients(model):
    counts = {batch: 2 * steps for batch, steps in served.COUNTS[32].items()}  # of both rounds
    row = model.row
    assert row["padding_share"] == batching.wasted_share(row["sizes"], counts) and row["replayed_share"] == 1
    tokens = {batch: batch * steps for batch, steps in counts.items()}
    us = sum(n * (2500 + 30 * (16 if batch <= 16 else 32)) for batch, n in tokens.items()) / sum(tokens.values())
    assert row["step_us"] == pytest.approx(us) and row["capture_s"] == pytest.approx(1.2)
    assert row["pool_bytes"] == pytest.approx((34 + 5 * 2) * 2**20)  # the largest as if alone, the others beside it


def test_above_the_largest_size_steps_are_eager_and_not_padded(model):
    model.graphs = 5  # up to 16
    assert model.row["sizes"] == [1, 2, 4, 8, 16]
    assert model.row["replayed_share"] == pytest.approx(90 / 260)
    low, high = 9 * 30 + 14 * 60, 17 * 70 + 20 * 50 + 23 * 40 + 27 * 10
    assert model.row["step_us"] == pytest.approx((low * (2500 + 30 * 16) + high * 16000) / (low + high))


def test_chosen_sizes_pad_least_at_each_number_of_graphs(model):
    found = model.table
    for (rate, number), part in found.groupby(["rate", "graphs"]):
        whole = part[part["replayed_share"] == 1].set_index("policy")["padding_share"]
        if number <= len(served.COUNTS[rate]):  # more sizes than batches that occur are never chosen
            assert whole["chosen sizes"] == whole.min()
    assert found[found["policy"] == "every size"].groupby("rate")["padding_share"].max().eq(0).all()


def test_what_is_not_offered_moves_to_the_nearest(model):
    model.policy, model.graphs = "every size", 30
    assert model.graphs == 30
    model.policy = "vLLM's list"
    assert model.graphs == 7 and model.row["sizes"] == batching.vllm_sizes(32)
    model.rate, model.policy = 10, "magic"
    assert model.rate == 12 and model.policy == "powers of two" and model.graphs == 6


def test_sizes_that_were_served_say_what_came_out(model):
    assert "Computed from what each size costs. Served with just these sizes: " in model.summary and "4.00 ms between two tokens" in model.summary
    model.graphs = 3
    assert "Served with" not in model.summary and "3 graphs (1, 2, 4)" in model.summary


def test_a_table_without_every_size_is_refused(tables):
    ways, steps, pools = tables
    with pytest.raises(ValueError, match="every size was served"):
        ServeModel(ways[ways["way"] == "eager"], steps, pools)


def test_what_it_begins_with_moves_to_the_nearest_or_is_refused(tables):
    model = ServeModel(*tables, policy="chosen sizes", rate=5, graphs=999)
    assert model.policy == "chosen sizes" and model.rate in model.options("rate") and model.graphs == max(model.options("graphs"))
    assert abs(model.rate - 5) == min(abs(rate - 5) for rate in model.options("rate"))
    for wrong in ({"policy": "power of two"}, {"quantity": "seconds"}):
        with pytest.raises(ValueError, match="there is no .*: there are .*" + ("every size" if "policy" in wrong else "capture_s")):
            ServeModel(*tables, **wrong)


def test_each_quantity_is_drawn_once_at_each_rate_with_its_label(model):
    for quantity in model.options("quantity"):
        model.quantity = quantity
        chart = model.chart()
        assert chart is model.chart() and LABEL in str(chart) and all(policy in chart.text for policy in POLICIES)
    first = model.chart()
    model.rate = 4
    assert model.chart() is not first


def test_moving_a_control_changes_words_chart_and_the_other_controls(model):
    policy, graphs, rate, quantity, summary, chart = serve_view.view(model).children
    assert isinstance(policy, widgets.Dropdown) and isinstance(graphs, widgets.SelectionSlider)
    before, drawn = summary.value, chart.value
    graphs.value = 2
    assert model.graphs == 2 and summary.value != before and chart.value == drawn
    quantity.value = "pool_bytes"
    assert "memory of the pool" in re.search('alt="([^"]*)"', chart.value)[1] or chart.value != drawn
    policy.value = "every size"
    assert graphs.options[-1] == 32 and graphs.value == 2
    graphs.value = 32
    policy.value = "powers of two"
    assert graphs.value == 6 and len(graphs.options) == 6
    rate.value = 4
    assert model.rate == 4 and "4 requests a second" in summary.value


def test_each_control_goes_to_both_its_ends_with_the_others_at_theirs(model):
    policy, graphs, rate, quantity, summary, chart = serve_view.view(model).children
    for one in policy.options:
        for some in (0, -1, 0):
            policy.value, rate.value = one, rate.options[some]
            for end in (0, -1):
                graphs.value = graphs.options[end]
                quantity.value = quantity.options[end][1]
                assert (model.policy, model.rate, model.graphs) == (one, rate.options[some], graphs.options[end]) == (policy.value, rate.value, graphs.value)
                assert f"{one.replace(chr(39), '&#x27;')}, {graphs.value} graph" in summary.value and "nan" not in summary.value + model.chart().text
                assert 0 <= model.row["padding_share"] < 1 and 0 <= model.row["replayed_share"] <= 1 and min(model.row["step_us"], model.row["pool_bytes"]) > 0


def test_a_page_without_widgets_gets_the_words_and_a_chart(tables, monkeypatch):
    shown = []
    monkeypatch.setattr(serve_view, "show_widget", lambda widget, words: shown.append(words))
    monkeypatch.setattr(serve_view, "display", shown.append)
    serve_view.serve_sizes(*tables, policy="chosen sizes", graphs=3)
    assert "chosen sizes, 3 graphs" in shown[0] and isinstance(shown[1], charts.Chart)
