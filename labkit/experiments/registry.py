"""How experiments are registered, run in a child, and compare an eager step with its graph."""

import ast
import functools
import inspect
import json
from dataclasses import replace

from labkit import machine, recordings

EXPERIMENTS = {}


def experiment(fn):
    """Register an experiment: its table is measured live, or comes from the recording."""
    signature = inspect.signature(fn)

    @functools.wraps(fn)
    def table(**params):
        bound = signature.bind(**params)
        bound.apply_defaults()
        return recordings.live_or_recorded(fn.__name__, bound.arguments, lambda: fn(**bound.arguments), table.source)

    table.measure, table.source = fn, inspect.getsource(fn)
    EXPERIMENTS[fn.__name__] = table
    return table


def as_recorded(name, gpu=None):
    """Return the recorded table of an experiment, also where labs run live, of the GPU in use or of another slug; see recordings.recorded."""
    return recordings.recorded(name, EXPERIMENTS[name].source, gpu)


def measured_or_recorded(name):
    """Return the table of an experiment: measured where labs run live and this machine has what it takes, else as recorded.

    What it can lack is GPU memory, or a package that is installed only if one asks for it; the reason is printed.
    """
    try:
        return EXPERIMENTS[name]()
    except Exception as error:
        if not _lacking(error):
            raise
        print(f"{name} is not measured here, but shown as recorded: {machine.first_line(error)}")
        return as_recorded(name)


def _lacking(error):
    """Say whether an error tells of what this machine does not have, and not of a mistake."""
    import torch

    from labkit import models

    return isinstance(error, (models.TooLarge, torch.OutOfMemoryError, FileNotFoundError, ModuleNotFoundError))


def apart(fn):
    """Run an experiment in a child process: the profiler would slow every later launch of this one."""
    return functools.wraps(fn)(lambda **params: in_child(fn, params))


def in_child(fn, params=None, timeout_s=300):
    """Return what a function of a module gives in a child process; RuntimeError with its first line if it fails.

    params: its keywords, plain values; what it returns must be what JSON can hold.
    """
    from labkit import isolate

    result = isolate.run(f"import inspect, json\nfrom {fn.__module__} import {fn.__name__} as fn\n"
                         f"json.dumps(inspect.unwrap(fn)(**{params or {}!r}))", timeout_s=timeout_s)
    if result.error:
        raise RuntimeError(f"{fn.__name__} failed in its own process: {result.error}")
    return answer_of(result)


def answer_of(result):
    """Return what a child's last line gave: a json.dumps(...)."""
    return json.loads(ast.literal_eval(result.outputs[-1]["data"]["text/plain"]))


def as_pair(model, x):
    """Return the same step eager and as a graph, {name: callable}, and the graph; to be called in inference mode."""
    from labkit import graphs

    graph = graphs.GraphedCallable(model, x)
    return {"eager": functools.partial(model, x), "graph": functools.partial(graph, x)}, graph


def compare_pairs(steps, budget_s, target=0):
    """Time many steps, eager and as graphs, all in the same rounds; yields (key, graph, Comparison of the pair) each.

    `steps` lists (key, options of models.build). What drifts while a sweep is measured then drifts under all of its
    points. A step that does not fit on the GPU is left out, and said to be.
    """
    import torch

    from labkit import models, timing

    pairs = {}
    for key, options in steps:
        try:
            pairs[key] = as_pair(*models.build(**options))
        except (models.TooLarge, torch.OutOfMemoryError) as error:
            print(f"Left out: {key}: {str(error).splitlines()[0]}")
    with torch.inference_mode():
        everything = timing.compare({(key, how): call for key, (pair, _) in pairs.items() for how, call in pair.items()},
                                    budget_s=budget_s, target=target)
    for key, (pair, graph) in pairs.items():
        yield key, graph, timing.Comparison({how: replace(everything[key, how], name=how) for how in pair})


def cells(column, spread):
    """Return a spread as three cells of a row: the value, _low and _high."""
    return {column: spread.median, f"{column}_low": spread.low, f"{column}_high": spread.high}


def walls(both):
    """Return the raw wall times of a comparison, as kept in a recording."""
    return {name: m.wall_us.samples for name, m in both.measurements.items()}
