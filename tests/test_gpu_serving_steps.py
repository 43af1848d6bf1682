"""What only a GPU can show of lab 60's experiments: prefills replayed in pieces, steps held in place, traces served, vLLM's replays."""

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from labkit import architectures, batching, models, serving, timing, vllm_runs  # noqa: E402
from labkit.experiments import registry, serving_steps  # noqa: E402


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(models, "language_model", lambda kind, **_: architectures.tiny_model(kind, "cuda", max_position_embeddings=2048))
    for name, value in (("ROWS", 8), ("PLACES", 48), ("TOKENS", (4, 16)), ("RATES", (40, 200)), ("TRACE_S", 1), ("STEP_SIZES", (1, 2, 3, 4)),
                        ("EAGER_STEPS", (1, 4)), ("POOL_SIZES", [1, 2, 4]), ("PREFILL_SIZES", (64, 128, 512)), ("PREFILL_TOKENS", (50, 100, 300))):
        monkeypatch.setattr(serving_steps, name, value)


def test_prefills_of_any_length_replay_in_pieces_and_sizes_do_not_disturb_each_other():
    model = architectures.tiny_model("llama", "cuda")
    prefill = serving.PiecewisePrefill(model, [8, 16, 32])
    chains = [chain for chain, *_ in prefill.chains.values()]
    assert [len(chain) for chain in chains] == [3, 3, 3] and len({graph.pool for chain in chains for graph in chain}) == 1
    assert prefill.pool_bytes > 0
    for lengths in ([5], [16], [5, 2], [30], [1, 12], [3, 3, 3, 3], [20, 12], [5], [40]):  # the last is above the largest size
        ids = torch.randint(3, 96, (1, sum(lengths)), device="cuda")
        with torch.inference_mode():
            alone = torch.cat([model(part).logits[:, -1] for part in ids.split(lengths, 1)])
            assert torch.allclose(prefill(ids, lengths), alone, atol=1e-4)
            assert torch.allclose(prefill.eager(ids, lengths), alone, atol=1e-4)


def test_a_held_step_replays_past_the_end_of_its_places():
    decoder = serving.BatchedDecoder(architectures.tiny_model("llama", "cuda"), serving_steps.STEP_PLACE + 8, 4, [1, 2, 4])
    with torch.inference_mode():
        calls = {batch: serving_steps.step_of_loop(decoder, batch) for batch in (1, 2, 4)}
        for _ in range(30):
            assert [len(call()) for call in calls.values()] == [1, 2, 4]
    assert set(decoder.steps) == {(1, 1, True), (2, 2, True), (4, 4, True)}


def test_a_trace_takes_the_time_that_its_arrivals_take(tiny):
    decoder = serving.BatchedDecoder(models.language_model("llama"), 48, 8, [1, 2, 4, 8])
    trace = [batching.Request(0.0, 5, 3), batching.Request(0.5, 5, 3)]
    with timing.WaitingClock() as clock:
        served = batching.serve(decoder, trace, [torch.ones(5, dtype=torch.int64, device="cuda")] * 2, clock)
    assert served[0].came_s[-1] < 0.4 and 0.5 <= served[1].came_s[0] < 0.8


@pytest.mark.parametrize("name", ["serving_ways", "serving_step_cost", "serving_pools", "serving_prefill"])
def test_each_experiment_runs_live_on_a_tiny_model(tiny, name, monkeypatch):
    monkeypatch.setenv("LABKIT_BUDGET", "0.1")
    rows = registry.EXPERIMENTS[name].measure()
    of = {row.get("way") or row["how"]: row for row in rows}
    if name == "serving_ways":
        assert of["every size"]["replayed_share"] == 1 and of["eager"]["replayed_share"] == 0 and of["powers of two"]["pool_mib"] > 0
        assert all(row["capture_s"] > 0 for way, row in of.items() if way != "eager")
    elif name == "serving_step_cost":
        assert of["graph"]["wall_us"] < of["eager"]["wall_us"] and of["graph"]["capture_s"] > 0
    elif name == "serving_pools":
        assert of["one pool, largest first"]["pool_bytes"] <= of["a pool for each"]["pool_bytes"] and all(row["pool_bytes"] for row in rows)
    else:
        assert all(row["difference"] < 1e-3 for row in rows) and of["pieces"]["graphs"] == 9


@pytest.mark.skipif(not vllm_runs.installed(), reason="vLLM is not installed")
def test_vllm_tells_what_it_replays_and_takes():
    found = vllm_runs.run_vllm({}, batches=(1,))
    assert found["replays"]["decode step"] == pytest.approx(1, abs=0.3) and found["replays"]["long prefill"] == 0
    assert found["captured_at_start"] is True and found["compiles"] and found["metrics"] and found["budget_gib"] > 0
    eager = vllm_runs.run_vllm({"enforce_eager": True}, batches=(1,))
    assert set(eager["replays"].values()) == {0} and not eager["compiles"] and not eager["captured_sizes"]
