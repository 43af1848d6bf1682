"""The sweeps of lab 40 without a GPU: what is skipped and why, what comes when, and which curves are taken from recordings."""

import gc
import sys
import time
import types
import weakref

import pytest

torch = pytest.importorskip("torch")
from labkit import experiments, graphs, models, recordings, timing, trace  # noqa: E402
from labkit.experiments import sweeps  # noqa: E402


def fake_measurement(name, us):
    return timing.Measurement(name, *(timing.spread([us, us + 1, us + 2]) for _ in range(3)), 3, "budget")


@pytest.fixture
def gpu(monkeypatch):
    """Pretend a GPU: steps on the CPU, a graph that is eager, a clock that knows the answer; the batches of each comparison."""
    asked = []

    def compare(calls, **_):
        asked.append(sorted({batch for batch, _ in calls}))
        return timing.Comparison({key: fake_measurement(key, 50.0 if key[1] == "eager" else 10.0) for key in calls})

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(timing, "compare", compare)
    monkeypatch.setattr(models, "build", lambda kind, layers, width, batch, tokens, dtype: (
        models.mlp(layers, width), torch.zeros(batch, width)))
    monkeypatch.setattr(sweeps, "as_pair", lambda call, x: ({"eager": call, "graph": call}, types.SimpleNamespace(kernel_names=["k"] * 4)))
    monkeypatch.setattr(sweeps, "in_child", lambda fn, params, timeout_s: [
        {f"{how}_{part}": [1.0] * 4 for how in ("eager", "graph") for part in (*sweeps.TRACE, "kernel")} for _ in params["points"]])
    return asked


def rows_of(*batches, **curve):
    curve = {"model": "mlp", "layers": 2, "width": 8, "length": 1, "precision": "float32"} | curve
    return [row for row in sweeps.sweep_points(**curve, batches=batches) if isinstance(row, dict)]


def test_each_row_comes_at_once_and_again_with_its_traces(gpu):
    rows = rows_of(1, 4)
    assert [(row["batch"], row["eager_gpu_us"]) for row in rows] == [(1, None), (4, None), (1, [1.0] * 4), (4, [1.0] * 4)]
    assert gpu == [[1], [4]] and rows[0]["speedup"] == pytest.approx(51 / 11) and rows[0]["skipped"] == ""


@pytest.mark.parametrize("error", [
    models.TooLarge("a cache needs 9 GiB; 1 GiB are free. Choose less."), torch.OutOfMemoryError("out of memory. Tried to allocate"),
    graphs.CaptureError(torch.OutOfMemoryError("out of memory. Tried"), True)])
def test_a_batch_without_room_is_skipped_with_its_reason(gpu, monkeypatch, error):
    def as_pair(call, x, before=sweeps.as_pair):
        if len(x) == 4:
            raise error from error.__cause__ or (torch.OutOfMemoryError("out of memory. Tried") if isinstance(error, graphs.CaptureError) else None)
        return before(call, x)

    monkeypatch.setattr(sweeps, "as_pair", as_pair)
    rows = rows_of(1, 4, 8)
    assert [bool(row["skipped"]) for row in rows] == [False, True, False, False, False]
    assert rows[1]["skipped"] in ("a cache needs 9 GiB; 1 GiB are free", "out of memory")


def test_a_capture_that_fails_for_another_reason_is_an_error(gpu, monkeypatch):
    def as_pair(call, x):
        raise graphs.CaptureError(RuntimeError("operation not permitted"), True) from RuntimeError("operation not permitted")

    monkeypatch.setattr(sweeps, "as_pair", as_pair)
    with pytest.raises(graphs.CaptureError):
        rows_of(1)


def test_profiling_that_fails_is_an_error_and_frees_the_next_sweep(gpu, monkeypatch):
    def fail(*_):
        raise RuntimeError("_traces failed in its own process: out of luck")

    with monkeypatch.context() as broken:
        broken.setattr(sweeps, "in_child", fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            rows_of(1)
    assert len(rows_of(1)) == 2


def test_a_new_sweep_waits_for_the_profiler_of_a_stopped_one(gpu):
    with sweeps._at_work:
        points = sweeps.sweep_points("mlp", 2, 8, 1, "float32", batches=(1,))
        assert "has to end first" in next(points) and "has to end first" in next(points)
    assert isinstance(next(points), dict)
    points.close()


def test_two_sweeps_take_turns(gpu):
    first, second = (sweeps.sweep_points("mlp", 2, 8, 1, "float32", batches=(1, 2)) for _ in range(2))
    assert isinstance(next(first), dict) and "has to end first" in next(second)
    first.close()  # as Stop does
    assert isinstance(next(second), dict)
    second.close()
    assert len(rows_of(1)) == 2


def test_whatever_ends_the_work_beside_is_heard():
    def leave():
        raise SystemExit("gone")

    with pytest.raises(SystemExit, match="gone"):
        for _, _ in zip(range(10**7), sweeps.beside(leave, "waiting")):
            pass
    assert not sweeps._at_work.locked()


def test_recorded_sweeps_measure_a_curve_in_common_rounds_and_then_alone_what_had_no_room(gpu, monkeypatch):
    def as_pair(call, x, before=sweeps.as_pair, tried=[]):
        tried.append(len(x))
        if len(x) == 512 and tried.count(512) == 1:
            raise torch.OutOfMemoryError("out of memory. Tried")
        return before(call, x)

    monkeypatch.setattr(sweeps, "as_pair", as_pair)
    rows = sweeps._sweep("mlp", [(2, 8, 1)])
    assert len(rows) == 30 and not any(row["skipped"] for row in rows) and all(row["graph_gpu_us"] for row in rows)
    assert gpu == [[*sweeps.BATCHES[:-1]], [512], [*sweeps.BATCHES], [*sweeps.BATCHES]]


def test_a_skipped_batch_lets_go_of_the_others(gpu, monkeypatch):
    made = []

    def as_pair(call, x, before=sweeps.as_pair):
        if len(x) == 4:
            raise torch.OutOfMemoryError("out of memory. Tried")
        made.append(weakref.ref(call))
        return before(call, x)

    monkeypatch.setattr(sweeps, "as_pair", as_pair)
    gc.disable()
    try:
        sweeps._measured(sweeps._steps("mlp", 2, 8, 1, "float32"), (1, 2, 4), 1)
        assert len(made) == 2 and not any(ref() for ref in made)
    finally:
        gc.enable()


def test_a_point_without_room_in_the_child_stays_without_a_trace(gpu, monkeypatch):
    def as_pair(call, x, before=sweeps.as_pair):
        if len(x) == 2:
            raise models.TooLarge("no room")
        return before(call, x)

    monkeypatch.setattr(sweeps, "as_pair", as_pair)
    kernel = types.SimpleNamespace(name="k", launch_at_us=0.0, launch_us=1.0, start_us=2.0, gpu_us=3.0)
    monkeypatch.setattr(trace, "record_each", lambda calls, **_: {how: types.SimpleNamespace(kernels=[kernel]) for how in calls})
    curve = {"model": "mlp", "layers": 2, "width": 8, "length": 1, "precision": "float32"}
    found = sweeps._traces([curve | {"batch": batch} for batch in (1, 2, 4)])
    assert [bool(one) for one in found] == [True, False, True]
    assert found[0]["graph_kernel"] == [1] and found[2]["eager_gpu_us"] == [3.0]


def test_a_clock_that_runs_out_of_memory_makes_each_batch_try_alone(gpu, monkeypatch):
    def compare(calls, before=timing.compare, **options):
        if len(calls) > 2:
            raise torch.OutOfMemoryError("out of memory. Tried")
        return before(calls, **options)

    monkeypatch.setattr(timing, "compare", compare)
    rows = sweeps._in_common_rounds([{"model": "mlp", "layers": 2, "width": 8, "length": 1, "precision": "float32"}])
    assert [row["batch"] for row in rows] == [*sweeps.BATCHES] and not any(row["skipped"] for row in rows)


@pytest.mark.parametrize("precision, model, message", [
    ("int8", "mlp", "precision is one of float32, float16, bfloat16"), ("float16", "gpt9", "no language model is called 'gpt9'")])
def test_unknown_wishes_are_named(gpu, precision, model, message):
    with pytest.raises(ValueError, match=message):
        rows_of(1, precision=precision, model=model)


def test_work_counts_weights_cache_and_products():
    call, x = models.mlp(3, 16), torch.zeros(4, 16)
    assert sweeps._work(call, x, 1) == {"bytes": 4 * (3 * 256 + 2 * 64), "flops": 2 * 4 * 3 * 256}
    call, x = models.transformer(2, 64), torch.zeros(5, 7, 64)
    assert sweeps._work(call, x, 7)["flops"] == 2 * 35 * (2 * 12 * 64 * 64 + 2 * 2 * 7 * 64)
    from labkit import decode
    from transformers import AutoModelForCausalLM
    whole = AutoModelForCausalLM.from_config(models._language_config("llama", 2, 128))
    step = decode.DecodeStep(whole, batch=3, context=10)
    weights = sum(m.weight.numel() for m in whole.modules() if isinstance(m, torch.nn.Linear))
    assert sweeps._work(step, torch.zeros(3, 1, dtype=torch.long), 10) == {
        "bytes": 4 * (weights + 2 * 2 * 3 * 10 * 64), "flops": 2 * 3 * (weights + 2 * 2 * 10 * 128)}


def test_curves_come_from_the_recordings_where_nothing_is_measured():
    wanted = ("gpt2", 12, 768, 128, "float16")
    table = sweeps.curves(wanted)
    assert list(table["batch"]) == [*sweeps.BATCHES] and set(table["model"]) == {"gpt2"} and not table.attrs["provenance"]["live"]
    with pytest.raises(recordings.RecordingError, match=r"not recorded: \[\('gpt2', 1, 2, 3, 'float16'\)\]; there are: .*'gpt2', 12, 768, 128"):
        sweeps.curves(wanted, ("gpt2", 1, 2, 3, "float16"))


def test_all_sweeps_are_recorded_with_their_constants():
    table, constants = sweeps.recorded_sweeps()
    assert set(table["model"]) == {"mlp", "transformer", "gpt2", "llama"} and {"graph", "by hand"} == set(constants["how"])
    assert len(table) == sum(len(getattr(experiments, f"sweep_{model}")()) for model in set(table["model"]))


def test_what_a_language_model_needs_is_imported_beside():
    sweeps.get_ready()
    with sweeps._at_work:  # waits for its end, if it has begun
        pass
    for _ in range(600):
        if "labkit.decode" in sys.modules and "transformers.models.llama.modeling_llama" in sys.modules:
            break
        time.sleep(0.1)
    assert {"labkit.decode", "transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama"} <= set(sys.modules)
