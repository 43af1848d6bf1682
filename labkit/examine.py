"""The capture doctor: would this callable capture as a CUDA graph, what stands in the way, and what would it gain?"""

import ast
import json
import linecache
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

from labkit import isolate, machine

NOT_SEEN = ("Not always seen from outside: Python branches and numbers, which are baked in as they were at capture; work that a "
            "library puts on the default stream; prints, files and counters elsewhere; other shapes than these.")


@dataclass(frozen=True)
class Diagnosis:
    """What came of a trial capture; printed, it is a report. Times are microseconds of wall time, (median, low, high)."""

    capturable: bool
    where: str
    failure: str = ""  # first cause, your line, kind, way round
    nodes: dict | None = None  # how many of each kind
    kernels: int = 0
    capture_seconds: float = 0.0
    pool_bytes: int = 0
    eager_us: tuple = ()
    graph_us: tuple = ()
    speedup: tuple = ()
    largest_difference: float | None = None  # between eager and replay, over the largest value, on values new to the graph
    risks: tuple = ()  # what would go wrong without a word

    def __str__(self):
        if not self.capturable:
            return f"Not capturable, as tried {self.where}.\n{self.failure}\n\n{NOT_SEEN}"
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.nodes.items())
        apart = self.largest_difference
        same = "are no tensors" if apart is None else f"up to {apart:.3g} off eager" if apart else "the same numbers as eager"
        times = (f"{name:8} {t[0]:,.1f} ({t[1]:,.1f} to {t[2]:,.1f}){unit}" for name, t, unit in (
            ("eager", self.eager_us, " µs"), ("graph", self.graph_us, " µs"), ("speedup", self.speedup, " times as fast")))
        lines = [f"Capturable, as tried {self.where}.", f"nodes    {kinds}", f"kernels  {self.kernels}",
                 f"capture  {self.capture_seconds * 1e3:,.1f} ms, {self.pool_bytes / 2**20:,.1f} MiB stay in its pool", *times,
                 f"results  {same}", *(f"RISK     {risk}" for risk in self.risks)]
        return "\n".join([*lines, "", NOT_SEEN])

    __repr__ = __str__


def diagnose(fn, *inputs, here=False, timeout_s=120.0):
    """Try to capture fn(*inputs) in a child process, which a failure cannot harm, and measure it -> Diagnosis.

    fn: any callable or nn.Module; inputs: any pytree of tensors on one GPU. Both are sent to the child, weights too. What
    cannot be sent raises ValueError; `here=True` then tries it in this process, at your risk (a warning says so).
    Raises NoGPU without a GPU.
    """
    machine.require_gpu("A trial capture")
    if here:
        warnings.warn("the trial capture runs in this process: if it fails, save your work and restart", stacklevel=2)
        return Diagnosis(where="in this process", **examine(fn, inputs))
    import cloudpickle
    with tempfile.TemporaryDirectory(prefix="labkit-") as folder:
        path = Path(folder) / "call"
        try:
            cells = {name: linecache.getlines(name) for name in list(linecache.cache) if "ipykernel" in name or name[0] == "<"}
            path.write_bytes(cloudpickle.dumps((fn, inputs, cells)))  # cells, so that a failure can show its line
        except Exception as error:
            raise ValueError(f"this callable cannot be sent to a child process ({str(error).strip().splitlines()[0]}): make "
                             "it importable, or pass here=True (--here), and know that a failed capture leaves marks") from error
        result = isolate.run(f"import json\nfrom labkit import examine\njson.dumps(examine.sent({str(path)!r}))", timeout_s)
    if result.error:
        return Diagnosis(False, "in a child process", f"{result.cause or ''}\n{result.error}".strip())
    found = json.loads(ast.literal_eval(result.outputs[-1]["data"]["text/plain"]))
    return Diagnosis(where="in a child process", **found)


def sent(path):
    """Examine a call that was written to a file."""
    import cloudpickle

    fn, inputs, cells = cloudpickle.loads(Path(path).read_bytes())
    linecache.cache |= {name: (1, None, lines, name) for name, lines in cells.items()}
    return examine(fn, inputs)


def examine(fn, inputs):
    """Try the capture in this process; returns the fields of a Diagnosis, without `where`."""
    import torch

    from labkit import explain, graphs, timing

    try:
        with torch.inference_mode():
            risks = _risks(fn, inputs)
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        return {"capturable": False, "failure": f"it fails without a capture, too: {type(error).__name__}: {said}\n"
                                                f"  where: {explain.user_line(error)}"}
    try:
        graph = graphs.GraphedCallable(fn, inputs)
    except (explain.CaptureError, TypeError, ValueError) as error:
        return {"capturable": False, "failure": str(error)}
    with torch.inference_mode():
        apart = _difference(fn, graph, inputs)
        both = timing.compare({"eager": lambda: fn(*inputs), "graph": lambda: graph(*inputs)}, budget_s=2)
    if apart and apart > 1e-2:
        risks = [*risks, f"on new values the replay is up to {apart:.3g} off: something that changes is baked in, or seeded inside"]
    eager, replay, speedup = both["eager"].wall_us, both["graph"].wall_us, both.ratio("eager", "graph")
    return {"capturable": True, "nodes": dict(graph.node_kinds), "kernels": len(graph.kernel_names),
            "capture_seconds": graph.capture_seconds, "pool_bytes": graph.pool_bytes, "largest_difference": apart,
            "risks": risks, **{name: (s.median, s.low, s.high) for name, s in (
                ("eager_us", eager), ("graph_us", replay), ("speedup", speedup))}}


def _difference(fn, graph, inputs):
    """Return the largest difference between eager and replay on new inputs, relative to the largest value."""
    import torch
    from torch.utils import _pytree as pytree

    from labkit import graphs

    def renewed(t):
        shuffled = t.flatten()[torch.randperm(t.numel(), device=t.device)].view(t.shape)
        return shuffled * 1.25 if t.is_floating_point() else shuffled  # whole numbers may be places in a table

    new = pytree.tree_map_only(torch.Tensor, renewed, inputs)
    answers = []
    for call in (fn, graph):
        torch.manual_seed(7)
        answers.append(pytree.tree_map_only(torch.Tensor, torch.clone, call(*new)))
    sizes = [t.abs().max().item() for t in pytree.tree_leaves(answers[0]) if isinstance(t, torch.Tensor) and t.numel()]
    apart = graphs.difference(*answers)
    return apart / max([size for size in sizes if 0 < size < float("inf")], default=1.0) if apart else apart


def _risks(fn, inputs):
    """Call fn once, eagerly, and return what it changes beside its result, in words."""
    import torch

    from labkit import watch

    places = [slot for slot in watch.slots(fn, "", 4, {}, (torch.Tensor, int, float, str, bool, torch.nn.Module))
              if not isinstance(slot[3], torch.nn.Module)]
    before = [value.clone() if isinstance(value, torch.Tensor) else value for *_, value in places]
    state = torch.cuda.default_generators[torch.cuda.current_device()].get_state()
    fn(*inputs)
    risks = []
    for (holder, key, label, _), old in zip(places, before, strict=True):
        new = watch.now(holder, key)
        if isinstance(old, torch.Tensor):
            if not (isinstance(new, torch.Tensor) and new.shape == old.shape and torch.equal(new, old)):
                risks.append(f"each call changes the tensor {label}: warm-up leaves its marks there, so reset it before use")
        elif new != old:
            risks.append(f"each call changes {label} ({old!r} to {new!r}): Python runs at capture only, a replay does not")
    if not torch.equal(state, torch.cuda.default_generators[torch.cuda.current_device()].get_state()):
        risks.append("it draws random numbers: each replay draws new ones, from the generator as it is then")
    return risks
