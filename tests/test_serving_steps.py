"""The experiments of lab 60 without a GPU: tiny models, graphs that are eager, a clock of our own, a vLLM that is made up."""

import contextlib
import json
from collections import Counter

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
import served  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

from labkit import architectures, batching, contents, decode, graphs, models, recordings, serving, timing, vllm_runs  # noqa: E402
from labkit.experiments import registry, serving_steps  # noqa: E402


class Static:
    """Instead of a graph: a replay runs the callable again, and writes into the same outputs."""
    capture_seconds, made = 0.5, []

    def __init__(self, fn, args=(), *, pool=None, **_):
        self.fn, self.args, self.pool = fn, (args,) if isinstance(args, torch.Tensor) else tuple(args), pool or (0, len(self.made) + 1)
        with torch.inference_mode():
            self.result = fn(*self.args)
        self.outputs = tuple(leaf for leaf in pytree.tree_leaves(self.result) if leaf is not None)
        self.made.append(self)

    def __call__(self, *args):
        self.args = args or self.args
        self.replay()
        return self.result

    def replay(self):
        with torch.inference_mode():
            new = self.fn(*self.args)
            for old, leaf in zip(self.outputs, pytree.tree_leaves(new) if new is not None else (), strict=True):
                old.copy_(leaf)


class Clock:
    """A clock on which each look takes 2 ms."""

    def __init__(self):
        self.at = 0.0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def now(self):
        self.at += 0.002
        return self.at

    def wait(self, until):
        self.at = until


@pytest.fixture
def gpu(monkeypatch):
    """Pretend a GPU: small sizes, and what was timed."""
    asked = []

    def compare(calls, **options):
        asked.append((list(calls), options))
        for _ in range(2):
            for call in calls.values():
                call()
        return timing.Comparison({name: timing.Measurement(name, *(timing.spread([10.0 * us, 10.0 * us + 1]) for _ in range(3)), 2, "budget")
                                  for us, name in enumerate(calls, 1)})

    monkeypatch.setattr(timing, "compare", compare)
    monkeypatch.setattr(timing, "WaitingClock", Clock)
    monkeypatch.setattr(Static, "made", [])
    monkeypatch.setattr(graphs, "GraphedCallable", Static)
    monkeypatch.setattr("labkit.buckets.GraphedCallable", Static)
    monkeypatch.setattr(contents, "pool_bytes", lambda pool: 2**20 * sum(graph.pool == pool for graph in Static.made))
    monkeypatch.setattr(serving, "pool_bytes", contents.pool_bytes)
    monkeypatch.setattr("labkit.buckets.pool_bytes", contents.pool_bytes)
    monkeypatch.setattr(models, "require_room", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30 - 2**20 * len(Static.made), 2**30))
    monkeypatch.setattr(models, "language_model", lambda kind, **_: architectures.tiny_model(kind, max_position_embeddings=2048))
    real = decode.GraphedDecoder.__init__

    def captured(decoder, *args, **options):
        real(decoder, *args, **options)
        decoder.captured = True  # so that the rows are captured; a prompt alone stays eager
        decoder.graphs = {"greedy": Static(lambda: (torch.zeros(1),))}
        decoder.advance = lambda: decoder.step("greedy")
        decoder.begin = lambda ids, mask: decoder.step.prefill(ids, mask, "greedy")

    monkeypatch.setattr(decode.GraphedDecoder, "__init__", captured)
    for name, value in (("ROWS", 4), ("PLACES", 24), ("TOKENS", (3, 8)), ("RATES", (3, 9)), ("TRACE_S", 1), ("STEP_SIZES", (1, 2, 3, 4)),
                        ("EAGER_STEPS", (1, 2, 4)), ("POOL_SIZES", [1, 2, 4]), ("PREFILL_SIZES", (8, 16, 32)), ("PREFILL_TOKENS", (10, 20, 40))):
        monkeypatch.setattr(serving_steps, name, value)
    return asked


def measured(name):
    """Return the rows of an experiment as a recording would keep them."""
    rows = json.loads(json.dumps(registry.EXPERIMENTS[name].measure()))
    assert "NaN" not in json.dumps(rows)
    return rows


WAYS = ["eager", "powers of two", "vLLM's list", "chosen sizes", "every size"]


def test_a_trace_is_served_in_each_way_at_each_rate_in_each_round(gpu, monkeypatch):
    seeds, real = [], serving_steps.trace_at
    monkeypatch.setattr(serving_steps, "trace_at", lambda rate, seed=0: seeds.append(seed) or real(rate, seed))
    rows = measured("serving_ways")
    assert [(row["rate"], row["way"], row["round"]) for row in rows] == [(rate, way, n) for rate in (3, 9) for way in WAYS for n in (0, 1)]
    assert seeds == [1, 1] + [0] * 20 and real(9, 0) != real(9, 1) and len(real(9)) == 9  # sizes are chosen from other requests
    of = {row["way"]: row for row in rows}
    assert of["eager"]["graphs"] == of["eager"]["replayed_share"] == of["eager"]["padding_share"] == of["eager"]["pool_mib"] == 0
    assert of["powers of two"]["sizes"] == [1, 2, 4] and of["every size"]["sizes"] == [1, 2, 3, 4]
    assert len(of["chosen sizes"]["sizes"]) <= 3 and of["every size"]["padding_share"] == 0 and of["every size"]["replayed_share"] == 1
    assert of["powers of two"]["capture_s"] == 1.5 and of["powers of two"]["pool_mib"] == 3.0
    for row in rows:
        assert sum(steps for _, steps in row["batches"]) == row["steps"] and row["requests"] == row["rate"]
        assert row["padding_share"] == pytest.approx(batching.wasted_share(row["sizes"], dict(row["batches"])))


def test_each_shape_has_run_before_any_trace_is_served(gpu, monkeypatch):
    lengths, sizes, seen = set(), set(), []
    join, step_of, serve = serving.BatchedDecoder.join, serving.BatchedDecoder._step_of, batching.serve
    monkeypatch.setattr(serving.BatchedDecoder, "join", lambda decoder, ids: lengths.add(len(ids)) or join(decoder, ids))
    monkeypatch.setattr(serving.BatchedDecoder, "_step_of", lambda decoder, size: sizes.add(size) or step_of(decoder, size))
    monkeypatch.setattr(batching, "serve", lambda *given: seen.append((set(lengths), set(sizes))) or serve(*given))
    measured("serving_ways")
    assert seen[0][0] >= set(range(3, 9)) and seen[0][1] == {1, 2, 3, 4}


def test_each_way_writes_the_same_tokens(gpu):
    model, trace = architectures.tiny_model("llama", "cpu"), serving_steps.trace_at(9)
    written = []
    for sizes in ([], [1, 2, 4]):
        decoder = serving.BatchedDecoder(model, 24, 4, sizes)
        kept, serve = [], batching.serve
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batching, "serve", lambda *given: kept.extend(serve(*given)) or kept)
            serving_steps.served_once(decoder, trace)
        written.append([one.tokens for one in kept])
        assert any(was for _, _, was in decoder.steps) == bool(sizes)
    assert written[0] == written[1] and [len(tokens) for tokens in written[0]] == [r.output_tokens for r in trace]


def test_steps_are_timed_eager_and_as_graphs_at_their_own_batch(gpu):
    rows = measured("serving_step_cost")
    assert [(row["way"], row["batch"]) for row in rows] == [("eager", n) for n in (1, 2, 4)] + [("graph", n) for n in (1, 2, 3, 4)]
    [(calls, options)] = gpu
    assert calls == [(row["way"], row["batch"]) for row in rows] and options["target"] == 0  # all in the same rounds
    assert {row["capture_s"] for row in rows if row["way"] == "graph"} == {0.5} and rows[0]["wall_us"] == pytest.approx(10.5)


def test_a_timed_step_does_the_same_work_each_time(gpu):
    decoder = serving.BatchedDecoder(architectures.tiny_model("llama", "cpu"), serving_steps.STEP_PLACE + 8, 4, [1, 2, 4])
    with torch.inference_mode():
        steps = {batch: serving_steps.step_of_loop(decoder, batch) for batch in (1, 2, 4)}
        for _ in range(20):  # more than there are places
            for batch, step in steps.items():
                assert len(step()) == batch
    assert set(decoder.steps) == {(batch, batch, True) for batch in steps}


def test_pools_are_followed_size_by_size(gpu):
    rows = measured("serving_pools")
    assert [(row["how"], row["size"]) for row in rows] == [
        (how, size) for how, order in (("one pool, largest first", (4, 2, 1)), ("one pool, smallest first", (1, 2, 4)),
                                       ("a pool for each", (4, 2, 1)), ("one pool, outputs kept", (4, 2, 1))) for size in order]
    assert [row["pool_bytes"] / 2**20 for row in rows] == [row["taken_bytes"] / 2**20 for row in rows] == [1, 2, 3] * 4
    made = Static.made[-12:]
    assert [len({graph.pool for graph in made[i:i + 3]}) for i in (0, 3, 6, 9)] == [1, 1, 3, 1]
    assert [len(graph.outputs) for graph in made] == [0] * 9 + [1] * 3


def test_prefills_are_compared_in_three_ways_and_come_out_alike(gpu, monkeypatch):
    real = serving.PiecewisePrefill

    def captured(model, sizes):
        made = real(model, sizes)
        with torch.inference_mode():
            for size in sorted(sizes, reverse=True):
                made.chains[size] = made._captured(size)
        return made

    monkeypatch.setattr(serving, "PiecewisePrefill", captured)
    monkeypatch.setattr(serving_steps, "PREFILL_TOKENS", (10, 20, 30))
    rows = measured("serving_prefill")
    assert [(row["tokens"], row["prompts"], row["way"]) for row in rows] == [
        (tokens, prompts, way) for tokens in (10, 20, 30) for prompts in (1, 4) for way in ("eager", "whole", "pieces")]
    assert all(row["difference"] < 1e-5 for row in rows) and len(gpu) == 1
    assert rows[0].keys() - {"samples"} == served.prefill()[0].keys()
    assert {row["way"]: row["graphs"] for row in rows} == {"eager": 0, "whole": 3, "pieces": 9}  # two layers: three pieces a size


# ---- vLLM

STEPS = [{"batch": batch, "wall_us": 1000.0, "wall_us_low": 990.0, "wall_us_high": 1010.0, "rounds": 7, "samples": {"16": [1.0]}} for batch in (1, 2)]
FOUND = {"vllm": "0.26.0", "captured_sizes": [1, 2], "graphs_gib": 0.4, "lines": ["took 0.4 GiB"], "graph_use": {}, "steps": STEPS,
         "replays": {"prefill": 17, "long prefill": 0, "decode step": 1.0}}


@pytest.mark.parametrize("name, made_up", [("serving_ways", served.ways), ("serving_step_cost", served.steps), ("serving_pools", served.pools)])
def test_tables_that_are_made_up_have_the_columns_of_those_that_are_measured(gpu, name, made_up):
    assert {frozenset(row.keys() - {"samples"}) for row in measured(name)} == {frozenset(row) for row in made_up()}


@pytest.fixture
def vllm(monkeypatch):
    monkeypatch.setattr(vllm_runs, "installed", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def test_each_configuration_of_vllm_gives_a_row_a_batch_with_its_log_lines(vllm, monkeypatch):
    asked = []

    def run(options, *, batches, timeout_s, progress, environment):
        asked.append((options, batches, environment))
        assert 0 < timeout_s <= serving_steps.ONE_VLLM_S
        for _ in (1, *batches):
            progress({})  # moves the bar
        return dict(FOUND)

    monkeypatch.setattr(vllm_runs, "run_vllm", run)
    rows = measured("vllm_table")
    assert [(row["configuration"], row["batch"]) for row in rows] == [(name, batch) for name in vllm_runs.CONFIGURATIONS for batch in (1, 2)]
    assert [options for options, *_ in asked] == list(vllm_runs.CONFIGURATIONS.values())
    assert [batches for _, batches, _ in asked] == [[1, 4, 16, 64, 128]] * 4 + [[1, 4, 16], [1, 3]]
    assert [environment for *_, environment in asked] == [None] * 5 + [{"VLLM_USE_V2_MODEL_RUNNER": "0"}]
    assert rows[0]["graphs"] == 2 and rows[0]["replays_long_prefill"] == 0 and rows[0]["lines"] == ["took 0.4 GiB"] and "steps" not in rows[0]


def test_a_configuration_that_fails_is_left_out_and_all_that_fail_are_an_error(vllm, monkeypatch, capsys):
    def run(options, but=None, environment=None, **_):
        if options != but or environment:
            raise vllm_runs.VllmFailed("vLLM ended with code 1")
        return dict(FOUND)

    monkeypatch.setattr(vllm_runs, "run_vllm", lambda options, **more: run(options, {}, **more))
    assert {row["configuration"] for row in measured("vllm_table")} == {"default"}
    assert "Left out: neither: vLLM ended with code 1" in capsys.readouterr().out
    monkeypatch.setattr(vllm_runs, "run_vllm", run)
    with pytest.raises(vllm_runs.VllmFailed, match="default: vLLM ended with code 1; enforce_eager: "):
        registry.EXPERIMENTS["vllm_table"].measure()


def test_one_that_hangs_costs_the_last_ones_and_no_more(vllm, monkeypatch, capsys):
    now = [0.0]

    def run(options, *, timeout_s, **_):
        if options == {"enforce_eager": True}:
            now[0] += timeout_s
            raise vllm_runs.VllmFailed(f"vLLM did not end within {timeout_s:g} s")
        now[0] += 80
        return dict(FOUND)

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(vllm_runs, "run_vllm", run)
    assert {row["configuration"] for row in measured("vllm_table")} == set(list(vllm_runs.CONFIGURATIONS)[:5]) - {"enforce_eager"}
    assert now[0] <= serving_steps.VLLM_LIMIT_S + 80
    said = capsys.readouterr().out
    assert "enforce_eager: vLLM did not end within 240 s" in said and "default, V1 model runner: no time was left of 500 s" in said


def test_both_loops_are_timed_at_the_same_mean_context():
    assert vllm_runs.PROMPT_TOKENS + (vllm_runs.SHORT_TEXT + vllm_runs.LONG_TEXT) / 2 == serving_steps.STEP_PLACE
    assert set(vllm_runs.VLLM_BATCHES) <= set(serving_steps.STEP_SIZES) and {1, 128} <= set(vllm_runs.VLLM_BATCHES)
    assert vllm_runs.PROMPT_TOKENS * 128 <= 8192  # tokens that vLLM prefills at once by default, on smaller GPUs too


def test_no_trace_takes_long_even_where_a_step_takes_a_tenth_of_a_second():
    class Slow:
        rows, running, steps, at = serving_steps.ROWS, [], Counter(), 0.0

        def check(self, ids, tokens):
            assert len(ids) + tokens - 1 <= serving_steps.PLACES

        def join(self, ids):
            self.at, self.running = self.at + 0.1, [*self.running, len(ids)]

        def advance(self):
            self.at += 0.1
            return self.running

        def leave(self, row):
            self.running = self.running[:-1]
            return len(self.running)

        def reset(self):
            pass

        def now(self):
            return self.at

        def wait(self, until):
            self.at = until

    for rate in serving_steps.RATES:
        trace, slow = serving_steps.trace_at(rate), Slow()
        batching.serve(slow, trace, [range(request.prompt_tokens) for request in trace], slow)
        assert 3 < slow.at < 60  # and a GPU's steps take a fifth of that, or less: a trace that cannot be kept up with ends all the same


def test_flags_are_held_against_what_is_meant_by_them(monkeypatch):
    def parse(lines):
        return [{"error": "unrecognized arguments: " + words[-1]} if words[0] == "some/model" and words[-1] in ("true", "false") else
                {"enforce_eager": "--enforce-eager" in words, "model": words[-1] if words[-1] in ("true", "false") else "some/model"}
                for words in lines]

    monkeypatch.setattr(vllm_runs, "flags_of", parse)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.26.0")
    rows = measured("vllm_flags")
    assert [row["as_meant"] for row in rows] == [False, False, False, True, True, True] and {row["vllm"] for row in rows} == {"0.26.0"}
    assert rows[0]["error"] == "unrecognized arguments: false" and rows[2]["model"] == "false"


def test_a_parser_that_could_not_be_loaded_is_no_answer(monkeypatch):
    monkeypatch.setattr(vllm_runs, "flags_of", lambda lines: [{"error": "ModuleNotFoundError: No module named 'uvloop'"}] * len(lines))
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.26.0")
    with pytest.raises(vllm_runs.VllmFailed, match="reads no line at all: .* 'uvloop'"):
        registry.EXPERIMENTS["vllm_flags"].measure()


def test_without_vllm_a_live_lab_takes_the_recording_and_measuring_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(vllm_runs, "installed", lambda: False)
    with pytest.raises(ModuleNotFoundError, match=r"labkit\[vllm\].*of_vllm"):
        registry.EXPERIMENTS["vllm_table"].measure()
    monkeypatch.setattr(recordings, "recorded", lambda name, source: f"recorded {name}")
    monkeypatch.setitem(serving_steps.EXPERIMENTS, "vllm_table", type("Table", (), {"__call__": lambda self: "measured", "source": ""})())
    for live, here, wanted in ((True, False, "recorded vllm_table"), (True, True, "measured"), (False, False, "measured")):
        monkeypatch.setattr(recordings, "tables_are_live", lambda live=live: live)
        monkeypatch.setattr(vllm_runs, "installed", lambda here=here: here)
        assert serving_steps.of_vllm("vllm_table") == wanted
    assert capsys.readouterr().out == "vLLM is not installed here: as recorded.\n"


# ---- prefill in pieces, and the clock

def test_a_prefill_in_pieces_gives_each_prompt_the_logits_it_gets_alone(monkeypatch):
    monkeypatch.setattr(graphs, "GraphedCallable", Static)
    model = architectures.tiny_model("llama", "cpu")
    prefill = serving.PiecewisePrefill(model, [8, 16])
    assert not prefill.chains  # on the CPU all runs eagerly
    with torch.inference_mode():
        for size in (16, 8):
            prefill.chains[size] = prefill._captured(size)
        for lengths in ([5], [16], [5, 2], [1, 12], [3, 3, 3, 3], [17], [9, 9]):  # the last two are above the largest size
            ids = torch.randint(3, 96, (1, sum(lengths)), generator=torch.Generator().manual_seed(len(lengths)))
            alone = torch.cat([model(part).logits[:, -1] for part in ids.split(lengths, 1)])
            for found in (prefill(ids, lengths), prefill.eager(ids, lengths)):
                assert torch.allclose(found, alone, atol=1e-5)
    assert len({graph.pool for chain, *_ in prefill.chains.values() for graph in chain}) == 1


def test_a_prefill_of_other_models_or_lengths_is_refused():
    with pytest.raises(TypeError, match="only a LlamaForCausalLM .* not a GPT2LMHeadModel"):
        serving.PiecewisePrefill(architectures.tiny_model("gpt2", "cpu"), [8])
    prefill = serving.PiecewisePrefill(architectures.tiny_model("llama", "cpu"), [8])
    for lengths in ([4], [3, 4], [6, 0], [], [7, -1]):
        with pytest.raises(ValueError, match="do not add up to 6 tokens"):
            prefill(torch.ones(1, 6, dtype=torch.int64), lengths)
    for ids in (torch.ones(6, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64), torch.ones(1, 6)):
        with pytest.raises(ValueError, match="ids must be int64 of shape"):
            prefill(ids, [6])
    with pytest.raises(ValueError, match="a prompt of 200 tokens is longer than the 128 positions"):
        prefill(torch.ones(1, 200, dtype=torch.int64), [200])
    for sizes in ([0], [-3], [2.5], [True], [129], [8, 0]):
        with pytest.raises(ValueError, match="whole numbers from 1 to 128"):
            serving.PiecewisePrefill(architectures.tiny_model("llama", "cpu"), sizes)


def test_the_clock_holds_the_gpu_waits_and_gives_all_back(monkeypatch):
    held = []

    @contextlib.contextmanager
    def hold(what, gives=None):
        held.append(what)
        yield gives
        held.remove(what)

    monkeypatch.setattr(timing, "_gpu_to_ourselves", lambda: hold("gpu"))
    monkeypatch.setattr(timing, "_core_after_core", lambda: hold("core", lambda: held.append("moved")))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with pytest.raises(KeyError), timing.WaitingClock() as clock:
        assert held == ["gpu", "core", "moved"]
        began = clock.now()
        clock.wait(began + 0.05)
        assert began + 0.05 <= clock.now() < began + 5
        clock.wait(0.0)  # is over already
        raise KeyError
    assert held == ["moved"]
