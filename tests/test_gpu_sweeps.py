"""What only a GPU can show of lab 40: captured decode steps, sweeps measured here, and the explorer that runs them."""

import time

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

SCRIPT = """
import json, time
from labkit.explorers.sweep_model import Live, SweepModel
model = SweepModel({"here": Live()}, model="mlp", layers=24, width=1024, precision="float16", highest=8)
began, came = time.perf_counter(), []
model.observe(lambda change: came.append((change["new"], time.perf_counter() - began)), names="status")
await model.measure()
kept = ["batch", "speedup_low", "speedup_high", "graph_wall_us"]
print(json.dumps({"rows": model.table[kept].to_dict("records"), "came": came, "traced": bool(model.table["eager_gpu_us"].map(len).all())}))
"""


def test_a_captured_decode_step_gives_the_tokens_of_eager():
    from labkit import GraphedCallable, decode, models
    for kind in ("gpt2", "llama"):
        model = models.language_model(kind, layers=2, width=128, dtype=torch.float32)
        step, ids = decode.decode_step(model, batch=3, context=40)
        with torch.inference_mode():
            graph, keys = GraphedCallable(step, ids), step.cache.layers[0].keys
            for seed in range(4):
                ids = torch.randint(1000, (3, 1), device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
                expected, written = step(ids), keys.clone()
                keys[:, :, -1] = 0
                assert torch.equal(graph(ids), expected) and torch.equal(keys, written)


def test_a_batch_that_does_not_fit_is_skipped_with_its_reason_and_the_sweep_goes_on():
    from labkit.experiments import sweeps
    rows = [row for row in sweeps.sweep_points("gpt2", 2, 768, 512, "float16", batches=(1, 2**20, 2)) if isinstance(row, dict)]
    assert [bool(row["skipped"]) for row in rows] == [False, True, False, False, False]
    assert "of this GPU are free" in rows[1]["skipped"] and all(row["eager_gpu_us"] for row in rows[3:])


def test_a_sweep_that_is_dropped_leaves_the_gpu_as_it_was():
    from labkit.experiments import sweeps
    next(sweeps.sweep_points("mlp", 6, 1024, 1, "float16", batches=(1,)))  # workspaces that stay are made
    torch.cuda.empty_cache()
    before, points = torch.cuda.memory_allocated(), sweeps.sweep_points("mlp", 6, 1024, 1, "float16")
    next(points), points.close()
    assert torch.cuda.memory_allocated() <= before + 2**20


def test_the_explorer_measures_here_what_was_recorded(capsys):
    """Drive Measure in a kernel, as a press on the button does: in time, and equal to the recording within intervals."""
    import json

    import nbformat

    from labkit import build, launch_model, machine, recordings
    from labkit.experiments import sweeps
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(SCRIPT)])
    ran = build.execute(build.NOTEBOOKS / "explorer.ipynb", notebook).cells[0].outputs
    answer = json.loads("".join(output.get("text", "") for output in ran).strip().splitlines()[-1])
    points = [at for said, at in answer["came"] if "points measured" in said]
    with capsys.disabled():
        print(f"\nfirst point after {points[1]:.1f} s, then {', '.join(f'{b - a:.1f}' for a, b in zip(points[1:], points[2:]))} s")
    assert answer["traced"] and points[1] < 10 and max(b - a for a, b in zip(points[1:4], points[2:5])) < 2
    recorded, chains = sweeps.recorded_sweeps()
    recorded = launch_model.add_predictions(recorded, launch_model.fit(chains)).query(
        "model == 'mlp' and layers == 24 and width == 1024 and precision == 'float16'").set_index("batch")
    same_gpu = recordings.load("sweep_mlp")["machine"]["gpu"] == machine.describe().gpu
    agree = []
    for row in answer["rows"] if same_gpu else ():
        other = recorded.loc[row["batch"]]
        # measured in one process, and predicted from kernels profiled in another: the same kernel can take longer in one of them
        low, high = sorted((other.graph_wall_us, other.predicted_graph_us))
        assert 0.9 * low < row["graph_wall_us"] < 1.1 * high
        if high < 1.1 * low:
            agree.append(row["speedup_low"] <= other.speedup_high and other.speedup_low <= row["speedup_high"])
    assert not same_gpu or (len(agree) >= 3 and all(agree))


def test_stop_answers_within_one_point():
    import asyncio

    from labkit.explorers.sweep_model import Live, SweepModel
    model = SweepModel({"here": Live()}, model="mlp", layers=6, width=1024, precision="float16")

    async def press_both():
        sweep = asyncio.ensure_future(model.measure())
        while not len(model.table):
            await asyncio.sleep(0.01)
        pressed = time.perf_counter()
        model.stop()
        await sweep
        return time.perf_counter() - pressed

    assert asyncio.run(press_both()) < 3 and "Stopped after" in model.status and len(model.table) <= 2
