"""What a captured step is made of, on the CPU: keys that heads share are read once, projections of one input are one product."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from torch._dynamo.utils import counters  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

from labkit import architectures, decode, decoding  # noqa: E402


@pytest.fixture
def model():
    return architectures.tiny_model("llama", num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture
def seen(monkeypatch):
    """The shapes of the keys that attention was given, and how many heads asked for them."""
    shapes, attend = [], decoding.scaled_dot_product_attention

    def spy(query, key, *args, **options):
        shapes.append((query.shape[1], key.shape[1]))
        return attend(query, key, *args, **options)

    decoding._tried_shared.cache_clear()
    decoding._tried_shared(torch.float32, torch.device("cpu"), 32, 8)
    monkeypatch.setattr(decoding, "scaled_dot_product_attention", spy)
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
    with decoding.keys_read_once():
        assert torch.allclose(logits_of(step, ids), wanted, atol=1e-5)
    assert set(seen) == {(4, 2)} and len(seen) == model.config.num_hidden_layers and ALL_ATTENTION_FUNCTIONS["sdpa"] is usual


def test_prompts_heads_of_their_own_and_what_no_kernel_takes_attend_as_usual(model, seen, monkeypatch):
    alone = architectures.tiny_model("llama", num_attention_heads=2, num_key_value_heads=2)
    with decoding.keys_read_once():
        model(torch.ones(1, 5, dtype=torch.int64))
        logits_of(*step_of(alone))
        monkeypatch.setattr(decoding, "_takes_shared", lambda *_: False)
        logits_of(*step_of(model))
    assert not seen


def test_what_no_kernel_takes_is_found_out_by_a_try(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("No available kernel.")

    decoding._tried_shared.cache_clear()
    monkeypatch.setattr(decoding, "scaled_dot_product_attention", refuse)
    assert decoding._takes_shared(torch.float32, torch.device("cpu"), 32, 8) is False
    decoding._tried_shared.cache_clear()


def test_the_usual_attention_is_back_after_an_error(model):
    usual = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with pytest.raises(ZeroDivisionError), decoding.keys_read_once():
        1 / 0
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is usual


def test_projections_of_the_same_input_are_one_product_while_asked_and_the_logits_stay(model, monkeypatch):
    ids, products = torch.arange(3, 9)[None], []
    multiply = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, weight, bias=None: products.append(1) or multiply(x, weight, bias))
    with torch.inference_mode():
        wanted, names = model(ids).logits, list(model.state_dict())
        apart, before = len(products), sum(p.numel() for p in model.parameters())
        joined = decoding.JoinedProjections(model)
        products.clear()
        assert torch.equal(model(ids).logits, wanted) and len(products) == apart  # still apart
        products.clear()
        with joined:
            assert torch.allclose(model(ids).logits, wanted, atol=1e-5)
        assert len(products) == apart - 3 * model.config.num_hidden_layers and len(joined.joined) == 2 * model.config.num_hidden_layers
        assert torch.equal(model(ids).logits, wanted) and list(model.state_dict()) == names
    stores = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(stores.values()) == 4 * before and all(one.given is None for one in joined.joined)  # no weight is held twice


def test_a_model_without_such_projections_is_refused(model):
    decoding.JoinedProjections(model)
    for other in (architectures.tiny_model("gpt2"), model):
        with pytest.raises(ValueError, match="no projections to join"):
            decoding.JoinedProjections(other)


def test_both_can_be_compiled_into_one_piece(model, seen):
    step, ids = step_of(model)
    wanted, joined = logits_of(step, ids), decoding.JoinedProjections(model)
    torch.compiler.reset(), counters.clear()

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    def run(ids):
        return model(input_ids=ids, position_ids=step.position, use_cache=True, **{step.keyword: step.cache}).logits

    with torch.inference_mode(), decoding.keys_read_once(), joined:
        step.lengths.fill_(31)
        assert torch.allclose(run(ids), wanted, atol=1e-5) and counters["stats"]["unique_graphs"] == 1
