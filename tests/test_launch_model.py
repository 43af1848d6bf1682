"""The launch model: each of its parts on steps that can be worked out by hand."""

import numpy as np
import pandas as pd
import pytest
from made_up import batch_sweep, ceilings, table

from labkit import build, launch_model
from labkit.charts.sweeps import floors_of
from labkit.launch_model import Constants

CONSTANTS = Constants(gap_us=0.5, hand_gap_us=1.0, fixed_us=4.0, call_us=20.0)


def row(launches=3, apart=10.0, work=2.0, enqueue=60.0, graph_work=2.0):
    """A traced row of `launches` kernels, launched every `apart` us under the profiler."""
    return {"eager_launch_at_us": [apart * i for i in range(launches)], "eager_gpu_us": [work] * launches, "batch": 1,
            "graph_gpu_us": [graph_work] * launches, "eager_enqueue_us": enqueue, "eager_wall_us": 50.0, "graph_wall_us": 25.0}


def chains(gap, hand_gap, fixed, call):
    """Chains that add exactly these constants."""
    rows = []
    for nodes in (10, 50, 200):
        work = nodes * 3.0
        rows += [{"how": "graph", "nodes": nodes, "kernels_us": work, "wall_us": work + fixed + gap * nodes, "gpu_us": work,
                  "enqueue_us": call + nodes / 100},
                 {"how": "by hand", "nodes": nodes, "kernels_us": work, "wall_us": 9.0 * nodes, "gpu_us": work + hand_gap * nodes,
                  "enqueue_us": 9.0 * nodes}]
    return table(rows)


def test_the_constants_are_those_of_the_chains():
    found = launch_model.fit(chains(0.4, 1.1, 5.0, 12.0))
    assert (found.gap_us, found.hand_gap_us, found.fixed_us) == (pytest.approx(0.4), pytest.approx(1.1), pytest.approx(5.0))
    assert found.call_us == pytest.approx(12.1)


def test_a_graph_is_a_sum_or_what_its_call_keeps_the_cpu():
    assert launch_model.graph_us([2.0] * 10, CONSTANTS) == 4 + 20 + 5
    assert launch_model.graph_us([2.0], CONSTANTS) == 20


@pytest.mark.parametrize("launches, kernels, calls, expected", [
    ([10, 10, 10], [2, 2, 2], 1, 32), ([10, 10, 10], [2, 2, 2], 10, 30.2),  # the CPU sets the pace
    ([5, 5], [30, 30], 1, 66), ([5, 5], [30, 30], 10, 62.4),  # the GPU does
    ([10, 1, 1], [2, 20, 2], 1, 36)])  # both, by turns
def test_eager_is_a_queue(launches, kernels, calls, expected):
    assert launch_model.eager_us(launches, kernels, CONSTANTS, calls) == pytest.approx(expected)


def test_launches_and_kernels_that_do_not_pair_up_are_refused():
    with pytest.raises(ValueError):
        launch_model.eager_us([1.0], [1.0, 2.0], CONSTANTS)


def test_launches_keep_the_rhythm_of_the_profiler_and_the_pace_without_it():
    step = row(launches=3) | {"eager_launch_at_us": [0.0, 30.0, 40.0]}
    assert launch_model.launches_us(step) == pytest.approx([36, 12, 12])
    assert launch_model.launches_us(row(launches=1)) == pytest.approx([60])
    assert launch_model.launches_us(row(launches=3, apart=0.0)) == pytest.approx([20, 20, 20])


def test_faster_machines_and_longer_steps():
    now = launch_model.predict(row(), CONSTANTS)
    assert now == (pytest.approx(60.2), 20)
    assert launch_model.predict(row(), CONSTANTS, cpu=2)[0] == pytest.approx(30.2)
    assert launch_model.predict(row(), CONSTANTS, cpu=2)[1] == pytest.approx(4 + 6 + 1.5)
    assert launch_model.predict(row(work=200, graph_work=200), CONSTANTS, gpu=2) == (
        pytest.approx(302 + 18 / 10, rel=0.01), pytest.approx(302 + 0.75))
    assert launch_model.predict(row(), CONSTANTS, layers=3)[0] == pytest.approx(180.2)


def test_a_graph_is_predicted_from_its_own_kernels():
    assert launch_model.predict(row(work=2, graph_work=20), CONSTANTS) == (pytest.approx(60.2), 4 + 60 + 1.5)


def test_predictions_stand_beside_what_was_measured():
    untraced = dict.fromkeys(("eager_launch_at_us", "eager_gpu_us", "graph_gpu_us")) | {"batch": 2, "eager_enqueue_us": 60.0,
                                                                                        "eager_wall_us": 50.0, "graph_wall_us": 25.0}
    made = launch_model.add_predictions(table([row(), untraced]), CONSTANTS)
    assert made["predicted_eager_us"].iloc[0] == pytest.approx(60.2) and made["predicted_graph_us"].iloc[0] == 20
    assert made["eager_error"].iloc[0] == pytest.approx(0.204) and made["graph_error"].iloc[0] == pytest.approx(-0.2)
    assert made["predicted_speedup"].iloc[0] == pytest.approx(3.01)
    assert made[["predicted_eager_us", "graph_error"]].iloc[1].isna().all() and made.attrs["provenance"]["gpu"] == "made up"


SOLUTIONS = build.NOTEBOOKS / "solutions"


def test_the_queue_that_lab_41_teaches_is_the_packaged_one():
    cells = build.code_cells(SOLUTIONS / "41_predict_the_speedup.ipynb")
    names = {}
    exec(next(cell for cell in cells if cell.startswith("def eager_us(")), names)
    for launches, kernels in (([10.0] * 9, [2.0] * 9), ([5.0] * 9, [30.0] * 9), ([10.0, 1.0, 1.0] * 5, [2.0, 20.0, 2.0] * 5)):
        for calls in (1, 10):
            taught = names["eager_us"](launches, kernels, CONSTANTS.hand_gap_us, calls)
            assert taught == pytest.approx(launch_model.eager_us(launches, kernels, CONSTANTS, calls))


def test_the_launches_and_the_floor_that_the_labs_teach_are_the_packaged_ones():
    cells = [cell for path in SOLUTIONS.glob("4*.ipynb") for cell in build.code_cells(path)]
    taught = {"numpy": np}
    for name in ("launches_us", "floor_us"):
        exec(next(cell for cell in cells if cell.startswith(f"def {name}(")).partition("\n\n")[0], taught)
    step = pd.Series(row(launches=3) | {"eager_launch_at_us": [0.0, 40.0, 30.0]})
    assert taught["launches_us"](step) == pytest.approx(launch_model.launches_us(step))
    made = batch_sweep("gpt2", precisions=("float16",)).query("skipped == ''")
    ceiling = ceilings().set_index(["what", "precision"])["per_second"]
    floors = floors_of(made, ceilings())
    ours = [taught["floor_us"](*work, ceiling["read"].iloc[0], ceiling["multiply", "float16"]) for work in made[["bytes", "flops"]].to_numpy()]
    assert ours == pytest.approx(floors[["read", "multiply"]].max(axis=1).tolist())


def test_a_sweep_without_any_trace_gets_no_predictions():
    nothing = table([{"batch": 1, "skipped": "out of memory"}])  # as recorded where no batch fitted
    empty = table([row() | {"eager_launch_at_us": [], "eager_gpu_us": []}])
    for made in (nothing, empty):
        assert launch_model.add_predictions(made, CONSTANTS)[["predicted_eager_us", "graph_error"]].isna().all(axis=None)
        assert not launch_model.traced(made).any()


def test_lab_41_keeps_the_name_of_its_table_of_predictions_for_it():
    cells = build.code_cells(SOLUTIONS / "41_predict_the_speedup.ipynb")
    assert sum("predicted = " in cell for cell in cells) == 1  # else a cell run again would break those below


@pytest.mark.parametrize("factors", [{"cpu": 0}, {"gpu": -2}, {"layers": 0}, {"layers": 1.5}])
def test_a_prediction_says_what_cannot_be(factors):
    row = {"eager_gpu_us": [2.0], "graph_gpu_us": [2.0], "eager_launch_at_us": [0.0], "eager_enqueue_us": 5.0}
    assert launch_model.predict(row, CONSTANTS)
    with pytest.raises(ValueError, match="cpu and gpu must be above 0 and layers a whole number from 1"):
        launch_model.predict(row, CONSTANTS, **factors)
    for whole in (row | {"eager_gpu_us": None}, pd.DataFrame([row] * 2)):
        with pytest.raises(ValueError, match="needs one traced row of a sweep"):
            launch_model.predict(whole, CONSTANTS)
