"""Decoding with language models: the article's benchmark of a decode step. Times in µs."""

from labkit.experiments.registry import as_pair, cells, experiment, walls

LANGUAGE = {"GPT-2": ("gpt2", 12, 768, "float16"), "Llama 1B": ("llama", 16, 2048, "bfloat16"), "Llama 8B": ("llama", 32, 4096, "bfloat16")}


def _language(name):
    import torch

    from labkit import models

    kind, layers, width, precision = LANGUAGE[name]
    torch.cuda.empty_cache()
    return models.language_model(kind, layers=layers, width=width, dtype=getattr(torch, precision))


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
