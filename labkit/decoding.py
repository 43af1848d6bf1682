"""What a captured decoder replays: one step of a causal LM over a static cache, on tensors that stay where they are."""

import contextlib
import copy
import inspect
import operator
import re

import torch
from torch.overrides import TorchFunctionMode
from transformers import StaticCache, cache_utils
from transformers.cache_utils import StaticLayer

from labkit import sharing

WHOLE = {"StaticSlidingWindowLayer": "StaticLayer",
         "LinearAttentionAndStaticSlidingWindowAttentionLayer": "LinearAttentionAndStaticFullAttentionLayer"}
SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 0}  # what each option is when it is left out


class MadeBefore(TorchFunctionMode):
    """Make tensors from Python's lists and numbers once: the copy to the GPU that makes them cannot be captured.

    That is for torch.tensor(values) and for x[[-2]]. What comes out is a copy, made on the GPU.
    """

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.tensor and not isinstance(args[0], torch.Tensor):
            return self._once((repr(args), repr(kwargs)), function, args, kwargs).clone()
        if function is torch.Tensor.__getitem__ and isinstance(args[1], tuple):
            device = args[0].device
            args = args[0], tuple(self._once((repr(index), device), torch.tensor, (index,), {"device": device})
                                  if isinstance(index, list) else index for index in args[1])
        return function(*args, **kwargs)

    def _once(self, key, function, args, kwargs):
        if key not in self.made:
            self.made[key] = function(*args, **kwargs)
        return self.made[key]


class StaticStep:
    """One decode step and all it reads and writes: called, it returns the logits it picked from, (batch, vocabulary).

    masks: "static", where the step makes the mask of each layer from the prompts' padding and the place in the cache, or
    "own", where the model makes them as for generate(). experts: how a mixture of experts multiplies, None for its own way.
    compiled: whether the model's part of a step goes through torch.compile, which then tries out kernels (a minute or more).
    Raises ValueError where masks of a kind that is not known would be needed.
    """

    def __init__(self, model, max_length, batch, masks, experts, compiled=False):
        self.model, self.max_length, self.experts, device = model, max_length, experts, model.device
        takes = inspect.signature(model.forward).parameters
        self.keyword, self.positioned = cache_keyword(model), "position_ids" in takes
        self.last_only = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self.cache = StaticCache(config=model.config, max_cache_len=max_length)
        self.lengths = torch.zeros(len(self.cache.layers), dtype=torch.int64, device=device)
        for i, layer in enumerate(self.cache.layers):
            if whole := WHOLE.get(type(layer).__name__):  # a window's edge, kept in Python, would be captured as it is
                states = {"number_of_states": layer.number_of_states} if hasattr(layer, "number_of_states") else {}
                layer = self.cache.layers[i] = getattr(cache_utils, whole)(max_cache_len=max_length, **states)
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = self.lengths[i]  # a view: one fill_ rewinds all layers
        self.token, self.position = (torch.zeros(batch, 1, dtype=torch.int64, device=device) for _ in range(2))
        self.slot = torch.zeros(1, dtype=torch.int64, device=device)  # how many places are filled
        self.valid = torch.ones(batch, max_length, dtype=torch.bool, device=device)  # all places but a prompt's padding
        self.skipped = torch.zeros(batch, 1, dtype=torch.int64, device=device)  # places of a prompt's padding
        self.places = torch.arange(max_length, device=device)
        self.history = torch.zeros(batch, max_length + 1, dtype=torch.int64, device=device)
        self.finished = torch.zeros(batch, dtype=torch.bool, device=device)
        self.padding = torch.zeros(1, dtype=torch.int64, device=device)
        self.allowed = torch.zeros((), dtype=model.dtype, device=device)
        self.forbidden = torch.full((), torch.finfo(model.dtype).min, dtype=model.dtype, device=device)
        self.options = {name: torch.full((), value, device=device) for name, value in SAMPLING.items()}
        self.generator, self.seed = torch.Generator(device), 0
        self.template = self.ends = None
        self.constants = contextlib.nullcontext() if compiled else MadeBefore()
        self.one_token = torch.compile(model.forward, mode="max-autotune-no-cudagraphs", dynamic=False) if compiled else model
        ids, positions = self.rehearsal(), self.places[:2].expand(batch, 2)
        logits = self._forward(self._prepared(ids, self.valid[:, :2], positions, first=True))
        self.ends = torch.zeros(logits.shape[-1], dtype=torch.bool, device=device)  # which tokens end a sequence
        self.slot.fill_(2)
        self.template = self._template() if masks == "static" else None

    def rehearsal(self):
        """Empty the cache and return two tokens a sequence, (batch, 2), to run the model on before a capture."""
        self.rewind()
        return torch.ones_like(self.history[:, :2])

    def rewind(self):
        """Empty the cache in place, and forget the prompts."""
        self.cache.reset()
        for tensor in (self.lengths, self.slot, self.skipped, self.history, self.finished, self.token, self.position):
            tensor.zero_()
        self.valid.fill_(True)

    def hold(self, place):
        """Go to a place of the cache, whatever it holds there: each call after it does the same work."""
        for counter in (self.lengths, self.slot, self.position):
            counter.fill_(place)

    def prefill(self, ids, mask, pick):
        """Run prompts, (batch, length), through the model, mask False at padding; pick a token and return its logits."""
        self.rewind()
        length = ids.shape[1]
        self.valid[:, :length] = mask
        self.skipped.copy_(length - mask.sum(-1, keepdim=True))
        positions = (mask.long().cumsum(-1) - 1).masked_fill(~mask, 0)
        logits = self._forward(self._prepared(ids, mask, positions, first=True))
        self.slot.fill_(length - 1)
        self.position.copy_(positions[:, -1:])
        self._take(self._pick(logits, pick))
        return logits

    def __call__(self, pick):
        if self.template is None:
            with self.constants:
                inputs = self._prepared(self.token, self.valid, self.position)
        else:
            inputs = {**self.template[0], "attention_mask": self._masks()}
        with self.constants:
            logits = self._forward(inputs)
        self._take(self._pick(logits, pick))
        return logits

    def _prepared(self, ids, mask, positions, first=False):
        """Return a forward's arguments as generate() would prepare them."""
        positions = {"position_ids": positions} if self.positioned else {}
        inputs = self.model.prepare_inputs_for_generation(
            ids, attention_mask=mask.long(), use_cache=True, is_first_iteration=first, **positions, **self.last_only,
            **{self.keyword: self.cache})
        return {**inputs, "return_dict": True}

    def _forward(self, inputs):
        """Return the logits of the last place, (batch, vocabulary)."""
        if inputs["input_ids"].shape[1] > 1:
            logits = self.model(**inputs).logits
        else:
            with sharing.keys_read_once(), self._experts_chosen():
                logits = self.one_token(**inputs).logits
        if logits.ndim != 3 or logits.shape[0] != len(self.token):
            raise ValueError(f"its logits have the shape {tuple(logits.shape)}, not (batch, tokens, vocabulary)")
        return logits[:, -1].float()

    @contextlib.contextmanager
    def _experts_chosen(self):
        """Have a mixture of experts multiply as asked for within it."""
        before = self.experts and self.model.config._experts_implementation
        if self.experts:
            self.model.set_experts_implementation(self.experts)
        try:
            yield
        finally:
            if self.experts:
                self.model.set_experts_implementation(before)

    def _pick(self, logits, pick):  # (batch, vocabulary) -> (batch,)
        """Pick a token for each sequence: "greedy", "sampled", or "filtered" by top_k and top_p before."""
        if pick == "greedy":
            return logits.argmax(-1)
        scores, order = logits / self.options["temperature"], None
        if pick == "filtered":
            scores, order = torch.sort(scores, dim=-1, descending=True, stable=True)
            ranks = torch.arange(scores.shape[-1], device=scores.device)
            scores = scores.masked_fill(ranks >= self.options["top_k"], -torch.inf)
            shares = scores.softmax(-1)
            scores = scores.masked_fill(shares.cumsum(-1) - shares >= self.options["top_p"], -torch.inf)
        noise = torch.empty_like(scores).exponential_(generator=self.generator)  # the largest share / noise: a fair draw
        place = (scores.softmax(-1) / noise).argmax(-1, keepdim=True)
        return (place if order is None else order.gather(-1, place)).squeeze(-1)

    def _take(self, tokens):
        """Make tokens, (batch,), the next input and move on; sequences that have ended get padding."""
        tokens = torch.where(self.finished, self.padding, tokens)
        self.finished.logical_or_(self.ends[tokens])
        self.token.copy_(tokens[:, None])
        for counter in (self.slot, self.position):
            counter.add_(1)
        self.history.index_copy_(1, self.slot, self.token)

    def choose(self, sampling):
        """Set sampling options by name; returns how the step picks then: "greedy", "sampled" or "filtered".

        Raises ValueError for an option that is none, or for what it cannot be.
        """
        if unknown := sampling.keys() - SAMPLING.keys():
            raise ValueError(f"unknown sampling option {', '.join(sorted(unknown))}; there are: {', '.join(SAMPLING)}")
        given = {name: value for name, value in sampling.items() if value is not None}
        if not given:
            return "greedy"
        given |= {name: whole_numbers(**{name: given[name]})[0] for name in ("top_k", "seed") if name in given}
        limits = {"temperature": (1e-6 <= given.get("temperature", 1) <= 1e6, "from 1e-6 to 1e6 (for greedy, leave all sampling options out)"),
                  "top_k": (given.get("top_k", 1) >= 1, "1 or more"),
                  "top_p": (0 < given.get("top_p", 1) <= 1, "above 0 and at most 1"),
                  "seed": (0 <= given.get("seed", 0) < 2**63, "from 0 to 2**63 - 1")}
        for name, (fits, wanted) in limits.items():
            if not fits:
                raise ValueError(f"{name} must be {wanted}, not {given[name]}")
        for name, tensor in self.options.items():
            most = len(self.ends)
            tensor.fill_(min(given.get(name, SAMPLING[name] or most), most) if name == "top_k" else given.get(name, SAMPLING[name]))
        self.seed = given.get("seed", 0)
        return "filtered" if {"top_k", "top_p"} & given.keys() else "sampled"

    def end_at(self, tokens):
        """Set which tokens end a sequence (an int or several; None: the model's own) and what pads it; returns whether any.

        Raises ValueError for a token that the model does not have.
        """
        config = self.model.generation_config
        tokens = config.eos_token_id if tokens is None else tokens
        tokens = tokens.tolist() if hasattr(tokens, "tolist") else tokens  # a tensor, or NumPy's
        tokens = [tokens] if isinstance(tokens, (int, float)) else () if tokens is None else tokens
        tokens = [whole_numbers(eos_token_id=token)[0] for token in tokens]
        if wrong := [token for token in tokens if not 0 <= token < len(self.ends)]:
            raise ValueError(f"eos_token_id must be from 0 to {len(self.ends) - 1}, not {wrong[0]}")
        self.ends.zero_()
        self.ends[tokens] = True
        self.padding.fill_(next(t for t in (config.pad_token_id, *tokens, 0) if t in range(len(self.ends))))
        return bool(tokens)

    def _template(self):
        """Return a step's arguments without masks, and {layer type: (kind, width)} of the masks that it needs."""
        inputs, config = self._prepared(self.token, self.valid, self.position), self.model.config.get_text_config(decoder=True)
        masks = inputs.pop("attention_mask", None)
        inputs |= {"input_ids": self.token} | ({"position_ids": self.position} if "position_ids" in inputs else {})
        known = {id(self.token), id(self.position)}
        if others := [k for k, v in inputs.items() if isinstance(v, torch.Tensor) and id(v) not in known]:
            raise ValueError(f"its step takes other tensors too: {', '.join(others)}")
        sliding, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
        kinds = {"full_attention": ("full", 0), "sliding_attention": ("sliding", sliding)}
        kinds["chunked_attention"] = "chunked", chunk
        kinds[None] = ("sliding", sliding) if sliding else ("chunked", chunk) if chunk else ("full", 0)
        masks = masks if isinstance(masks, dict) else {None: masks}
        needed = {name: None if mask is None else kinds.get(name) for name, mask in masks.items()}
        shape = (len(self.token), 1, 1, self.max_length)
        if wrong := [name for name, mask in masks.items() if mask is not None and (not needed[name] or mask.shape != shape)]:
            raise ValueError(f"its masks are not of a kind that is known: {', '.join(map(str, wrong))}")
        return inputs, needed

    def _masks(self):
        """Return the masks of a step, each (batch, 1, 1, max_length): in a dict by layer type, or one for all layers."""
        seen, made = self.valid & (self.places <= self.slot), {}
        for kind in {*self.template[1].values()} - {None}:
            name, width = kind
            mask = seen
            if name == "sliding":
                mask = seen & (self.places > self.slot - width)
            elif name == "chunked":
                first = self.slot - self.skipped
                mask = seen & (self.places - self.skipped >= first - first % width)
            made[kind] = self._as_wanted(mask[:, None, None])
        masks = {name: made.get(kind) for name, kind in self.template[1].items()}
        return masks[None] if None in masks else masks

    def _as_wanted(self, mask):
        """Return a mask as the model's attention takes it: bool, or numbers to add."""
        if self.model.config.get_text_config(decoder=True)._attn_implementation == "sdpa":
            return mask
        return torch.where(mask, self.allowed, self.forbidden)

    def masks_differ(self, slot):
        """Say whether, with so many places filled, the static masks are other than the model's own."""
        self.slot.fill_(slot)
        self.lengths.fill_(slot)
        own, made = self._prepared(self.token, self.valid, self.position)["attention_mask"], self._masks()
        own, made = (masks if isinstance(masks, dict) else {None: masks} for masks in (own, made))
        return any(own[name] is not made[name] and not torch.equal(own[name], made[name]) for name in own)

    def over_rows(self, buffers, places, tokens, active):
        """Return a RowsStep of this model over other buffers: keys and values of each layer in turns, (rows, heads, length, width)."""
        step, size = copy.copy(self), len(places)
        step.slot, step.token, step.position = places[:, None], tokens, places[:, None]
        step.valid = torch.ones(size, self.max_length, dtype=torch.bool, device=places.device)
        step.skipped, step.cache, rows = torch.zeros_like(tokens), copy.copy(self.cache), torch.arange(size, device=places.device)
        step.cache.layers = [RowLayer(keys[:size], values[:size], rows, places) for keys, values in zip(buffers[::2], buffers[1::2])]
        inputs, masks = self.template
        inputs = inputs | {"input_ids": tokens, self.keyword: step.cache}
        step.template = inputs | ({"position_ids": step.position} if "position_ids" in inputs else {}), masks
        return RowsStep(step, places, tokens, active)

    def edges(self):
        """Return the lengths (tokens), below max_length, at which something in the model may change: windows, chunks and the like."""
        config = self.model.config.get_text_config(decoder=True).to_dict()
        named = [value for name, value in config.items() if re.search(r"window|chunk|topk|original_max_position", name)]
        return sorted({value for value in named if type(value) is int and 1 < value < self.max_length})


class RowLayer(StaticLayer):
    """A layer of a static cache in which each row writes at a place of its own; keys and values are the first rows' views."""

    def __init__(self, keys, values, rows, places):
        super().__init__(max_cache_len=keys.shape[2])
        self.keys, self.values, self.rows, self.places = keys, values, rows, places
        self.cumulative_length, self.is_initialized = places, True

    def update(self, key_states, value_states, *args, **kwargs):
        """Write one token a row, (rows, heads, 1, width), each at its place; returns all keys and values of these rows."""
        self.keys[self.rows, :, self.places] = key_states[:, :, 0]
        self.values[self.rows, :, self.places] = value_states[:, :, 0]
        return self.keys, self.values


class RowsStep:
    """One greedy step of rows at places of their own: rows in use move on by one place, the others stay at place 0."""

    def __init__(self, step, places, tokens, active):
        self.step, self.places, self.tokens, self.active = step, places, tokens, active

    def __call__(self):
        """Make each row's token, (rows, 1), the next one; returns the logits it was picked from, (rows, vocabulary)."""
        logits = self.step._forward({**self.step.template[0], "attention_mask": self.step._masks()})
        self.tokens.copy_(logits.argmax(-1, keepdim=True))
        self.places.add_(1).mul_(self.active)
        return logits


def cache_keyword(model):
    """Return the name under which a model's forward takes its cache, None if it keeps none: the wrong one is ignored."""
    named = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "past_key_values", "cache_params") if name in named), None)


def whole_numbers(**named):
    """Return numbers as a list of ints; raises ValueError for one that is not whole."""
    try:
        return [operator.index(number) for number in named.values()]
    except TypeError:
        raise ValueError(f"{' and '.join(named)} must be whole, not {' and '.join(map(repr, named.values()))}") from None
