"""Keys and values that heads of attention share are read once."""

import contextlib
import functools
import threading
import warnings

import torch
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
