"""What only a GPU can show of GraphedDecoder: its step captured, and still the tokens of generate()."""

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")
from labkit import ReplayError, architectures, decode  # noqa: E402

TEN = ["gpt2", "llama", "qwen3", "mistral", "gemma3_text", "phi3", "opt", "gpt_neox", "falcon", "mixtral"]


def prompts(*shape, seed=1):
    return torch.randint(3, 96, shape, generator=torch.Generator().manual_seed(seed)).cuda()


def padded(batch, length):
    return (torch.arange(length) >= torch.arange(batch)[:, None] % length).long().cuda()


def generated(model, ids, n, mask=None):
    mask, before = torch.ones_like(ids) if mask is None else mask, model.generation_config
    model.generation_config = type(before)(pad_token_id=0)
    try:
        return model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=n)[:, ids.shape[1]:]
    finally:
        model.generation_config = before


@pytest.fixture(scope="module")
def decoder():
    return decode.GraphedDecoder(architectures.tiny_model("llama", "cuda"), 48, 2)


@pytest.mark.parametrize("name", TEN)
def test_a_captured_loop_gives_the_tokens_of_generate_padded_and_past_a_windows_edge(name):
    model, ids, mask = architectures.tiny_model(name, "cuda"), prompts(3, 6), padded(3, 6)
    decoder = decode.GraphedDecoder(model, 32, 3)
    assert decoder.captured and decoder.padding_refused is None and len(decoder.graphs["greedy"].nodes) > 10
    for given in (None, mask):
        assert torch.equal(decoder.generate(ids, 20, attention_mask=given, eos_token_id=()), generated(model, ids, 20, given))


def test_sixty_four_prompts_of_different_lengths_are_decoded_at_once():
    model, ids, mask = architectures.tiny_model("llama", "cuda"), prompts(64, 6), padded(64, 6)
    decoder = decode.GraphedDecoder(model, 32, 64)
    assert torch.equal(decoder.generate(ids, 20, attention_mask=mask, eos_token_id=()), generated(model, ids, 20, mask))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_captured_too(dtype):
    for name in ("gpt2", "llama", "mistral"):
        decoder = decode.GraphedDecoder(architectures.tiny_model(name, "cuda", dtype), 32, 4)
        assert decoder.generate(prompts(4, 6), 20, eos_token_id=()).shape == (4, 20)


def test_a_compiled_step_is_captured_and_gives_the_tokens_of_generate():
    model, ids, mask = architectures.tiny_model("llama", "cuda"), prompts(3, 6), padded(3, 6)
    compiled, plain = (decode.GraphedDecoder(model, 32, 3, compiled=given) for given in (True, False))
    assert torch.equal(compiled.generate(ids, 20, attention_mask=mask, eos_token_id=()), generated(model, ids, 20, mask))
    assert len(compiled.graphs["greedy"].nodes) < len(plain.graphs["greedy"].nodes)


def test_a_loop_is_only_replays(decoder, monkeypatch):
    decoder.generate(prompts(2, 5), 2)
    monkeypatch.setattr(type(decoder.step), "__call__", lambda *_: pytest.fail("the step ran outside its graph"))
    assert decoder.generate(prompts(2, 5), 20, eos_token_id=()).shape == (2, 20)


def test_the_loop_does_not_wait_for_the_gpu(decoder):
    ids, mask = prompts(2, 5), torch.ones(2, 5, dtype=torch.bool, device="cuda")
    with torch.inference_mode():
        decoder.begin(ids, mask)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(20):
                decoder.advance()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_reset_leaves_nothing_and_the_next_prompt_is_decoded_as_the_first_was(decoder):
    first = decoder.generate(prompts(2, 5), 20, eos_token_id=())
    decoder.generate(prompts(2, 9, seed=2), 30, eos_token_id=(), temperature=1.0)
    decoder.reset()
    assert not any(layer.keys.any() or layer.values.any() for layer in decoder.step.cache.layers)
    assert not decoder.step.lengths.any() and torch.equal(decoder.generate(prompts(2, 5), 20, eos_token_id=()), first)


@pytest.mark.parametrize("options", [{"temperature": 0.8}, {"top_k": 9}, {"top_p": 0.9, "top_k": 40}])
def test_sampling_repeats_under_replay_from_the_first_time_on(options):
    decoder = decode.GraphedDecoder(architectures.tiny_model("llama", "cuda"), 48, 2, prove=False)
    tokens = [decoder.generate(prompts(2, 5), 30, eos_token_id=(), seed=seed, **options) for seed in (7, 7, 8, 7)]
    assert torch.equal(tokens[0], tokens[1]) and torch.equal(tokens[0], tokens[3]) and not torch.equal(tokens[0], tokens[2])
    greedy = decoder.generate(prompts(2, 5), 30, eos_token_id=())
    assert torch.equal(decoder.generate(prompts(2, 5), 30, eos_token_id=(), top_k=1), greedy)


def test_it_stops_at_an_end_and_streams_what_came(decoder):
    free, came = decoder.generate(prompts(2, 5), 20, eos_token_id=()), []
    ends = [int(free[0, 3]), int(free[1, 6])]
    tokens = decoder.generate(prompts(2, 5), 20, eos_token_id=ends, every=4, stream=came.append)
    assert tokens.shape[1] <= 7 and torch.equal(torch.cat(came, 1), tokens.cpu())


def test_no_replay_runs_past_the_cache(decoder):
    with pytest.raises(ValueError, match="and the cache has 48"):
        decoder.generate(prompts(2, 5), 45)
    decoder.generate(prompts(2, 5), 44, eos_token_id=())
    with pytest.raises(ReplayError, match="its limit"), torch.inference_mode():
        decoder.advance()


def test_weights_that_moved_are_noticed_by_the_next_prompt():
    decoder = decode.GraphedDecoder(architectures.tiny_model("llama", "cuda"), 16, 1, prove=False)
    head = decoder.model.lm_head
    head.weight = torch.nn.Parameter(head.weight.clone(), requires_grad=False)
    with pytest.raises(ReplayError, match="since the capture"):
        decoder.generate(prompts(1, 5), 4)


def test_a_step_that_cannot_be_captured_is_refused_with_the_line_and_the_reason():
    model = architectures.tiny_model("llama", "cuda", rope_parameters={
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 64, "factor": 2.0})  # it looks, at each step, how long the text is by now
    with pytest.raises(decode.DecoderRefused, match=r"(?s)the capture failed: .*the CPU waits for the GPU.*\.py, line \d+"):
        decode.GraphedDecoder(model, 32, 1)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("places", [32, 77])  # whatever the cache's length
def test_heads_that_share_keys_read_them_once(compiled, places):
    model = architectures.tiny_model("llama", "cuda", torch.bfloat16, head_dim=64, num_attention_heads=4, num_key_value_heads=2)
    decoder = decode.GraphedDecoder(model, places, 3, compiled=compiled)
    assert sum("sdpa" in name for name in decoder.graphs["greedy"].kernel_names) == model.config.num_hidden_layers
    assert decoder.padding_refused is None


def test_a_window_captured_by_hand_is_wrong_without_an_error():
    from labkit.experiments import decoding_steps, registry
    for name, equal in (("llama", True), ("mistral", False)):  # in a child: past its end, a replay of this would break the process
        found = registry.in_child(decoding_steps._by_hand, {"name": name}, 180)
        assert found["static_equals"] and found["captures"] and found["captured_equals"] is equal


def test_a_compiled_step_that_shares_what_it_reads_is_captured_and_gives_the_same_tokens():
    from labkit import GraphedCallable
    from labkit.experiments import decoding_steps
    model = architectures.tiny_model("llama", "cuda", torch.bfloat16, hidden_size=128, head_dim=64, num_attention_heads=4, num_key_value_heads=2)
    step, ids = decode.DecodeStep(model, 3, 64), torch.full((3, 1), 5, device="cuda")
    with torch.inference_mode(), decoding_steps._no_autocast():
        step(ids)
        wanted = logits_of(step, ids)
        call = decoding_steps._compiled(step)
        tokens = call(ids)
        graph = GraphedCallable(call, ids)
        for given in (tokens, graph(ids)):  # the best, or tied with it
            assert (wanted.amax(-1, keepdim=True) - wanted.gather(-1, given) <= 0.05 * wanted.abs().amax()).all()


@torch.inference_mode()
def logits_of(step, ids):
    step.lengths.fill_(step.context - 1)
    return step.model(input_ids=ids, position_ids=step.position, use_cache=True, **{step.keyword: step.cache}).logits[:, -1].float()


def test_nothing_is_replayed_before_there_is_a_prompt():
    decoder = decode.GraphedDecoder(architectures.tiny_model("llama", "cuda"), 16, 1, prove=False)
    with pytest.raises(ReplayError, match="its limit"):
        decoder.advance()
    assert decoder.generate(prompts(1, 5), 4, eos_token_id=()).shape == (1, 4)
