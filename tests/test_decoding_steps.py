"""The experiments of lab 50 without a GPU: what they compare, in which order rows come, and what a tiny architecture tells."""

import json
import types

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from made_up import table  # noqa: E402
from test_decode_loop import Tape  # noqa: E402

from labkit import architectures, experiments, graphs, models, recordings, timing, trace  # noqa: E402
from labkit.experiments import decoding_steps, registry  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


class Eager:
    """Instead of a graph: runs the callable each time."""
    nodes, kernel_names, capture_seconds, pool_bytes, generators = [1, 2, 3], ["k"] * 3, 0.5, 2**20, ()

    def __init__(self, fn, args=(), **_):
        self.fn, self.args = fn, (args,) if isinstance(args, torch.Tensor) else args

    def __call__(self, *args):
        return self.fn(*args)

    def replay(self):
        return self.fn(*self.args)


@pytest.fixture
def gpu(monkeypatch):
    """Pretend a GPU: tiny models on the CPU, graphs that are eager, a clock that gives each call its turn; what it timed."""
    asked = []

    def compare(calls, **_):
        asked.append(list(calls))
        for call in calls.values():
            call()
        return timing.Comparison({name: timing.Measurement(name, *(timing.spread([10.0 * us, 10.0 * us + 1]) for _ in range(3)), 2, "budget")
                                  for us, name in enumerate(calls, 1)})

    monkeypatch.setattr(timing, "compare", compare)
    monkeypatch.setattr(timing, "one_loop_us", lambda call, calls: call() is None or 7.0)
    monkeypatch.setattr(timing, "stopwatch", lambda: lambda: 5.0)
    monkeypatch.setattr(graphs, "GraphedCallable", Eager)
    monkeypatch.setattr(models, "require_room", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (800, 800))
    monkeypatch.setattr(torch, "ones", lambda *shape, device=None, _ones=torch.ones, **options: _ones(
        *shape, device=None if device == "cuda" else device, **options))
    monkeypatch.setattr(models, "language_model", lambda kind, layers, width, dtype: architectures.tiny_model(
        kind, max_position_embeddings=2048))
    monkeypatch.setattr(decoding_steps, "_no_autocast", lambda: torch.autocast("cpu", enabled=False, cache_enabled=False))
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    monkeypatch.setattr(trace, "record_each", lambda calls, **_: {
        name: types.SimpleNamespace(kernels=[types.SimpleNamespace(name="a kernel", gpu_us=2.0)] * (call() is not None)) for name, call in calls.items()})
    monkeypatch.setattr(decoding_steps, "in_child", lambda fn, params=None, timeout_s=0: json.loads(json.dumps(fn(**params or {}))))
    monkeypatch.setattr(decoding_steps, "SPAN", {"GPT-2": (128, 200), "Llama 8B": (128,)})
    monkeypatch.setattr(decoding_steps, "LADDER_BATCHES", (1, 32))
    return asked


def test_the_ladder_has_every_rung_and_its_share_of_the_floor(gpu):
    rows = [row for name in ("ladder_gpt2", "ladder_llama_8b") for row in registry.EXPERIMENTS[name].measure()]
    points = {(row["model"], row["batch"], row["context"]): [r["rung"] for r in rows if all(r[k] == row[k] for k in ("model", "batch", "context"))]
              for row in rows}
    compiled = {decoding_steps.COMPILED, decoding_steps.BOTH}
    assert points == {(name, batch, context): [rung for rung in decoding_steps.RUNGS if (context == 128 or rung not in compiled)
                                               and (name == "Llama 8B" or rung != decoding_steps.READ_ONCE)]  # GPT-2's heads share no keys
                      for name, context in (("GPT-2", 128), ("GPT-2", 200), ("Llama 8B", 128)) for batch in (1, 32)}
    assert all(names[-1] == "read" for names in gpu)  # the floor is measured in the same rounds
    for row in rows:
        captured = row["rung"].endswith("captured") or row["rung"] == decoding_steps.READ_ONCE
        assert row["share"] == pytest.approx(row["floor_us"] / row["wall_us"], rel=0.01) and row["share_low"] < row["share"] < row["share_high"]
        assert [row[key] for key in ("nodes", "capture_s", "pool_mib", "kernels_us")] == ([3, 0.5, 1.0, 2.0] if captured else [None] * 4)
        assert row["same_tokens"] == (row["batch"] if captured else None)
        assert row["longest"] == ([["a kernel", 1, 2.0]] if captured else [])
    assert "NaN" not in json.dumps(rows)


def test_what_does_not_fit_or_compile_is_left_out_and_the_rest_is_kept(gpu, monkeypatch, capsys):
    from labkit import decode
    step = decode.decode_step

    def decode_step(model, batch, context):
        if batch == 32:
            raise models.TooLarge("a cache needs 9 GiB. Choose less.")
        return step(model, batch, context)

    def broken(*_, **__):
        raise RuntimeError("no compiler\nand more")

    monkeypatch.setattr(decode, "decode_step", decode_step)
    monkeypatch.setattr(torch, "compile", lambda call, **_: broken)
    rows = registry.EXPERIMENTS["ladder_gpt2"].measure()
    assert {(row["batch"], row["context"]) for row in rows} == {(1, 128), (1, 200)}
    assert [row["kernels_us"] for row in rows if row["rung"] == "captured"] == [2.0, 2.0] and len(rows) == 6
    out = capsys.readouterr().out
    assert "Left out: batch 32, context 128: a cache needs 9 GiB\n" in out and "Left out: compiled: no compiler\n" in out


def test_a_compiled_step_can_be_watched_and_is_compiled_once(monkeypatch):
    from torch._dynamo.utils import counters

    from labkit import decode
    from labkit.watch import Watched
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **_: real(call, backend="eager", dynamic=False))
    step = decode.DecodeStep(architectures.tiny_model("llama"), batch=2, context=9)
    ids, call = torch.ones(2, 1, dtype=torch.long), decoding_steps._compiled(step)
    torch.compiler.reset(), counters.clear()
    with torch.inference_mode(), torch.autocast("cpu", enabled=False, cache_enabled=False):
        assert torch.equal(call(ids), step(ids))
        torch.set_autocast_cache_enabled(False)  # as in a capture
        assert torch.equal(call(ids), step(ids)) and counters["stats"]["unique_graphs"] == 1
        Watched(call, []).check()


def test_a_pass_over_many_tokens_is_compared_with_its_graph(gpu):
    rows = decoding_steps.prefill_cost.measure()
    assert [(row["model"], row["tokens"]) for row in rows] == [(name, n) for name in ("GPT-2", "Llama 8B") for n in (1, 4, 16, 64, 256, 1024)]
    assert gpu == [["eager", "graph"]] * 12 and rows[0]["kernels"] == 3  # no pass is longer than the model's positions


def test_the_mask_of_a_pass_changes_nothing(gpu):
    model = architectures.tiny_model("llama")
    ids = torch.arange(3, 12)[None]
    with torch.inference_mode():
        assert torch.allclose(decoding_steps._pass_of(model, 9)(ids), model(ids).logits[:, -1], atol=1e-5)


def test_ways_to_write_are_held_against_generate_and_what_fails_is_left_out(gpu, monkeypatch, capsys):
    def decoder(model, *_, compiled):
        def generate(ids, n):
            if compiled:
                raise RuntimeError("no compiler here\nand more")
            return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=n)[:, ids.shape[1]:]
        return types.SimpleNamespace(generate=generate)

    from labkit import decode
    monkeypatch.setattr(decode, "GraphedDecoder", decoder)
    rows = decoding_steps.generate_speed.measure()
    assert [row["how"] for row in rows] == ["generate()", "generate(), static cache", "GraphedDecoder"] * 2
    assert {row["same_tokens"] for row in rows} == {32} and rows[2]["token_us"] == pytest.approx(rows[2]["wall_us"] / 32)
    assert "Left out: GraphedDecoder, compiled: no compiler here\n" in capsys.readouterr().out


def test_the_articles_way_stands_beside_ours(gpu):
    rows = decoding_steps.article_benchmark.measure()
    assert [(row["size"], row["batch"], row["way"]) for row in rows] == [
        (size, batch, way) for size, batch in (("small", 1), ("large", 1), ("large", 32)) for way in ("one loop each", "in rounds")]
    assert rows[0]["eager_us"] == 7.0 and rows[0]["speedup"] == 1 and rows[1]["speedup"] != 1


def test_a_text_is_streamed_both_ways_with_the_time_of_each_token(gpu, monkeypatch):
    tokenizer = types.SimpleNamespace(
        apply_chat_template=lambda messages, **_: {"input_ids": torch.arange(3, 9)[None]},
        decode=lambda tokens, **_: "".join(chr(60 + token % 60) for token in tokens))
    monkeypatch.setattr(models, "pretrained", lambda dtype: (architectures.tiny_model("llama", max_position_embeddings=2048), tokenizer))
    rows = decoding_steps.streamed_text.measure()
    texts = {how: [row["token"] for row in rows if row["how"] == how] for how in ("eager", "graph")}
    assert texts["eager"] == texts["graph"] and 1 <= len(texts["eager"]) <= 96
    assert all(len(row["text"]) == 1 and row["at_us"] == 5.0 for row in rows)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
def test_an_architecture_is_tried_by_hand_and_by_the_decoder(name):
    assert decoding_steps._by_hand(name, "cpu") == {"static_equals": True}
    found = decoding_steps._by_decoder(name, "cpu")
    assert found["decodes"] and found["decoder_equals"] and found["padding"] and found["nodes"] is None


class Pretended(str):
    """A device that is the CPU to torch, and a GPU to whoever asks."""
    __hash__ = str.__hash__

    def __eq__(self, other):
        return other in ("cpu", "cuda")


class Taped:
    """Instead of a graph of a step by hand: what its operations were, once, on tensors that stay where they are."""

    def __init__(self, step, clone):
        step(), step(), step()
        names = vars(step) if isinstance(step, decoding_steps._HandStep) else step.__globals__
        tensors = [t for layer in names["cache"].layers for t in vars(layer).values() if isinstance(t, torch.Tensor)] + [names["token"]]
        before = [t.clone() for t in tensors]
        with Tape() as self.tape:
            step()
        for tensor, was in zip(tensors, before):
            tensor.copy_(was)  # a capture does not run

    def replay(self):
        self.tape.replay()


@pytest.mark.parametrize("name, found", [
    ("llama", {"static_equals": True, "captures": True, "captured_equals": True}),
    ("mistral", {"static_equals": True, "captures": True, "captured_equals": False}),  # its position is baked in
    ("mixtral", {"static_equals": True, "captures": True, "captured_equals": False})])
def test_a_step_captured_by_hand_is_right_wrong_or_says_why_not(monkeypatch, name, found):
    monkeypatch.setattr(graphs, "GraphedCallable", Taped)
    assert decoding_steps._by_hand(name, Pretended("cpu")) == found


def test_a_replay_that_breaks_was_captured_and_is_wrong(monkeypatch):
    class Breaks(Taped):
        def replay(self):
            raise RuntimeError("device-side assert triggered")

    monkeypatch.setattr(graphs, "GraphedCallable", Breaks)
    assert decoding_steps._by_hand("llama", Pretended("cpu")) == {"static_equals": True, "captures": True, "captured_equals": False,
                                                                  "cause": "RuntimeError: device-side assert triggered"}


@pytest.mark.parametrize("name, cause", [("rwkv", "its forward takes no cache"), ("xlstm", "modeling_xlstm.py, line")])
def test_what_a_static_cache_cannot_serve_says_why(name, cause):
    found = decoding_steps._by_hand(name, "cpu")
    assert found["static_equals"] is False and cause in found["cause"] and "captures" not in found


def test_an_architecture_that_is_refused_or_crashes_says_why_in_its_row(gpu, monkeypatch):
    def in_child(fn, params, timeout_s):
        if fn is decoding_steps._by_hand:
            raise RuntimeError("_by_hand failed in its own process: the child process crashed: SIGSEGV")
        return fn(**params, device="cpu")

    monkeypatch.setattr(decoding_steps, "in_child", in_child)
    row = decoding_steps._tried("reformer")
    assert row["decodes"] is False and "is not decoded" in row["why_not"] and "SIGSEGV" in row["cause"] and row["captures"] is None


def test_an_error_of_the_gpu_is_named_and_not_what_cuda_advises(monkeypatch):
    def in_child(fn, params, timeout_s):
        raise RuntimeError("it failed in its own process: line 3: fn()\ntorch.AcceleratorError: CUDA error: device-side assert triggered\n"
                           "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.")

    monkeypatch.setattr(decoding_steps, "in_child", in_child)
    assert decoding_steps._tried("llama")["cause"] == "torch.AcceleratorError: CUDA error: device-side assert triggered"


def test_by_hand_has_a_process_of_its_own_only_where_a_capture_may_have_failed(gpu, monkeypatch):
    asked, fails = [], set()

    def in_child(fn, params, timeout_s):
        asked.append(fn.__name__)
        if fn.__name__ in fails:
            raise RuntimeError(f"{fn.__name__} failed in its own process: SIGSEGV")
        return fn(**params, device="cpu")

    monkeypatch.setattr(decoding_steps, "in_child", in_child)
    whole = decoding_steps._tried("llama")
    assert asked == ["_by_both"] and whole["decodes"] and whole["static_equals"] and not whole["why_not"] + whole["cause"]
    asked.clear()
    decoding_steps._tried("reformer")
    assert asked == ["_by_both", "_by_hand"]
    asked.clear(), fails.update({"_by_both", "_by_hand"})
    row = decoding_steps._tried("llama")
    assert asked == ["_by_both", "_by_decoder", "_by_hand"] and row["decodes"] and not row["why_not"] and "SIGSEGV" in row["cause"]


def test_the_table_has_each_architecture_once_and_speeds_those_that_decode(gpu, monkeypatch, capsys):
    monkeypatch.setattr(architectures, "known_architectures", lambda: ["gpt2", "reformer"])
    monkeypatch.setattr(decoding_steps, "in_child", lambda fn, params, timeout_s: fn(**params, device="cpu"))
    assert [row["architecture"] for row in decoding_steps.architecture_table.measure()] == ["gpt2", "reformer"]
    speeds = decoding_steps.architecture_speeds.measure()
    assert [row["architecture"] for row in speeds] == ["gpt2"] and speeds[0]["speedup"] == pytest.approx(0.5, rel=0.1)
    assert "Left out: reformer: " in capsys.readouterr().out


def test_a_step_that_is_timed_stays_within_its_caches(gpu, monkeypatch):
    compare = timing.compare
    monkeypatch.setattr(timing, "compare", lambda calls, **_: [call() for call in calls.values() for _ in range(60)] and compare(calls))
    assert [row["architecture"] for row in decoding_steps._speeds(["deepseek_v32", "llama"], "cpu")] == ["deepseek_v32", "llama"]


def test_a_process_that_breaks_costs_only_the_architectures_it_had(gpu, monkeypatch, capsys):
    def in_child(fn, params, timeout_s):
        if "a5" in params["names"]:
            raise RuntimeError("_speeds failed in its own process: SIGSEGV")
        return [{"architecture": name} for name in params["names"]]

    monkeypatch.setattr(architectures, "known_architectures", lambda: [f"a{i}" for i in range(60)])
    monkeypatch.setattr(decoding_steps, "in_child", in_child)
    assert [row["architecture"] for row in decoding_steps.architecture_speeds.measure()] == [f"a{i}" for i in range(24, 60)]
    assert "a23: _speeds failed in its own process: SIGSEGV" in capsys.readouterr().out


def test_what_runs_in_a_child_is_found_there_by_name_and_answers_in_json():
    row = registry.in_child(decoding_steps._by_both, {"name": "llama", "device": "cpu"}, 180)
    assert row["decodes"] and row["decoder_equals"] and row["static_equals"]
    for fn, params in ((decoding_steps._ladder_kernels, {"name": "GPT-2", "points": [(1, 128)]}), (decoding_steps._speeds, {"names": ["gpt2"]})):
        if torch.cuda.is_available():
            assert registry.in_child(fn, params, 180)
        elif fn is decoding_steps._ladder_kernels:
            with pytest.raises(RuntimeError, match="needs an NVIDIA GPU"):
                registry.in_child(fn, params, 180)
        else:
            assert registry.in_child(fn, params, 180) == []


def test_a_point_that_a_child_has_no_room_for_has_no_kernels(gpu, monkeypatch):
    from labkit import decode
    step = decode.decode_step

    def decode_step(model, batch, context):
        if batch == 32 and len(gpu) >= 4:  # in the child, after all were timed
            raise torch.OutOfMemoryError("full")
        return step(model, batch, context)

    monkeypatch.setattr(decode, "decode_step", decode_step)
    rows = [row for row in registry.EXPERIMENTS["ladder_gpt2"].measure() if row["rung"] == "captured"]
    assert [(row["batch"], row["kernels_us"]) for row in rows] == [(1, 2.0), (32, None)] * 2 and rows[1]["longest"] == []


LADDERS = {"GPT-2": "ladder_gpt2", "Llama 1B": "ladder_llama_1b", "Llama 8B": "ladder_llama_8b"}


def test_the_whole_ladder_is_one_table_and_each_row_says_where_it_comes_from(monkeypatch):
    def ladder(name, told):
        made = table([{"model": name, "wall_us": 1.0}] * 2)
        made.attrs["provenance"]["label"] = told
        return made

    for name in LADDERS.values():
        monkeypatch.setitem(registry.EXPERIMENTS, name, lambda name=name: ladder(name, "LIVE"))
        registry.EXPERIMENTS[name].source = name
    monkeypatch.setattr(recordings, "recorded", lambda name, source, gpu: ladder(name, "RECORDED"))
    whole = experiments.decode_ladder()
    assert [*whole.model] == [name for name in LADDERS.values() for _ in range(2)] and [*whole.index] == [*range(6)]
    assert [*whole.label] == ["LIVE"] * 2 + ["RECORDED"] * 4 and whole.attrs["provenance"]["label"] == "LIVE; RECORDED"
    for measured, live in (((), 0), ("Llama 8B", 2), (["Llama 8B", "GPT-2"], 4), ([*LADDERS], 6)):
        assert [*experiments.decode_ladder(measured).label].count("LIVE") == live
    with pytest.raises(ValueError, match="no ladder is of 'Llama'; there are those of 'GPT-2', 'Llama 1B', 'Llama 8B'"):
        experiments.decode_ladder(["Llama"])


@pytest.mark.parametrize(("error", "shown"), [
    (models.TooLarge("a llama of 32 layers needs about 16.1 GiB; 9.0 GiB of this GPU are free.\nMore"), True),
    (torch.OutOfMemoryError("CUDA out of memory."), True), (FileNotFoundError("SmolLM2 needs gguf, not installed here"), True),
    (ModuleNotFoundError("vLLM is not installed here"), True), (RuntimeError("a mistake"), False), (KeyError("a mistake"), False)])
def test_what_a_machine_lacks_is_shown_as_recorded_and_a_mistake_is_not_hidden(monkeypatch, capsys, error, shown):
    def fails():
        raise error

    fails.source = "fails"
    monkeypatch.setitem(registry.EXPERIMENTS, "prefill_cost", fails)
    monkeypatch.setattr(recordings, "recorded", lambda name, source, gpu: (name, source))
    if shown:
        assert experiments.measured_or_recorded("prefill_cost") == ("prefill_cost", "fails")
        assert capsys.readouterr().out == f"prefill_cost is not measured here, but shown as recorded: {str(error).splitlines()[0]}\n"
    else:
        with pytest.raises(type(error), match="a mistake"):
            experiments.measured_or_recorded("prefill_cost")
