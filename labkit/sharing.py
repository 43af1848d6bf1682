"""What a model shares is read once: keys and values by the heads that ask for them, an input by the layers that multiply it."""

import collections
import contextlib
import functools
import itertools
import threading
import warnings

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_ENTERING, _WITHIN = threading.Lock(), []  # the usual attention, as often as keys_read_once was entered


@contextlib.contextmanager
def keys_read_once():
    """Within it, attention (sdpa, one token a sequence) reads keys and values once for all the heads that share them.

    With a mask, and a static cache needs one, transformers copies them for each head first, in 5.17 always, later under
    torch.compile (its sdpa_attention.py, use_gqa_in_sdpa): most kernels cannot do without. cuDNN's can, so it is tried.
    It holds for all models and threads, until the last that entered it has left.
    """
    with _ENTERING:
        if not _WITHIN:
            usual = ALL_ATTENTION_FUNCTIONS["sdpa"]
            ALL_ATTENTION_FUNCTIONS["sdpa"] = _read_shared_once(usual)
        _WITHIN.append(_WITHIN[0] if _WITHIN else usual)
    try:
        yield
    finally:
        with _ENTERING:
            usual = _WITHIN.pop()
            if not _WITHIN:
                del ALL_ATTENTION_FUNCTIONS["sdpa"]  # what is registered for all counts again, if there was no other
                if ALL_ATTENTION_FUNCTIONS["sdpa"] is not usual:
                    ALL_ATTENTION_FUNCTIONS["sdpa"] = usual


def _read_shared_once(usual):
    """Return an attention that hands what heads that share keys ask for to a kernel that takes it so, and all else to `usual`."""
    def attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, *args, **more):
        shared = query.shape[1] > key.shape[1] and query.shape[2] == 1 and key.shape == value.shape and not query.requires_grad
        asked = dropout or more.get("position_bias") is not None or more.get("softcap") is not None
        if not shared or asked or attention_mask is None or attention_mask.ndim != 4 or attention_mask.shape[1] > 1 or not _takes_shared(
                query.dtype, query.device, attention_mask.dtype, *key.shape[2:]):
            return usual(module, query, key, value, attention_mask, dropout, scaling, *args, **more)
        with _taking_shared(query.device):
            out = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    return attention


def _taking_shared(device):
    """Return a context in which attention takes heads that share keys as they are: on a GPU, by cuDNN's kernel."""
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if device.type == "cuda" else contextlib.nullcontext()


@torch.compiler.assume_constant_result
def _takes_shared(dtype, device, masks, places, width):
    """Return whether this device has such a kernel for masks of this dtype and so many places, each `width` numbers wide; it is tried once."""
    return _tried_shared(dtype, device, masks, places, width)


@functools.lru_cache(maxsize=None)
def _tried_shared(dtype, device, masks, places, width):
    query, key = (torch.zeros(1, heads, length, width, dtype=dtype, device=device) for heads, length in ((2, 1), (1, places)))
    mask = torch.ones(1, 1, 1, places, dtype=masks, device=device)
    try:
        with _taking_shared(device), warnings.catch_warnings(action="ignore"):  # that say why not
            scaled_dot_product_attention(query, key, key, attn_mask=mask, enable_gqa=True)
    except RuntimeError:  # not half precision, an older GPU, a width that it does not take
        return False
    return True


class JoinedProjections:
    """A context in which linear layers that multiply the same input do so in one product: q, k and v, and gate and up.

    model: its weights stay what they are, but those of such layers become parts of one tensor. Joined are plain nn.Linear
    without bias, of one dtype and on one device, whose weights are nobody else's. One that gets another input than its
    neighbours (encoded text, say), or is to learn, multiplies by itself; only, no input may be written into between them.
    Copies of the model, and what is saved of it, are not joined. Raises ValueError for a model without such layers, and on
    entering where weights were moved or replaced since. Attributes: joined (the products that there are in place of more).
    """

    TOGETHER = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")

    def __init__(self, model):
        self.entered, self.joined, self._weights = 0, [], []
        uses = collections.Counter(_store(weight) for module in model.modules() for weight in module._parameters.values())
        for module, names in itertools.product(list(model.modules()), self.TOGETHER):
            layers = [getattr(module, name, None) for name in names]
            if _can_be_joined(layers, uses):
                self.joined.append(_Joined(layers, self))
                self._weights += [layer._parameters for layer in layers]
                uses.update(_store(layer.weight) for layer in layers)  # one of them may stand in another module, too
        if not self.joined:
            raise ValueError(f"{type(model).__name__} has no projections to join: they are named otherwise, have a bias, or are joined already")
        self._pointers = [weights["weight"].data_ptr() for weights in self._weights]

    def __enter__(self):
        now = [weights["weight"].data_ptr() if "weight" in weights else None for weights in self._weights]
        if now != self._pointers:
            raise ValueError("weights were moved or replaced since their projections were joined: join them again")
        self.entered += 1

    def __exit__(self, *_):
        self.entered -= 1
        for one in self.joined:
            one.given = None, {}


def _can_be_joined(layers, uses):
    """Say whether layers are plain linear ones of one kind, whose weights are nobody else's by `uses`: {where one lies: how often}."""
    if not all(type(layer) in (nn.Linear, _Part) and layer.bias is None and _store(layer.weight) for layer in layers):
        return False
    weights = [layer.weight for layer in layers]
    mine = collections.Counter(map(_store, weights))  # one store for several, if they were joined before
    return (all(uses[store] == times for store, times in mine.items()) and len({w.data_ptr() for w in weights}) == len(layers)
            and len({(w.dtype, w.device, w.shape[1], w.is_inference()) for w in weights}) == 1)


def _store(weight):
    """Return where in memory a weight lies, the same for weights that share it; 0 for one of a peculiar kind."""
    return weight.untyped_storage().data_ptr() if type(weight) is nn.Parameter and weight.layout == torch.strided else 0


class _Joined:
    """The one weight of linear layers, whose own become parts of it, in place; and what it last gave: (input, {part: product})."""

    @torch.no_grad()
    def __init__(self, layers, switch):
        self.switch, self.given, self.sizes = switch, (None, {}), [layer.out_features for layer in layers]
        with torch.inference_mode(layers[0].weight.is_inference()):  # parts are of the kind that their layers' weights are
            self.weight = torch.cat([layer.weight for layer in layers])
            for i, (layer, weight) in enumerate(zip(layers, self.weight.split(self.sizes))):
                layer.weight.data = weight
                layer.__class__, layer.part, layer.joined = _Part, i, self

    def __call__(self, x, part):
        """Return the product of x with one of the weights, multiplied for all of them with the first."""
        given, products = self.given
        mine = products.pop(part, None) if given is x else None
        if mine is None:
            products = dict(enumerate(nn.functional.linear(x, self.weight).split(self.sizes, -1)))
            mine, self.given = products.pop(part), (x, products)
        if not products:
            self.given = None, {}
        return mine

    def __reduce__(self):
        return type(None), ()  # a copy of a model has weights of its own


class _Part(nn.Linear):
    """One of several linear layers that, within the context, multiply together."""

    def forward(self, x):
        if self.joined is None or not self.joined.switch.entered or torch.is_grad_enabled() and self.weight.requires_grad:
            return super().forward(x)
        return self.joined(x, self.part)
