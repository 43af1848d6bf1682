"""One decode step over rows that requests of different lengths join and leave, captured at a few batch sizes."""

import contextlib
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
