"""What tests of serving hold tokens against: prompts drawn at random, and what a model writes for each of them alone."""

import torch

from labkit import decode


def prompts_of(trace, device="cpu", seed=1):
    """Return ids, (length,), for each request of a trace, in the vocabulary of the tiny models."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 96, (request.prompt_tokens,), generator=draw).to(device) for request in trace]


def alone(model, ids, n):
    """Return the n tokens that generate() writes for a prompt, (length,)."""
    return decode._generated(model, ids[None], torch.ones_like(ids[None], dtype=torch.bool), n)[1][0].tolist()
