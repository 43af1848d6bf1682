"""Keys and values that heads share are read once, on the CPU, and never wrong ones."""

import threading

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from torch._dynamo.utils import counters  # noqa: E402
from transformers import StaticCache  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface  # noqa: E402

from labkit import architectures, decode, decoding, sharing  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def model():
    return architectures.tiny_model("llama", num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture
def seen(monkeypatch):
    """The shapes of the keys that attention was given, and how many heads asked for them."""
    shapes, attend = [], sharing.scaled_dot_product_attention

    def spy(query, key, *args, **options):
        shapes.append((query.shape[1], key.shape[1]))
        return attend(query, key, *args, **options)

    sharing._tried_shared.cache_clear()
    sharing._tried_shared(torch.float32, torch.device("cpu"), torch.bool, 32, 8)
    monkeypatch.setattr(sharing, "scaled_dot_product_attention", spy)
    return shapes


def step_of(model, batch=3, context=32):
    return decode.DecodeStep(model, batch, context), torch.ones(batch, 1, dtype=torch.int64)


@torch.inference_mode()
def logits_of(step, ids):
    step.lengths.fill_(step.context - 1)
    return step.model(input_ids=ids, position_ids=step.position, use_cache=True, **{step.keyword: step.cache}).logits


def test_heads_that_share_keys_read_them_once_and_the_logits_stay(model, seen):
    step, ids = step_of(model)
    wanted, usual = logits_of(step, ids), ALL_ATTENTION_FUNCTIONS["sdpa"]
    with sharing.keys_read_once():
        assert torch.allclose(logits_of(step, ids), wanted, atol=1e-5)
    assert set(seen) == {(4, 2)} and len(seen) == model.config.num_hidden_layers and ALL_ATTENTION_FUNCTIONS["sdpa"] is usual


def test_prompts_heads_of_their_own_and_what_no_kernel_takes_attend_as_usual(model, seen, monkeypatch):
    alone = architectures.tiny_model("llama", num_attention_heads=2, num_key_value_heads=2)
    with sharing.keys_read_once():
        model(torch.ones(1, 5, dtype=torch.int64))
        logits_of(*step_of(alone))
        monkeypatch.setattr(sharing, "_takes_shared", lambda *_: False)
        logits_of(*step_of(model))
    assert not seen


def test_what_no_kernel_takes_is_found_out_by_a_try(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("No available kernel.")

    sharing._tried_shared.cache_clear()
    monkeypatch.setattr(sharing, "scaled_dot_product_attention", refuse)
    assert sharing._takes_shared(torch.float32, torch.device("cpu"), torch.bool, 32, 8) is False
    sharing._tried_shared.cache_clear()


def test_the_usual_attention_is_back_after_an_error(model):
    usual = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with pytest.raises(ZeroDivisionError), sharing.keys_read_once():
        1 / 0
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is usual


SAMPLE = ["llama", "qwen2", "mistral", "gemma2", "falcon_h1", "mixtral", "deepseek_v3", "diffllama", "jamba", "granitemoe", "dbrx", "whisper", "bigbird_pegasus"]


@pytest.mark.parametrize("name", SAMPLE)
@torch.inference_mode()
def test_architectures_compute_the_same_with_it(name):
    check_both(name)


def check_both(name):
    """Hold a tiny architecture's logits with keys read once against what they are without."""
    model, ids = architectures.tiny_model(name), torch.randint(3, 96, (2, 6), generator=torch.Generator().manual_seed(1))

    def a_step(within):
        cache = {decoding.cache_keyword(model): StaticCache(config=model.config, max_cache_len=16), "use_cache": True}
        model(input_ids=ids, **cache)
        with within:
            return model(input_ids=ids[:, :1], **cache).logits

    close = {"rtol": 0, "atol": 1e-5 * float(model(ids, use_cache=False).logits.abs().max())}
    torch.testing.assert_close(a_step(sharing.keys_read_once()), a_step(sharing.contextlib.nullcontext()), **close)


def test_threads_that_enter_and_leave_as_they_like_leave_the_usual_attention_as_it_was():
    usual, inside, leave = ALL_ATTENTION_FUNCTIONS["sdpa"], threading.Event(), threading.Event()

    def stay():
        with sharing.keys_read_once():
            inside.set(), leave.wait(9)

    thread = threading.Thread(target=stay)
    with sharing.keys_read_once(), sharing.keys_read_once():
        thread.start(), inside.wait(9)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not usual  # the other is still within
    leave.set(), thread.join(9)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is usual


def test_attention_that_is_registered_later_counts():
    with sharing.keys_read_once():
        pass
    usual = ALL_ATTENTION_FUNCTIONS["sdpa"]
    try:
        AttentionInterface.register("sdpa", max)
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is max
    finally:
        AttentionInterface.register("sdpa", usual)


@pytest.mark.parametrize("asked", [{"dropout": 0.5}, {"softcap": 30.0}, {"position_bias": torch.zeros(1)}, {"attention_mask": None},
                                   {"attention_mask": torch.ones(1, 4, 1, 32)}, {"query": torch.zeros(1, 4, 1, 8, requires_grad=True)}])
def test_attention_that_asks_for_more_is_handed_on(seen, asked):
    given, told = torch.zeros(1, 2, 32, 8), []
    attend = sharing._read_shared_once(lambda *args, **more: told.append(more) or "usual")
    plain = {"query": torch.zeros(1, 4, 1, 8), "attention_mask": torch.ones(1, 1, 1, 32, dtype=torch.bool)}
    assert attend(None, key=given, value=given, **plain)[1] is None and len(seen) == 1
    assert attend(None, key=given, value=given, **{**plain, **asked}) == "usual" and len(seen) == 1 and len(told) == 1


def test_it_is_compiled_into_one_piece(model, seen):
    step, ids = step_of(model)
    wanted = logits_of(step, ids)
    torch.compiler.reset(), counters.clear()

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    def run(ids):
        return model(input_ids=ids, position_ids=step.position, use_cache=True, **{step.keyword: step.cache}).logits

    with torch.inference_mode(), sharing.keys_read_once():
        step.lengths.fill_(31)
        assert torch.allclose(run(ids), wanted, atol=1e-5) and counters["stats"]["unique_graphs"] == 1
