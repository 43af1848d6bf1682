"""Charts: each says what it shows in numbers taken from its table, is a picture, and never goes out unlabelled."""

import base64
import io

import numpy as np
import pandas as pd
import pytest
from made_up import LABEL, batch_sweep, ceilings, interval, nodes, pair, step, table
from matplotlib.image import imread

from labkit import charts
from labkit.charts import canvas, drawing, sweeps

SIZES = table([interval({"size": 2**k, "enqueue_us": 10.0, "gpu_us": 10.0 * (2**k / 1024) ** 3}, "gpu_us")
               for k in range(5, 14)])
COSTS = table([interval({"what": "driver call", "layer": "driver", "cost_us": 4.0}, "cost_us"),
               interval({"what": "linear", "layer": "torch", "cost_us": 12.0}, "cost_us")])
GPT2 = batch_sweep("gpt2", memory=10**8)
CURVE = GPT2[(GPT2["length"] == 128) & (GPT2["precision"] == "float16")]
MLP = batch_sweep("mlp")
DRAWN = {
    "sweep": lambda: charts.sweep(CURVE).marked(4),
    "roofline": lambda: charts.roofline(CURVE[CURVE["skipped"] == ""], ceilings()),
    "predictions": lambda: charts.predictions(MLP),
    "compare": lambda: charts.compare(pair()),
    "bars": lambda: charts.bars(COSTS, "what", "cost_us", by="layer"),
    "lines": lambda: charts.lines(SIZES, "size", ["enqueue_us", "gpu_us"], crossing=True),
    "timeline": lambda: charts.timeline(step()),
    "durations": lambda: charts.durations(step()),
    "graph": lambda: charts.graph_drawing(nodes(40, (6, 20))),
}


@pytest.mark.parametrize("name", DRAWN)
def test_every_chart_is_a_picture_with_words_and_a_label(name):
    chart = DRAWN[name]()
    data, metadata = chart._repr_mimebundle_()
    picture = imread(io.BytesIO(base64.b64decode(data["image/png"])))
    assert picture.shape[1] == 7 * charts.DPI and picture[..., :3].std() > 0.03
    assert metadata["image/png"]["alt"] == data["text/plain"] == str(chart)
    assert metadata["image/png"]["width"] == 7 * charts.PIXELS
    assert str(chart).endswith(f"{LABEL}.") and 2 <= str(chart).count(". ") <= 5
    assert chart.provenance["label"] == LABEL


@pytest.mark.parametrize("name", DRAWN)
def test_no_type_is_too_small_for_a_projector(name, monkeypatch):
    sizes, parts = [], (canvas.FigureCanvasAgg.draw, 6.75 if name == "graph" else 9)  # in boxes: that picture is low, so shown wider
    monkeypatch.setattr(canvas.FigureCanvasAgg, "draw", lambda self: (parts[0](self), sizes.extend(
        (text.get_fontsize(), text.get_text()) for text in self.figure.findobj(canvas.Text) if text.get_text())))
    canvas._KEPT.clear()
    DRAWN[name]()
    assert len(sizes) > 5 and min(sizes)[0] >= parts[1]


def test_a_picture_of_fewer_inches_is_as_much_lower_and_keeps_its_type():
    wide, narrow = (charts.sweep(CURVE, inches=inches, dpi=110 * 7 // inches) for inches in (7, 5))
    sizes = [imread(io.BytesIO(chart.png)).shape[:2] for chart in (wide, narrow)]
    assert sizes[0] == sizes[1] and wide.text == narrow.text and wide.png != narrow.png


def test_a_table_without_provenance_is_not_drawn():
    with pytest.raises(ValueError, match="where its numbers come from"):
        charts.compare(pd.DataFrame({"name": ["eager"], "wall_us": [1.0]}))


def test_a_filtered_table_keeps_its_label():
    two = step()
    assert charts.timeline(two[two["how"] == "graph"]).provenance["label"] == LABEL


def test_missing_columns_and_empty_tables_are_named():
    with pytest.raises(ValueError, match="needs the column 'speed'.*name, enqueue_us"):
        charts.bars(pair(), "name", "speed")
    with pytest.raises(ValueError, match="no rows"):
        charts.durations(step()[:0])


def test_compare_says_times_and_speedup():
    text = charts.compare(pair(600.0, 100.0)).text
    assert "600 µs (wall" in text and "6.00 times as fast as eager (5.82 to 6.18)" in text


def test_lines_find_where_two_lines_cross():
    assert "equal near matrix size (rows and columns) 1,024" in DRAWN["lines"]().text
    below = SIZES[SIZES["size"] < 500]
    assert "do not cross" in charts.lines(below, "size", ["enqueue_us", "gpu_us"], crossing=True).text


def test_lines_survive_eight_decades_one_point_and_zero():
    wide = table([{"nodes": 10.0**k, "wall_us": 10.0 ** (k - 2)} for k in range(9)])
    assert "0.01 µs at nodes in the graph 1, 1 s at 100,000,000" in charts.lines(wide, "nodes", "wall_us").text
    assert charts.lines(wide[:1], "nodes", "wall_us").png
    assert charts.lines(table([{"batch": b, "gpu_us": float(b)} for b in range(4)]), "batch", "gpu_us").png


def test_names_at_the_line_ends_do_not_touch():
    same = table([{"batch": b, "model": f"model {m}", "wall_us": 100.0 + m} for m in range(6) for b in (1, 2)])
    figure, axes = canvas.blank(3.6)
    curves = dict(drawing._curves(same, "batch", ["wall_us"], "model"))
    canvas.scale(axes.yaxis, True, "wall_us", same["wall_us"])
    canvas.label_ends(axes, curves, canvas.looks_of(list(curves)))
    heights = np.sort([text.get_position()[1] for text in axes.texts])
    assert np.diff(heights).min() >= 0.0749 and heights.max() <= 1.0


@pytest.mark.parametrize("kernels", [1, 3, 350])
def test_timeline_counts_kernels_launches_and_idle_time(kernels):
    text = charts.timeline(step(kernels, apart=10.0, launch=4.0, work=3.0)).text
    span = 10 * (kernels - 1) + 8
    assert f"Eager: {kernels} kernels, {kernels} launch" in text and f"Graph: {kernels} kernels, 1 launch," in text
    assert f"the GPU is idle {1 - 3 * kernels / span:.0%} of" in text


def test_timeline_counts_overlapping_kernels_once():
    both = table([{"name": "a", "launch_at_us": 0.0, "launch_us": 2.0, "start_us": 5.0, "gpu_us": 5.0},
                  {"name": "b", "launch_at_us": 2.0, "launch_us": 2.0, "start_us": 6.0, "gpu_us": 2.0}])
    assert "idle 50% of 10 µs" in charts.timeline(both).text


def test_timeline_tells_copies_from_kernels():
    made = step(5)
    made.loc[made["index"] == 0, "name"] = "Memcpy DtoD (Device -> Device)"
    text = charts.timeline(made).text
    assert "Eager: 4 kernels, 4 launches, the" in text and "Graph: 4 kernels, 1 launch, the" in text


def test_timeline_zooms():
    assert "shows the first 50 µs;" in charts.timeline(step(), window_us=50).text
    assert charts.timeline(step(), window_us=50).png != charts.timeline(step()).png


@pytest.mark.parametrize("window_us", [400, 16_020])
def test_the_last_tick_of_a_timeline_stands_inside_the_picture(window_us, monkeypatch):
    monkeypatch.setattr(drawing, "finish", lambda figure, *_: figure)
    monkeypatch.setattr(canvas, "_KEPT", {})
    figure = charts.timeline(step(2000, apart=10.0), window_us=window_us)
    ticks = [text for text in figure.axes[-1].get_xticklabels() if text.get_position()[0] <= window_us]
    assert max(text.get_window_extent(figure.canvas.get_renderer()).x1 for text in ticks) <= figure.bbox.x1


def test_bars_coloured_by_their_names_say_these_once(monkeypatch):
    monkeypatch.setattr(drawing, "finish", lambda figure, *_: [text.get_text() for text in figure.axes[0].texts])
    assert charts.bars(COSTS, "what", "cost_us", by="what") == ["4 µs", "12 µs"]
    assert charts.bars(COSTS, "what", "cost_us", by="layer") == ["4 µs   driver", "12 µs   torch"]


def test_durations_count_a_graph_and_its_eager_twin_once():
    assert charts.durations(step(170, work=3.0)).text.startswith("170 kernels work for 3 µs to 3 µs each. Half")


def test_graph_drawing_says_shape_and_what_is_left_out():
    assert "longest chain has 4 of" in charts.graph_drawing(nodes(4)).text
    assert "longest chain has 38 of" in charts.graph_drawing(nodes(40, (6, 20))).text
    text = charts.graph_drawing(nodes(300)).text
    assert text.startswith("300 nodes") and text.endswith("shows the first 40.")


def test_boxes_never_share_a_place():
    level = {node: node - (node > 5) - (node > 9) - (node > 30) for node in range(60)}
    spots, height = drawing._spots(level)
    assert len(set(spots.values())) == 60 and max(column for column, _ in spots.values()) < 8
    assert max(row for _, row in spots.values()) == height - 1


@pytest.mark.parametrize("us, said", [(0.5, "0.5 µs"), (999.4, "999 µs"), (999.9, "1 ms"), (1234, "1.23 ms"),
                                      (2e6, "2 s")])
def test_times_are_said_in_a_fitting_unit(us, said):
    assert charts.time(us) == said


def test_save_writes_the_picture(tmp_path):
    chart = charts.compare(pair())
    assert chart.save(tmp_path / "pair.png").read_bytes() == chart.png


def test_what_cannot_be_drawn_is_said_and_not_drawn_wrongly():
    def made(**columns):
        table = pd.DataFrame(columns)
        table.attrs["provenance"] = {"label": "TEST DATA"}
        return table

    with pytest.raises(ValueError, match="pick some of them"):
        charts.bars(made(name=list("ab") * 60, us=[1.0] * 120), "name", "us")
    with pytest.raises(ValueError, match="values that are no numbers"):
        charts.bars(made(name=["a", "b"], us=[1.0, float("nan")]), "name", "us")
    with pytest.raises(ValueError, match="no kernels"):
        charts.durations(made(name=["Memcpy"], gpu_us=[1.0]))
    assert "do not cross" in charts.lines(made(x=[1, 2], y_us=[1.0, 2.0]), "x", "y_us", crossing=True).text
    assert charts.bars(made(name=["$x^{$"], us=[1.0]), "name", "us", title="$x^{$").png


def test_outcomes_are_counted_by_group_and_none_is_lost():
    rows = [{"group": g, "result": r} for g, r in (("a", "captured"), ("a", "fails"), ("b", "captured"), ("b", "captured"),
                                                   ("c", "fails"), (None, None))]
    said = charts.outcomes(table(rows), "group", "result", what="operations").text
    assert said.startswith("6 operations: 3 captured, 2 fails, 1 none.")
    assert "a: 1 captured, 1 fails." in said and "b: 2 captured." in said and "none: 1 none." in said
    assert said.index("c: 1 fails") < said.index("b: 2 captured")
    with pytest.raises(ValueError, match="has 8 different values, and this chart shows up to 7"):
        charts.outcomes(table([{"group": "a", "result": str(i)} for i in range(8)]), "group", "result")


def test_overhead_is_said_of_the_batches_shown():
    whole = batch_sweep("gpt2")[:10]
    low = charts.first_low_overhead(whole)
    assert f"stays above 10% up to batch {low // 2}." in charts.sweep(whole[whole["batch"] < low]).text
    later = charts.sweep(whole[whole["batch"] > low])
    assert f"Overhead is under 10% from batch {2 * low} on, the first shown." in later.text


def test_charts_of_one_curve_refuse_several():
    rows = batch_sweep("gpt2")
    assert len(rows) > 10
    for draw in (charts.sweep, lambda table: charts.roofline(table, ceilings())):
        with pytest.raises(ValueError, match="shows one curve, and the table has 4: GPT-2 decode step, 12 layers"):
            draw(rows)


def test_a_sweep_says_its_ends_where_overhead_ends_and_what_was_left_out():
    chart = charts.sweep(CURVE)
    assert chart.text.startswith("Eager: 452 µs at batch 1, 452 µs at batch 64. Graph: 101 µs at batch 1")
    assert "Overhead stays above 10% up to batch 64. Left out: batch 128, 256, 512 (out of memory)." in chart.text
    whole = batch_sweep("gpt2")[:10]
    low = charts.first_low_overhead(whole)
    assert f"first falls under 10% at batch {low}." in charts.sweep(whole).text
    row = whole[whole["batch"] == low].iloc[0]
    assert 1 - row["graph_wall_us"] / row["eager_wall_us"] < 0.1
    assert charts.sweep(whole[:1]).png != charts.sweep(whole[:1], batches=[1, 2, 4]).png
    with pytest.raises(ValueError, match="no rows"):
        charts.sweep(CURVE[CURVE["skipped"] != ""])


def test_a_sweep_draws_predictions_where_there_are_some():
    assert charts.sweep(CURVE).png != charts.sweep(CURVE.assign(predicted_eager_us=np.nan)).png
    assert charts.sweep(CURVE.drop(columns=["predicted_eager_us", "predicted_graph_us", "predicted_speedup"])).png


def test_a_roofline_names_the_higher_floor_and_needs_the_ceilings_of_its_precision():
    one = MLP[(MLP["width"] == 4096) & (MLP["precision"] == "float32")]
    text, first, last = charts.roofline(one, ceilings()).text, one.iloc[0], one.iloc[-1]
    read, multiply = first["bytes"] / 8e12 * 1e6, last["flops"] / 5e13 * 1e6
    assert f"At batch 1 the floor is {charts.time(read)}, set by what the step must read; the graph takes" in text
    assert f"At batch 512 the floor is {charts.time(multiply)}, set by what the step must multiply" in text
    with pytest.raises(ValueError, match="no row for 'multiply' in float32"):
        charts.roofline(one, ceilings()[:1])


@pytest.fixture
def unfinished(monkeypatch):
    """Let a sweep's chart end before it is emptied: call it through this, which returns the figure and the sentences."""
    monkeypatch.setattr(sweeps, "finish", lambda figure, table, title, said, *_: (figure, said))
    monkeypatch.setattr(canvas, "_KEPT", {})


@pytest.mark.parametrize("first", [0, 3, 6])
def test_reasons_for_what_was_left_out_stay_inside_the_picture(unfinished, first):
    rows = CURVE.sort_values("batch").reset_index(drop=True)  # on a small GPU each batch needs another size: a reason each
    for i in range(first, first + 4):
        rows.loc[i, "skipped"] = f"a cache of {2**i} x 1,024 tokens needs about {2**i}.5 GiB; 0.4 GiB of this GPU are free"
    rows.attrs = CURVE.attrs
    figure, said = charts.sweep(rows)
    assert all(any(f"batch {2**i:,} (a cache of {2**i} x 1,024" in words for words in said) for i in range(first, first + 4))
    top, (left, bottom), (right, _) = figure.axes[0], *figure.bbox.get_points()
    crosses = [line for line in top.lines if line.get_marker() == "x"]
    assert crosses and top.texts
    for artist in (*top.texts, *crosses):
        extent = artist.get_window_extent(figure.canvas.get_renderer())
        assert left <= extent.x0 and extent.x1 <= right and bottom <= extent.y0 and extent.y1 <= top.bbox.y1 + 1


def test_a_floor_of_one_batch_can_be_seen(unfinished):
    one = CURVE.sort_values("batch")[:1]
    one.attrs = CURVE.attrs
    figure, _ = charts.roofline(one, ceilings())
    assert [line.get_marker() for line in figure.axes[0].lines].count("_") == 2


def test_predictions_say_medians_and_where_they_are_worst():
    made = MLP.assign(eager_error=0.04, graph_error=-0.02)
    made.attrs = MLP.attrs
    made.loc[made.index[3], "graph_error"] = 0.3
    text = charts.predictions(made).text
    assert text.startswith("Eager: median error 4.0%, 100% of 60 within 10%, worst 4%. Graph: median error 2.0%")
    assert "worst 30%" in text and "Worst graph: MLP, 6 layers, width 1,024, float32, batch 8." in text
    with pytest.raises(ValueError, match="no rows"):
        charts.predictions(made.assign(eager_error=np.nan))
    with pytest.raises(ValueError, match="needs the column 'eager_error'"):
        charts.predictions(MLP.drop(columns=["eager_error", "graph_error"]))


def test_a_figure_used_again_shows_nothing_of_the_chart_before():
    first = charts.sweep(CURVE).png
    charts.sweep(MLP[:10], title="another"), charts.timeline(step())
    assert charts.sweep(CURVE).png == first


def test_many_mebibytes_are_written_out():
    assert [canvas.say(mib * 2**20, "pool_bytes") for mib in (9.876, 999, 1133)] == ["9.88 MiB", "999 MiB", "1,133 MiB"]
