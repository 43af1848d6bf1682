"""Decode a transformers causal LM over a static cache: one step as it is timed, and a decoder whose loop is only replays."""

import functools
import math
import os
import threading
import traceback

import torch
from torch import nn
from transformers import DynamicCache, GenerationConfig, StaticCache
from transformers.cache_utils import DynamicLayer

from labkit import decoding, graphs, models

# What a model's generation_config may ask for that changes greedy tokens, and that the step does not do.
CHANGES = ("repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "suppress_tokens", "guidance_scale",
           "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "min_length", "min_new_tokens", "num_beams",
           "exponential_decay_length_penalty", "penalty_alpha", "watermarking_config")
NEUTRAL = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_length": 0, "num_beams": 1, "guidance_scale": 1.0}


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
        self.keyword = decoding.cache_keyword(model)

    def forward(self, ids):
        """Return the next tokens of ids, both (batch, 1), int64; the cache is rewound first."""
        self.lengths.fill_(self.context - 1)
        result = self.model(input_ids=ids, position_ids=self.position, use_cache=True, **{self.keyword: self.cache})
        return result.logits[:, -1].argmax(-1, keepdim=True)


class _SameLength(DynamicLayer):
    """A growing layer of a cache that joins the new token on, but keeps what it had: each call does the same work."""

    def update(self, key_states, value_states, *args, **kwargs):
        return torch.cat([self.keys, key_states], dim=-2), torch.cat([self.values, value_states], dim=-2)


class GrowingStep(nn.Module):
    """The same step over a cache that is joined anew for each token, as generate() does it; arguments as of DecodeStep."""

    def __init__(self, model, batch, context):
        super().__init__()
        weight, (heads, head) = next(model.parameters()), _heads(model.config)
        self.model, self.context, self.cache = model, context, DynamicCache(config=model.config)
        self.position = torch.full((1, 1), context - 1, device=weight.device)
        for i in range(model.config.num_hidden_layers if context > 1 else 0):
            keys, values = torch.randn(2, batch, heads, context - 1, head, dtype=weight.dtype, device=weight.device)
            self.cache.update(keys, values, i)
            self.cache.layers[i].__class__ = _SameLength
        self.keyword = decoding.cache_keyword(model)

    def forward(self, ids):
        """Return the next tokens of ids, both (batch, 1), int64."""
        cache = self.cache if self.context > 1 else DynamicCache(config=self.model.config)
        result = self.model(input_ids=ids, position_ids=self.position, use_cache=True, **{self.keyword: cache})
        return result.logits[:, -1].argmax(-1, keepdim=True)


def decode_step(model, batch, context):
    """Return a DecodeStep and random ids for it, (batch, 1), int64.

    Raises models.TooLarge if its cache would not fit, ValueError for a batch or a context (tokens) that the model does not take.
    """
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


class DecoderRefused(ValueError):
    """A model, or a prompt, that a GraphedDecoder would not decode as the model's generate() does: the message says why."""


class GraphedDecoder:
    """Decode a causal LM of transformers with its step captured as one CUDA graph: a decode loop is only replays.

    The step embeds the last token of each sequence, attends over a static cache, picks the next token, writes it back to its
    own input and moves on. On the CPU the very same step runs eagerly (`captured` is False).

    model: a causal LM in eval mode, on one device. max_length: places in the cache, for a prompt and all new tokens but the
    last. batch: sequences. prove: show first that logits and tokens equal generate()'s, across the edge of a sliding window
    too (which costs a few short generations); where two tokens tie within what the logits differ by, either may come.
    compiled: let torch.compile write kernels for the step, which takes a minute or more and is worth it for long texts.
    masks: "static" or "own", experts: see decoding.StaticStep; left out, what works is found out. A sliding window is kept
    whole, as the mask leaves the rest out: its cache takes max_length places.

    Attributes: captured, masks, experts, padding_refused (None, or why all prompts must be of one length), step, graphs (for
    each way to pick in use, a GraphedCallable). Raises DecoderRefused for a model that would not decode as its generate(),
    ValueError for a size that cannot be, models.TooLarge for a cache that does not fit.
    """

    @torch.inference_mode()
    def __init__(self, model, max_length, batch=1, *, prove=True, compiled=False, masks=None, experts=None):
        _refuse_model(model)
        max_length, batch = decoding.whole_numbers(max_length=max_length, batch=batch)
        if masks not in (None, "static", "own"):
            raise ValueError(f"masks must be 'static', 'own' or None, not {masks!r}")
        if max_length < 8 or batch < 1:
            raise ValueError(f"max_length must be 8 or more and batch 1 or more, not {max_length} and {batch}")
        most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or max_length
        if max_length > most:
            raise ValueError(f"this model has {most:,} positions, fewer than max_length, {max_length:,}")
        self.model, self.max_length, self.batch = model, max_length, batch
        self.captured, self.padding_refused, refused = model.device.type == "cuda", None, {}
        self._fresh, self._writing = True, threading.Lock()
        config = model.config.get_text_config(decoder=True)
        if self.captured and getattr(config, "num_attention_heads", None):
            numbers = 2 * batch * config.num_hidden_layers * max_length * math.prod(_heads(config))
            models.require_room(f"a cache of {batch} x {max_length:,} tokens", numbers * model.dtype.itemsize)
        switch = self.captured and experts is None and any("experts" in name for name, _ in model.named_modules())
        for self.experts in (None, "batched_mm") if switch else (experts,):
            for self.masks in [masks] if masks else ["static", "own"]:
                try:
                    self.graphs, self.step = {}, decoding.StaticStep(model, max_length, batch, self.masks, self.experts, compiled)
                    self._ready("greedy")
                    if prove:
                        _prove(self)
                    return self.reset()
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:  # whatever a model's own code may raise
                    how = f"with {self.masks} masks" + (f" and {self.experts}" if self.experts else "")
                    refused.setdefault(_in_words(error), how)
        raise DecoderRefused("\n  ".join([f"{type(model).__name__} is not decoded, as it would not decode as generate() does:",
                                          *(f"{how}: {why}" for why, how in refused.items())]))

    def _ready(self, pick):
        """Have the step pick tokens so from now on; captured, if it is not yet."""
        self.pick = pick
        if self.captured and pick not in self.graphs:
            self.step.prefill(self.step.rehearsal(), self.step.valid[:, :2], pick)  # so that the warm-up has room
            pool, random = next((graph.pool for graph in self.graphs.values()), None), self.step.generator
            self.graphs[pick] = graphs.GraphedCallable(functools.partial(self.step, pick), clone=False, pool=pool,
                                                       generators=() if pick == "greedy" else (random,), limit=0)  # no prompt yet

    @torch.inference_mode()
    def reset(self):
        """Empty the cache, in place: nothing stays of what was decoded, nor of a warm-up."""
        self.step.rewind()

    @torch.inference_mode()
    def begin(self, ids, mask, pick="greedy"):
        """Run prompts through the model, eagerly, and pick the first tokens; returns their logits, (batch, vocabulary).

        ids: (batch, length), int64. mask: of that shape, bool, False at padding. pick: "greedy", or what StaticStep.choose returned.
        """
        self._ready(pick)
        self.step.generator.manual_seed(self.step.seed)  # after a capture, whose rehearsal draws
        self._fresh = True
        if self.captured:
            self.graphs[pick].rewind()
            self.graphs[pick].limit = self.max_length - ids.shape[1]
        return self.step.prefill(ids, mask, pick)

    def advance(self):
        """Decode one token of each sequence; returns the logits it was picked from, (batch, vocabulary), which the next call overwrites.

        Captured, it raises graphs.ReplayError where weights changed since the capture, or the cache is full.
        """
        if not self.captured:
            with torch.inference_mode():
                return self.step(self.pick)
        graph = self.graphs[self.pick]
        graph() if self._fresh else graph.replay()  # the first call checks that the weights are still what they were
        self._fresh = False
        return graph.outputs[0]

    @torch.inference_mode()
    def generate(self, ids, n, *, attention_mask=None, eos_token_id=None, stream=None, every=8, **sampling):
        """Return up to `n` new tokens for each prompt: (batch, new), int64, on the model's device.

        ids: prompts, (batch, length), padded on the left where attention_mask, of the same shape, is 0. Greedy, unless one of
        temperature, top_k, top_p or seed (0) is given. A sequence that has come to an end - one of eos_token_id: an int or
        several, () for none, left out for the model's own - goes on with padding, and all stop when all have; to see that,
        the CPU waits for the GPU every `every` steps. stream: called as often, with the tokens new since, (batch, some), on
        the CPU. Raises ValueError for what does not fit, DecoderRefused for padding that this model does not decode right, and
        where the model is no longer as it was, RuntimeError while this decoder is writing already.
        """
        if not self._writing.acquire(blocking=False):
            raise RuntimeError("this decoder is writing already, in another thread or in a stream of its own: one text at a time")
        try:
            return self._write(ids, n, attention_mask, eos_token_id, stream, every, sampling)
        finally:
            self._writing.release()

    def _write(self, ids, n, attention_mask, eos_token_id, stream, every, sampling):
        """Do what generate() says."""
        n, every = decoding.whole_numbers(n=n, every=every)
        _refuse_state(self.model)
        mask = checked(self, ids, n, attention_mask)
        if every < 1:
            raise ValueError(f"every must be 1 or more, not {every}")
        pick, ends = self.step.choose(sampling), self.step.end_at(eos_token_id)
        self.begin(ids, mask, pick)
        first, made, told = ids.shape[1], 1, 0
        while True:
            tokens = self.step.history[:, first:first + made]
            ended = ends and bool(self.step.finished.all())
            until = int(self.step.ends[tokens].int().argmax(-1).max()) + 1 if ended else made
            if stream and until > told:
                stream(tokens[:, told:until].cpu())
            if ended or made == n:
                return tokens[:, :until].clone()
            told, made = made, min(n, made + every) if ends or stream else n
            for _ in range(made - told):
                self.advance()


def checked(decoder, ids, n, mask):
    """Return the attention mask of prompts, (batch, length), bool, once all that generate() was given is found to fit.

    Raises ValueError for what does not, DecoderRefused for padding that this model does not decode right.
    """
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or len(ids) != decoder.batch:
        given = tuple(ids.shape) if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise ValueError(f"ids must be a tensor of shape ({decoder.batch}, length), as the batch is fixed, not {given}")
    length, vocabulary, device = ids.shape[1], len(decoder.step.ends), decoder.model.device
    if ids.dtype != torch.int64 or ids.device != device:
        raise ValueError(f"ids must be int64 on {device}, not {ids.dtype} on {ids.device}")
    if not length or n < 1:
        raise ValueError(f"a prompt has 1 token or more, and n is 1 or more, not {length} and {n}")
    if length + n - 1 > decoder.max_length:
        raise ValueError(f"a prompt of {length} tokens and {n} new ones fill {length + n - 1} places, and the cache has "
                         f"{decoder.max_length}: make the decoder with a larger max_length")
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise ValueError(f"ids must be from 0 to {vocabulary - 1}, not from {int(ids.min())} to {int(ids.max())}")
    if mask is None:
        return torch.ones_like(ids, dtype=torch.bool)
    if not isinstance(mask, torch.Tensor):
        raise ValueError(f"attention_mask must be a tensor in the shape of ids, {tuple(ids.shape)}, not {type(mask).__name__}")
    if mask.shape != ids.shape or not ((mask == 0) | (mask == 1)).all():
        raise ValueError(f"attention_mask must be 0s and 1s in the shape of ids, {tuple(ids.shape)}, not {tuple(mask.shape)}")
    mask = mask.to(device, torch.bool)
    if not mask[:, -1].all() or (mask[:, :-1] & ~mask[:, 1:]).any():
        raise ValueError("prompts are padded on the left: each row of attention_mask is 0s, then 1s, one at least")
    if decoder.padding_refused and not mask.all():
        raise DecoderRefused(decoder.padding_refused)
    return mask


def _refuse_model(model):
    """Raise DecoderRefused for a model that cannot be decoded so, whatever its tokens."""
    if not callable(getattr(model, "generate", None)) or getattr(model, "generation_config", None) is None:
        raise DecoderRefused(f"{type(model).__name__} is not decoded: it is no causal LM of transformers, which has a generate()")
    devices, attention = {p.device for p in model.parameters()}, model.config.get_text_config(decoder=True)._attn_implementation
    _refuse_faults(model, (
        (model.config.is_encoder_decoder, "it has an encoder: only decoders are decoded so"),
        (not decoding.cache_keyword(model), "it keeps no cache: its forward takes none"),
        (len(devices) > 1, f"its weights are on {', '.join(sorted(map(str, devices)))}: a graph needs one device"),
        (attention not in ("sdpa", "eager"), f"its attention is {attention}: model.set_attn_implementation('sdpa') first")))
    _refuse_state(model)


def _refuse_state(model):
    """Raise DecoderRefused for a model that, as it is now, may give other tokens than the step."""
    asked = model.generation_config
    changes = [option for option in CHANGES if getattr(asked, option, None) not in (None, NEUTRAL.get(option))]
    _refuse_faults(model, (
        (model.training, "it is in training mode, where dropout makes tokens random: call eval() first"),
        (changes, f"its generation_config asks for what the step does not do: {', '.join(changes)}; set it to None")))


def _refuse_faults(model, faults):
    """Raise DecoderRefused for the first of some faults, (whether the model has it, in words), that it has."""
    for wrong, why in faults:
        if wrong:
            raise DecoderRefused(f"{type(model).__name__} is not decoded: {why}")


def _in_words(error):
    """Return in one line what went wrong and, if it was in the model's own code, at which line of it."""
    if isinstance(error, DecoderRefused):
        return str(error)
    cause = error.cause if isinstance(error, graphs.CaptureError) else error
    words = f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}"
    lines = [frame for frame in traceback.extract_tb(cause.__traceback__) if f"{os.sep}transformers{os.sep}" in frame.filename]
    if lines:
        words += f" ({os.path.basename(lines[-1].filename)}, line {lines[-1].lineno}: {lines[-1].line})"
    return words if cause is error else f"the capture failed: {error.kind}: {words}"


def _prove(decoder):
    """Raise DecoderRefused unless logits and tokens equal generate()'s, also across the model's windows' edges."""
    step, most = decoder.step, decoder.max_length
    edges = step.edges()
    if step.template:
        places = {p for edge in edges for p in (edge - 1, edge, edge + 1)} | {2, most - 1}
        step.valid[0, :3] = False
        step.skipped[0] = 3
        if any(step.masks_differ(place) for place in sorted(places) if place < most):
            raise DecoderRefused("the masks differ from the model's own")
    prompts = {5, *(p for edge in edges for p in (edge - 2, edge + 2))}
    for length in sorted(p for p in prompts if 0 < p <= most - 3):
        _compare(decoder, length, min(8, most - length + 1), padded=False)
    try:
        _compare(decoder, 5, min(8, most - 4), padded=True)
        for edge in edges:
            if edge + 3 <= most:
                _compare(decoder, edge, min(8, most - edge + 1), padded=True)
    except torch.OutOfMemoryError:  # says nothing of the model
        raise
    except Exception as error:
        decoder.padding_refused = f"{type(decoder.model).__name__} does not decode padded prompts: {_in_words(error)}"


def _compare(decoder, length, n, padded):
    """Decode n tokens from random prompts; raise DecoderRefused unless logits and tokens are generate()'s."""
    model, random = decoder.model, torch.Generator().manual_seed(length)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(vocabulary, (decoder.batch, length), generator=random).to(model.device)
    mask = torch.ones_like(ids, dtype=torch.bool)
    if padded:
        places, rows = torch.arange(length, device=ids.device), torch.arange(len(ids), device=ids.device)
        mask = places >= (1 + rows[:, None]) % max(2, length - 1)
    decoder.step.end_at(())
    wanted, chosen = _generated(model, ids, mask, n)
    logits = decoder.begin(ids, mask)
    for i in range(n):
        if differ := how_they_differ(logits, wanted[i], decoder.step.token, model.dtype, f"new token {i + 1}", "generate()'s"):
            raise DecoderRefused(f"after a {'padded ' if padded else ''}prompt of {length} tokens, {differ}")
        decoder.step.token.copy_(chosen[:, i:i + 1])  # where two tokens tie, go on with the same text
        if i + 1 < n:
            logits = decoder.advance()


def how_they_differ(logits, wanted, tokens, dtype, what, whose):
    """Say how the logits, (batch, vocabulary), of `what`, or its tokens, (batch, 1), are others than `whose`; "" if they are not.

    Equal are logits within what a model of this dtype can differ by, and tokens that are the best, or tie with it.
    """
    precision, largest = torch.finfo(dtype).eps, wanted.abs().amax(-1).clamp_min(1e-6)
    apart = (logits - wanted).abs().amax(-1) / largest
    if not (apart <= min(512 * precision, precision ** 0.5)).all():
        return f"the logits of {what} differ from {whose} by {apart.max():.2g} of the largest"
    behind = (wanted.amax(-1) - wanted.gather(-1, tokens)[:, 0]) / largest
    if not (behind <= 2 * apart + precision).all():  # by more than the logits differ: no tie
        return f"{what} is another one than {whose}"
    return ""


def _generated(model, ids, mask, n):
    """Return the logits, n times (batch, vocabulary), and tokens, (batch, n), of the model's own greedy generate()."""
    asked, model.generation_config = model.generation_config, GenerationConfig(pad_token_id=0)
    try:
        out = model.generate(ids, attention_mask=mask.long(), do_sample=False, max_new_tokens=n, use_cache=True,
                             return_dict_in_generate=True, output_logits=True)
    finally:
        model.generation_config = asked
    return [logits.float() for logits in out.logits], out.sequences[:, ids.shape[1]:]
