"""What a model shares, on the CPU: keys that heads share are read once, projections of one input are one product, and never a wrong one."""

import copy
import io
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


def test_projections_of_the_same_input_are_one_product_while_asked_and_the_logits_stay(model, monkeypatch):
    ids, products = torch.arange(3, 9)[None], []
    multiply = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, weight, bias=None: products.append(1) or multiply(x, weight, bias))
    with torch.inference_mode():
        wanted, names = model(ids).logits, list(model.state_dict())
        apart, before = len(products), sum(p.numel() for p in model.parameters())
        joined = sharing.JoinedProjections(model)
        products.clear()
        assert torch.equal(model(ids).logits, wanted) and len(products) == apart  # still apart
        products.clear()
        with joined:
            assert torch.allclose(model(ids).logits, wanted, atol=1e-5)
        assert len(products) == apart - 3 * model.config.num_hidden_layers and len(joined.joined) == 2 * model.config.num_hidden_layers
        assert torch.equal(model(ids).logits, wanted) and list(model.state_dict()) == names
    stores = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(stores.values()) == 4 * before and all(one.given == (None, {}) for one in joined.joined)  # no weight is held twice


def test_a_model_without_such_projections_is_refused():
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no projections to join"):
        sharing.JoinedProjections(architectures.tiny_model("gpt2"))


SAMPLE = ["llama", "qwen2", "mistral", "gemma2", "falcon_h1", "mixtral", "deepseek_v3", "diffllama", "jamba", "granitemoe", "dbrx", "whisper", "bigbird_pegasus"]


@pytest.mark.parametrize("name", SAMPLE)
@torch.inference_mode()
def test_architectures_compute_the_same_with_both(name):
    check_both(name)


def check_both(name):
    """Hold a tiny architecture's logits, with keys read once and with projections joined, against what they are without."""
    model, ids = architectures.tiny_model(name), torch.randint(3, 96, (2, 6), generator=torch.Generator().manual_seed(1))

    def a_step(within):
        cache = {decoding.cache_keyword(model): StaticCache(config=model.config, max_cache_len=16), "use_cache": True}
        model(input_ids=ids, **cache)
        with within:
            return model(input_ids=ids[:, :1], **cache).logits

    close = {"rtol": 0, "atol": 1e-5 * float(model(ids, use_cache=False).logits.abs().max())}
    torch.testing.assert_close(a_step(sharing.keys_read_once()), a_step(sharing.contextlib.nullcontext()), **close)
    wanted = model(ids, use_cache=False).logits
    try:
        joined = sharing.JoinedProjections(model)
    except ValueError:
        return 0
    with joined:
        torch.testing.assert_close(model(ids, use_cache=False).logits, wanted, **close)
    torch.testing.assert_close(model(ids, use_cache=False).logits, wanted, **close)
    return len(joined.joined)


class Attention(torch.nn.Module):
    """Three projections, called in the order of the letters; k and v may get another text."""

    def __init__(self, order="qkv"):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (torch.nn.Linear(8, 8, bias=False) for _ in range(3))
        self.order = order

    def forward(self, x, other=None):
        return torch.cat([getattr(self, f"{letter}_proj")(x if letter == "q" or other is None else other) for letter in self.order], -1)


@pytest.mark.parametrize("order", ["qkv", "vqk", "kv", "qqkv", "qkvkk", "qqkkvv"])
@pytest.mark.parametrize("others", [False, True])
def test_projections_may_come_in_any_order_and_with_other_inputs(order, others):
    model, x, *other = Attention(order), *torch.randn(1 + others, 2, 8)
    with torch.no_grad():
        wanted, joined = model(x, *other), sharing.JoinedProjections(model)
        for _ in range(2):
            with joined, joined:  # as often as one likes
                torch.testing.assert_close(model(x, *other), wanted)
        assert joined.joined[0].given == (None, {}) and not joined.entered


def tied(model):
    model[1].k_proj.weight = model[0].k_proj.weight


def same_layer(model):
    model[1].k_proj = model[0].k_proj


def own_kind(model):
    class Quantised(torch.nn.Linear):
        pass
    for part in model:
        part.k_proj.__class__ = Quantised


def own_tensor(model):
    class Packed(torch.Tensor):
        pass
    for part in model:
        part.k_proj.weight = torch.nn.Parameter(part.k_proj.weight.data.as_subclass(Packed))


def adapted(model):
    for part in model:
        part.v_proj = torch.nn.Sequential(part.v_proj)


@pytest.mark.parametrize("change, joins", [
    (tied, 0), (same_layer, 1), (own_kind, 0), (own_tensor, 0), (adapted, 0), (lambda model: model[0].k_proj.double(), 1),
    (lambda model: model[0].k_proj.to("meta"), 1), (lambda model: setattr(model[0], "k_proj", torch.nn.Linear(4, 8, bias=False)), 1),
    (lambda model: setattr(model[0].q_proj, "bias", torch.nn.Parameter(torch.ones(8))), 1)])
def test_only_plain_layers_of_one_kind_with_weights_of_their_own_are_joined(change, joins):
    model = torch.nn.Sequential(Attention(), Attention())
    change(model)
    kinds = [p.dtype for p in model.parameters()]
    if not joins:
        with pytest.raises(ValueError, match="Sequential has no projections to join"):
            sharing.JoinedProjections(model)
    else:
        assert len(sharing.JoinedProjections(model).joined) == joins
    assert [p.dtype for p in model.parameters()] == kinds


@pytest.mark.parametrize("change", [
    lambda model: setattr(model.k_proj, "weight", torch.nn.Parameter(torch.randn(8, 8))), lambda model: model.double(),
    lambda model: setattr(model.k_proj.weight, "data", torch.randn(8, 8)), sharing.JoinedProjections,
    lambda model: model.load_state_dict({name: torch.randn(8, 8) for name in model.state_dict()}, assign=True)])
def test_weights_that_were_moved_or_replaced_are_refused_and_can_be_joined_again(change):
    model, x = Attention(), torch.randn(2, 8)
    joined = sharing.JoinedProjections(model)
    change(model)
    with pytest.raises(ValueError, match="moved or replaced since their projections were joined: join them again"), joined:
        pass
    with torch.no_grad():
        x = x.to(model.q_proj.weight.dtype)
        wanted = model(x)
        with sharing.JoinedProjections(model):
            torch.testing.assert_close(model(x), wanted)


def test_weights_that_change_in_place_count_and_learn():
    model, x = Attention(), torch.randn(2, 8)
    joined = sharing.JoinedProjections(model)
    model.load_state_dict({name: torch.randn(8, 8) for name in model.state_dict()})
    wanted = model(x)
    with torch.no_grad(), joined:
        torch.testing.assert_close(model(x), wanted)
    with joined:
        model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_copies_and_what_is_saved_of_a_joined_model_stand_alone(model, tmp_path):
    ids, joined = torch.arange(3, 9)[None], sharing.JoinedProjections(model)
    wanted, file = model(ids).logits, io.BytesIO()
    with joined:
        copied = copy.deepcopy(model)
        torch.save(copied, file)
        file.seek(0)
        for other in (copied, torch.load(file, weights_only=False)):
            other.model.layers[0].self_attn.q_proj.weight.zero_()
            assert not torch.allclose(other(ids).logits, wanted)
    model.save_pretrained(tmp_path)
    assert torch.equal(type(model).from_pretrained(tmp_path)(ids).logits, wanted)
    assert torch.equal(model(ids).logits, wanted)


def test_an_error_or_a_layer_that_is_left_out_leaves_nothing_behind():
    model, x = Attention("qk"), torch.ones(1, 8)
    joined = sharing.JoinedProjections(model)
    with pytest.raises(ZeroDivisionError), torch.no_grad(), joined:
        model(x), 1 / 0
    x.zero_()
    model.order = "v"
    with torch.no_grad(), joined:
        assert not model(x).any() and joined.entered == 1


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


def test_both_can_be_compiled_into_one_piece(model, seen):
    step, ids = step_of(model)
    wanted, joined = logits_of(step, ids), sharing.JoinedProjections(model)
    torch.compiler.reset(), counters.clear()

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    def run(ids):
        return model(input_ids=ids, position_ids=step.position, use_cache=True, **{step.keyword: step.cache}).logits

    with torch.inference_mode(), sharing.keys_read_once(), joined:
        step.lengths.fill_(31)
        assert torch.allclose(run(ids), wanted, atol=1e-5) and counters["stats"]["unique_graphs"] == 1
