"""GraphedDecoder on the CPU: the tokens of generate() for many architectures; what would be silently wrong is refused."""

import inspect

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from torch.utils import _pytree as pytree  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from labkit import architectures, decode, decoding, graphs  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

TEN = ["gpt2", "llama", "qwen3", "mistral", "gemma3_text", "phi3", "opt", "gpt_neox", "falcon", "mixtral"]
OTHERS = ["bloom", "mpt", "gemma2", "qwen3_moe", "deepseek_v3", "gpt_oss", "cohere2", "olmo2", "starcoder2", "phi", "mamba",
          "jamba", "qwen3_next", "bart", "bert", "stablelm", "granitemoe", "smollm3", "glm4", "lfm2"]
CHUNKED = () if transformers.__version__.startswith("5.17") else ("llama4_text",)  # 5.17: no chunked masks for a static cache
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "lift_fresh", "aten.equal", "is_nonzero")


def generated(model, ids, n, mask=None, **options):
    """Return the new tokens of the model's own generate(), greedy."""
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"eos_token_id": None, "pad_token_id": 0, **options}
    before = model.generation_config
    model.generation_config = type(before)(**options)
    try:
        return model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=n)[:, ids.shape[1]:]
    finally:
        model.generation_config = before


def prompts(*shape, seed=1, vocabulary=96):
    return torch.randint(3, vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def padded(batch, length):
    """Return an attention mask: the first prompt is the longest, the others have ever more padding on the left."""
    return (torch.arange(length) >= torch.arange(batch)[:, None] % length).long()


@pytest.fixture(scope="module")
def llama():
    return architectures.tiny_model("llama")


@pytest.fixture(scope="module")
def decoder(llama):
    return decode.GraphedDecoder(llama, max_length=32, batch=2)


@pytest.mark.parametrize("name", TEN)
def test_tokens_are_those_of_generate_with_and_without_padding_past_the_edge_of_a_window(name):
    model, ids, mask = architectures.tiny_model(name), prompts(3, 6), padded(3, 6)
    decoder = decode.GraphedDecoder(model, max_length=32, batch=3)
    assert not decoder.captured and decoder.padding_refused is None
    for given in (None, mask):
        tokens = decoder.generate(ids, 20, attention_mask=given, eos_token_id=())
        assert torch.equal(tokens, generated(model, ids, 20, given))
        assert len(tokens.unique()) > 5  # not one token again and again, which proves little


class Tape(TorchDispatchMode):
    """What a capture would keep of a step: its operations on tensors that stay where they are, no Python around them."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        assert not any(name in str(operation) for name in WAITS), f"{operation} would wait for the GPU, or copy from the CPU"
        self.kept.append((operation, args, kwargs or {}, result := operation(*args, **kwargs or {})))
        return result

    def replay(self):
        for operation, args, kwargs, then in self.kept:
            for old, new in zip(pytree.tree_leaves(then), pytree.tree_leaves(operation(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@torch.inference_mode()
def recorded(decoder, pick="greedy"):
    """Have a decoder replay a recording of its step, as it would a graph."""
    decoder.step.prefill(decoder.step.rehearsal(), decoder.step.valid[:, :2], pick)
    decoder.step(pick)  # a warm-up
    with Tape() as tape:
        logits = decoder.step(pick)
    decoder.advance = lambda: tape.replay() or logits
    return decoder


@pytest.mark.parametrize("name", [*TEN, *CHUNKED, "gemma2", "deepseek_v3", "gpt_oss", "jamba", "qwen3_next", "phi"])
def test_a_step_recorded_once_and_replayed_gives_the_tokens_of_generate(name):
    model, ids, mask = architectures.tiny_model(name), prompts(3, 6), padded(3, 6)
    experts = "batched_mm" if "experts" in str(model) else None
    decoder = recorded(decode.GraphedDecoder(model, 32, 3, experts=experts, masks="static"))
    for given in (None, mask):
        assert torch.equal(decoder.generate(ids, 20, attention_mask=given, eos_token_id=()), generated(model, ids, 20, given))


@pytest.mark.parametrize("name, whole", [("trocr", decoding.WHOLE), ("recurrent_gemma", decoding.WHOLE), ("mistral", {})])
def test_what_is_right_eagerly_and_wrong_once_captured_is_refused(name, whole, monkeypatch):
    """Positions, or with `whole` left empty the window's edge, that the model keeps in Python: a replay does not move them."""
    monkeypatch.setattr(decoding, "WHOLE", whole)
    decoder = decode.GraphedDecoder(architectures.tiny_model(name), 32, 2, masks="own")
    with torch.inference_mode():
        decode._prove(decoder)
        with pytest.raises(decode.DecoderRefused, match="logits of new token . differ from generate"):
            decode._prove(recorded(decoder))


class Taped(graphs.GraphedCallable):
    """Instead of a graph: a recording of the step; it counts its replays as a graph does."""

    def __init__(self, step, clone, pool, generators, limit):
        step(), step(), step()
        with Tape() as self._graph:
            self.outputs = (step(),)
        self.limit, self._calls, self.pool, self.generators = limit, 0, pool or "the first one's", generators

    __call__ = graphs.GraphedCallable.replay


def test_a_decoder_on_a_gpu_captures_each_way_to_pick_once_and_only_replays(llama, monkeypatch):
    monkeypatch.setattr(graphs, "GraphedCallable", Taped)
    decoder, ids = decode.GraphedDecoder(llama, 24, 2), prompts(2, 5)
    wanted = {seed: decoder.generate(ids, 12, eos_token_id=(), seed=seed) for seed in (3, 4)}
    decoder.captured = True
    with torch.inference_mode():
        decoder._ready("greedy")
        with pytest.raises(graphs.ReplayError, match="its limit"):  # no prompt yet
            decoder.advance()
    for _ in range(2):
        assert torch.equal(decoder.generate(ids, 20, eos_token_id=()), generated(llama, ids, 20))
        with pytest.raises(graphs.ReplayError, match="replayed 19 times, its limit"):
            decoder.advance()
        assert all(torch.equal(decoder.generate(ids, 12, eos_token_id=(), seed=seed), tokens) for seed, tokens in wanted.items())
    assert {pick: graph.pool for pick, graph in decoder.graphs.items()} == dict.fromkeys(("greedy", "sampled"), "the first one's")
    monkeypatch.setattr(type(decoder.step), "__call__", lambda *_: pytest.fail("the step ran outside its graph"))
    assert torch.equal(decoder.generate(ids, 12, eos_token_id=()), generated(llama, ids, 12))


def test_sampling_recorded_once_and_replayed_repeats_by_its_seed(llama):
    decoder = decode.GraphedDecoder(llama, 32, 2)
    wanted = decoder.generate(prompts(2, 5), 16, eos_token_id=(), top_k=9, temperature=0.8, seed=3)
    recorded(decoder, "filtered")
    assert torch.equal(decoder.generate(prompts(2, 5), 16, eos_token_id=(), top_k=9, temperature=0.8, seed=3), wanted)
    assert not torch.equal(decoder.generate(prompts(2, 5), 16, eos_token_id=(), top_k=5, seed=4), wanted)


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_too(name):
    model, ids = architectures.tiny_model(name), prompts(2, 5)
    tokens = decode.GraphedDecoder(model, max_length=24, batch=2).generate(ids, 16, eos_token_id=())
    assert torch.equal(tokens, generated(model, ids, 16))


@pytest.mark.parametrize("name, edge, length", [(name, 10, length) for name in ("mistral", "gemma2", *CHUNKED)
                                                for length in (8, 10, 20)])
def test_tokens_across_the_edge_of_a_window_whichever_side_the_prompt_ends(name, edge, length):
    model, ids = architectures.tiny_model(name), prompts(2, length)
    decoder = decode.GraphedDecoder(model, max_length=40, batch=2)
    assert edge in decoder.step.edges() and decoder.masks == "static"
    for mask in (None, padded(2, length)):
        assert torch.equal(decoder.generate(ids, 15, attention_mask=mask, eos_token_id=()), generated(model, ids, 15, mask))


@pytest.mark.parametrize("batch", [1, 64])
def test_one_sequence_and_sixty_four(batch, llama):
    ids, mask = prompts(batch, 7), padded(batch, 7)
    tokens = decode.GraphedDecoder(llama, max_length=24, batch=batch).generate(ids, 12, attention_mask=mask, eos_token_id=())
    assert torch.equal(tokens, generated(llama, ids, 12, mask))


@pytest.mark.parametrize("way", ["static", "own"])
def test_both_kinds_of_masks_and_of_experts_give_the_same_tokens(way):
    model, ids = architectures.tiny_model("mixtral"), prompts(2, 6)
    decoder = decode.GraphedDecoder(model, 24, 2, masks=way, experts="batched_mm")
    assert (decoder.masks, decoder.experts) == (way, "batched_mm")
    assert torch.equal(decoder.generate(ids, 14, eos_token_id=()), generated(model, ids, 14))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_compiled_step_gives_the_tokens_of_generate_and_prompts_stay_out_of_it(name, monkeypatch):
    model, compiled, taken = architectures.tiny_model(name), [], torch.compile

    def traced(forward, **options):
        compiled.append(options)
        whole = taken(forward, backend="eager", dynamic=False, fullgraph=True)  # as with kernels written, but at once

        def one(**inputs):
            assert inputs["input_ids"].shape == (3, 1)
            return whole(**inputs)

        return one

    monkeypatch.setattr(torch, "compile", traced)
    ids, mask = prompts(3, 6), padded(3, 6)
    tokens = decode.GraphedDecoder(model, 24, 3, compiled=True).generate(ids, 15, attention_mask=mask, eos_token_id=())
    assert torch.equal(tokens, generated(model, ids, 15, mask))
    assert compiled == [{"mode": "max-autotune-no-cudagraphs", "dynamic": False}]


def test_attention_without_sdpa_gets_masks_of_numbers():
    model = architectures.tiny_model("llama", attn_implementation="eager")
    decoder = decode.GraphedDecoder(model, 24, 2)
    assert decoder.masks == "static" and all(mask.is_floating_point() for mask in [decoder.step._masks()])
    assert torch.equal(decoder.generate(prompts(2, 6), 14, eos_token_id=()), generated(model, prompts(2, 6), 14))


def test_it_stops_once_all_sequences_have_ended_as_generate_does(llama, decoder):
    free = decoder.generate(prompts(2, 5), 20, eos_token_id=())
    ends = [int(free[0, 3]), int(free[1, 6])]  # the first ends at the latest with token 4, the second with 7
    wanted = generated(llama, prompts(2, 5), 20, eos_token_id=ends)
    for every in (1, 3, 8, 50):
        assert torch.equal(decoder.generate(prompts(2, 5), 20, eos_token_id=ends, every=every), wanted)
    assert wanted.shape[1] <= 7


def test_the_models_own_end_counts_unless_another_is_given(llama, decoder):
    first = int(decoder.generate(prompts(2, 5), 1, eos_token_id=())[0, 0])
    before = llama.generation_config.eos_token_id
    try:
        llama.generation_config.eos_token_id = first
        assert torch.equal(decoder.generate(prompts(2, 5), 12), generated(llama, prompts(2, 5), 12, eos_token_id=first))
    finally:
        llama.generation_config.eos_token_id = before


def test_the_cpu_looks_for_the_end_only_every_few_steps(decoder, monkeypatch):
    steps, looks = [], []
    monkeypatch.setattr(decoder, "advance", lambda advance=decoder.advance: steps.append(len(looks)) or advance())
    decoder.generate(prompts(2, 5), 17, eos_token_id=(), every=4, stream=lambda tokens: looks.append(tokens.shape[1]))
    assert looks == [1, 4, 4, 4, 4] and len(steps) == 16 and steps == [1 + i // 4 for i in range(16)]


def test_a_stream_gets_every_token_once_and_none_after_the_end(decoder):
    free, came = decoder.generate(prompts(2, 5), 20, eos_token_id=()), []
    ends = [int(free[0, 3]), int(free[1, 6])]
    tokens = decoder.generate(prompts(2, 5), 20, eos_token_id=ends, every=4, stream=came.append)
    assert torch.equal(torch.cat(came, 1), tokens)


def test_a_loop_fills_the_cache_to_its_last_place_and_no_further(llama):
    decoder, ids = decode.GraphedDecoder(llama, 16, 2), prompts(2, 6)
    assert torch.equal(decoder.generate(ids, 11, eos_token_id=()), generated(llama, ids, 11))
    with pytest.raises(ValueError, match="a prompt of 6 tokens and 12 new ones fill 17 places, and the cache has 16"):
        decoder.generate(ids, 12)
    with pytest.raises(ValueError, match="a prompt of 17 tokens and 1 new ones fill 17 places"):
        decoder.generate(prompts(2, 17), 1)


@pytest.mark.parametrize("name", ["llama", "mistral", "jamba"])
def test_nothing_stays_of_a_warm_up_or_of_what_came_before(name):
    decoder = decode.GraphedDecoder(architectures.tiny_model(name), 24, 2)
    decoder.generate(prompts(2, 9), 12, eos_token_id=()), decoder.generate(prompts(2, 9), 3, temperature=1.0)
    decoder.reset()
    step = decoder.step
    held = [value for layer in step.cache.layers for value in vars(layer).values()]
    held = [tensor for value in held for tensor in (value.values() if isinstance(value, dict) else [value])]
    tensors = [tensor for tensor in held if isinstance(tensor, torch.Tensor)]
    assert len(tensors) >= 4 and not any(tensor.any() for tensor in (*tensors, step.lengths, step.slot, step.history))
    fresh = decode.GraphedDecoder(decoder.model, 24, 2).generate(prompts(2, 7), 12, eos_token_id=())
    assert torch.equal(decoder.generate(prompts(2, 7), 12, eos_token_id=()), fresh)


def test_addresses_stay_from_prompt_to_prompt(decoder):
    def addresses():
        layers = decoder.step.cache.layers
        tensors = [t for layer in layers for t in (layer.keys, layer.values, layer.cumulative_length)]
        return [t.data_ptr() for t in (*tensors, *(v for v in vars(decoder.step).values() if isinstance(v, torch.Tensor)))]
    before = addresses()
    decoder.generate(prompts(2, 5), 6), decoder.generate(prompts(2, 9), 6, top_k=3), decoder.reset()
    assert addresses() == before


def test_sampling_repeats_by_its_seed_and_differs_by_it(decoder):
    def sample(seed, **options):
        return decoder.generate(prompts(2, 5), 16, eos_token_id=(), seed=seed, **options)
    for options in ({}, {"temperature": 0.7}, {"top_k": 9}, {"top_p": 0.9, "temperature": 1.3}):
        assert torch.equal(sample(7, **options), sample(7, **options))
        assert not torch.equal(sample(7, **options), sample(8, **options))
    greedy = decoder.generate(prompts(2, 5), 16, eos_token_id=())
    assert torch.equal(sample(7, top_k=1), greedy) and torch.equal(sample(7, temperature=1e-4), greedy)
    assert not torch.equal(sample(7), greedy)


@torch.inference_mode()
def drawn(step, logits, times=4000, **options):
    """Return how often each token was picked from one row of logits, as shares."""
    tokens = step._pick(logits.expand(times, -1), step.choose(options))
    return torch.bincount(tokens, minlength=logits.shape[-1]) / times


def test_what_is_drawn_is_distributed_as_it_should_be(decoder):
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0] + [-30.0] * 90)
    for temperature in (1.0, 0.5, 2.0):
        share = drawn(decoder.step, logits, temperature=temperature)
        assert (share - (logits / temperature).softmax(-1)).abs().max() < 0.03
    kept = drawn(decoder.step, logits, top_k=3)
    assert set(kept.nonzero().flatten().tolist()) == {0, 1, 2} and (kept[:3] - logits[:3].softmax(-1)).abs().max() < 0.03
    assert set(drawn(decoder.step, logits, top_p=0.7).nonzero().flatten().tolist()) == {0, 1}
    assert set(drawn(decoder.step, logits, top_p=1e-6).nonzero().flatten().tolist()) == {0}
    assert set(drawn(decoder.step, logits, top_p=0.78).nonzero().flatten().tolist()) == {0, 1, 2}
    assert set(drawn(decoder.step, logits, top_k=4, top_p=0.78).nonzero().flatten().tolist()) == {0, 1}  # shares of the four


def test_filters_keep_what_those_of_transformers_keep(decoder):
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
    logits = torch.randn(96, generator=torch.Generator().manual_seed(3)) * 2
    scores = logits[None]
    for warp in (TemperatureLogitsWarper(1.5), TopKLogitsWarper(20), TopPLogitsWarper(0.8)):
        scores = warp(None, scores)
    share = drawn(decoder.step, logits, 20_000, temperature=1.5, top_k=20, top_p=0.8)
    assert torch.equal(share > 0, scores[0].isfinite()) and (share - scores[0].softmax(-1)).abs().max() < 0.02


@pytest.mark.parametrize("options, message", [
    ({"temperature": 0}, r"temperature must be from 1e-6 to 1e6 \(for greedy, leave all sampling options out\), not 0"),
    ({"temperature": 1e-50}, "not 1e-50"), ({"temperature": float("inf")}, "not inf"), ({"top_p": float("nan")}, "at most 1, not nan"),
    ({"top_k": 1.5}, "top_k must be whole, not 1.5"), ({"seed": 1.5}, "seed must be whole, not 1.5"), ({"seed": -1}, "seed must be from 0 to"),
    ({"seed": 2**64}, "seed must be from 0 to"), ({"every": 1.5}, "n and every must be whole, not 3 and 1.5"),
    ({"eos_token_id": 4.0}, "eos_token_id must be whole, not 4.0"), ({"attention_mask": [[1] * 5] * 2}, "must be a tensor in the shape of ids"),
    ({"top_k": 0}, "top_k must be 1 or more, not 0"), ({"top_p": 1.5}, "top_p must be above 0 and at most 1, not 1.5"),
    ({"topk": 5}, "unknown sampling option topk; there are: temperature, top_k, top_p, seed"),
    ({"eos_token_id": 96}, "eos_token_id must be from 0 to 95, not 96"), ({"every": 0}, "every must be 1 or more, not 0")])
def test_options_that_cannot_be_are_refused(decoder, options, message):
    with pytest.raises(ValueError, match=message):
        decoder.generate(prompts(2, 5), 3, **options)
    decoder.generate(prompts(2, 5), 3)  # and nothing stays of it


@pytest.mark.parametrize("ids, n, message", [
    (prompts(3, 5), 2, r"ids must be a tensor of shape \(2, length\), as the batch is fixed, not \(3, 5\)"),
    ([[1, 2]], 2, "not list"), (prompts(2, 5).int(), 2, "ids must be int64 on cpu, not torch.int32 on cpu"),
    (prompts(2, 5), 2.5, "n and every must be whole, not 2.5 and 8"),
    (prompts(2, 0), 2, "a prompt has 1 token or more, and n is 1 or more, not 0 and 2"), (prompts(2, 5), 0, "not 5 and 0"),
    (prompts(2, 5) + 96, 2, "ids must be from 0 to 95, not from 1")])
def test_prompts_that_do_not_fit_are_refused(decoder, ids, n, message):
    with pytest.raises(ValueError, match=message):
        decoder.generate(ids, n)


@pytest.mark.parametrize("mask, message", [
    ([[1, 1, 0], [1, 1, 1]], "prompts are padded on the left"), ([[0, 1, 1], [0, 0, 0]], "prompts are padded on the left"),
    ([[1, 0, 1], [1, 1, 1]], "prompts are padded on the left"),
    ([[1, 1], [1, 1]], r"0s and 1s in the shape of ids, \(2, 3\), not"),
    ([[2, 1, 1], [1, 1, 1]], "0s and 1s")])
def test_masks_that_do_not_fit_are_refused(decoder, mask, message):
    with pytest.raises(ValueError, match=message):
        decoder.generate(prompts(2, 3), 2, attention_mask=torch.tensor(mask))


@pytest.mark.parametrize("fault, message", [
    ("_take", "the logits of new token [23] differ from generate"),
    ("_masks", "with static masks: the masks differ from the model's own"),
    ("_pick", "new token 1 is another one than generate")])
def test_a_step_with_a_fault_is_refused(monkeypatch, fault, message):
    """Positions that stand still, windows that are not looked at, tokens that are not the likeliest."""
    right = getattr(decoding.StaticStep, fault)

    def wrong(step, *args):
        if fault == "_take":
            right(step, *args)
            return step.position.sub_(1)
        if fault == "_pick":
            return args[0].argmin(-1)
        return step._as_wanted((step.valid & (step.places <= step.slot))[:, None, None])
    monkeypatch.setattr(decoding.StaticStep, fault, wrong)
    with pytest.raises(decode.DecoderRefused, match=message):
        decode.GraphedDecoder(architectures.tiny_model("mistral"), 24, 2, masks="static")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_where_two_tokens_tie_in_low_precision_both_go_on_with_the_same_text(dtype, monkeypatch):
    right, ties = decoding.StaticStep._pick, []

    def second_where_they_tie(step, logits, pick):
        best, other = logits.topk(2).values.unbind(-1)
        tied = (best - other) / logits.abs().amax(-1) < torch.finfo(dtype).eps
        ties.extend(tied.tolist())
        return torch.where(tied, logits.topk(2).indices[:, 1], right(step, logits, pick))
    monkeypatch.setattr(decoding.StaticStep, "_pick", second_where_they_tie)
    for name in ("gpt2", "llama", "qwen3"):
        decode.GraphedDecoder(architectures.tiny_model(name, dtype=dtype), 64, 1)
    assert True in ties or dtype == torch.float16


def test_padding_that_is_decoded_wrong_is_refused_and_prompts_without_it_are_not(monkeypatch, llama):
    right = decoding.StaticStep.prefill
    monkeypatch.setattr(decoding.StaticStep, "prefill",
                        lambda step, ids, mask, pick: right(step, ids, torch.ones_like(mask), pick))
    decoder = decode.GraphedDecoder(llama, 24, 2)
    assert torch.equal(decoder.generate(prompts(2, 5), 9, eos_token_id=()), generated(llama, prompts(2, 5), 9))
    with pytest.raises(decode.DecoderRefused, match="LlamaForCausalLM does not decode padded prompts: after a padded"):
        decoder.generate(prompts(2, 5), 9, attention_mask=padded(2, 5))


@pytest.mark.parametrize("name, message", [
    ("gpt_neo", "GPTNeoForCausalLM is not decoded, as it would not decode as generate.*logits of new token 1 differ"),
    ("rwkv", "RwkvForCausalLM is not decoded: it keeps no cache"),
    ("xlstm", r"has no attribute 'rnn_state' \(modeling_xlstm.py, line \d+: ")])
def test_architectures_that_a_static_cache_gets_wrong_are_refused_with_the_reason(name, message):
    with pytest.raises(decode.DecoderRefused, match=f"(?s){message}"):
        decode.GraphedDecoder(architectures.tiny_model(name), 24, 2)


def test_models_that_are_not_ready_are_refused_with_the_reason(llama):
    with pytest.raises(decode.DecoderRefused, match=r"training mode, where dropout makes tokens random: call eval\(\) first"):
        decode.GraphedDecoder(architectures.tiny_model("llama").train(), 24)
    model = architectures.tiny_model("llama")
    model.generation_config.repetition_penalty, model.generation_config.num_beams = 1.1, 1
    with pytest.raises(decode.DecoderRefused, match="asks for what the step does not do: repetition_penalty; set it to None"):
        decode.GraphedDecoder(model, 24)
    for other in (model.model, torch.nn.Linear(2, 2)):
        with pytest.raises(decode.DecoderRefused, match="it is no causal LM of transformers"):
            decode.GraphedDecoder(other, 24)
    for given, message in (({"max_length": 7}, "max_length must be 8 or more and batch 1 or more"), ({"max_length": 24, "batch": 0}, "batch 1 or more"),
                           ({"max_length": 24.5}, "max_length and batch must be whole, not 24.5 and 1"),
                           ({"max_length": 24, "masks": "mine"}, "masks must be 'static', 'own' or None, not 'mine'")):
        with pytest.raises(ValueError, match=message):
            decode.GraphedDecoder(llama, **given)


@pytest.mark.parametrize("change, message", [
    (lambda model: model.train(), "training mode"), (lambda model: setattr(model.generation_config, "repetition_penalty", 1.5), "repetition_penalty")])
def test_a_model_that_would_write_otherwise_by_now_is_refused(change, message):
    model = architectures.tiny_model("llama")
    decoder = decode.GraphedDecoder(model, 24, 2)
    change(model)
    with pytest.raises(decode.DecoderRefused, match=message):
        decoder.generate(prompts(2, 5), 3)


def test_a_text_that_is_interrupted_leaves_nothing_and_no_two_are_written_at_once(decoder, llama):
    wanted = generated(llama, prompts(2, 5), 20)

    def again(tokens):
        decoder.generate(prompts(2, 3), 4)

    with pytest.raises(RuntimeError, match="writing already.* one text at a time"):
        decoder.generate(prompts(2, 5), 20, eos_token_id=(), stream=again)
    steps = iter([None] * 6)
    hook = llama.model.layers[1].register_forward_hook(lambda *_: next(steps))
    with pytest.raises(StopIteration):
        decoder.generate(prompts(2, 5), 20, eos_token_id=())
    hook.remove()
    assert torch.equal(decoder.generate(prompts(2, 5), 20, eos_token_id=()), wanted)


def test_prompts_of_one_token_and_of_the_whole_cache(decoder, llama):
    for length, n, mask in ((1, 12, None), (4, 12, torch.tensor([[0, 0, 0, 1], [1] * 4])), (4, 12, torch.tensor([[0, 0, 0, 1]] * 2)), (32, 1, None), (31, 2, None)):
        tokens = decoder.generate(prompts(2, length), n, attention_mask=mask, eos_token_id=())
        assert torch.equal(tokens, generated(llama, prompts(2, length), n, mask))


def test_an_end_with_the_first_token_and_padding_that_no_model_has():
    model, ids, came = architectures.tiny_model("llama"), prompts(2, 5), []
    model.generation_config.pad_token_id = -1  # as some configs say for none
    decoder = decode.GraphedDecoder(model, 24, 2)
    first = decoder.generate(ids, 1, eos_token_id=())
    assert torch.equal(decoder.generate(ids, 9, eos_token_id=first[:, 0], stream=came.append), first) and torch.equal(came[0], first)
    end = int(first[0, 0])
    assert decoder.generate(ids, 9, eos_token_id=end)[0].tolist() == [end] * 9


def test_the_parts_of_a_loop_can_be_called_alone(decoder, llama):
    wanted = generated(llama, prompts(2, 5), 3)
    decoder.begin(prompts(2, 5), torch.ones(2, 5, dtype=torch.bool))
    tokens = [decoder.step.token.clone(), *(decoder.advance() is None or decoder.step.token.clone() for _ in range(2))]
    assert torch.equal(torch.cat(tokens, 1), wanted)


def test_the_proof_leaves_the_model_as_it_was(llama):
    before, config = llama.generation_config, llama.generation_config.to_dict()
    decode.GraphedDecoder(llama, 16)
    assert llama.generation_config is before and before.to_dict() == config


def test_the_cache_goes_in_under_the_name_that_forward_takes(llama, decoder):
    assert decoder.step.keyword in inspect.signature(llama.forward).parameters
    assert decoding.cache_keyword(torch.nn.Linear(1, 1)) is None


def test_every_architecture_left_over_is_tiny():
    known = architectures.known_architectures()
    assert len(known) >= 100 and set(TEN + OTHERS) <= set(known)
    assert not architectures.PECULIAR.keys() & set(architectures.LEFT_OUT)
    with pytest.raises(ValueError, match="no tiny architecture is called 'blt'; there are: afmoe, "):
        architectures.tiny_model("blt")


@pytest.mark.parametrize("error, raised", [(decode.DecoderRefused("off by 3"), None), (torch.OutOfMemoryError("full"), torch.OutOfMemoryError)])
def test_padding_that_is_not_decoded_right_is_refused_and_no_room_is_no_verdict(llama, monkeypatch, error, raised):
    def compare(decoder, length, n, padded, before=decode._compare):
        if padded:
            raise error
        before(decoder, length, n, padded)

    monkeypatch.setattr(decode, "_compare", compare)
    if raised:
        with pytest.raises(raised):
            decode.GraphedDecoder(llama, 24, 2)
        return
    made, ids = decode.GraphedDecoder(llama, 24, 2), prompts(2, 5)
    assert torch.equal(made.generate(ids, 6, eos_token_id=()), generated(llama, ids, 6))
    with pytest.raises(decode.DecoderRefused, match="does not decode padded prompts: off by 3"):
        made.generate(ids, 6, attention_mask=torch.tensor([[0, 1, 1, 1, 1], [1] * 5]))
