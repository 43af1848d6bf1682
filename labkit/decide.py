"""Should this model use CUDA graphs? Measured here, or looked up among the recorded sweeps, and judged by stated rules."""

import functools
import importlib
import sys
from dataclasses import dataclass, replace
from html import escape
from math import ceil, log2
from pathlib import Path

from labkit import charts, experiments, machine, recordings, report
from labkit.experiments.registry import in_child
from labkit.experiments.sweeps import INPUTS, PRECISIONS

GAIN, OFF, CALLS, MEMORY = 1.1, 0.01, 10_000, 0.1  # the bounds of all rules
USE, STAY, UNSURE, WRONG, CANNOT, UNKNOWN = ADVICE = (
    "use a graph", "stay eager", "too close to say", "do not use its graph", "cannot be captured", "not measured")
RULES = {
    USE: f"the speedup is at least {GAIN:g}, by the lower end of its interval",
    STAY: f"the speedup is below {GAIN:g}, by the upper end of its interval",
    UNSURE: f"the interval of the speedup holds {GAIN:g}",
    WRONG: f"replayed, it fails, or its results are more than {OFF:.0%} off on new values",
    CANNOT: "the trial capture fails; the first cause stands there"}
REMARKS = (f"A capture that needs more than {CALLS:,} calls to pay for itself, and a pool of more than {MEMORY:.0%} of the GPU's memory, are "
           "pointed out. A capture is timed once, its warm-up calls included. A target was met when the whole interval of the median call is "
           "within it, and missed when all of it is beyond. That interval is of the one process that measured: another process, where the CPU "
           "may be slower, and single calls can take longer. torch.compile gives more where its whole interval lies above the graph's; its results are not compared.")
NEAREST = "Not recorded as asked; this is the nearest that is"
TARGET = {(False, True): "only a graph met", (None, True): "a graph met, and eager perhaps,", (True, False): "only eager met",
          (True, None): "eager met, and a graph perhaps,", (True, True): "both met", (False, False): "neither met"}  # of (eager, graph)
SIZES = {"mlp": (24, 1024, 1), "transformer": (24, 512, 64), "causal": (24, 512, 64), "gpt2": (12, 768, 128), "llama": (16, 2048, 128)}


@dataclass(frozen=True)
class Point:
    """What is known of a step at one batch. Times are wall times in µs, and speedups over eager, as (median, low, high)."""

    batch: int
    eager_us: tuple = ()
    graph_us: tuple = ()
    speedup: tuple = ()
    kernels: int = 0
    capture_seconds: float | None = None
    pool_bytes: int | None = None
    off: float | None = None  # how far results differ on new values, over the largest
    failure: str = ""  # why it cannot be captured
    skipped: str = ""  # why nothing is known
    risks: tuple = ()
    compiled: dict | None = None  # speedups by torch.compile, by how, and the `seconds` of compiling; or `failed`, a reason
    note: str = ""  # what was looked up instead of what was asked for

    @property
    def advice(self):
        """Return one of ADVICE, by the RULES."""
        if self.skipped or self.failure:
            return UNKNOWN if self.skipped else CANNOT
        if not self.speedup or self.off is not None and not self.off <= OFF:
            return WRONG
        _, low, high = self.speedup
        return USE if low >= GAIN else STAY if high < GAIN else UNSURE

    @property
    def break_even(self):
        """Return after how many calls the capture has paid for itself; None where that is not known, or never."""
        saved = self.eager_us[0] - self.graph_us[0] if self.eager_us and self.graph_us else 0
        return ceil(self.capture_seconds * 1e6 / saved) if self.capture_seconds is not None and saved > 0 else None

    @property
    def better_compiled(self):
        """Return the ways of torch.compile whose speedup lies above the graph's, with both whole intervals."""
        ways = {how: s for how, s in (self.compiled or {}).items() if how not in ("seconds", "failed")}
        return {how: s for how, s in ways.items() if s[1] > (self.speedup[2] if self.speedup else GAIN)}


@dataclass(frozen=True)
class Decision:
    """The answer for some batches of a model; printed, it is a page. latency_us: the target, or None. label: where numbers are from."""

    model: str
    points: tuple
    label: str
    latency_us: float | None = None
    memory_bytes: float | None = None

    @property
    def recommendation(self):
        """Return what to do, in one sentence."""
        said = []
        for advice in ADVICE:
            points = [point for point in self.points if point.advice == advice]
            if points:
                speeds = sorted(point.speedup[0] for point in points) if advice in (USE, STAY, UNSURE) else ()
                gain = " to ".join(dict.fromkeys(f"{speed:.2f}" for speed in (*speeds[:1], *speeds[-1:])))
                said.append(f"{advice} at {_batches(points)}" + (gain and f", {gain} times as fast"))
        if better := [point for point in self.points if point.better_compiled]:
            said.append(f"torch.compile gives more at {_batches(better)}")
        if self.latency_us:
            met = [(p, tuple(_meets(p, how, self.latency_us) for how in ("eager", "a graph"))) for p in self.points]
            grouped = {words: [p for p, each in met if each == wanted] for wanted, words in TARGET.items()}
            targets = [f"{words} {charts.time(self.latency_us)} at {_batches(points)}" for words, points in grouped.items() if points]
            said += [f"in the one process that measured, {', '.join(targets)}"] * bool(targets)
        if any(NEAREST in point.note for point in self.points):
            said.append("not all of this was recorded as asked: see the notes")
        return "; ".join(said)[:1].upper() + "; ".join(said)[1:] + "."

    def rows(self):
        """Return what is known of each batch in words: {what: [a text for each point]}."""
        told = [self._told(point) for point in self.points]
        return {what: [one.get(what, "") for one in told] for what in dict.fromkeys(what for one in told for what in one)}

    def _told(self, p):
        told = {"batch": f"{p.batch:,}", "advice": p.advice, "why": p.skipped or p.failure or RULES[p.advice]}
        told |= {name: _span(us, charts.time) for name, us in (("eager", p.eager_us), ("as a graph", p.graph_us)) if us}
        if p.speedup:
            told |= {"speedup": _span(p.speedup, "{:.2f}".format), "kernels": f"{p.kernels:,}"}
        if p.capture_seconds is not None:
            told["capture"] = charts.time(p.capture_seconds * 1e6)
            calls = p.break_even
            told["paid back after"] = "never" if calls is None else (
                f"{calls:,} call{'s' * (calls > 1)}" + ": only for steps that run this often" * (calls > CALLS) + ", or never" * (p.speedup[1] <= 1))
        if p.pool_bytes is not None:
            share = p.pool_bytes / self.memory_bytes if self.memory_bytes else 0
            told["pool"] = f"{p.pool_bytes / 2**20:,.1f} MiB" + f": {share:.0%} of this GPU's memory" * (share > MEMORY)
        if p.compiled is not None:
            ways = {how: s for how, s in p.compiled.items() if how not in ("seconds", "failed")}
            told["torch.compile"] = p.compiled.get("failed") or "; ".join(f"{how} {_span(s, '{:.2f}'.format)}" for how, s in ways.items()) + (
                f" times as fast as eager; compiling took {p.compiled['seconds']:.0f} s")
        if self.latency_us and p.speedup:
            words = {True: "met", False: "missed", None: "too close to say"}
            eager, graph = (words[_meets(p, how, self.latency_us)] for how in ("eager", "a graph"))
            told[f"{charts.time(self.latency_us)} or less"] = f"eager: {eager}; a graph: {'not to be used' if p.advice == WRONG else graph}"
        return told | ({"careful": "; ".join(p.risks)} if p.risks else {}) | ({"note": p.note} if p.note else {})

    def __str__(self):
        rows, lines = self.rows(), [f"{self.model}: {self.recommendation}", f"({self.label}.)"]
        for i in range(len(self.points)):
            lines += ["", f"batch {rows['batch'][i]}", *(f"  {what:16} {texts[i]}".replace("\n", "\n" + " " * 19)
                                                        for what, texts in rows.items() if what != "batch" and texts[i])]
        rules = [f"  {advice}: {rule}." for advice, rule in RULES.items()]
        return "\n".join([*lines, "", "The rules:", *rules, f"  {REMARKS}"])

    __repr__ = __str__

    def _repr_html_(self):
        rules = "".join(f"<li>{escape(advice)}: {escape(rule)}.</li>" for advice, rule in RULES.items())
        return (f'<p><b>{escape(self.model)}: {escape(self.recommendation)}</b></p>{report.grid(self.rows())}'
                f"<small>{escape(self.label)}.</small><details><summary>The rules</summary><ul>{rules}</ul>{REMARKS}</details>")


def _batches(points):
    *most, last = dict.fromkeys(f"{point.batch:,}" for point in points)
    return f"batch {', '.join(most)}{' and ' if most else ''}{last}"


def _span(values, say):
    middle, low, high = map(say, values)
    return f"{middle} ({low} to {high})"


def _meets(point, how, target_us):
    """Say whether a step met a target (µs) by its whole interval: True, False (a graph of no use never does), or None, not known."""
    if how != "eager" and point.advice in (WRONG, CANNOT):
        return False
    times = point.eager_us if how == "eager" else point.graph_us
    return None if not times or times[1] <= target_us < times[2] else times[2] <= target_us


# ---- where numbers come from

def decide(model, batches=(1, 8, 32), *, latency_us=None, **options):
    """Judge a model at some batches -> Decision. latency_us: a target in µs; for the others see `points`, which also says what it raises."""
    *_, answer = answers(model, batches, latency_us=latency_us, **options)
    return answer


def answers(model, batches, *, latency_us=None, **options):
    """Yield the Decision after each batch, as `decide` gives it after the last; ValueError for a target that is no time, and see `points`."""
    if not (latency_us is None or isinstance(latency_us, (int, float)) and latency_us > 0):
        raise ValueError(f"a target is a time above 0, not {latency_us!r}")
    found, live = (), _is_live(model)
    for point in points(model, batches, **options):
        label = recordings.provenance("decide")["label"] if live else experiments.as_recorded(f"sweep_{model}").attrs["provenance"]["label"]
        found += (point,)
        yield Decision(model, found, label, latency_us, machine.describe().memory_gib * 2**30 if live else None)


def points(model, batches=(1, 8, 32), *, inputs=(), layers=None, width=None, length=None, precision="float16", compiled=True, timeout_s=120.0):
    """Yield a Point for each batch, measured here in child processes, or (ours, where nothing is measured) the nearest recorded.

    model: one of SIZES; a folder or config.json of a causal LM of transformers, whose decode step is taken, with random weights;
    or module:callable with `inputs` like "Bx128:float16", where B stands for the batch. layers, width: of ours. length: tokens of
    a transformer's step, context of a decode step. timeout_s: for each capture, and each torch.compile (left out without
    `compiled`). Raises ValueError for what cannot be asked for, NoGPU for what is not recorded.
    """
    kind, default = kind_of(model), SIZES.get(model, (None, None, 128))
    size = tuple(given if given is not None else ours for given, ours in zip((layers, width, length), default))
    if kind != "ours" and (layers or width):
        raise ValueError(f"layers and width are those of {model} itself")
    if (kind == "callable") != bool(inputs):
        raise ValueError("a module:callable, and nothing else, takes inputs, like Bx128:float16")
    if not batches or not all(isinstance(n, int) and n > 0 for n in (*batches, *filter(lambda n: n is not None, size))):
        raise ValueError("batches (one at least), layers, width and length are whole numbers from 1")
    if precision not in PRECISIONS:
        raise ValueError(f"precision is one of {', '.join(PRECISIONS)}")
    batches = list(dict.fromkeys(batches))
    if kind == "callable" and len(batches) > 1 and not any("B" in text.partition(":")[0] for text in inputs):
        raise ValueError("several batches need inputs that say where the batch goes: write B for it, like Bx128:float16")
    if not _is_live(model):
        yield from _looked_up(model, size, precision, batches)
        return
    machine.require_gpu(f"Measuring {model} (recorded are {', '.join(sorted(SIZES.keys() - {'causal'}))})")
    what = {"kind": kind, "model": model, "size": size, "precision": precision, "inputs": tuple(inputs), "path": [*sys.path]}
    for batch in batches:
        found = _asked_of_a_child(trial_capture, what | {"batch": batch}, timeout_s)
        point = Point(batch, **{name: tuple(value) if isinstance(value, list) else value for name, value in found.items()})
        asked = _asked_of_a_child(trial_compile, what | {"batch": batch}, timeout_s) if compiled and not point.skipped else None
        yield point if asked is None else replace(point, compiled={"failed": asked["skipped"]} if "skipped" in asked else asked)


def kind_of(model):
    """Say what a model is, by its name: "ours", "config" or "callable"; ValueError where it is none of them."""
    if model in SIZES:
        return "ours"
    if Path(model).is_file() or Path(model, "config.json").is_file():
        return "config"
    if ":" in model:
        return "callable"
    raise ValueError(f"{model!r} is none of ours ({', '.join(SIZES)}), no folder or file with a config.json of transformers, and no module:callable")


def _is_live(model):
    return recordings.tables_are_live() or f"sweep_{model}" not in experiments.EXPERIMENTS


def _looked_up(model, size, precision, batches):
    """Yield the recorded points nearest to what was asked for, each named where it is another."""
    rows, costs = experiments.as_recorded(f"sweep_{model}"), experiments.as_recorded("capture_cost")
    wanted = dict(zip(INPUTS[1:], (*size, precision)))

    def far(row, names):
        return sum(abs(log2(row[name] / wanted[name])) if isinstance(wanted[name], int) else 100 * (row[name] != wanted[name]) for name in names)

    for batch in batches:
        wanted["batch"] = batch
        row = min(rows.to_dict("records"), key=lambda row: (far(row, INPUTS[1:]), far(row, ["batch"])))
        other = [f"{name} {row[name]} for {wanted[name]}" for name in wanted if row[name] != wanted[name]]
        note = f"{NEAREST}: {', '.join(other)}. " if other else ""
        if row["skipped"]:
            yield Point(row["batch"], skipped=row["skipped"], note=note)
            continue
        like = min(costs.to_dict("records"), key=lambda cost: abs(log2(cost["kernels"] / row["kernels"])))
        spans = {name: tuple(row[column + end] for end in ("", "_low", "_high")) for name, column in (
            ("eager_us", "eager_wall_us"), ("graph_us", "graph_wall_us"), ("speedup", "speedup"))}
        near = 0.5 <= like["kernels"] / row["kernels"] <= 2
        cost = (f"The capture is that of a recorded graph of {like['kernels']:,} kernels; its pool is not recorded." if near else
                "What its capture costs is not recorded.")
        yield Point(row["batch"], **spans, kernels=int(row["kernels"]), capture_seconds=like["capture_s"] if near else None,
                    compiled={"failed": "not recorded: needs a GPU"}, note=note + cost)


def _asked_of_a_child(trial, what, timeout_s):
    try:
        return in_child(trial, what, timeout_s)
    except RuntimeError as error:  # its first line is our own call, where the child raised
        return {"skipped": str(error).splitlines()[:2][-1]}


def trial_capture(batch, **what):
    """Capture and measure the step of a batch in this process: the fields of a Point, or `skipped`, why there is no step."""
    from labkit import examine

    if isinstance(made := _made(batch, **what), str):
        return {"skipped": made}
    found = examine.examine(*made)
    if found.get("failure", "").startswith("it fails without a capture"):  # which says nothing about graphs
        return {"skipped": found["failure"]}
    found["off"] = found.pop("largest_difference", None)
    return {name: value for name, value in found.items() if name in Point.__dataclass_fields__}


def trial_compile(batch, **what):
    """Compile the step of a batch with torch.compile, then capture that: speedups over eager, and how long compiling took (seconds).

    {"skipped": why} where there is no step, or where it does not compile.
    """
    import torch

    from labkit import graphs, timing

    if isinstance(made := _made(batch, **what), str):
        return {"skipped": made}
    (fn, inputs), found, elapsed = made, {}, timing.stopwatch()
    with torch.inference_mode():
        try:
            compiled = torch.compile(fn, dynamic=False)
            compiled(*inputs)
            torch.cuda.synchronize()
            found["seconds"] = elapsed() / 1e6
            for how in ("compiled", "compiled and captured"):
                call = compiled if how == "compiled" else graphs.GraphedCallable(compiled, inputs)
                both = timing.compare({"eager": lambda: fn(*inputs), how: lambda: call(*inputs)}, budget_s=2)
                spread = both.ratio("eager", how)
                found[how] = (spread.median, spread.low, spread.high)
        except Exception as error:  # whatever a compiler may raise; what was measured before it stays
            return found if len(found) > 1 else {"skipped": f"it fails: {_first_line(error)}"}
    return found


def _made(batch, path, **what):
    """Return the step of a batch, as (callable, inputs), or in words why there is none."""
    sys.path[:] = path
    try:
        return _step(batch, **what)
    except Exception as error:  # too large, or whatever a module or config of others may do
        return _first_line(error)


def _step(batch, kind, model, size, precision, inputs):
    import torch

    from labkit import decode, models

    (layers, width, length), dtype = size, getattr(torch, precision)
    if kind == "callable":
        return imported(model), tuple(example(text.replace("B", str(batch))) for text in inputs)
    if model in models.KINDS:
        fn, x = models.build(model, layers=layers, width=width, batch=batch, tokens=length, dtype=dtype)
    else:
        whole = _from_config(model, dtype) if kind == "config" else models.language_model(model, layers=layers, width=width, dtype=dtype)
        fn, x = decode.decode_step(whole, batch, length)
    return fn, (x,)


def _from_config(path, dtype, device="cuda"):
    """Build a causal LM of transformers from its config, with random weights: time does not depend on them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from labkit import models

    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        weights = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    models.require_room(f"a {config.model_type} of {weights / 1e9:.1f} billion weights in {dtype}", weights * dtype.itemsize)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)


def imported(name):
    """Return what module:callable names, a module of torch on the GPU and in eval mode; ValueError where there is none."""
    import torch

    module, _, path = name.partition(":")
    try:
        fn = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except (Exception, SystemExit) as error:  # importing runs the module
        raise ValueError(f"{name!r} is no module:callable that can be imported from here ({_first_line(error)})") from error
    if isinstance(fn, torch.nn.Module):
        return fn.cuda().eval()
    if not callable(fn):
        raise ValueError(f"{name} is a {type(fn).__name__}, which cannot be called")
    return fn


def example(text):
    """Make a tensor on the GPU from "1x128:float16": normal numbers, or for whole-number types zeros; ValueError for another text."""
    import torch
    shape, _, dtype = text.partition(":")
    try:
        shape, dtype = [int(size) for size in shape.split("x")], getattr(torch, dtype or "float32")
        zeros = torch.zeros(shape, dtype=dtype, device="cuda")
        return zeros.float().normal_().to(dtype) if dtype.is_floating_point else zeros
    except (ValueError, AttributeError, TypeError, RuntimeError) as error:
        raise ValueError(f"--input wants a shape and a type, like 1x128:float16, not {text!r} ({_first_line(error)})") from error


def _first_line(error):
    return f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
