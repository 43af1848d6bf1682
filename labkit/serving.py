"""What a server replays: a decode step over rows that requests join and leave, and prefills of changing length, in pieces."""

import contextlib
import functools
from collections import Counter

import torch
from torch.nn import functional as F
from transformers.cache_utils import StaticLayer

from labkit import decode, graphs, models
from labkit.batching import at_least
from labkit.contents import pool_bytes


class BatchedDecoder:
    """A decode step over up to `rows` requests of different lengths, captured at a few sizes; rows in use come first.

    model: a causal LM that a GraphedDecoder decodes with static masks. max_length: places in the cache of a row. sizes: batch
    sizes to capture, all in one memory pool, the largest first; above the largest, and on the CPU, the step runs eagerly.
    Greedy: each row gets the tokens that the model writes for its prompt alone, but where two tokens tie, as other batch sizes
    can mean other kernels. That is proven first, for a few prompts side by side, as GraphedDecoder proves the model alone.
    Attributes: running (the length of each row in use), steps: {(rows in use, rows run, whether replayed): steps}, graphs.
    Raises decode.DecoderRefused for a model that does not decode so, models.TooLarge, ValueError for sizes that are none,
    CaptureError like GraphedCallable.
    """

    @torch.inference_mode()
    def __init__(self, model, max_length, rows, sizes=()):
        if not isinstance(sizes, (list, tuple, range, set)):
            raise ValueError(f"sizes must be a list of whole numbers, not {sizes!r}")
        sizes = list(sizes)
        if type(rows) is not int or rows < 1:
            raise ValueError(f"rows is a whole number, 1 or more, not {rows!r}")
        if not all(type(size) is int and 1 <= size <= rows for size in sizes):
            raise ValueError(f"sizes are whole numbers from 1 to {rows}, the number of rows, not {sizes}")
        self.alone = decode.GraphedDecoder(model, max_length, 1, masks="static")  # proves the model, and runs prompts
        step, device = self.alone.step, model.device
        if wrong := [type(layer).__name__ for layer in step.cache.layers if type(layer) is not StaticLayer]:
            raise decode.DecoderRefused(f"{type(model).__name__} keeps more than keys and values of each token ({wrong[0]})")
        self.rows, self.max_length, self.sizes = rows, max_length, sorted(set(sizes))
        buffers = [buffer for layer in step.cache.layers for buffer in (layer.keys, layer.values)]
        if self.alone.captured:
            models.require_room(f"a cache of {rows} x {max_length:,} tokens", rows * sum(buffer.nbytes for buffer in buffers))
        self.kept = [torch.zeros(rows, *buffer.shape[1:], dtype=buffer.dtype, device=device) for buffer in buffers]
        self.places = torch.zeros(rows, dtype=torch.int64, device=device)  # where each row writes next
        self.tokens = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self.active = torch.zeros(rows, dtype=torch.bool, device=device)
        self.logits = torch.zeros(rows, len(step.ends), device=device)  # of the last step that was replayed
        self.eager, self.graphs, self.steps, pool = functools.cache(self._step_of), {}, Counter(), None
        self.reset()
        try:
            for size in reversed(self.sizes if self.alone.captured else []):
                self.graphs[size] = graphs.GraphedCallable(self.without_output(size), clone=False, pool=pool)
                pool = self.graphs[size].pool
            for prompts in {min(3, most) for most in (rows, *self.sizes[-1:])}:  # with few sizes: by a graph, and above them
                self.reset()
                self._prove(prompts)
        except (torch.OutOfMemoryError, graphs.CaptureError):
            raise
        except Exception as error:  # whatever a model's own code may raise
            raise decode.DecoderRefused(f"{type(model).__name__} is not decoded in rows: {type(error).__name__}: {error}") from error
        self.reset()
        self.steps.clear()

    def _step_of(self, size):
        return self.alone.step.over_rows(self.kept, self.places[:size], self.tokens[:size], self.active[:size])

    def without_output(self, size):
        """Return the step of a size as it is captured: what a graph hands out keeps its place in the pool, so it hands nothing out."""
        return functools.partial(_written, self.logits[:size], self.eager(size))

    def _prove(self, number):
        """Raise ValueError unless so many prompts, 1 to 3, of different lengths get, side by side, the logits and tokens they get alone."""
        vocabulary, draw = len(self.alone.step.ends), torch.Generator().manual_seed(0)
        lengths = [length for length in (3, 7, 5)[:number] if length + 4 <= self.max_length]
        prompts = [torch.randint(vocabulary, (length,), generator=draw).to(self.tokens.device) for length in lengths]
        wanted = []
        for ids in prompts:
            self.alone.begin(ids[None], torch.ones_like(ids[None], dtype=torch.bool))
            wanted.append([(self.alone.advance().clone(), self.alone.step.token.clone()) for _ in range(4)])
        for ids in prompts:
            self.join(ids)
        for step in zip(*wanted):
            logits, expected = self._advance()[:len(prompts)], torch.cat([logits for logits, _ in step])
            if differ := decode.how_they_differ(logits, expected, self.tokens[:len(prompts)], self.alone.model.dtype,
                                                "a new token", "those of its prompt alone"):
                raise ValueError(f"beside other prompts, {differ}")
            self.tokens[:len(prompts)] = torch.cat([token for _, token in step])  # where two tie, go on with the same text

    @torch.inference_mode()
    def reset(self):
        """Free all rows, also after a call that was interrupted."""
        self.running, self.broken, self.unchecked = [], False, set(self.graphs)
        self.places.zero_()
        self.active.zero_()

    def check(self, ids, tokens=1):
        """Raise ValueError unless a prompt, (length,), and so many new tokens fit into a row."""
        if not isinstance(ids, torch.Tensor) or ids.ndim != 1:
            raise ValueError(f"ids must be a tensor of shape (length,), not {tuple(ids.shape) if isinstance(ids, torch.Tensor) else ids!r}")
        decode.checked(self.alone, ids[None], tokens, None)

    @torch.inference_mode()
    def join(self, ids):
        """Run a prompt, (length,), in a free row; returns its first token. Raises ValueError where no row is free, or for ids."""
        row = len(self.running)
        if row == self.rows:
            raise ValueError(f"all {self.rows} rows are in use: let one leave first")
        self.check(ids)
        with self._whole():
            self.alone.begin(ids[None], torch.ones_like(ids[None], dtype=torch.bool))
            for i, layer in enumerate(self.alone.step.cache.layers):
                for buffer, written in zip(self.kept[2 * i:], (layer.keys, layer.values)):
                    buffer[row] = written[0]  # to its end, where there are zeros: of who had the row before, nothing stays
            self.tokens[row] = self.alone.step.token[0]
            self.places[row], self.active[row] = len(ids), True
            self.running.append(len(ids))
            self.unchecked = set(self.graphs)  # each graph looks at its first step whether the weights are what they were
            return int(self.tokens[row, 0])

    @torch.inference_mode()
    def advance(self):
        """Decode one token of each row in use, at the smallest captured size that holds them; returns them as a list of ints.

        Raises ValueError where no row is in use, or one is full.
        """
        if not self.running:
            raise ValueError("no row is in use: let a request join first")
        if (longest := max(self.running)) >= self.max_length:
            raise ValueError(f"row {self.running.index(longest)} has filled its {self.max_length} places: let it leave")
        with self._whole():
            self._advance()
            return self.tokens[:len(self.running), 0].tolist()

    def _advance(self):
        """Run the step; returns its logits, (rows run, vocabulary)."""
        size = at_least(self.sizes, len(self.running))
        graph = self.graphs.get(size)
        if graph:
            (graph if size in self.unchecked else graph.replay)()
            self.unchecked.discard(size)
        logits = self.logits[:size] if graph else self.eager(size)()
        self.steps[len(self.running), size, bool(graph)] += 1
        self.running = [length + 1 for length in self.running]
        return logits

    @torch.inference_mode()
    def leave(self, row):
        """Free a row; the last row in use moves there, so that those in use come first. Returns where that one stood.

        Raises ValueError for a row that is not in use.
        """
        last = len(self.running) - 1
        if type(row) is not int or not 0 <= row <= last:
            raise ValueError(f"row {row!r} is not in use: {last + 1} are")
        with self._whole():
            for buffer in (*self.kept, self.places, self.tokens) if row != last else ():
                buffer[row] = buffer[last]
            self.active[last], self.places[last] = False, 0
            self.running[row] = self.running[last]
            self.running.pop()
            return last

    @contextlib.contextmanager
    def _whole(self):
        """What is begun is ended, or the rows are no longer used."""
        if self.broken:
            raise ValueError("a call was interrupted half-way, and the rows may be wrong: reset() the decoder")
        self.broken = True
        yield
        self.broken = False

    @property
    def pool_bytes(self):
        """Return the bytes of GPU memory that the pool of all graphs keeps reserved; 0 without graphs."""
        return sum(map(pool_bytes, {graph.pool for graph in self.graphs.values()}))

    @property
    def capture_seconds(self):
        """Return the seconds that all captures took, with their warm-up."""
        return sum(graph.capture_seconds for graph in self.graphs.values())


def _written(into, step):
    """Run a step and write its logits, (rows, vocabulary), to a place that stays."""
    into.copy_(step())


class PiecewisePrefill:
    """Run prompts through a Llama in one pass, all but attention replayed: its graphs know only how many tokens there are.

    model: a LlamaForCausalLM of transformers. sizes: numbers of tokens to capture, the largest first, all in one memory pool;
    each is a chain of graphs, one more than the model has layers. Between two graphs attention runs eagerly, prompt by
    prompt, over the real tokens only. Above the largest size, and on the CPU, all runs eagerly. The weights have to stay
    where they are: nothing looks. Attributes: chains, {size: (graphs, ids, positions, attended)}. Raises TypeError for
    another model, ValueError for sizes, ids or lengths that are none, CaptureError like GraphedCallable.
    """

    @torch.inference_mode()
    def __init__(self, model, sizes):
        if type(model).__name__ != "LlamaForCausalLM":
            raise TypeError(f"only a LlamaForCausalLM is cut into these pieces, not a {type(model).__name__}")
        self.model, self.sizes, self.chains = model, sorted(set(sizes)), {}
        self.places = torch.arange(most := model.config.max_position_embeddings, device=model.device)[None]
        if not all(type(size) is int and 1 <= size <= most for size in self.sizes):
            raise ValueError(f"sizes are whole numbers from 1 to {most:,}, the positions of this model, not {self.sizes}")
        for size in reversed(self.sizes if model.device.type == "cuda" else []):
            self.chains[size] = self._captured(size)

    def _captured(self, size):
        ids, positions = torch.zeros_like(self.places[:, :size]), self.places[:, :size].clone()
        attended, chain = self._room_for(size), []

        def capture(*piece):
            pool = next((made[0].pool for made, *_ in self.chains.values()), chain[0].pool if chain else None)
            chain.append(graphs.GraphedCallable(functools.partial(_piece_of, self.model, *piece), clone=False, pool=pool))
            return chain[-1].outputs

        _in_pieces(self.model, capture, ids, positions, lambda *_: attended)
        return chain, ids, positions, attended

    def _room_for(self, tokens):
        weight = self.model.model.layers[0].self_attn.o_proj.weight
        return torch.zeros(1, tokens, weight.shape[1], dtype=weight.dtype, device=weight.device)

    @torch.inference_mode()
    def __call__(self, ids, lengths):
        """Return the logits of the last token of each prompt, (prompts, vocabulary); ids: all prompts in a row, (1, tokens)."""
        size = at_least(self.sizes, ids.shape[-1])
        if size not in self.chains:
            return self.eager(ids, lengths)
        chain, held, positions, attended = self.chains[size]
        real = self._positions(ids, lengths)
        held[:, :ids.shape[1]].copy_(ids)
        positions[:, :ids.shape[1]].copy_(real)

        def replay(i, *_):
            chain[i].replay()
            return chain[i].outputs

        [out] = _in_pieces(self.model, replay, held, positions, functools.partial(_attend, lengths, attended))
        return self._logits(out, lengths)

    @torch.inference_mode()
    def eager(self, ids, lengths):
        """Return the same, without any graph."""
        return self._logits(self.hidden(ids, lengths), lengths)

    @torch.inference_mode()
    def hidden(self, ids, lengths):
        """Return what stands before the last layer, (1, tokens, width), without any graph."""
        positions = self._positions(ids, lengths)
        attend = functools.partial(_attend, lengths, self._room_for(ids.shape[1]))
        [out] = _in_pieces(self.model, functools.partial(_piece_of, self.model), ids, positions, attend)
        return out

    @property
    def pool_bytes(self):
        """Bytes that the pool of all graphs keeps reserved; 0 without graphs."""
        return sum(map(pool_bytes, {graph.pool for chain, *_ in self.chains.values() for graph in chain}))

    def _positions(self, ids, lengths):
        if ids.ndim != 2 or len(ids) != 1 or ids.dtype != torch.int64 or ids.device != self.places.device:
            raise ValueError(f"ids must be int64 of shape (1, tokens) on {self.places.device}, not {ids.dtype} of {tuple(ids.shape)} on {ids.device}")
        if not all(type(length) is int for length in lengths) or min(lengths, default=0) < 1 or sum(lengths) != ids.shape[1]:
            raise ValueError(f"the lengths of the prompts, {lengths}, do not add up to {ids.shape[1]} tokens")
        if max(lengths) > self.places.shape[1]:
            raise ValueError(f"a prompt of {max(lengths):,} tokens is longer than the {self.places.shape[1]:,} positions of this model")
        return torch.cat([self.places[:, :length] for length in lengths], 1)

    def _logits(self, out, lengths):
        ends = [sum(lengths[:i + 1]) for i in range(len(lengths))]
        return self.model.lm_head(torch.cat([out[0, end - 1:end] for end in ends]))


def _in_pieces(model, call, ids, positions, attend):
    """Run the pieces of a Llama by `call`, with `attend` between them; returns what the last one does."""
    state = attended = None
    for i in range(len(model.model.layers) + 1):
        state = call(i, ids, positions, state, attended)
        attended = attend(*state[3:]) if len(state) > 1 else None
    return state


def _piece_of(model, i, ids, positions, state, attended):
    """Return what a Llama does from its attention i - 1 to its attention i: (x, cos, sin, q, k, v), or at last (x,)."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    layers = model.model.layers
    if state is None:
        x = model.model.embed_tokens(ids)  # (1, tokens, width)
        cos, sin = model.model.rotary_emb(x, positions)
    else:
        x, cos, sin = state[:3]
        x = x + layers[i - 1].self_attn.o_proj(attended)
        x = x + layers[i - 1].mlp(layers[i - 1].post_attention_layernorm(x))
    if i == len(layers):
        return (model.model.norm(x),)
    part, normed = layers[i].self_attn, layers[i].input_layernorm(x)
    q, k, v = (project(normed).unflatten(-1, (-1, part.head_dim)).transpose(1, 2) for project in (part.q_proj, part.k_proj, part.v_proj))
    return (x, cos, sin, *apply_rotary_pos_emb(q, k, cos, sin), v)


def _attend(lengths, into, q, k, v):
    """Let the tokens of each prompt attend to those before them; q, k, v: (1, heads, tokens, width), into: (1, tokens, all heads)."""
    end = 0
    for length in lengths:
        begin, end = end, end + length
        own = (each[:, :, begin:end] for each in (q, k, v))
        into[:, begin:end] = F.scaled_dot_product_attention(*own, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
    return into
