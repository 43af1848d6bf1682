"""The batch explorer and what-if without a kernel: every control, every transition, and sweeps that stop, fail or leave out."""

import asyncio
import json
import io
import subprocess
import sys
import time
from statistics import median

import numpy as np
import pytest
from made_up import GRIDS, LABEL, batch_sweep, ceilings, sources, sweep_row, table
from matplotlib.figure import Figure
from PIL import Image

from labkit import charts, launch_model, machine, recordings
from labkit.explorers import sweep_view, whatif_model, whatif_view
from labkit.explorers.sweep_model import BATCHES, Live, SweepModel

CONSTANTS = launch_model.Constants(0.4, 0.5, 8.0, 9.0)


def points(*key_and_batches, fails_at=None, memory=10**9):
    """A made-up sweep_points: each batch at once without its traces, then each measured one again with them."""
    *key, batches = key_and_batches
    rows = [sweep_row(*key, batch, memory=memory) for batch in batches]
    for row in rows:
        if row["batch"] == fails_at:
            raise RuntimeError("the GPU fell off the bus\nand more lines")
        yield {**row, **dict.fromkeys(name for name in row if isinstance(row[name], list))}
    yield from (row for row in rows if not row["skipped"])


def live(pts=points, **measures):
    source = Live(pts, **measures)
    source.pace = 0.001
    return SweepModel({"measure here": source} | sources(pace=0.001))


@pytest.fixture(autouse=True)
def some_gpu(monkeypatch):
    monkeypatch.setattr(machine, "describe", lambda: machine.Machine(gpu="Some GPU", cpu="c", cores=1, os="o", python="3",
                                                                     torch=None, transformers=None, labkit="0"))


def test_the_models_need_no_widgets_and_no_torch():
    code = ("import sys, labkit.explorers.sweep_model, labkit.explorers.whatif_model; "
            "print({'ipywidgets', 'IPython', 'torch'} & set(sys.modules))")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_every_control_gives_the_curve_it_says():
    model = SweepModel(sources())
    for gpu in model.options("gpu"):
        model.gpu = gpu
        for kind in model.options("model"):
            model.model = kind
            for layers, width, length in GRIDS[kind]:
                for precision in model.options("precision"):
                    model.layers, model.width, model.length, model.precision = layers, width, length, precision
                    # each move finds the nearest curve, so that a size that is not there alone is passed on the way
                    model.width, model.length = width, length
                    model.layers = layers
                    assert model.key in model.source.curves and model.key[0] == kind
                    assert charts.curve_name(model.table.iloc[0]) in model.summary
                    assert set(model.table["model"]) == {kind} and set(model.table["precision"]) == {precision}


def test_what_was_not_recorded_moves_to_the_nearest_and_says_so():
    model = SweepModel(sources())
    assert model.note == ""
    model.model = "mlp"
    assert model.key == ("mlp", 6, 1024, 1, "float16") and model.note.startswith("Not recorded here: layers 12, width 768. Moved")
    model.width = 3000
    assert model.width == 4096 and model.note == "Not recorded here: width 3,000. Moved to width 4,096."
    model.layers = 24  # only with width 1,024
    assert (model.layers, model.width) == (24, 1024) and model.note == "Not recorded here: width 4,096. Moved to width 1,024."
    model.precision = "bfloat16"
    assert model.precision != "bfloat16" and "precision bfloat16. Moved to precision float" in model.note
    model.batch = 100
    assert model.batch == 128 and "batch 100. Moved to batch 128" in model.note
    model.batch = 64
    assert model.note == ""
    model.gpu, model.view = "no such GPU", "no such view"
    assert model.gpu in model.sources and model.view == "speedup"


def test_a_range_cuts_the_curve_and_takes_the_batch_along():
    model = SweepModel(sources())
    model.batch, model.highest = 512, 64
    assert list(model.table["batch"]) == [1, 2, 4, 8, 16, 32, 64] == list(model.options("batch")) and model.batch == 64
    model.lowest = 300
    assert model.lowest <= model.highest and list(model.table["batch"]) == [64, 128, 256]


@pytest.mark.parametrize("control, value", [("model", "mlp"), ("length", 1023), ("precision", "float32"), ("highest", 32),
                                            ("gpu", "Made-up B"), ("batch", 16), ("view", "roofline"), ("view", "timeline")])
def test_no_control_leaves_a_stale_chart(control, value):
    model = SweepModel(sources())
    before, shown = model.chart(), model.shown
    setattr(model, control, value)
    assert model.shown == shown + 1 and model.chart() is not before and model.chart().png != before.png


def test_charts_are_labelled_drawn_once_and_follow_the_view():
    model = SweepModel(sources())
    assert model.chart() is model.chart() and LABEL in str(model.chart())
    assert "Overhead first falls under 10% at batch" in model.chart().text
    model.view = "timeline"
    assert model.summary.endswith("The timeline is the profiler's, which slows every launch, also the graph's one.")
    assert "48 kernels, 1 launch" in model.chart().text
    model.view = "roofline"
    assert "set by what the step must" in model.chart().text
    model.sources["Made-up A"].ceilings, model._drawn = None, {}
    assert model.chart() == "The ceilings of this GPU are not measured yet."


def test_a_recorded_sweep_is_played_back_and_says_so():
    model, said = SweepModel(sources(pace=0.001)), []
    model.observe(lambda change: said.append((change["new"], len(model.table), model.busy)), names="status")
    asyncio.run(model.measure())
    assert said[0] == ("0 of 10 points played back.", 0, True) and ("3 of 10 points played back.", 3, True) in said
    assert said[-1] == ("Done: 10 of 10 points played back.", 10, False)


def test_stop_ends_it_at_once_and_keeps_the_points():
    model = SweepModel(sources(pace=0.01))

    async def stopped():
        task = asyncio.ensure_future(model.measure())
        while len(model.table) != 3:
            await asyncio.sleep(0.001)
        model.stop()
        assert not model.busy and model.status == "Stopped after 3 of 10 points played back." and len(model.table) == 3
        await task
        assert len(model.table) == 3 and model.status.startswith("Stopped after 3")
        model.batch = 2
        assert len(model.table) == 3  # the chosen point moves over what there is
        model.stop()
        assert model.status.startswith("Stopped after 3")
        await model.measure()
        assert len(model.table) == 10

    asyncio.run(stopped())
    model.precision = "float32"
    assert len(model.table) == 10 and model.status.startswith("Recorded on")


def test_two_presses_never_run_two_sweeps():
    running = []

    def counted(*args):
        running.append(1)
        yield from points(*args)

    model = live(counted)

    async def pressed_twice():
        await asyncio.gather(model.measure(), model.measure())

    asyncio.run(pressed_twice())
    assert len(running) == 1 and model.status == "Done: 10 of 10 points measured."


def test_a_control_moved_in_the_middle_ends_the_sweep_and_clears_its_chart():
    model = live()

    async def moved():
        task = asyncio.ensure_future(model.measure())
        while len(model.table) != 2:
            await asyncio.sleep(0.001)
        model.width = 1024
        assert not model.busy and len(model.table) == 0 and model.status.startswith("Stopped after 2 of 10 points measured")
        assert isinstance(model.chart(), str) and "not measured yet" in model.chart()
        await model.measure()  # a new sweep, though the old task was never awaited
        assert len(model.table) == 10 and set(model.table["width"]) == {1024}
        await task
        model.width = 768
        assert len(model.table) == 2 and model.status == "Measured here."

    asyncio.run(moved())


def test_an_error_in_the_middle_is_said_and_the_explorer_goes_on():
    model = live(lambda *args: points(*args, fails_at=8))
    asyncio.run(model.measure())
    assert model.status == "Stopped after 3 of 10 points measured by an error: the GPU fell off the bus"
    assert len(model.table) == 3 and not model.busy and model.chart().png
    model.source.points = points
    asyncio.run(model.measure())
    assert model.status == "Done: 10 of 10 points measured." and len(model.table) == 10


def test_a_batch_that_does_not_fit_is_left_out_with_its_reason():
    model = live(lambda *args: points(*args, memory=10**8))
    asyncio.run(model.measure())
    assert model.status == "Done: 10 of 10 points measured." and (model.table["skipped"] != "").sum() == 3
    assert "Left out: batch 128, 256, 512 (out of memory)" in model.chart().text
    model.batch = 512
    assert "left out (out of memory)" in model.summary
    model.view = "timeline"
    assert model.chart() == model.summary
    model = live(lambda *args: points(*args, memory=1))
    asyncio.run(model.measure())
    assert "left out" in model.chart()


def test_constants_that_cannot_be_measured_cost_no_traces():
    def fail():
        raise RuntimeError("no room for chains")

    model = live(constants=fail)
    asyncio.run(model.measure())
    assert "by an error: no room for chains" in model.status and model.table["eager_gpu_us"].map(len).all() and not model.busy


def test_live_points_come_first_without_traces_then_with_predictions():
    asked = []
    model = live(constants=lambda: asked.append("constants") or CONSTANTS, ceilings=lambda: asked.append("ceilings") or ceilings())
    said = []
    model.observe(lambda change: said.append(change["new"]), names="status")
    model.view = "timeline"
    assert "not measured yet" in model.chart() and model.options("batch") == BATCHES
    asyncio.run(model.measure())
    assert asked == ["constants", "ceilings"] and any("what a launch adds" in words for words in said)
    assert model.table["predicted_speedup"].notna().all() and "predicted" in model.summary
    assert "LIVE on Some GPU" in str(model.chart())
    asyncio.run(model.measure())
    assert len(asked) == 2
    model.gpu = "Made-up A"
    assert LABEL in str(model.chart()) and model.status.startswith("Recorded on Made-up A")


def test_stop_closes_a_live_sweep_so_that_it_can_let_go_of_the_gpu():
    closed = []

    def held(*args):
        try:
            yield from points(*args)
        finally:
            closed.append(True)

    model = live(held)

    async def stopped():
        task = asyncio.ensure_future(model.measure())
        while len(model.table) != 1:
            await asyncio.sleep(0.001)
        model.stop()
        assert closed == [True]
        await task

    asyncio.run(stopped())


def test_without_sources_it_says_what_is_missing():
    with pytest.raises(ValueError, match="needs a recorded sweep or a GPU"):
        SweepModel({})


def parts(box):
    """List the widgets in a box, {CSS class: widget}."""
    found = {name: box for name in box._dom_classes}
    for child in getattr(box, "children", ()):
        found |= parts(child)
    return found


def test_widgets_move_the_model_and_follow_it():
    model = SweepModel(sources(pace=0.001))
    found = parts(sweep_view.view(model))
    for name, value in (("gpu", "Made-up B"), ("model", "llama"), ("layers", 32), ("precision", "float32"), ("batch", 8),
                        ("view", "roofline"), ("width", 4096), ("length", 2047)):
        found[f"labkit-{name}"].value = value
        assert getattr(model, name) == value and found[f"labkit-{name}"].description
    found["labkit-range"].value = (2, 64)
    assert (model.lowest, model.highest) == (2, 64)
    assert all(found[f"labkit-{name}"].value for name in ("note", "status", "summary")) or model.note == ""
    before = found["labkit-chart"].value
    model.model = "gpt2"
    assert found["labkit-layers"].value == 12 and found["labkit-chart"].value != before
    assert found["labkit-chart"].value.startswith("<img") and LABEL in found["labkit-chart"].value
    assert found["labkit-gpu"].layout.display is None and found["labkit-width"].layout.display is None
    model.model = "mlp"
    assert found["labkit-length"].layout.display == "none" and found["labkit-width"].layout.display is None
    alone = parts(sweep_view.view(SweepModel({"one": sources()["Made-up A"]})))
    assert alone["labkit-gpu"].layout.display == "none"


def test_buttons_measure_and_stop():
    model = SweepModel(sources(pace=0.01))
    found = parts(sweep_view.view(model))
    measure, stop = found["labkit-measure"], found["labkit-stop"]

    async def pressed():
        assert (measure.button_style, stop.button_style) == ("primary", "")
        measure.click(), measure.click()
        while len(model.table) != 2 or not model.busy:
            await asyncio.sleep(0.001)
        assert (measure.button_style, stop.button_style) == ("", "primary") and "2 of 10 points played back" in found["labkit-status"].value
        stop.click()
        await asyncio.sleep(0.1)
        assert "Stopped after 2 of 10" in found["labkit-status"].value and measure.button_style == "primary"

    asyncio.run(pressed())


def test_explore_shows_widgets_then_a_picture_and_what_is_at_hand(monkeypatch):
    shown = []
    monkeypatch.setattr(sweep_view, "display", lambda thing, *rest, **options: shown.append(thing))
    sweep_view.explore(sources=sources())
    assert "application/vnd.jupyter.widget-view+json" in shown[0] and "kernels" in shown[0]["text/plain"]
    assert "without widgets" in shown[1].data and shown[2].png and LABEL in str(shown[2])


TRACED = batch_sweep("gpt2", memory=10**8)


def test_what_if_follows_its_sliders():
    model = whatif_model.WhatIfModel(TRACED, CONSTANTS)
    (_, eager), (_, graph), same = *model.times[:2], model.times[2:]
    assert [us for _, us in same] == [eager, graph] and "Move a slider" in model.summary
    model.cpu = 2.0
    assert model.times[2][1] < eager and model.times[3][1] == pytest.approx(graph, rel=0.2)
    assert "a CPU 2 times as fast" in model.summary and "gains less" in model.summary
    model.cpu, model.gpu = 1.0, 2.2
    assert model.gpu == 2.0 and model.times[3][1] < graph and "gains more" in model.summary
    model.gpu, model.more_layers = 1.0, 4
    assert model.times[2][1] > 3 * eager
    model.batch = 500
    assert model.batch == 64 == model.batches()[-1]  # those beyond did not fit
    model.curve = list(model.curves)[-1]
    assert model.curve in model.summary and model.batch in model.batches()
    for bare in (sweep_row("mlp", 6, 1024, 1, "float16", 1, traced=False), {"batch": 1, "skipped": "out of memory"}):
        with pytest.raises(ValueError, match="needs a sweep with traces"):
            whatif_model.WhatIfModel(table([bare]), CONSTANTS)
    for wish, message in (({"curve": "no such curve"}, "no traced curve is called 'no such curve'; there are: GPT-2"), ({"cpu": 100}, "cpu is one of 0.5")):
        with pytest.raises(ValueError, match=message):
            whatif_model.WhatIfModel(TRACED, CONSTANTS, **wish)
    nearest = whatif_model.WhatIfModel(TRACED, CONSTANTS, batch=3)
    assert nearest.curve == next(iter(nearest.curves)) and nearest.batch in (2, 4)


def test_what_if_has_labelled_sliders_and_bars(monkeypatch):
    shown = []
    for room in (sweep_view, whatif_view):
        monkeypatch.setattr(room, "display", lambda thing, *rest, **options: shown.append(thing))
    whatif_view.whatif(TRACED, CONSTANTS)
    assert "predicted" in shown[0]["text/plain"] and LABEL in shown[1].data
    model = whatif_model.WhatIfModel(TRACED, CONSTANTS)
    found = parts(whatif_view.view(model))
    for name, trait in (("cpu", "cpu"), ("gpu-speed", "gpu"), ("more-layers", "more_layers")):
        before = found["labkit-whatif"].value
        found[f"labkit-{name}"].value = 2
        assert getattr(model, trait) == 2 and found["labkit-whatif"].value != before
    found["labkit-whatif-curve"].value = list(model.curves)[-1]
    assert found["labkit-whatif-batch"].options == model.batches()


def test_a_moved_control_is_answered_at_once():
    model = SweepModel(sources())
    found = parts(sweep_view.view(model))

    def plain():
        """Return how long matplotlib takes here and now for a plain picture of two lines."""
        start, figure = time.process_time(), Figure(figsize=(8, 4), dpi=110)
        for axes in figure.subplots(1, 2):
            axes.plot(range(9), range(9), marker="o", label="a line")
            axes.legend()
        figure.savefig(io.BytesIO(), format="png")
        return time.process_time() - start

    def answer(name, value):
        start = time.process_time()
        found[f"labkit-{name}"].value = value
        return time.process_time() - start

    plain()  # the first one loads fonts
    before = plain()
    pictures = [answer("precision", "float32"), answer("range", (1, 64)), answer("model", "mlp"), answer("view", "roofline"),
                answer("width", 4096), answer("view", "timeline"), answer("batch", 16), answer("view", "speedup")]
    marks = [answer("batch", batch) for batch in (1, 2, 4, 8, 32)]  # over a curve that is drawn
    again = answer("batch", 8)  # drawn before
    most = max(0.1, min(before, plain()))  # where a plain picture takes longer than that, the machine is what is slow
    assert median(pictures) < most and median(marks) < 0.3 * most  # tests.bench_explorer has the figures
    assert again < 0.3 * most


def test_a_batch_is_marked_on_the_picture_as_if_drawn_with_it():
    model = SweepModel(sources())
    plain, one = charts.sweep(model.table), charts.sweep(model.table).marked(4)
    assert one.png == plain.marked(4).png and plain.marked(3) is plain
    before, after = (np.asarray(Image.open(io.BytesIO(chart.png)).convert("L")) for chart in (plain, one))
    changed = (before != after).any(axis=0).nonzero()[0]
    assert 10 < np.ptp(changed) < 0.05 * before.shape[1] and (after <= before).all()


@pytest.mark.parametrize("how", ["cancelled", "interrupted"])
def test_a_sweep_that_is_cancelled_or_interrupted_leaves_the_explorer_free(how):
    def interrupted(*args):
        for i, row in enumerate(points(*args)):
            if i == 2:
                raise KeyboardInterrupt
            yield row

    model = live(interrupted if how == "interrupted" else points)

    async def ended():
        task = asyncio.ensure_future(model.measure())
        while len(model.table) != 2:
            await asyncio.sleep(0.001)
        if how == "cancelled":
            task.cancel()
        await task

    with pytest.raises((asyncio.CancelledError, KeyboardInterrupt)):
        asyncio.run(ended())
    assert not model.busy and model.status == "Stopped after 2 of 10 points measured." and len(model.table) == 2
    model.source.points = points
    asyncio.run(model.measure())
    assert model.status == "Done: 10 of 10 points measured."


@pytest.mark.parametrize("how", ["stopped", "moved"])
def test_a_sweep_that_fails_as_it_ends_leaves_nothing_stale(how):
    def fails_at_its_end(*args):
        try:
            yield from points(*args)
        finally:
            raise RuntimeError("no luck\nat all")

    model = live(fails_at_its_end)

    async def ended():
        task = asyncio.ensure_future(model.measure())
        while len(model.table) != 2:
            await asyncio.sleep(0.001)
        if how == "stopped":
            model.stop()
        else:
            model.width = 1024
        await task

    asyncio.run(ended())
    assert not model.busy and model.status.startswith("Stopped after 2 of 10 points measured")
    assert model.status.endswith("Then an error: no luck") and len(model.table) == (2 if how == "stopped" else 0)


def test_an_error_without_words_is_named():
    def fails(*_):
        raise MemoryError
        yield

    model = live(fails)
    asyncio.run(model.measure())
    assert model.status == "Stopped after 0 of 10 points measured by an error: MemoryError"


def test_a_second_sweep_of_a_curve_is_drawn_anew():
    model = live()
    asyncio.run(model.measure())
    before = model.chart()
    assert model.chart() is before
    model.source.points = lambda *args: ({**row, "eager_wall_us": 1.1 * row["eager_wall_us"]} for row in points(*args))
    asyncio.run(model.measure())
    assert model.chart().text != before.text


def test_what_cannot_be_drawn_is_said_instead_of_a_chart():
    model = SweepModel(sources())
    found = parts(sweep_view.view(model))
    limits = model.source.ceilings
    part = limits[limits["precision"] != model.precision]
    part.attrs = limits.attrs
    model.source.ceilings, model._drawn = part, {}
    found["labkit-view"].value = "roofline"
    assert model.chart() == "This cannot be drawn: the ceilings have no row for 'multiply' in float16."
    assert "cannot be drawn" in found["labkit-chart"].value and "<img" not in found["labkit-chart"].value
    found["labkit-view"].value = "speedup"
    assert "<img" in found["labkit-chart"].value


@pytest.mark.parametrize("wish, message", [
    ({"gpu": "no such GPU"}, "gpu is one of Made-up A, Made-up B, not 'no such GPU'"), ({"view": "time"}, "view is one of roofline, speedup, time"),
    ({"model": "bert"}, "model is one of gpt2, llama, mlp, transformer, not 'bert'"), ({"precision": "fp16"}, "precision is one of bfloat16,"),
    ({"lenght": 128}, "the explorer has no 'lenght' to set; it has: model, layers"), ({"layers": "24"}, "layers is a whole number, not '24'")])
def test_a_wish_that_cannot_be_is_refused_with_what_can(wish, message):
    with pytest.raises(ValueError, match=message):
        SweepModel(sources(), **wish)


def test_a_number_that_was_not_recorded_moves_at_the_start_too_and_it_is_said():
    model = SweepModel(sources(), model="gpt2", layers=13, width=768)
    assert model.layers == 12 and model.note == "Not recorded here: layers 13. Moved to layers 12."
    assert SweepModel(sources()).note == ""


def test_a_batch_outside_of_the_range_is_not_called_unrecorded():
    model = SweepModel(sources(), batch=1)
    model.lowest = 8
    assert model.batch == 8 and model.note == "Batch 1 is outside of the range: moved to 8."


def test_the_roofline_says_how_far_the_chosen_batch_is_from_its_floor():
    model = SweepModel(sources(), view="roofline", batch=4)
    row, floors = model._row(), charts.floors_of(model.table[model.table["batch"] == 4], model.source.ceilings).iloc[0]
    assert f" The floor is {charts.time(max(floors))}: eager takes {row['eager_wall_us'] / max(floors):.3g} times that" in model.summary
    model.view = "speedup"
    assert "floor" not in model.summary


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Give a function that records a made-up sweep of GPT-2: the name of a folder and of a GPU, and what to change in each row."""
    def record(slug, gpu, change=dict):
        rows = [change(sweep_row("gpt2", 12, 768, 128, "float16", batch)) for batch in BATCHES]
        kept = {"schema": 1, "kind": "rows", "name": "sweep_gpt2", "command": "", "commit": "", "code_hash": "", "params": {},
                "recorded_at": "2000-01-01", "machine": {"gpu": gpu}, "method": {}, "rows": rows}
        (tmp_path / slug).mkdir()
        (tmp_path / slug / "sweep_gpt2.json").write_text(json.dumps(kept))

    monkeypatch.setattr(recordings, "FOLDER", tmp_path)
    monkeypatch.setattr(machine, "mode", lambda: machine.Mode(False, "none is here"))
    monkeypatch.delenv("LABKIT_RECORDING", raising=False)
    return record


def test_a_damaged_recording_is_left_out_and_the_others_serve(folder, tmp_path, capsys):
    for slug in ("a", "b"):
        folder(slug, slug.upper())
    folder("c", "C", lambda row: {name: row[name] for name in row if name != "length"})
    (tmp_path / "a" / "sweep_gpt2.json").write_text("{")
    assert list(sweep_view.at_hand()) == ["B"]
    said = capsys.readouterr().out
    assert "Left out: a" in said and "sweep_gpt2.json cannot be read" in said and "Left out: c (KeyError: 'length')" in said
    for slug in ("b", "c"):
        (tmp_path / slug / "sweep_gpt2.json").write_text("{")
    with pytest.raises(recordings.RecordingError, match="cannot be read"):
        sweep_view.at_hand()


def test_two_recordings_of_the_same_kind_of_gpu_are_both_offered(folder, monkeypatch):
    for slug in ("old", "new"):
        folder(slug, "Same GPU")
    assert list(sweep_view.at_hand()) == ["Same GPU", "Same GPU (old)"]
    monkeypatch.setenv("LABKIT_RECORDING", "old")
    assert list(sweep_view.at_hand()) == ["Same GPU", "Same GPU (new)"]
