"""Serving: traces in each way, what a step, a pool and a prefill cost by captured size, and vLLM itself. Times in µs, or as named."""

from labkit import batching, recordings, vllm_runs
from labkit.experiments.registry import EXPERIMENTS, cells, experiment

# The shape of Llama 3.2 1B in bfloat16, as vllm_runs gives it to vLLM: so that both loops are seen with the same work.
LAYERS, WIDTH, PRECISION = 16, 2048, "bfloat16"
ROWS, PLACES, TOKENS = 32, 256, (16, 128)  # rows that a server has, places in each, tokens of a prompt and of its answer
RATES, TRACE_S, ROUNDS = (4, 12, 32), 4, 2  # requests a second, for so many seconds; each trace is served twice in each way
STEP_SIZES, STEP_PLACE, EAGER_STEPS = (*range(1, 33), 48, 64, 96, 128), 80, (1, 2, 4, 8, 16, 32, 64, 128)
POOL_SIZES = batching.vllm_sizes(128)
PREFILL_SIZES, PREFILL_TOKENS, SPLIT = (128, 512, 1024, 4096), (100, 400, 1000, 3000), (0.4, 0.3, 0.2, 0.1)
VLLM_LIMIT_S, ONE_VLLM_S = 500, 240  # seconds for all configurations of vLLM, and for one: one that hangs must not cost the others
FLAGS = (  # what somebody types, and which enforce_eager is meant by it: first as the article types it
    ("article", ("some/model", "--enforce-eager", "false"), False), ("article", ("some/model", "--enforce-eager", "true"), True),
    ("article", ("--enforce-eager", "false"), False), ("right", ("some/model",), False),
    ("right", ("some/model", "--enforce-eager"), True), ("right", ("some/model", "--no-enforce-eager"), False))


def _server_model():
    import torch

    from labkit import models

    torch.cuda.empty_cache()
    return models.language_model("llama", layers=LAYERS, width=WIDTH, dtype=getattr(torch, PRECISION))


# ---- a trace, in each way

def trace_at(rate, seed=0):
    """Return the requests of the trace that is served at a rate (requests a second)."""
    return batching.poisson_trace(rate, rate * TRACE_S, TOKENS, TOKENS, seed)


@experiment
def serving_ways():
    """Serve the same requests, at three rates, eager and with graphs for four lists of sizes: times, padding, memory, capture.

    A row for each way, rate and round: the summary of the trace as it was served, the sizes, their memory and capture.
    The chosen sizes are as many as the powers of two, and chosen from the steps of other requests at the same rates.
    """
    import torch

    from labkit import serving

    model, rows = _server_model(), []
    lists = {"eager": [], "powers of two": batching.powers_of_two(ROWS), "vLLM's list": batching.vllm_sizes(ROWS), "every size": batching.every_size(ROWS)}
    made = {way: serving.BatchedDecoder(model, PLACES, ROWS, sizes) for way, sizes in lists.items()}
    run_each_shape_once(made["eager"])
    counts = {}
    for rate in RATES:
        for batch, steps in served_once(made["powers of two"], trace_at(rate, seed=1))["batches"]:
            counts[batch] = counts.get(batch, 0) + steps
    chosen = batching.best_sizes(counts, len(lists["powers of two"]))
    made["chosen sizes"] = serving.BatchedDecoder(model, PLACES, ROWS, chosen)
    kept = {way: {"sizes": decoder.sizes, "graphs": len(decoder.graphs), "pool_mib": decoder.pool_bytes / 2**20,
                  "capture_s": decoder.capture_seconds} for way, decoder in made.items()}
    for number in range(ROUNDS):
        for rate in RATES:
            for way in list(made) if number % 2 == 0 else list(reversed(made)):
                found = served_once(made[way], trace_at(rate))
                rows.append({"way": way, "rate": rate, "round": number, **kept[way], **found})
    del made
    torch.cuda.empty_cache()
    order = list(lists)[:3] + ["chosen sizes", "every size"]
    return sorted(rows, key=lambda row: (row["rate"], order.index(row["way"]), row["round"]))


def run_each_shape_once(decoder):
    """Run each length of a prompt and each number of rows, eagerly: what comes first with a shape pays for the choice of kernels."""
    import torch

    for length in range(TOKENS[0], TOKENS[1] + 1):
        decoder.join(torch.ones(length, dtype=torch.int64, device=decoder.tokens.device))
        decoder.leave(0)
    with torch.inference_mode():
        for rows in range(1, decoder.rows + 1):
            decoder.eager(rows)()
    decoder.reset()


def served_once(decoder, trace, clock=None):
    """Serve a trace with random prompts on the decoder's device; returns the summary, and [batch, steps at it] in `batches`.

    clock: for its `now` and `wait`; left out, this GPU's own time.
    """
    import contextlib

    import torch

    from labkit import timing

    draw, device = torch.Generator().manual_seed(0), decoder.tokens.device
    vocabulary = decoder.alone.model.config.vocab_size
    prompts = [torch.randint(vocabulary, (request.prompt_tokens,), generator=draw).to(device) for request in trace]
    decoder.reset()
    with contextlib.nullcontext(clock) if clock else timing.WaitingClock() as clock:
        served = batching.serve(decoder, trace, prompts, clock)
    batches = {}
    for (batch, _, _), steps in decoder.steps.items():
        batches[batch] = batches.get(batch, 0) + steps
    return batching.summary(served, decoder.steps) | {"batches": [[batch, batches[batch]] for batch in sorted(batches)]}


# ---- what each size costs

@experiment
def serving_step_cost():
    """Time one step of our loop, the reading of its tokens included, with 1 to 128 requests at 80 tokens: eager, and as a graph.

    A row for each way and batch: the time of a step.
    """
    import torch

    from labkit import serving, timing

    model, most = _server_model(), max(STEP_SIZES)
    eager, graphed = (serving.BatchedDecoder(model, STEP_PLACE + 8, most, sizes) for sizes in ((), STEP_SIZES))
    calls = {("eager", batch): step_of_loop(eager, batch) for batch in EAGER_STEPS}
    calls |= {("graph", batch): step_of_loop(graphed, batch) for batch in STEP_SIZES}
    with torch.inference_mode():
        both = timing.compare(calls, budget_s=12, target=0, without_gpu=set(calls))
    return [{"way": way, "batch": batch, **cells("wall_us", both[way, batch].wall_us), "rounds": both[way, batch].rounds,
             "capture_s": graphed.graphs[batch].capture_seconds if way == "graph" else None,
             "samples": {"wall_us": both[way, batch].wall_us.samples}} for way, batch in calls]


def step_of_loop(decoder, batch):
    """Return a step of so many rows that goes back to the same place each time, and so does the same work; for inference mode."""
    def step():
        decoder.places[:batch].fill_(STEP_PLACE)
        decoder.running = [STEP_PLACE] * batch
        return decoder.advance()

    decoder.reset()
    return step


@experiment
def serving_pools():
    """Capture a step of our loop at each of vLLM's sizes up to 128: bytes kept, in one pool and in many, by order of capture.

    A row for each capture of each way: the bytes that the pools so far keep, and that the GPU has less.
    The last way hands the logits out, (size, vocabulary), which then keep their place in the pool.
    """
    import gc

    import torch

    from labkit import contents, graphs, serving

    decoder, rows = serving.BatchedDecoder(_server_model(), PLACES, POOL_SIZES[-1]), []
    down, quiet = POOL_SIZES[::-1], decoder.without_output
    for how, order, shared, step in (("one pool, largest first", down, True, quiet), ("one pool, smallest first", POOL_SIZES, True, quiet),
                                     ("a pool for each", down, False, quiet), ("one pool, outputs kept", down, True, decoder.eager)):
        gc.collect()  # now, and not within the captures: what was free before must not become more
        torch.cuda.empty_cache()
        made, free = [], torch.cuda.mem_get_info()[0]
        for size in order:
            made.append(graphs.GraphedCallable(step(size), clone=False, pool=made[0].pool if made and shared else None))
            torch.cuda.empty_cache()
            rows.append({"how": how, "size": size, "graphs": len(made), "capture_s": made[-1].capture_seconds,
                         "pool_bytes": sum(map(contents.pool_bytes, {graph.pool for graph in made})),
                         "taken_bytes": free - torch.cuda.mem_get_info()[0]})
        del made
    return rows


# ---- prefill

@experiment
def serving_prefill():
    """Time a prefill of one prompt, and of four in one pass: eager, whole graphs padded to a size, and graphs around attention.

    A row for each number of tokens, of prompts, and way: its time, its graphs and their memory, and how far its logits are off.
    """
    import torch

    from labkit import buckets, serving, timing

    model, calls, difference = _server_model(), {}, {}
    pieces = serving.PiecewisePrefill(model, PREFILL_SIZES)
    whole = whole_prefill(pieces, buckets.BucketedGraphs)
    with torch.inference_mode():
        for tokens in PREFILL_TOKENS:
            for lengths in ([tokens], [int(share * tokens) for share in SPLIT]):
                ids = torch.randint(model.config.vocab_size, (1, sum(lengths)), device=model.device)
                ways = {"eager": lambda ids=ids, lengths=lengths: pieces.eager(ids, lengths),
                        "whole": lambda ids=ids, lengths=lengths: whole(ids, lengths),
                        "pieces": lambda ids=ids, lengths=lengths: pieces(ids, lengths)}
                own = torch.cat([model(part, use_cache=False, logits_to_keep=1).logits[:, -1] for part in ids.split(lengths, 1)]).float()
                for way, call in ways.items():
                    calls[tokens, len(lengths), way] = call
                    difference[tokens, len(lengths), way] = float((call().float() - own).abs().max() / own.abs().max())
        both = timing.compare(calls, budget_s=10, target=0, without_gpu=set(calls))
    kept = {"eager": (0, 0), "whole": (len(PREFILL_SIZES), whole.pool_bytes), "pieces": (
        sum(len(chain) for chain, *_ in pieces.chains.values()), pieces.pool_bytes)}
    return [{"tokens": tokens, "prompts": prompts, "way": way, **cells("wall_us", both[tokens, prompts, way].wall_us),
             "graphs": kept[way][0], "pool_bytes": kept[way][1], "difference": difference[tokens, prompts, way],
             "rounds": both[tokens, prompts, way].rounds, "samples": {"wall_us": both[tokens, prompts, way].wall_us.samples}}
            for tokens, prompts, way in calls]


def whole_prefill(pieces, bucketed):
    """Return a call like that of PiecewisePrefill by whole graphs: one prompt after the other, each padded to a captured size."""
    import torch

    model = pieces.model

    def whole(ids):
        return pieces.hidden(ids, [ids.shape[1]])

    graphs = bucketed(whole, torch.zeros_like(pieces.places[:, :1]), PREFILL_SIZES, dim=1, out_dim=1)

    def call(ids, lengths):
        return torch.cat([model.lm_head(graphs(part)[:, -1]) for part in ids.split(lengths, 1)])

    call.pool_bytes = graphs.pool_bytes
    return call


# ---- vLLM itself

@experiment
def vllm_table():
    """Run vLLM itself in each of its configurations, each in a process of its own: time per step, sizes, memory, its log lines.

    A row for each configuration and batch: the time of a step, beside what the configuration told at its start and in its log.
    A configuration that fails is left out, aloud, as is one that no time is left for. Raises ModuleNotFoundError without vLLM,
    VllmFailed where all fail.
    """
    import gc
    import time

    if not vllm_runs.installed():
        raise ModuleNotFoundError("vLLM is not installed here: pip install 'labkit[vllm]' (into an environment of its own), or look at "
                                  "the recording: experiments.of_vllm('vllm_table')", name="vllm")
    import torch
    from tqdm import tqdm

    gc.collect()
    torch.cuda.empty_cache()  # vLLM takes half of the GPU
    rows, failed, until = [], {}, time.monotonic() + VLLM_LIMIT_S
    for name, options in vllm_runs.CONFIGURATIONS.items():
        more = vllm_runs.EXTRA_ENVIRONMENT.get(name)
        batches = vllm_runs.FEW_BATCHES if more else vllm_runs.VLLM_BATCHES
        steps = [batch for batch in batches if batch <= options.get("max_num_seqs", batch)]
        try:
            if (left := until - time.monotonic()) < 10:
                raise vllm_runs.VllmFailed(f"no time was left of {VLLM_LIMIT_S} s")
            with tqdm(total=1 + len(steps), desc=f"vLLM, {name}", leave=False) as bar:
                found = vllm_runs.run_vllm(options, batches=steps, timeout_s=min(left, ONE_VLLM_S), progress=lambda _: bar.update(),
                                           environment=more)
        except vllm_runs.VllmFailed as error:  # one that fails must not cost the others
            failed[name] = str(error)
            print(f"Left out: {name}: {error}", flush=True)
            continue
        about = {key: value for key, value in found.items() if key not in ("steps", "replays")}
        about |= {f"replays_{what.replace(' ', '_')}": count for what, count in found["replays"].items()}
        rows += [{"configuration": name, "options": options, **step, **about, "graphs": len(found["captured_sizes"])} for step in found["steps"]]
    if not rows:
        raise vllm_runs.VllmFailed("; ".join(f"{name}: {why}" for name, why in failed.items()))
    return rows


@experiment
def vllm_flags():
    """Let vLLM's own parser read what the article types, and what is right: which enforce_eager and which model come out.

    A row for each list of words: what was meant by it, and what the parser made of it. Raises VllmFailed where it is not vLLM's
    parser that refuses, but none could be loaded: then not even what is right is read.
    """
    from importlib.metadata import version

    answers = vllm_runs.flags_of([words for _, words, _ in FLAGS])
    if all("error" in answer for (whose, *_), answer in zip(FLAGS, answers) if whose == "right"):
        raise vllm_runs.VllmFailed(f"vLLM's parser reads no line at all: {answers[-1]['error']}")
    return [{"whose": whose, "words": " ".join(words), "meant": meant, "enforce_eager": answer.get("enforce_eager"), "model": answer.get("model"),
             "error": answer.get("error", ""), "as_meant": answer.get("enforce_eager") is meant and answer["model"] not in words[1:],
             "vllm": version("vllm")} for (whose, words, meant), answer in zip(FLAGS, answers, strict=True)]


def of_vllm(name):
    """Return vllm_table or vllm_flags: measured where labs run live and vLLM is installed, else as recorded."""
    table = EXPERIMENTS[name]
    if vllm_runs.installed() or not recordings.tables_are_live():
        return table()
    print("vLLM is not installed here: as recorded.")
    return recordings.recorded(name, table.source)
