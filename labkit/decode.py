"""One decode step of a transformers causal LM over a StaticCache: the next token of each sequence from the one before."""

import inspect

import torch
from torch import nn
from transformers import StaticCache

from labkit import models


class DecodeStep(nn.Module):
    """Feed one token a sequence to a causal LM whose static cache is full but for that token; the next tokens come out.

    model: a causal LM of transformers. batch: sequences. context: tokens attended to, the new one included; keys and values of
    the others are random, as time does not depend on them. Each call rewinds the cache, so that all calls do the same work.
    """

    def __init__(self, model, batch, context):
        super().__init__()
        weight = next(model.parameters())
        self.model, self.context, self.cache = model, context, StaticCache(config=model.config, max_cache_len=context)
        self.cache.early_initialization(batch, *_heads(model.config), weight.dtype, weight.device)
        self.lengths = torch.empty(len(self.cache.layers), dtype=torch.int64, device=weight.device)
        self.position = torch.full((1, 1), context - 1, device=weight.device)
        for layer, length in zip(self.cache.layers, self.lengths):
            layer.keys.normal_()
            layer.values.normal_()
            layer.cumulative_length = length  # a view: one fill_ rewinds all layers
        named = inspect.signature(model.forward).parameters
        self.keyword = "cache" if "cache" in named else "past_key_values"  # the wrong one is ignored without a word

    def forward(self, ids):  # (batch, 1) -> (batch, 1)
        self.lengths.fill_(self.context - 1)
        result = self.model(input_ids=ids, position_ids=self.position, use_cache=True, **{self.keyword: self.cache})
        return result.logits[:, -1].argmax(-1, keepdim=True)


def decode_step(model, batch, context):
    """Return a DecodeStep and random ids for it, (batch, 1); raises models.TooLarge if they would not fit, ValueError."""
    weight, config = next(model.parameters()), model.config
    if batch < 1 or not 1 <= context <= config.max_position_embeddings:
        raise ValueError(f"this model takes a batch of 1 or more and a context of 1 to {config.max_position_embeddings:,}, "
                         f"not {batch} and {context}")  # a position beyond would break this process's GPU work for good
    heads, head = _heads(config)
    numbers = batch * (2 * config.num_hidden_layers * context * heads * head + 4 * config.vocab_size)
    models.require_room(f"a cache of {batch} x {context:,} tokens", numbers * weight.itemsize)
    generator = torch.Generator(weight.device).manual_seed(0)
    ids = torch.randint(config.vocab_size, (batch, 1), device=weight.device, generator=generator)
    return DecodeStep(model, batch, context), ids


def _heads(config):
    """Return how many heads of keys and values a model has, and how wide each is."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return heads, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
