"""Serve many requests with one decode step: a running batch that requests join and leave, padded to a captured size.

Requests of a trace arrive by a clock that is handed in, so that tests need none of their own; nothing is timed here.
"""

import bisect
import copy
import csv
import functools
import random
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy
import torch
from transformers.cache_utils import StaticLayer

from labkit import decode, graphs
from labkit.contents import pool_bytes

COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")


# ---- traces of requests

@dataclass(frozen=True)
class Request:
    """One request of a trace: when it arrives (seconds from the start), and how many tokens it brings and wants."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


def poisson_trace(rate, requests, prompt_tokens=(16, 128), output_tokens=(16, 128), seed=0):
    """Return requests that arrive independently of each other, `rate` a second on average, as a list in order of arrival.

    Lengths are drawn evenly between two numbers. The same seed gives the same trace. Raises ValueError for a rate or a
    number of requests that is not above 0, or lengths that are none.
    """
    if not rate > 0 or requests < 1:
        raise ValueError(f"a trace has a rate above 0 and 1 request or more, not {rate} and {requests}")
    for name, (low, high) in (("prompt_tokens", prompt_tokens), ("output_tokens", output_tokens)):
        if not 1 <= low <= high:
            raise ValueError(f"{name} are from 1 or more up to as many or more, not {low} to {high}")
    chance, now, made = random.Random(seed), 0.0, []
    for _ in range(requests):
        now += chance.expovariate(rate)
        made.append(Request(now, chance.randint(*prompt_tokens), chance.randint(*output_tokens)))
    return made


def read_trace(path):
    """Return the requests of a CSV file with the columns arrival_s, prompt_tokens and output_tokens, in order of arrival.

    Raises ValueError that names the line for anything that is not a number, or not above 0 (an arrival may be 0).
    """
    with open(path, newline="", encoding="utf-8") as file:
        reader, made = csv.DictReader(file), []
        if missing := set(COLUMNS) - set(reader.fieldnames or ()):
            raise ValueError(f"{path} has no column {', '.join(sorted(missing))}: its first line names {', '.join(COLUMNS)}")
        for row in reader:
            try:
                arrival, *tokens = float(row["arrival_s"]), *(int(row[name]) for name in COLUMNS[1:])
                fine = 0 <= arrival < float("inf") and min(tokens) >= 1
            except (TypeError, ValueError):
                fine = False
            if not fine:
                said = ", ".join(f"{name} {row[name]!r}" for name in COLUMNS)
                raise ValueError(f"{path}, line {reader.line_num}: arrival_s is 0 or more, tokens are 1 or more, not {said}")
            made.append(Request(arrival, *tokens))
    if not made:
        raise ValueError(f"{path} holds no requests")
    return sorted(made, key=lambda request: request.arrival_s)


# ---- which batch sizes to capture

def powers_of_two(most):
    """Return the sizes 1, 2, 4, ... and `most`."""
    return sorted({2**k for k in range(_size(most).bit_length())} | {most})


def vllm_sizes(most):
    """Return the sizes that vLLM captures up to `most`: 1, 2, 4, then every 8 to 256, then every 16 (vLLM 0.26, config)."""
    return [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, _size(most) + 1, 16)) if size <= most]


def every_size(most):
    """Return all sizes up to `most`: no padding, and the most to capture."""
    return list(range(1, _size(most) + 1))


def best_sizes(counts, number):
    """Return up to `number` sizes that pad least, for {batch: steps at it}; the largest batch is always one of them.

    By dynamic programming over the batches that occur: the least padding with k sizes up to one batch is that with k - 1
    sizes up to a smaller one, and all between them padded. Raises ValueError for counts or a number that are none.
    """
    batches = sorted(batch for batch, steps in counts.items() if steps)
    if not batches or batches[0] < 1 or number < 1:
        raise ValueError(f"sizes are chosen for batches of 1 or more that occur, and 1 size or more, not {counts} and {number}")

    sizes, steps = numpy.array(batches), numpy.array([counts[batch] for batch in batches])
    before = numpy.concatenate([[0], numpy.cumsum(steps)]), numpy.concatenate([[0], numpy.cumsum(sizes * steps)])

    def padded(first, last):  # rows padded when the batches first..last (places in the list) all run at the last one's size
        return sizes[last] * (before[0][last + 1] - before[0][first]) - (before[1][last + 1] - before[1][first])

    places = numpy.arange(len(sizes))
    least, chosen = padded(0, places), []
    for _ in range(1, min(number, len(sizes))):
        ways = numpy.where(places[:, None] < places, least[:, None] + padded(places[:, None] + 1, places), numpy.iinfo(int).max)
        chosen.append(ways.argmin(0))  # where the size before stands, by where the last one does
        least = numpy.minimum(ways.min(0), least)  # no batch before: one size is enough
    place, found = len(sizes) - 1, []
    for step in reversed(chosen):
        found.append(place)
        if not place:
            break
        place = step[place]
    return [int(sizes[place]) for place in sorted({*found, place})]


def wasted_share(sizes, counts):
    """Return which share of all rows computed is padding, for {batch: steps at it}; batches above all sizes are not padded."""
    real = sum(batch * steps for batch, steps in counts.items())
    run = sum(_at_least(sizes, batch) * steps for batch, steps in counts.items())
    return 1 - real / run if run else 0.0


def _at_least(sizes, batch):
    """Return the smallest of sorted sizes that holds a batch; the batch itself where none does."""
    place = bisect.bisect_left(sizes, batch)
    return sizes[place] if place < len(sizes) else batch


def _size(most):
    if type(most) is not int or most < 1:
        raise ValueError(f"the largest size is a whole number, 1 or more, not {most!r}")
    return most


# ---- the step

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


class BatchedDecoder:
    """A decode step over up to `rows` requests of different lengths, captured at a few sizes; rows in use come first.

    model: a causal LM that a GraphedDecoder decodes with static masks. max_length: places in the cache of a row. sizes: batch
    sizes to capture, all in one memory pool, the largest first; above the largest, and on the CPU, the step runs eagerly.
    Greedy: each row's tokens are those that the model writes for that prompt alone. `steps` counts {(rows in use, rows run,
    whether replayed): steps}. Raises decode.DecoderRefused for a model
    that keeps more than keys and values, ValueError for sizes that are none, CaptureError like GraphedCallable.
    """

    @torch.inference_mode()
    def __init__(self, model, max_length, rows, sizes=()):
        if rows < 1 or not all(type(size) is int and 1 <= size <= rows for size in sizes):
            raise ValueError(f"sizes are whole numbers from 1 to {rows}, the number of rows, not {list(sizes)}")
        self.alone = decode.GraphedDecoder(model, max_length, 1, masks="static")  # proves the model, and runs prompts
        step = self.alone.step
        if wrong := [type(layer).__name__ for layer in step.cache.layers if type(layer) is not StaticLayer]:
            raise decode.DecoderRefused(f"{type(model).__name__} keeps more than keys and values of each token ({wrong[0]})")
        self.rows, self.max_length, self.model, device = rows, max_length, model, model.device
        self.places = torch.zeros(rows, dtype=torch.int64, device=device)  # where each row writes next
        self.tokens = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self.active = torch.zeros(rows, dtype=torch.bool, device=device)
        self.numbers = torch.arange(rows, device=device)
        self.kept = [torch.zeros(rows, *buffer.shape[1:], dtype=buffer.dtype, device=device)
                     for layer in step.cache.layers for buffer in (layer.keys, layer.values)]
        self.sizes, self.running, self.steps, self.graphs, pool = sorted(set(sizes)), [], Counter(), {}, None
        self.eager = functools.cache(self._step_of)
        for size in reversed(self.sizes if self.alone.captured else []):
            self.graphs[size] = graphs.GraphedCallable(self.eager(size), clone=False, pool=pool)
            pool = self.graphs[size].pool
        self.unchecked = set()

    def _step_of(self, size):
        """Return the step of the first `size` rows, as a callable without arguments that changes what it is bound to."""
        step = copy.copy(self.alone.step)
        places, tokens = self.places[:size], self.tokens[:size]
        step.slot, step.token, step.position = places[:, None], tokens, places[:, None]
        step.valid = torch.ones(size, self.max_length, dtype=torch.bool, device=self.places.device)
        step.skipped = torch.zeros_like(tokens)
        step.cache = copy.copy(step.cache)
        pairs = zip(self.kept[::2], self.kept[1::2])
        step.cache.layers = [RowLayer(keys[:size], values[:size], self.numbers[:size], places) for keys, values in pairs]
        changed = {"input_ids": tokens, step.keyword: step.cache}
        if "position_ids" in step.template[0]:
            changed["position_ids"] = step.position
        step.template = {**step.template[0], **changed}, step.template[1]
        return Step(step, places, tokens, self.active[:size])

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
        size = _at_least(self.sizes, count)
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


class Step:
    """One step of some rows: their tokens become the next ones, each row in use moves on by one place, others stay at place 0."""

    def __init__(self, step, places, tokens, active):
        self.step, self.places, self.tokens, self.active = step, places, tokens, active

    def __call__(self):
        step = self.step
        logits = step._forward({**step.template[0], "attention_mask": step._masks()})  # (rows, vocabulary)
        self.tokens.copy_(logits.argmax(-1, keepdim=True))
        self.places.add_(1).mul_(self.active)
        return self.tokens


# ---- the loop

@dataclass
class Served:
    """What became of a request: when it arrived, when each of its tokens came (seconds from the start), and the tokens."""

    request: Request
    arrival_s: float
    came_s: list = field(default_factory=list)
    tokens: list = field(default_factory=list)


def serve(decoder, trace, prompts, clock):
    """Serve the requests of a trace by continuous batching; returns a Served for each, in the trace's order.

    prompts: a list of ids, (length,), one for each request. clock: `clock.now()` gives seconds, `clock.wait(until)` lets time
    pass until then. All that have arrived join as long as rows are free, then all rows advance by one token; a request
    leaves with its last token. Raises ValueError for a request that does not fit into a row.
    """
    for number, (request, ids) in enumerate(zip(trace, prompts, strict=True)):
        if len(ids) != request.prompt_tokens or len(ids) + request.output_tokens - 1 > decoder.max_length:
            raise ValueError(f"request {number} brings {len(ids)} tokens (its trace says {request.prompt_tokens}) and wants "
                             f"{request.output_tokens}; a row has {decoder.max_length} places")
    served = [Served(request, request.arrival_s) for request in trace]
    waiting, rows = deque(sorted(range(len(trace)), key=lambda number: trace[number].arrival_s)), []
    while waiting or rows:
        if not rows and clock.now() < trace[waiting[0]].arrival_s:
            clock.wait(trace[waiting[0]].arrival_s)
        while waiting and len(rows) < decoder.rows and trace[waiting[0]].arrival_s <= clock.now():
            number = waiting.popleft()
            rows.append(served[number])
            _came(rows[-1], decoder.join(prompts[number]), clock)
            _leave_if_done(decoder, rows, len(rows) - 1)
        if rows:
            for one, token in zip(rows, decoder.advance(), strict=True):
                _came(one, token, clock)
            for row in reversed(range(len(rows))):
                _leave_if_done(decoder, rows, row)
    return served


def summary(served, steps):
    """Return what a run of `serve` gave, as a dict: throughput, times to the first and between tokens, padding, replays.

    steps: those of the decoder while it served. Times in milliseconds; p50 and p99 over requests, or over pairs of tokens.
    """
    first = [1e3 * (one.came_s[0] - one.arrival_s) for one in served]
    between = [1e3 * (b - a) for one in served for a, b in zip(one.came_s, one.came_s[1:])]
    span = max(one.came_s[-1] for one in served) - min(one.arrival_s for one in served)
    tokens, run = sum(len(one.tokens) for one in served), sum(size * times for (_, size, _), times in steps.items())
    found = {"requests": len(served), "tokens": tokens, "tokens_per_s": tokens / span if span else None}
    for name, times in (("first_token_ms", first), ("between_tokens_ms", between)):
        found |= {f"{name}_p{share}": float(numpy.percentile(times, share)) if times else None for share in (50, 99)}
    return found | {
        "steps": sum(steps.values()),
        "replayed_share": sum(times for (_, _, replayed), times in steps.items() if replayed) / (sum(steps.values()) or 1),
        "padding_share": 1 - sum(count * times for (count, _, _), times in steps.items()) / run if run else 0.0}


def _came(one, token, clock):
    one.tokens.append(token)
    one.came_s.append(clock.now())


def _leave_if_done(decoder, rows, row):
    if len(rows[row].tokens) == rows[row].request.output_tokens:
        last = decoder.leave(row)
        rows[row] = rows[last]
        rows.pop()
