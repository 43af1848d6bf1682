"""One decode step over rows that requests of different lengths join and leave, captured at a few batch sizes."""

import functools
from collections import Counter

import torch
from transformers.cache_utils import StaticLayer

from labkit import decode, graphs, models
from labkit.batching import at_least
from labkit.contents import pool_bytes


class BatchedDecoder:
    """A decode step over up to `rows` requests of different lengths, captured at a few sizes; rows in use come first.

    model: a causal LM that a GraphedDecoder decodes with static masks. max_length: places in the cache of a row. sizes: batch
    sizes to capture, all in one memory pool, the largest first; above the largest, and on the CPU, the step runs eagerly.
    Greedy: each row gets the tokens that the model writes for its prompt alone, but where two tokens tie, as other batch sizes
    can mean other kernels. Proven here is the model alone, as by GraphedDecoder; the rows are proven by our tests.
    Attributes: running (the length of each row in use), steps: {(rows in use, rows run, whether replayed): steps}, graphs.
    Raises decode.DecoderRefused for a model that keeps more than keys and values, models.TooLarge, ValueError for sizes that
    are none, CaptureError like GraphedCallable.
    """

    @torch.inference_mode()
    def __init__(self, model, max_length, rows, sizes=()):
        if rows < 1 or not all(type(size) is int and 1 <= size <= rows for size in sizes):
            raise ValueError(f"sizes are whole numbers from 1 to {rows}, the number of rows, not {list(sizes)}")
        self.alone = decode.GraphedDecoder(model, max_length, 1, masks="static")  # proves the model, and runs prompts
        step = self.alone.step
        if wrong := [type(layer).__name__ for layer in step.cache.layers if type(layer) is not StaticLayer]:
            raise decode.DecoderRefused(f"{type(model).__name__} keeps more than keys and values of each token ({wrong[0]})")
        self.rows, self.max_length, device = rows, max_length, model.device
        self.places = torch.zeros(rows, dtype=torch.int64, device=device)  # where each row writes next
        self.tokens = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self.active = torch.zeros(rows, dtype=torch.bool, device=device)
        if self.alone.captured:
            room = rows * sum(buffer.nbytes for layer in step.cache.layers for buffer in (layer.keys, layer.values))
            models.require_room(f"a cache of {rows} x {max_length:,} tokens", room)
        self.kept = [torch.zeros(rows, *buffer.shape[1:], dtype=buffer.dtype, device=device)
                     for layer in step.cache.layers for buffer in (layer.keys, layer.values)]
        self.sizes, self.running, self.steps, self.graphs, pool = sorted(set(sizes)), [], Counter(), {}, None
        self.eager = functools.cache(self._step_of)
        for size in reversed(self.sizes if self.alone.captured else []):
            self.graphs[size] = graphs.GraphedCallable(self.eager(size), clone=False, pool=pool)
            pool = self.graphs[size].pool
        self.unchecked = set()

    def _step_of(self, size):
        return self.alone.step.over_rows(self.kept, self.places[:size], self.tokens[:size], self.active[:size])

    @torch.inference_mode()
    def join(self, ids):
        """Run a prompt, (length,), in a free row; returns its first token. Raises ValueError where no row is free, or for ids."""
        row, length = len(self.running), len(ids)
        if row == self.rows:
            raise ValueError(f"all {self.rows} rows are in use: let one leave first")
        self.alone.begin(ids[None], decode.checked(self.alone, ids[None], 1, None))
        for kept, layer in zip(zip(self.kept[::2], self.kept[1::2]), self.alone.step.cache.layers):
            for buffer, written in zip(kept, (layer.keys, layer.values)):
                buffer[row, :, :length] = written[0, :, :length]
        self.places[row], self.active[row] = length, True
        self.tokens[row] = self.alone.step.token[0]
        self.running.append(length)
        self.unchecked = set(self.graphs)  # each graph looks at its first step whether the weights are what they were
        return int(self.tokens[row, 0])

    @torch.inference_mode()
    def advance(self):
        """Decode one token of each row in use, at the smallest captured size that holds them; returns them as a list."""
        count = len(self.running)
        if not count:
            raise ValueError("no row is in use: let a request join first")
        if (longest := max(self.running)) >= self.max_length:
            raise ValueError(f"row {self.running.index(longest)} has filled its {self.max_length} places: let it leave")
        size = at_least(self.sizes, count)
        step = self.graphs.get(size, self.eager(size))
        step.replay() if size in self.graphs and size not in self.unchecked else step()
        self.unchecked.discard(size)
        self.steps[count, size, size in self.graphs] += 1
        self.running = [length + 1 for length in self.running]
        return self.tokens[:count, 0].tolist()

    @torch.inference_mode()
    def leave(self, row):
        """Free a row; the last row in use moves there, so that those in use come first. Returns where that one stood."""
        last = len(self.running) - 1
        if not 0 <= row <= last:
            raise ValueError(f"row {row} is not in use: {last + 1} are")
        if row != last:
            for buffer in (*self.kept, self.places, self.tokens):
                buffer[row] = buffer[last]
        self.running[row] = self.running[last]
        self.running.pop()
        self.places[last], self.active[last] = 0, False
        return last

    @property
    def pool_bytes(self):
        """Bytes that the pool of all graphs keeps reserved; 0 without graphs."""
        return sum(map(pool_bytes, {graph.pool for graph in self.graphs.values()}))

    @property
    def capture_seconds(self):
        """Seconds that all captures took, with their warm-up."""
        return sum(graph.capture_seconds for graph in self.graphs.values())
