"""Serving on the CPU: sizes to capture, traces, rows that join and leave, and every request's tokens as if it were alone."""

import itertools
import random
from collections import Counter

import pytest

torch = pytest.importorskip("torch")
from alone import alone, prompts_of  # noqa: E402

from labkit import architectures, batching, decode, decoding, serving  # noqa: E402
from labkit.batching import Request  # noqa: E402

POLICIES = {"powers of two": batching.powers_of_two, "vLLM": batching.vllm_sizes, "every": batching.every_size}


class Clock:
    """A clock of its own: each look takes a millisecond."""

    def __init__(self):
        self.at, self.waited = 0.0, []

    def now(self):
        self.at += 0.001
        return self.at

    def wait(self, until):
        self.waited.append(until - self.at)
        self.at = until


@pytest.fixture(scope="module")
def model():
    return architectures.tiny_model("llama", "cpu")


@pytest.fixture
def decoder(model):
    return serving.BatchedDecoder(model, 32, 4, [1, 2, 4])


# ---- sizes

@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("most", [1, 2, 3, 8, 100, 256, 257, 512])
def test_each_list_rises_from_one_and_stays_within(policy, most):
    sizes = policy(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] <= most
    assert sizes[-1] == most or policy is batching.vllm_sizes


def test_the_lists_are_those_that_are_known():
    assert batching.powers_of_two(12) == [1, 2, 4, 8, 12] and batching.every_size(3) == [1, 2, 3]
    vllm = batching.vllm_sizes(512)
    assert len(vllm) == 51 and vllm[:5] == [1, 2, 4, 8, 16] and vllm[33:36] == [248, 256, 272] and vllm[-1] == 512


@pytest.mark.parametrize("most", [0, -1, 2.0, "8", True])
def test_a_largest_size_that_is_none_is_refused(most):
    for policy in POLICIES.values():
        with pytest.raises(ValueError, match="whole number, 1 or more"):
            policy(most)


def test_the_best_sizes_pad_least_of_all_choices():
    draw = random.Random(0)
    for _ in range(150):
        counts = {batch: draw.randint(0, 9) for batch in draw.sample(range(1, 14), draw.randint(1, 7))}
        occur = sorted(batch for batch, steps in counts.items() if steps)
        if not occur:
            continue
        number, most = draw.randint(1, 6), occur[-1]
        chosen = batching.best_sizes(counts, number)
        others = [sorted({*some, most}) for some in itertools.combinations(occur[:-1], min(number, len(occur)) - 1)]
        assert len(chosen) <= number and chosen[-1] == most and chosen == sorted(set(chosen))
        assert batching.wasted_share(chosen, counts) == min(batching.wasted_share(sizes, counts) for sizes in others)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_no_list_of_as_many_sizes_pads_less_than_the_best(policy):
    draw = random.Random(1)
    counts = Counter(min(64, max(1, round(draw.gauss(30, 15)))) for _ in range(2000))
    sizes = policy(max(counts))
    assert batching.wasted_share(batching.best_sizes(counts, len(sizes)), counts) <= batching.wasted_share(sizes, counts)


def test_a_batch_runs_at_the_smallest_size_that_holds_it_and_as_it_is_above_all():
    draw = random.Random(2)
    for _ in range(300):
        sizes, batch = sorted(draw.sample(range(1, 50), draw.randint(0, 12))), draw.randint(1, 60)
        run, holding = batching.at_least(sizes, batch), [size for size in sizes if size >= batch]
        assert run == min(holding, default=batch) >= batch


def test_no_sizes_that_hold_all_batches_pad_less_than_as_many_best_ones_and_more_never_pad_more():
    draw = random.Random(3)
    for _ in range(100):
        counts = {batch: draw.randint(1, 10**draw.randint(0, 9)) for batch in draw.sample(range(1, 65), draw.randint(1, 40))}
        sizes = sorted({*draw.sample(range(1, 65), draw.randint(0, 20)), draw.randint(max(counts), 70)})
        found = [batching.wasted_share(batching.best_sizes(counts, number), counts) for number in range(1, len(counts) + 2)]
        assert found[min(len(sizes), len(found)) - 1] <= batching.wasted_share(sizes, counts) + 1e-12
        assert found == sorted(found, reverse=True) and found[-1] == 0


def test_padding_is_counted_by_rows_and_larger_batches_are_not_padded():
    assert batching.wasted_share([4], {3: 2, 4: 1}) == pytest.approx(2 / 12) and batching.wasted_share([2], {5: 1}) == 0
    assert batching.wasted_share([1], {}) == 0 and batching.wasted_share([8, 4], {3: 1}) == 0.25


@pytest.mark.parametrize("counts, number", [({}, 1), ({4: 0}, 1), ({0: 3}, 1), ({4: 3}, 0), ({4: -3}, 1), ({4: 3}, 1.5), ({4: 0.5}, 1), ({2.5: 3}, 1), ({"4": 3}, 1), ({4: 3}, None)])
def test_sizes_are_not_chosen_for_nothing(counts, number):
    with pytest.raises(ValueError, match="sizes are chosen for batches"):
        batching.best_sizes(counts, number)


# ---- traces

def test_a_poisson_trace_repeats_with_its_seed_and_has_its_rate():
    trace = batching.poisson_trace(50, 2000, (3, 9), (2, 4), seed=4)
    assert trace == batching.poisson_trace(50, 2000, (3, 9), (2, 4), seed=4) != batching.poisson_trace(50, 2000, (3, 9), (2, 4), seed=5)
    assert trace[-1].arrival_s == pytest.approx(40, rel=0.1) and trace == sorted(trace, key=lambda r: r.arrival_s)
    assert {r.prompt_tokens for r in trace} == set(range(3, 10)) and {r.output_tokens for r in trace} == {2, 3, 4}


@pytest.mark.parametrize("given, why", [((0, 5), "rate above 0"), ((float("nan"), 5), "rate above 0"), ((1, 0), "1 request or more"),
                                        ((1, 5, (0, 3)), "prompt_tokens are"), ((1, 5, (1, 3), (4, 2)), "output_tokens are"),
                                        ((1e-320, 2), "never arrive")])
def test_a_trace_of_nothing_is_refused(given, why):
    with pytest.raises(ValueError, match=why):
        batching.poisson_trace(*given)


def test_a_trace_file_is_read_in_order_of_arrival(tmp_path):
    (tmp_path / "trace.csv").write_text("\ufeffoutput_tokens, arrival_s,prompt_tokens ,user\n3,1.5,7,x\n1,0,2,y\n", "utf-8")  # as from Excel
    assert batching.read_trace(tmp_path / "trace.csv") == [Request(0.0, 2, 1), Request(1.5, 7, 3)]


@pytest.mark.parametrize("text, why", [
    ("", "has no column arrival_s, output_tokens, prompt_tokens"), ("arrival_s,prompt_tokens\n1,2\n", "has no column output_tokens"),
    ("arrival_s,prompt_tokens,output_tokens\n", "holds no requests"),
    ("arrival_s,prompt_tokens,output_tokens\n1,2,3\n1,2,many\n", "line 3: .* output_tokens 'many'"),
    ("arrival_s,prompt_tokens,output_tokens\n-1,2,3\n", "line 2: .* arrival_s '-1'"),
    ("arrival_s,prompt_tokens,output_tokens\nnan,2,3\n", "line 2"), ("arrival_s,prompt_tokens,output_tokens\n1,0,3\n", "line 2"),
    ("arrival_s,prompt_tokens,output_tokens\n1,2\n", "line 2: .* output_tokens None"),
    ("arrival_s,prompt_tokens,output_tokens\n1,2," + "3" * 200_000, "trace.csv, line 2: field larger"),
    ("arrival_s" * 30_000 + ",prompt_tokens\n", "trace.csv, line 1: field larger"), ("arrival_s;prompt_tokens;output_tokens\n1;2;3\n", "commas"),
    ("arrival_s,prompt_tokens,output_tokens\n1,2.0,3\n", "line 2: .* whole numbers.* '2.0'"),
    ("arrival_s,prompt_tokens,output_tokens\n1e400,2,3\n", "line 2"), ("arrival_s,prompt_tokens,output_tokens\n1,2,\u00fc\n", "line 2"),
    ("arrival_s,prompt_tokens,output_tokens\n1,2,3\0\n", "line 2"), ("arrival_s,prompt_tokens,output_tokens\n\n\n1,2,-3\n", "line 4"),
    ("arrival_s,prompt_tokens,output_tokens\n1,2," + "9" * 5000 + "\n", "line 2"),
    ("arrival_s,prompt_tokens,output_tokens\n0,5,113,69\n", "line 2: .* '113' and then 69"),  # a decimal comma
    ("arrival_s,prompt_tokens,output_tokens, arrival_s\n1,2,3,99\n", "the column arrival_s more than once")])
def test_a_trace_file_that_is_none_names_the_line(tmp_path, text, why):
    (tmp_path / "trace.csv").write_text(text, "latin-1")
    with pytest.raises(ValueError, match=why) as raised:
        batching.read_trace(tmp_path / "trace.csv")
    assert len(str(raised.value).removeprefix(str(tmp_path))) < 250  # however long the field was


def test_a_trace_file_is_served_as_it_says(model, decoder, tmp_path):
    (tmp_path / "trace.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0.5,7,3\n0,2,9\n0,30,3\n")
    trace, clock = batching.read_trace(tmp_path / "trace.csv"), Clock()
    prompts = prompts_of(trace)
    served = batching.serve(decoder, trace, prompts, clock)
    assert [one.tokens for one in served] == [alone(model, ids, n) for ids, n in zip(prompts, (9, 3, 3))]
    assert clock.waited and served[2].came_s[0] > 0.5 > served[1].came_s[-1]


def test_a_trace_file_in_another_encoding_is_none(tmp_path):
    (tmp_path / "trace.csv").write_text("arrival_s,prompt_tokens,output_tokens\n1,2,3\n", "utf-16")
    with pytest.raises(ValueError, match="has no column"):
        batching.read_trace(tmp_path / "trace.csv")


# ---- rows

@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma3_text", "opt", "mixtral"])
def test_tokens_are_those_of_each_request_alone_whatever_runs_beside_it(name):
    model = architectures.tiny_model(name, "cpu")
    decoder = serving.BatchedDecoder(model, 40, 5, [1, 2, 4])
    trace = batching.poisson_trace(150, 10, (3, 14), (1, 12), seed=3)
    prompts = prompts_of(trace)
    served = batching.serve(decoder, trace, prompts, Clock())
    assert [one.tokens for one in served] == [alone(model, ids, r.output_tokens) for r, ids in zip(trace, prompts)]
    assert {size for _, size, _ in decoder.steps} >= {2, 4, 5} and not decoder.running  # padded, and above the largest size


def test_rows_that_leave_make_room_and_the_last_one_moves(model, decoder):
    prompts = prompts_of([Request(0, length, 1) for length in (3, 9, 5, 4)])
    written = [[decoder.join(ids)] for ids in prompts[:3]]
    for _ in range(2):
        for tokens, token in zip(written, decoder.advance()):
            tokens.append(token)
    assert decoder.leave(0) == 2  # the third one stands in its row now
    written.append([decoder.join(prompts[3])])
    order = [2, 1, 3]
    for _ in range(3):
        for place, token in zip(order, decoder.advance(), strict=True):
            written[place].append(token)
    assert written == [alone(model, ids, len(tokens)) for ids, tokens in zip(prompts, written)]
    assert decoder.steps == {(3, 4, False): 5}


def test_padding_rows_change_nothing_and_keep_nothing(model, decoder):
    ids = prompts_of([Request(0, 6, 1)])[0]
    decoder.join(ids), decoder.join(ids), decoder.join(ids)
    decoder.advance()
    assert decoder.places.tolist() == [7, 7, 7, 0]
    decoder.leave(2), decoder.leave(1)
    assert decoder.places.tolist() == [7, 0, 0, 0] and decoder.active.tolist() == [True, False, False, False]
    with torch.inference_mode():
        for buffer in decoder.kept:
            buffer[1:] = float("nan")  # a row that looked at another one would be lost
    assert [decoder.advance()[0] for _ in range(5)] == alone(model, ids, 7)[2:]


def test_what_a_request_left_in_its_row_does_not_reach_the_next_one(model, decoder):
    first, second = prompts_of([Request(0, 9, 1), Request(0, 4, 1)])
    decoder.join(first), decoder.join(first)
    with torch.inference_mode():
        for buffer in decoder.kept:
            buffer[:2, :, 5:] = float("nan")  # masked places count as nothing, but nothing times NaN is NaN
    decoder.leave(0), decoder.leave(0)
    tokens = [decoder.join(second), *(decoder.advance()[0] for _ in range(6))]
    assert tokens == alone(model, second, 7)


def test_rows_left_in_any_order_go_on_with_their_own_tokens(model):
    decoder, draw = serving.BatchedDecoder(model, 24, 4, [1, 3]), random.Random(5)
    rows, done = [], 0
    while done < 25:
        if len(rows) < 4 and draw.random() < 0.5 or not rows:
            [ids] = prompts_of([Request(0, draw.randint(1, 10), 1)], seed=draw.randrange(10**6))
            rows.append((ids, [decoder.join(ids)]))
        elif draw.random() < 0.4 or max(decoder.running) == 24:
            row = draw.randrange(len(rows))
            ids, tokens = rows[row]
            assert tokens == alone(model, ids, len(tokens))
            rows[row] = rows[decoder.leave(row)]
            rows.pop()
            done += 1
        else:
            for (_, tokens), token in zip(rows, decoder.advance(), strict=True):
                tokens.append(token)
    assert {run for _, run, _ in decoder.steps} >= {1, 3, 4}


def test_a_prompt_as_long_as_the_cache_gets_its_one_token(model):
    decoder, trace = serving.BatchedDecoder(model, 8, 1, [1]), [Request(0.0, 8, 1), Request(0.0, 1, 8), Request(0.0, 3, 5)]
    prompts = prompts_of(trace)
    assert [one.tokens for one in batching.serve(decoder, trace, prompts, Clock())] == [alone(model, ids, r.output_tokens) for r, ids in zip(trace, prompts)]
    decoder.join(prompts[0])
    with pytest.raises(ValueError, match="row 0 has filled its 8 places"):
        decoder.advance()
    assert decoder.leave(0) == 0 and decoder.join(prompts[1]) and len(decoder.advance()) == 1  # refused, not broken


def test_a_token_that_ends_texts_ends_no_request():
    model = architectures.tiny_model("llama", "cpu")
    [ids] = prompts_of([Request(0, 5, 1)])
    wanted = alone(model, ids, 9)
    model.generation_config.eos_token_id = model.config.eos_token_id = wanted[3]
    decoder = serving.BatchedDecoder(model, 32, 4, [1, 2, 4])
    assert [one.tokens for one in batching.serve(decoder, [Request(0.0, 5, 9)] * 2, [ids] * 2, Clock())] == [wanted] * 2


def test_what_does_not_fit_is_refused(decoder):
    short = prompts_of([Request(0, 3, 1)])[0]
    with pytest.raises(ValueError, match="no row is in use"):
        decoder.advance()
    for _ in range(4):
        decoder.join(short)
    with pytest.raises(ValueError, match="all 4 rows are in use"):
        decoder.join(short)
    for row in (4, -1, 0.5, "0", None, True):
        with pytest.raises(ValueError, match=f"row {row!r} is not in use: 4 are"):
            decoder.leave(row)
    for _ in range(29):
        decoder.advance()
    with pytest.raises(ValueError, match="row 0 has filled its 32 places"):
        decoder.advance()


@pytest.mark.parametrize("ids, why", [([1, 2], "must be a tensor"), (torch.zeros(1, 3, dtype=torch.int64), "shape .length,."), (None, "must be a tensor"),
                                      (torch.zeros(33, dtype=torch.int64), "33 places"), (torch.zeros(3), "must be int64"),
                                      (torch.full((3,), 10**6), "ids must be from 0"), (torch.zeros(0, dtype=torch.int64), "1 token")])
def test_a_prompt_that_is_none_is_refused_and_takes_no_row(decoder, ids, why):
    with pytest.raises(ValueError, match=why):
        decoder.join(ids)
    assert not decoder.running and not decoder.active.any()


@pytest.mark.parametrize("request_", [Request(float("nan"), 3, 2), Request(-1.0, 3, 2), Request(0.0, 3, 0), Request(0.0, 4, 2), Request(float("inf"), 3, 2),
                                      Request(0.0, 3, 2.5), Request("0", 3, 2), Request(0.0, 3, "2"), Request(None, 3, 2)])
def test_a_request_that_is_none_is_named(decoder, request_):
    with pytest.raises(ValueError, match="request 1: "):
        batching.serve(decoder, [Request(0.0, 3, 1), request_], prompts_of([Request(0.0, 3, 1)] * 2), Clock())


def test_rows_are_a_whole_number(model):
    for rows in (0, 2.0, True):
        with pytest.raises(ValueError, match="rows is a whole number"):
            serving.BatchedDecoder(model, 32, rows)


@pytest.mark.parametrize("sizes", [[0], [5], [1.0], [-1, 2], [True], 4, None, "12"])
def test_sizes_beyond_the_rows_are_refused(model, sizes):
    with pytest.raises(ValueError, match="whole numbers"):
        serving.BatchedDecoder(model, 32, 4, sizes)


def test_a_model_with_other_masks_or_states_is_refused():
    with pytest.raises(decode.DecoderRefused, match="masks are not of a kind"):
        serving.BatchedDecoder(architectures.tiny_model("bloom", "cpu"), 32, 4)
    with pytest.raises(decode.DecoderRefused):
        serving.BatchedDecoder(architectures.tiny_model("mamba", "cpu"), 32, 4)


@pytest.mark.parametrize("name", ["bart", "blenderbot", "marian", "trocr", "xglm"])
def test_a_model_that_takes_all_rows_to_be_at_one_place_is_refused(name):
    with pytest.raises(decode.DecoderRefused):
        serving.BatchedDecoder(architectures.tiny_model(name, "cpu"), 32, 4)


def test_what_is_shown_first_runs_at_a_size_that_is_captured(model, monkeypatch):
    ran, real = [], serving.BatchedDecoder._advance
    monkeypatch.setattr(serving.BatchedDecoder, "_advance", lambda decoder: ran.append(len(decoder.running)) or real(decoder))
    for sizes, rows in (([1, 2], {2, 3}), ([1], {1, 3}), ([4], {3}), ([], {3})):
        ran.clear()
        serving.BatchedDecoder(model, 32, 4, sizes)
        assert set(ran) == rows
    ran.clear()
    assert serving.BatchedDecoder(model, 32, 1, [1]).join(torch.ones(3, dtype=torch.int64)) is not None and set(ran) == {1}


def test_rows_that_do_not_get_what_they_get_alone_are_refused(model, monkeypatch):
    right = decoding.RowsStep.__call__

    def one_too_far(step):
        step.places.add_(step.active)
        return right(step)

    monkeypatch.setattr(decoding.RowsStep, "__call__", one_too_far)
    with pytest.raises(decode.DecoderRefused, match="decoded in rows: .* beside other prompts, the logits of a new token differ"):
        serving.BatchedDecoder(model, 32, 4)


def test_more_places_than_the_model_has_positions_are_refused():
    with pytest.raises(ValueError, match="has 128 positions, fewer than max_length, 500"):
        serving.BatchedDecoder(architectures.tiny_model("gpt2", "cpu"), 500, 2)


# ---- interrupted

@pytest.mark.parametrize("where", ["join", "advance", "leave"])
def test_after_an_interruption_the_rows_are_not_used_until_reset(model, decoder, monkeypatch, where):
    ids = prompts_of([Request(0, 5, 1)])[0]
    decoder.join(ids), decoder.join(ids)

    class Interrupts(list):
        def append(self, item):
            raise KeyboardInterrupt

        def pop(self):
            raise KeyboardInterrupt

        def __iter__(self):
            raise KeyboardInterrupt

    decoder.running = Interrupts(decoder.running)
    monkeypatch.setattr("builtins.max", lambda *given: 0)  # looked at before anything is changed
    calls = {"join": lambda: decoder.join(ids), "advance": decoder.advance, "leave": lambda: decoder.leave(0)}
    with pytest.raises(KeyboardInterrupt):
        calls[where]()
    monkeypatch.undo()
    for call in (lambda: decoder.join(ids), lambda: decoder.leave(0)):
        with pytest.raises(ValueError, match=r"interrupted half-way.*reset\(\)"):
            call()
    decoder.reset()
    assert [decoder.join(ids), *(decoder.advance()[0] for _ in range(6))] == alone(model, ids, 7)


def test_an_interrupted_run_leaves_no_row_in_use_and_can_be_run_again(model, decoder):
    class Stops(Clock):
        def now(self):
            if self.at > 0.02:
                raise KeyboardInterrupt
            return super().now()

    trace = [Request(0.0, 4, 9)] * 5
    prompts = prompts_of(trace)
    with pytest.raises(KeyboardInterrupt):
        batching.serve(decoder, trace, prompts, Stops())
    assert not decoder.running
    served = batching.serve(decoder, trace, prompts, Clock())
    assert [one.tokens for one in served] == [alone(model, ids, 9) for ids in prompts]
    decoder.join(prompts[0])
    with pytest.raises(ValueError, match="1 rows are in use"):
        batching.serve(decoder, trace, prompts, Clock())


# ---- the loop

def test_many_arrivals_are_all_served_once_in_full_and_in_order(model):
    decoder = serving.BatchedDecoder(model, 12, 16, batching.powers_of_two(16))
    trace = batching.poisson_trace(400, 1000, (1, 4), (1, 8), seed=7)
    prompts, clock = prompts_of(trace), Clock()
    served = batching.serve(decoder, trace, prompts, clock)
    assert [one.request for one in served] == trace and not decoder.running
    assert [len(one.tokens) for one in served] == [r.output_tokens for r in trace]
    assert all(one.came_s == sorted(one.came_s) and one.came_s[0] > one.request.arrival_s for one in served)
    starts = [one.came_s[0] for one in served]
    assert starts == sorted(starts)  # first come, first served
    found = batching.summary(served, decoder.steps)
    assert found["requests"] == 1000 and found["tokens"] == sum(r.output_tokens for r in trace)
    assert sum(count * times for (count, _, _), times in decoder.steps.items()) == found["tokens"] - 1000  # a prompt gives the first


class Counts:
    """A decoder without a model: the tokens of a request are its number and how many came before."""
    rows, sizes = 8, [1, 2, 4]

    def __init__(self):
        self.running, self.steps = [], Counter()

    def check(self, ids, tokens):
        pass

    def join(self, ids):
        assert len(self.running) < self.rows
        self.running.append([ids[0], 0])
        return ids[0], 0

    def advance(self):
        for one in self.running:
            one[1] += 1
        self.steps[len(self.running), batching.at_least(self.sizes, len(self.running)), True] += 1
        return [tuple(one) for one in self.running]

    def leave(self, row):
        last = len(self.running) - 1
        self.running[row] = self.running[last]
        self.running.pop()
        return last

    def reset(self):
        self.running = []


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rate", [30, 100, 3000])  # mostly idle, just busy, far more than it can serve
def test_of_a_thousand_arrivals_no_token_is_lost_repeated_or_mixed_up(rate, seed):
    trace = batching.poisson_trace(rate, 1000, (1, 4), (1, 20), seed=seed)
    random.Random(seed).shuffle(trace)
    decoder = Counts()
    served = batching.serve(decoder, trace, [[number] * r.prompt_tokens for number, r in enumerate(trace)], Clock())
    assert [one.tokens for one in served] == [[(number, i) for i in range(r.output_tokens)] for number, r in enumerate(trace)]
    order = sorted(served, key=lambda one: one.request.arrival_s)
    assert [one.came_s[0] for one in order] == sorted(one.came_s[0] for one in served)  # first come, first served
    assert all(one.came_s[0] > one.request.arrival_s and one.came_s == sorted(one.came_s) for one in served)
    assert sum(batch * steps for (batch, _, _), steps in decoder.steps.items()) == sum(r.output_tokens - 1 for r in trace)


def test_requests_that_are_alike_but_for_their_prompts_are_not_mixed_up(model, decoder):
    trace = [Request(0.0, 5, 6)] * 3
    prompts = prompts_of(trace)
    assert [one.tokens for one in batching.serve(decoder, trace, prompts, Clock())] == [alone(model, ids, 6) for ids in prompts]


def test_the_loop_waits_for_requests_that_are_yet_to_come(decoder):
    trace, clock = [Request(5.0, 3, 2), Request(1.0, 4, 3)], Clock()
    served = batching.serve(decoder, trace, prompts_of(trace), clock)
    assert [one.request.arrival_s for one in served] == [5.0, 1.0] and len(clock.waited) == 2
    assert served[1].came_s[-1] < 5 < served[0].came_s[0]


def test_a_request_that_does_not_fit_is_named_before_any_runs(decoder):
    trace = [Request(0, 3, 2), Request(0, 30, 4)]
    with pytest.raises(ValueError, match="request 1: a prompt of 30 tokens and 4 new ones fill 33 places, and the cache has 32"):
        batching.serve(decoder, trace, prompts_of(trace), Clock())
    assert not decoder.steps


def test_the_summary_counts_what_it_says():
    one = batching.Served(Request(1.0, 3, 3), [1.5, 1.6, 1.8], [1, 2, 3])
    other = batching.Served(Request(2.0, 3, 1), [3.0], [1])
    found = batching.summary([one, other], Counter({(3, 4, True): 3, (5, 5, False): 1}))
    assert found["tokens"] == 4 and found["tokens_per_s"] == 2.0 and found["steps"] == 4
    assert found["ttft_ms_p50"] == pytest.approx(750) and found["itl_ms_p50"] == pytest.approx(150)
    assert found["replayed_share"] == 0.75 and found["padding_share"] == pytest.approx(3 / 17)
    with pytest.raises(ValueError, match="nothing was served"):
        batching.summary([], Counter())
    lone = batching.summary([other], Counter())
    assert lone["itl_ms_p99"] is None and lone["padding_share"] == 0
