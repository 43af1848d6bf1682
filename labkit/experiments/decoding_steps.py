"""Decoding with language models: what a pass costs, the ladder down to the memory limit, which architectures replay. Times in µs."""

import re

from labkit.experiments.registry import as_pair, as_recorded, cells, experiment, in_child, measured_or_recorded, walls

LANGUAGE = {"GPT-2": ("gpt2", 12, 768, "float16"), "Llama 1B": ("llama", 16, 2048, "bfloat16"), "Llama 8B": ("llama", 32, 4096, "bfloat16")}
SPAN = {"GPT-2": (128, 1024), "Llama 1B": (128, 1024, 8192), "Llama 8B": (128, 1024, 8192)}  # tokens of context
LADDER_BATCHES, COMPILED_AT = (1, 4, 16, 32), ((1, 128), (32, 128))  # a compilation takes a minute
RUNGS = GROWING, STATIC, CAPTURED, READ_ONCE, COMPILED, BOTH = (
    "eager, growing cache", "eager, static cache", "captured", "captured, keys read once", "compiled", "compiled and captured")
WRITTEN, PROMPT = 32, 32  # tokens
QUESTION = "Explain in three short sentences why the sky is blue."


@experiment
def prefill_cost():
    """Run 1 to 4,096 tokens of one text through a model in one pass, eager and as a graph: what it costs CPU and GPU.

    A row for each model and number of tokens: the CPU's time to send the pass, the GPU's, and both wall times.
    """
    import torch

    from labkit import timing

    rows = []
    for name in ("GPT-2", "Llama 8B"):
        model = _language(name)
        for tokens in (1, 4, 16, 64, 256, 1024, 4096):
            if tokens > model.config.max_position_embeddings:
                break
            pair, graph = as_pair(_pass_of(model, tokens), _ids(model, 1, tokens))
            with torch.inference_mode():
                both = timing.compare(pair, budget_s=2)
            eager, graphed = both["eager"], both["graph"]
            rows.append({"model": name, "tokens": tokens, "kernels": len(graph.kernel_names), **cells("enqueue_us", eager.enqueue_us),
                         **cells("gpu_us", graphed.gpu_us), **cells("eager_wall_us", eager.wall_us),
                         **cells("graph_wall_us", graphed.wall_us), **cells("speedup", both.ratio("eager", "graph")),
                         "samples": walls(both)})
            del pair, graph
        del model
    return rows


def _language(name):
    import torch

    from labkit import models

    kind, layers, width, precision = LANGUAGE[name]
    torch.cuda.empty_cache()
    return models.language_model(kind, layers=layers, width=width, dtype=getattr(torch, precision))


def _ids(model, batch, tokens):
    import torch

    return torch.randint(model.config.vocab_size, (batch, tokens), device=model.device)


def _pass_of(model, tokens):
    """Return what maps ids, (1, tokens), to the logits of the last one; with a mask of its own, so that a graph runs the same."""
    import torch

    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=model.device).tril()[None, None]
    return lambda ids: model(input_ids=ids, attention_mask=causal, use_cache=False, logits_to_keep=1).logits[:, -1]


def decode_ladder(measured=("GPT-2",)):
    """Return ladder_gpt2, ladder_llama_1b and ladder_llama_8b as one table; `label` says of each row where it comes from.

    measured: the models of which, where labs run live, the ladder is measured here; those of the others are as recorded.
    Raises ValueError for a model that has no ladder.
    """
    import pandas

    names = dict(zip(LANGUAGE, ("ladder_gpt2", "ladder_llama_1b", "ladder_llama_8b"), strict=True))
    measured = {measured} if isinstance(measured, str) else set(measured)
    if unknown := measured - set(names):
        raise ValueError(f"no ladder is of {', '.join(sorted(map(repr, unknown)))}; there are those of {', '.join(map(repr, names))}")
    tables = [(measured_or_recorded if model in measured else as_recorded)(name) for model, name in names.items()]
    rows = pandas.concat([table.assign(label=table.attrs["provenance"]["label"]) for table in tables], ignore_index=True)
    told = tables[-1].attrs["provenance"]
    rows.attrs = {"provenance": {**told, "label": "; ".join(rows.label.unique())}}
    return rows


@experiment
def ladder_gpt2():
    """Time a decode step of GPT-2 on each rung, from what people run to the floor: its bytes at the speed of a large sum.

    A row for each batch, context and rung: its time, its share of the floor, and of a captured one its kernels, nodes, capture and
    pool, and same_tokens, for how many of the batch it picks the token that the eager step picks.
    """
    return _ladder("GPT-2")


@experiment
def ladder_llama_1b():
    """Time a decode step of a Llama of 1.5 billion weights on each rung, from what people run to the floor.

    A row for each batch, context and rung, as ladder_gpt2 has them.
    """
    return _ladder("Llama 1B")


@experiment
def ladder_llama_8b():
    """Time a decode step of a Llama of 8 billion weights on each rung, from what people run to the floor.

    A row for each batch, context and rung, as ladder_gpt2 has them.
    """
    return _ladder("Llama 8B")


def _ladder(name):
    import torch
    from tqdm import tqdm

    from labkit import models

    model, rows = _language(name), []
    big = torch.ones(min(2**31, torch.cuda.mem_get_info()[0] // 8), device="cuda", dtype=torch.float16)
    points = [(batch, context) for context in SPAN[name] for batch in LADDER_BATCHES]
    with _no_autocast():
        for batch, context in tqdm(points, desc=name, unit="point", leave=False):
            try:
                rows += [{"model": name, "batch": batch, "context": context, **row} for row in _rungs(model, batch, context, big)]
            except (models.TooLarge, torch.OutOfMemoryError) as error:
                print(f"Left out: batch {batch}, context {context:,}: {str(error).partition('. ')[0]}")
    del model, big  # all of which hold weights that the child needs room for
    torch.cuda.empty_cache()
    done = [point for point in points if any((row["batch"], row["context"]) == point for row in rows)]
    worked = in_child(_ladder_kernels, {"name": name, "points": done}, 500)
    found = {(*point, rung): kernels for point, each in zip(done, worked, strict=True) for rung, kernels in each.items()}
    return [row | found.get((row["batch"], row["context"], row["rung"]), {"kernels_us": None, "longest": []}) for row in rows]


def _no_autocast():
    """Return a context in which what is compiled outside of a capture need not be compiled again inside of it."""
    import torch

    return torch.autocast("cuda", enabled=False, cache_enabled=False)


def _rungs(model, batch, context, big):
    """Return a row for each rung of one step, all timed in the same rounds, and for the floor's reading."""
    import torch

    from labkit import decode, timing
    from labkit.experiments.sweeps import _work

    step, calls, made = _captured_rungs(model, batch, context)
    calls = {GROWING: decode.GrowingStep(model, batch, context), STATIC: step, **calls}
    calls, ids = {rung: calls[rung] for rung in RUNGS if rung in calls}, _ids(model, batch, 1)
    with torch.inference_mode():
        both = timing.compare({**{name: (lambda call=call: call(ids)) for name, call in calls.items()}, "read": big.sum},
                              budget_s=6 if COMPILED in calls else 2, target=0,
                              without_gpu={GROWING, STATIC, COMPILED})
        same = {rung: int((graph(ids) == step(ids)).sum()) for rung, graph in made.items()}
    work = _work(step, ids, context)
    rows = []
    for rung in calls:
        found, graph = both[rung], made.get(rung)
        floor = both.ratio("read", rung)  # how many times as long the large sum takes
        scale = work["bytes"] / big.nbytes
        rows.append({"rung": rung, **cells("wall_us", found.wall_us), "enqueue_us": found.enqueue_us.median, "bytes": work["bytes"], "floor_us": both["read"].wall_us.median * scale,
                     **cells("share", timing.Spread(*(scale * end for end in (floor.median, floor.low, floor.high)), ())),
                     "gpu_us": found.gpu_us.median if graph else None, "nodes": len(graph.nodes) if graph else None,
                     "capture_s": graph.capture_seconds if graph else None, "pool_mib": graph.pool_bytes / 2**20 if graph else None,
                     "same_tokens": same.get(rung),
                     "rounds": found.rounds, "samples": {"wall_us": found.wall_us.samples}})
    return rows


def _captured_rungs(model, batch, context):
    """Return a decode step, what runs it as a graph, and compiled where that is asked for: {rung: callable}, {rung: graph}."""
    import torch

    from labkit import decode, graphs

    step, ids = decode.decode_step(model, batch, context)
    made, calls = {CAPTURED: graphs.GraphedCallable(step, ids)}, {}
    if getattr(model.config, "num_key_value_heads", None) not in (None, model.config.num_attention_heads):
        made[READ_ONCE] = graphs.GraphedCallable(_reading_once(step), ids)
    if (batch, context) in COMPILED_AT:
        torch.compiler.reset()
        compiled = _compiled(step)
        try:
            with torch.inference_mode():
                compiled(ids)
            calls[COMPILED], made[BOTH] = compiled, graphs.GraphedCallable(compiled, ids)
        except Exception as error:  # whatever a compiler may raise
            print(f"Left out: {COMPILED}: {str(error).partition(chr(10))[0]}")
    return step, {**made, **calls}, made


def _reading_once(step):
    """Return a decode step whose attention reads the keys and values that heads share once."""
    from labkit import sharing

    def reading_once(ids):
        with sharing.keys_read_once():
            return step(ids)

    return reading_once


def _compiled(step):
    """Return a decode step with kernels by torch.compile; rewound outside of it, else each layer would get kernels of its own."""
    import torch

    from labkit import sharing

    def one_token(ids):
        result = step.model(input_ids=ids, position_ids=step.position, use_cache=True, **{step.keyword: step.cache})
        return result.logits[:, -1].argmax(-1, keepdim=True)

    run = torch.compile(one_token, mode="max-autotune-no-cudagraphs", dynamic=False)

    def compiled_step(ids):
        step.lengths.fill_(step.context - 1)
        with sharing.keys_read_once():
            return run(ids)

    return compiled_step


def _ladder_kernels(name, points):
    """Return {rung: what its kernels are} for each point, of its captured rungs."""
    import torch

    from labkit import models, trace

    model, found = _language(name), []
    for batch, context in points:
        made, ids = {}, _ids(model, batch, 1)
        try:
            with _no_autocast():
                made = _captured_rungs(model, batch, context)[2]
            with torch.inference_mode():
                traced = trace.record_each({rung: (lambda graph=graph: graph(ids)) for rung, graph in made.items()}, calls_before=2)
            found.append({rung: _kernels(traced[rung]) for rung in made})
        except (models.TooLarge, torch.OutOfMemoryError):  # a child may take less memory than its parent
            found.append({})
        del made
    return found


def _kernels(traced, most=8):
    """Return how long the kernels of a step work together, and those that take longest in all: [name, how many, us]."""
    took = {}
    for kernel in traced.kernels:
        took.setdefault(re.sub(r"_\d+$", "", kernel.name), []).append(kernel.gpu_us)
    longest = sorted(((name, len(us), sum(us)) for name, us in took.items()), key=lambda row: -row[2])
    return {"kernels_us": sum(map(sum, took.values())), "longest": longest[:most]}


@experiment
def generate_speed():
    """Write 32 tokens after a prompt of 32: generate(), generate() with its own static cache, GraphedDecoder, and that compiled.

    A row for each model and way to write: its time, and how many tokens are those of generate(), from the first on.
    """
    return [row for name in ("GPT-2", "Llama 8B") for row in _writing(name)]


def _writing(name):
    """Return a row for each way in which a model can write."""
    import torch

    from labkit import decode, timing

    model = _language(name)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    ids = _ids(model, 1, PROMPT)
    plain = {"do_sample": False, "max_new_tokens": WRITTEN, "attention_mask": torch.ones_like(ids)}

    def writer(compiled):
        made = []

        def write():
            made or made.append(decode.GraphedDecoder(model, PROMPT + WRITTEN, compiled=compiled))
            return made[0].generate(ids, WRITTEN)
        return write

    calls = {"generate()": lambda: model.generate(ids, **plain)[:, PROMPT:],
             "generate(), static cache": lambda: model.generate(ids, cache_implementation="static", **plain)[:, PROMPT:],
             "GraphedDecoder": writer(False), "GraphedDecoder, compiled": writer(True)}
    written = {}
    with torch.inference_mode():
        for how in list(calls):
            try:
                written[how] = calls[how]()
            except Exception as error:  # whatever a compiler may raise
                print(f"Left out: {how}: {str(error).splitlines()[0]}")
                del calls[how]
        both = timing.compare(calls, budget_s=10, target=0, without_gpu=set(calls))
    return [{"model": name, "how": how, "tokens": WRITTEN,
             "same_tokens": int((written[how] == written["generate()"]).long().cumprod(-1).sum()), **cells("wall_us", both[how].wall_us),
             "token_us": both[how].wall_us.median / WRITTEN, **cells("speedup", both.ratio("generate()", how)),
             "rounds": both[how].rounds, "samples": {"wall_us": both[how].wall_us.samples}} for how in calls]


@experiment
def article_benchmark():
    """Compare a decode step with its graph as the article does, one loop of each, once, and as we do, in rounds.

    A row for each size, batch and way to measure: both times and the speedup.
    """
    import torch

    from labkit import decode, timing

    rows = []
    for size, name in (("small", "GPT-2"), ("large", "Llama 8B")):
        model = _language(name)
        for batch in (1, 32) if size == "large" else (1,):
            pair, graph = as_pair(*decode.decode_step(model, batch, 128))
            with torch.inference_mode():
                eager_us, graph_us = (timing.one_loop_us(call, 200) for call in (pair["eager"], graph.replay))
                both = timing.compare(pair, budget_s=4)
            ours, point = both.ratio("eager", "graph"), {"size": size, "model": name, "batch": batch}
            once = timing.Spread(eager_us / graph_us, eager_us / graph_us, eager_us / graph_us, ())
            rows += [point | {"way": "one loop each", "eager_us": eager_us, "graph_us": graph_us, **cells("speedup", once)},
                     point | {"way": "in rounds", "eager_us": both["eager"].wall_us.median, "graph_us": both["graph"].wall_us.median,
                              **cells("speedup", ours), "samples": walls(both)}]
            del pair, graph
        del model
    return rows


@experiment
def streamed_text():
    """Let SmolLM2-135M answer a question, eager by generate() and by replays: when each token came.

    A row for each new token of each way: when it came, and the text that it adds.
    """
    import torch

    from labkit import decode, models, timing

    model, tokenizer = models.pretrained(dtype=torch.float32)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt",
                                        return_dict=True)["input_ids"].to(model.device)
    decoder, rows = decode.GraphedDecoder(model, ids.shape[1] + 96), []

    def eager(put):
        model.generate(ids, max_new_tokens=96, do_sample=False, streamer=_Streamer(put))

    def graph(put):
        decoder.generate(ids, 96, stream=put, every=1)

    for how, write in (("eager", eager), ("graph", graph)):
        for take in (False, True):  # the first text warms up
            elapsed, came = timing.stopwatch(), []
            with torch.inference_mode():
                write(lambda tokens: came.append((elapsed(), tokens.flatten().tolist())))
        told, all_tokens = "", []
        for at_us, tokens in came:
            all_tokens += tokens
            text = tokenizer.decode(all_tokens, skip_special_tokens=True)
            rows.append({"how": how, "at_us": at_us, "token": all_tokens[-1], "text": text[len(told):], "model": "SmolLM2-135M-Instruct",
                         "question": QUESTION})
            told = text
    return rows


class _Streamer:
    """Hands each new token on; generate() first puts the prompt, which is left out."""

    def __init__(self, put):
        self.take, self.prompt = put, True

    def put(self, tokens):
        if not self.prompt:
            self.take(tokens)
        self.prompt = False

    def end(self):
        pass


@experiment
def architecture_table():
    """Try each causal LM of transformers, tiny: does a static cache decode as generate() does, does its step replay, and right?

    A row for each architecture: what came of it by hand and by GraphedDecoder, and the first cause where it failed.
    """
    from concurrent.futures import ThreadPoolExecutor

    from tqdm import tqdm

    from labkit import architectures, isolate

    names = architectures.known_architectures()
    with ThreadPoolExecutor(12) as threads:
        rows = list(tqdm(threads.map(_tried, names), total=len(names), desc="trying", unit="architecture", leave=False))
    isolate.keep_one()
    return rows


def _tried(name):
    """Return the row of one architecture: what came of it by GraphedDecoder and by hand, in a process of its own.

    In two, where in one of the two a capture may have failed, or more: no process is the same after that.
    """
    row = {"architecture": name, "static_equals": None, "captures": None, "captured_equals": None, "cause": "", "decodes": False,
           "decoder_equals": None, "masks": None, "experts": None, "padding": None, "nodes": None, "why_not": ""}
    parts = {"why_not": _by_decoder, "cause": _by_hand}
    try:
        row |= in_child(_by_both, {"name": name}, 180)
        del parts["why_not"]
    except RuntimeError:
        pass  # tried again below, one by one
    for note, part in parts.items() if row["static_equals"] is None else ():
        try:
            row |= in_child(part, {"name": name}, 180)
        except RuntimeError as error:
            lines = str(error).splitlines()
            row[note] = next((line for line in lines if "Error: " in line), lines[-1])  # what CUDA adds below says nothing of it
    return row


def _by_both(name, device="cuda"):
    """Decode with GraphedDecoder and, if its first way of capturing was right, by hand."""
    found = _by_decoder(name, device)
    return found | (_by_hand(name, device) if found.get("masks") == "static" and not found["experts"] else {})


class _HandStep:
    """A decode step as a tutorial writes it: one token in, the next one out and back into its own input, over a static cache."""

    def __init__(self, model, max_length):
        import torch
        from transformers import StaticCache

        from labkit import decoding

        self.model, self.cache = model, StaticCache(config=model.config, max_cache_len=max_length)
        self.token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        self.keyword = decoding.cache_keyword(model)

    def __call__(self, ids=None):
        ids = self.token if ids is None else ids
        logits = self.model(input_ids=ids, use_cache=True, **{self.keyword: self.cache}).logits
        self.token.copy_(logits[:, -1].argmax(-1, keepdim=True))
        return self.token

    def write(self, ids, n, step):
        """Write n tokens after a prompt, (1, length), the first by a pass over it, the others by `step`; returns (1, n)."""
        import torch

        self.cache.reset()
        tokens = [self(ids).clone()]
        for _ in range(n - 1):
            step()
            tokens.append(self.token.clone())
        return torch.cat(tokens, 1)


def _by_hand(name, device="cuda", new=16):
    """Decode as a tutorial does, over a static cache, then capture that step as it is, after a prompt, and decode again."""
    import torch

    from labkit import architectures, decode, decoding, graphs

    model, found = architectures.tiny_model(name, device), {}
    if not decoding.cache_keyword(model):
        return {"static_equals": False, "cause": "its forward takes no cache"}
    ids = torch.randint(3, 96, (1, 6), generator=torch.Generator().manual_seed(1)).to(device)
    with torch.inference_mode():
        try:
            _, wanted = decode._generated(model, ids, torch.ones_like(ids, dtype=torch.bool), new)
            step = _HandStep(model, 48)
            found["static_equals"] = bool(torch.equal(step.write(ids, new, step), wanted))
            if device == "cuda":
                step.write(ids, 1, step)  # from the prompt again: what Python knows of the cache now is what is baked in
                graph = graphs.GraphedCallable(step, clone=False)
                found["captures"] = True
                found["captured_equals"] = all(torch.equal(step.write(ids, n, graph.replay), wanted[:, :n]) for n in (4, new))
        except Exception as error:  # whatever a model's own code may raise, or a replay that writes past a window's end
            found["captured_equals" if found.get("captures") else "captures" if found else "static_equals"] = False
            found["cause"] = decode._in_words(error)
    return found


def _by_decoder(name, device="cuda", new=16):
    """Decode two prompts with GraphedDecoder, past the edge of the tiny models' windows, and hold the tokens against generate()'s."""
    import torch

    from labkit import architectures, decode

    model = architectures.tiny_model(name, device)
    try:
        decoder = decode.GraphedDecoder(model, 48, 2)
    except decode.DecoderRefused as error:
        return {"decodes": False, "why_not": " ".join(str(error).split())}
    ids = torch.randint(3, 96, (2, 6), generator=torch.Generator().manual_seed(1)).to(device)
    with torch.inference_mode():
        _, wanted = decode._generated(model, ids, torch.ones_like(ids, dtype=torch.bool), new)
    tokens = decoder.generate(ids, new, eos_token_id=())
    return {"decodes": True, "decoder_equals": bool(torch.equal(tokens, wanted)), "masks": decoder.masks, "experts": decoder.experts,
            "padding": decoder.padding_refused is None,
            "nodes": len(decoder.graphs["greedy"].nodes) if decoder.captured else None}


@experiment
def architecture_speeds():
    """Time the decoder's step of each tiny architecture at batch 1, eager and as a graph.

    A row for each architecture that decodes: both times of a step and the speedup.
    """
    from labkit import architectures

    names, rows = architectures.known_architectures(), []
    for some in (names[i:i + 24] for i in range(0, len(names), 24)):  # what breaks a process takes few with it
        try:
            rows += in_child(_speeds, {"names": some}, 180)
        except RuntimeError as error:
            print(f"Left out: {', '.join(some)}: {str(error).splitlines()[-1]}")
    return rows


def _speeds(names, device="cuda"):
    import torch

    from labkit import architectures, decode, graphs, timing

    rows = []
    for name in names:
        try:
            step = decode.GraphedDecoder(architectures.tiny_model(name, device), 48).step
            indexers = [layer.indexer_cumulative_length for layer in step.cache.layers if hasattr(layer, "indexer_cumulative_length")]

            def held(step=step, indexers=indexers):
                step.hold(8)
                for counter in indexers:  # of sparse attention: its second cache counts by itself
                    counter.fill_(8)
                return step("greedy")

            with torch.inference_mode():
                graph = graphs.GraphedCallable(held, clone=False)
                both = timing.compare({"eager": held, "graph": graph.replay}, budget_s=0.2)
        except Exception as error:  # refused, or whatever a model's own code may raise: its row in architecture_table says why
            print(f"Left out: {name}: {str(error).partition(chr(10))[0]}")
            continue
        rows.append({"architecture": name, **cells("speedup", both.ratio("eager", "graph")), "eager_wall_us": both["eager"].wall_us.median,
                     "graph_wall_us": both["graph"].wall_us.median, "samples": walls(both)})
    return rows
