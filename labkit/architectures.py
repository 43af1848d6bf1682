"""The causal LMs of transformers, tiny, from configs: all the peculiarities of an architecture with hardly any weights."""

import inspect

# What a config is given, of these, if it knows it. A window that is not known must not be given: the cache would take it.
TINY = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 10, "tie_word_embeddings": False,
    "initializer_range": 0.2, "is_decoder": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "forced_eos_token_id": None,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24, "n_groups": 1, "n_group": 1, "topk_group": 1,
    "index_n_heads": 2, "index_head_dim": 16, "index_topk": 64,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "decoder_layers": 2, "decoder_ffn_dim": 48, "decoder_attention_heads": 4, "encoder_layers": 1, "encoder_ffn_dim": 48,
    "encoder_attention_heads": 4, "word_embed_proj_dim": 32, "begin_suppress_tokens": None, "suppress_tokens": None,
    "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8}
FULL, LINEAR = "full_attention", "linear_attention"
LATENT = {"num_key_value_heads": 4}  # multi-head latent attention: keys and values of all heads come from one vector
MIXED = {"layer_types": [LINEAR, FULL]}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16}
# What an architecture needs else to be tiny, by its model_type.
PECULIAR = {
    "axk1": LATENT, "axk2": LATENT, "deepseek_v2": LATENT, "deepseek_v3": LATENT, "deepseek_v32": LATENT, "minicpm3": LATENT,
    "glm4_moe_lite": LATENT, "glm_moe_dsa": LATENT, "sarvam_mla": LATENT, "youtu": LATENT, "hy_v4": LATENT,
    "dots3_note_text": LATENT, "kimi_linear": LATENT | MIXED | {"linear_num_heads": 2, "linear_head_dim": 8},
    "longcat_flash": LATENT | {"num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 24},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1,
                   "ssm_state_size": 8, "chunk_size": 16},
    "qwen3_next": MIXED, "qwen3_5_text": MIXED, "qwen3_5_moe_text": MIXED, "bailing_hybrid": LATENT | MIXED,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8}, "recurrent_gemma": {"num_hidden_layers": 3},
    "bamba": MAMBA | {"attn_layer_indices": [1]}, "granitemoehybrid": MAMBA | {"layer_types": ["mamba", "attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16}, "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    "zamba": {"layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 2},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 4},
    "zaya": {"num_experts_per_tok": 1}, "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 10},
    "codegen": {"rotary_dim": 4}, "gptj": {"rotary_dim": 4}, "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "lfm2_moe": {"layer_types": ["conv", FULL]}, "lfm2": {"layer_types": ["conv", FULL]},
    "llama4_text": {"attention_chunk_size": 10},
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (8, 16)}, "xlnet": {"d_head": 8},
    "roc_bert": {"pronunciation_vocab_size": 16, "shape_vocab_size": 16, "pronunciation_embed_dim": 8, "shape_embed_dim": 8},
    "gemma3n_text": {"num_kv_shared_layers": 0, "laurel_rank": 8}, "gemma4_text": {"num_kv_shared_layers": 0},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "dbrx": {"d_model": 32, "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
             "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}},
    "moshi": {"num_codebooks": 2, "audio_vocab_size": 32},
}
# Not tiny whatever one asks for, not for text alone, or the same model as another.
LEFT_OUT = (
    "blt", "cohere_compass_text", "dots3_note", "emu3", "exaone", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_assistant",
    "gemma4_unified", "gemma4_unified_assistant", "git", "got_ocr2", "gpt-sw3", "inkling2_loop_text", "inkling2_text",
    "internlm3", "iquestcoder", "llama4", "mllama", "moss_transcribe_diarize", "musicgen", "musicgen_melody", "phi4_multimodal",
    "qwen3_5", "qwen3_5_moe", "qwen4_exp", "qwen4_exp_text")


def known_architectures():
    """Return the causal LMs that this version of transformers has, by model_type, in order, but those left out."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - set(LEFT_OUT))


def tiny_model(model_type, device="cpu", dtype=None, **changes):
    """Build a causal LM of a few thousand weights, random ones, in eval mode; changes are for its config.

    Raises ValueError for a model_type that is left out or that this version of transformers does not have, and for one that
    would not be tiny.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in known_architectures():
        raise ValueError(f"no tiny architecture is called {model_type!r}; there are: {', '.join(known_architectures())}")
    kind = CONFIG_MAPPING[model_type]
    shared = {name: value for name, value in TINY.items() if name in _fields(kind)}
    config = kind(**shared | PECULIAR.get(model_type, {}) | changes)
    with torch.device("meta"):
        weights = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if weights > 5e6:
        raise ValueError(f"a {model_type} would have {weights:,} weights, which is not tiny: it needs settings of its own")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype or torch.float32)
    return model.to(device).eval().requires_grad_(False)


def _fields(kind):
    """Return the names that a config class knows."""
    annotated = {name for base in kind.__mro__ for name in vars(base).get("__annotations__", ())}
    return annotated | set(inspect.signature(kind.__init__).parameters) | set(getattr(kind, "attribute_map", ()))
