"""Continuous batching without a model: requests that arrive, which batch sizes to capture, and the loop that serves them.

Time comes from a clock that is handed in; nothing is timed here.
"""

import bisect
import csv
import math
import random
from collections import deque
from dataclasses import dataclass, field
from numbers import Integral, Real

import numpy

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

    Lengths are drawn uniformly between two numbers. The same seed gives the same trace. Raises ValueError for a rate or a
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
    if not now < math.inf:
        raise ValueError(f"at a rate of {rate} a second, {requests} requests never arrive")
    return made


def read_trace(path):
    """Return the requests of a CSV file with the columns arrival_s, prompt_tokens and output_tokens, in order of arrival.

    Raises ValueError that names the line for anything that is not a number, or not above 0 (an arrival may be 0), and for a field
    too many (a decimal comma makes one).
    """
    made = []
    with open(path, newline="", encoding="utf-8-sig", errors="replace") as file:
        reader = csv.DictReader(file, skipinitialspace=True)
        names = next(_read_on((reader.fieldnames for _ in range(1)), reader, path)) or ()
        if missing := set(COLUMNS) - {name.strip() for name in names}:
            raise ValueError(f"{path} has no column {', '.join(sorted(missing))}: its first line names {', '.join(COLUMNS)}, with commas between")
        reader.fieldnames = [name.strip() for name in names]
        if twice := sorted(name for name in COLUMNS if reader.fieldnames.count(name) > 1):
            raise ValueError(f"{path} has the column {', '.join(twice)} more than once")
        for row in _read_on(reader, reader, path):
            try:
                arrival, *tokens = float(row["arrival_s"]), *(int(row[name]) for name in COLUMNS[1:])
                fine = None not in row and 0 <= arrival < float("inf") and min(tokens) >= 1
            except (TypeError, ValueError):
                fine = False
            if not fine:
                said = ", ".join(f"{name} {row[name] and row[name][:40]!r}" for name in COLUMNS)
                raise ValueError(f"{path}, line {reader.line_num}: arrival_s is 0 or more, tokens are whole numbers, 1 or more, "
                                 f"not {said}{' and then ' + ', '.join(row[None])[:40] if None in row else ''}")
            made.append(Request(arrival, *tokens))
    if not made:
        raise ValueError(f"{path} holds no requests")
    return sorted(made, key=lambda request: request.arrival_s)


def _read_on(lines, reader, path):
    try:
        yield from lines
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num + 1}: {error}") from None


# ---- which batch sizes to capture

def powers_of_two(most):
    """Return the sizes 1, 2, 4, ... and `most`; ValueError unless that is a whole number from 1."""
    return sorted({2**k for k in range(_size(most).bit_length())} | {most})


def vllm_sizes(most):
    """Return the sizes that vLLM captures up to `most`: 1, 2, 4, then every 8 to 256, then every 16; ValueError as for powers_of_two.

    Source: vLLM 0.26, VllmConfig._set_cudagraph_sizes in vllm/config/vllm.py.
    """
    return [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, _size(most) + 1, 16)) if size <= most]


def every_size(most):
    """Return all sizes up to `most`: no padding, and the most to capture; ValueError as for powers_of_two."""
    return list(range(1, _size(most) + 1))


def best_sizes(counts, number):
    """Return up to `number` sizes that pad least, for {batch: steps at it}; the largest batch is always one of them.

    By dynamic programming over the batches that occur: the least padding with k sizes up to one batch is that with k - 1
    sizes up to a smaller one, and all between them padded. Raises ValueError for counts or a number that are none.
    """
    whole = all(isinstance(one, Integral) and one >= 0 for one in (number, *counts, *counts.values()))
    batches = sorted(batch for batch, steps in counts.items() if steps) if whole else []
    if not batches or batches[0] < 1 or number < 1:
        raise ValueError(f"sizes are chosen for batches of 1 or more that occur, and 1 size or more, not {counts} and {number}")

    sizes, steps = numpy.array(batches), numpy.array([counts[batch] for batch in batches])
    steps_before, rows_before = (numpy.concatenate([[0], numpy.cumsum(each)]) for each in (steps, sizes * steps))

    def padded(first, last):  # rows padded when the batches first..last (places in the list) all run at the last one's size
        return sizes[last] * (steps_before[last + 1] - steps_before[first]) - (rows_before[last + 1] - rows_before[first])

    places = numpy.arange(len(sizes))
    least, before = padded(0, places), []  # the least padding up to each place, and where the size before stands, for 2, 3, ... sizes
    for _ in range(1, min(number, len(sizes))):
        ways = numpy.where(places[:, None] < places, least[:, None] + padded(places[:, None] + 1, places), numpy.iinfo(int).max)
        before.append(ways.argmin(0))
        least = numpy.minimum(ways.min(0), least)  # no batch before: one size is enough
    found = [len(sizes) - 1]
    while before and found[-1]:
        found.append(before.pop()[found[-1]])
    return sizes[sorted(found)].tolist()


def wasted_share(sizes, counts):
    """Return which share (0 to 1) of all rows computed is padding, for {batch: steps at it}; batches above all sizes are not padded."""
    sizes, real = sorted(sizes), sum(batch * steps for batch, steps in counts.items())
    run = sum(at_least(sizes, batch) * steps for batch, steps in counts.items())
    return 1 - real / run if run else 0.0


def at_least(sizes, batch):
    """Return the smallest of sorted sizes that holds a batch; the batch itself where none does."""
    place = bisect.bisect_left(sizes, batch)
    return sizes[place] if place < len(sizes) else batch


def _size(most):
    if type(most) is not int or most < 1:
        raise ValueError(f"the largest size is a whole number, 1 or more, not {most!r}")
    return most


# ---- the loop

@dataclass
class Served:
    """What became of a request: its tokens, and when each of them came (seconds from the start)."""

    request: Request
    came_s: list = field(default_factory=list)
    tokens: list = field(default_factory=list)


def serve(decoder, trace, prompts, clock):
    """Serve the requests of a trace by continuous batching; returns a Served for each, in the trace's order.

    prompts: a list of ids, (length,), one for each request. clock: `clock.now()` gives seconds, `clock.wait(until)` lets time
    pass until then. All that have arrived join as long as rows are free, then all rows advance by one token; a request
    leaves with its last token. Raises ValueError, before any runs, for a request that does not fit into a row, and for a
    decoder with rows in use. However it ends, no row is in use afterwards, and decoder.steps are the steps of this run.
    """
    if decoder.running:
        raise ValueError(f"{len(decoder.running)} rows are in use: let them leave, or reset() the decoder")
    for number, (request, ids) in enumerate(zip(trace, prompts, strict=True)):
        try:
            fine = isinstance(request.output_tokens, Integral) and isinstance(request.arrival_s, Real) and 0 <= request.arrival_s < math.inf
            if not fine or len(ids) != request.prompt_tokens:
                raise ValueError(f"it is {request}, and its prompt has {len(ids)} tokens")
            decoder.check(ids, request.output_tokens)
        except ValueError as error:
            raise ValueError(f"request {number}: {error}") from None
    decoder.steps.clear()
    try:
        return _until_all_are_served(decoder, trace, prompts, clock)
    finally:
        decoder.reset()


def _until_all_are_served(decoder, trace, prompts, clock):
    served = [Served(request) for request in trace]
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
    """Return what a run of `serve` gave, as a dict: throughput, time to first token, inter-token latency, padding, replays.

    steps: those of the decoder while it served. tokens_per_s: from the first arrival to the last token. ttft_ms is over requests,
    itl_ms over pairs of tokens, in milliseconds: p50 and p99. Shares are from 0 to 1. Raises ValueError if nothing was served.
    """
    if not served:
        raise ValueError("nothing was served")
    first = [1e3 * (one.came_s[0] - one.request.arrival_s) for one in served]
    between = [1e3 * (b - a) for one in served for a, b in zip(one.came_s, one.came_s[1:])]
    span = max(one.came_s[-1] for one in served) - min(one.request.arrival_s for one in served)
    real = sum(count * times for (count, _, _), times in steps.items())
    run = sum(size * times for (_, size, _), times in steps.items())
    replayed = sum(times for (_, _, was), times in steps.items() if was)
    found = {"requests": len(served), "tokens": sum(len(one.tokens) for one in served)}
    found["tokens_per_s"] = found["tokens"] / span if span else None
    for name, times in (("ttft_ms", first), ("itl_ms", between)):
        found |= {f"{name}_p{share}": float(numpy.percentile(times, share)) if times else None for share in (50, 99)}
    return found | {"steps": sum(steps.values()), "replayed_share": replayed / (sum(steps.values()) or 1),
                    "padding_share": 1 - real / run if run else 0.0}


def _came(one, token, clock):
    one.tokens.append(token)
    one.came_s.append(clock.now())


def _leave_if_done(decoder, rows, row):
    if len(rows[row].tokens) == rows[row].request.output_tokens:
        last = decoder.leave(row)
        rows[row] = rows[last]
        rows.pop()
