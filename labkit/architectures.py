"""The causal LMs of transformers, tiny, from configs: an architecture with all its peculiarities and hardly any weights."""

TINY = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False, "sliding_window": 10,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 24}
