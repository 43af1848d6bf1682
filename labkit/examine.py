"""The capture doctor: would this callable capture as a CUDA graph, what stands in the way, and what would it gain?"""

import json
import linecache
import sys
import tempfile
import types
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
        times = (f"{name:8} {t[0]:,.{d}f} ({t[1]:,.{d}f} to {t[2]:,.{d}f}) {unit}" for name, t, d, unit in (
            ("eager", self.eager_us, 1, "µs of wall time"), ("graph", self.graph_us, 1, "µs of wall time"),
            ("speedup", self.speedup, 2, "times as fast")) if t)
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
    with tempfile.TemporaryDirectory(prefix="labkit-") as folder:
        call, answer = Path(folder) / "call", Path(folder) / "answer"
        try:
            _send(call, fn, inputs)
        except Exception as error:
            said = str(error).strip().partition("\n")[0] or type(error).__name__
            raise ValueError(f"this callable cannot be sent to a child process ({said}): make it importable, or pass here=True "
                             "(--here), and know that a failed capture leaves marks") from error
        result = isolate.run(f"import sys\nsys.path[:] = {sys.path!r}\nfrom labkit import examine\n"
                             f"examine.answer({str(call)!r}, {str(answer)!r})", timeout_s)
        if answer.exists():
            return Diagnosis(where="in a child process", **json.loads(answer.read_text("utf-8")))
    return Diagnosis(False, "in a child process", f"The trial did not finish.\n{result.cause or ''}\n{result.error}".strip())


def _send(path, fn, inputs):
    """Write a call to a file: torch's format, for its tensors; cloudpickle, for functions of a notebook, with their lines."""
    import cloudpickle
    import torch

    def code(code):  # cloudpickle would forget which file code comes from
        made, parts = cloudpickle.cloudpickle._code_reduce(code)
        return made, tuple(code.co_filename if part == "<dynamic-code>" else part for part in parts)

    class Pickler(cloudpickle.Pickler):
        dispatch_table = cloudpickle.Pickler.dispatch_table.new_child({types.CodeType: code})

    cells = {name: linecache.getlines(name) for name in list(linecache.cache) if "ipykernel" in name or name[:1] == "<"}
    torch.save((fn, inputs, cells), path, pickle_module=types.SimpleNamespace(__name__="cloudpickle", Pickler=Pickler))


def answer(call, path):
    """Examine a call that was written to a file, and write what came of it to another."""
    import torch

    fn, inputs, cells = torch.load(call, weights_only=False)
    linecache.cache |= {name: (1, None, lines, name) for name, lines in cells.items()}
    Path(path).write_text(json.dumps(examine(fn, inputs)), "utf-8")


def examine(fn, inputs):
    """Try the capture in this process; returns the fields of a Diagnosis, without `where`."""
    import torch

    from labkit import explain, graphs

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
    found = {"capturable": True, "nodes": dict(graph.node_kinds), "kernels": len(graph.kernel_names),
             "capture_seconds": graph.capture_seconds, "pool_bytes": graph.pool_bytes, "risks": risks}
    try:
        with torch.inference_mode(), torch.random.fork_rng(devices=[graph.device]), torch.cuda.device(graph.device):
            found |= _measured(fn, graph, inputs)
            found["largest_difference"] = apart = _difference(fn, graph, inputs)
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        risks.append(f"captured, but it then failed when called again, or on new values: {type(error).__name__}: {said}")
    else:
        if apart and apart > 1e-2:
            risks.append(f"on new values the replay is up to {apart:.3g} off: something that changes is baked in, or seeded")
    return found


def _measured(fn, graph, inputs):
    """Return wall times of eager and graph and the speedup, (median, low, high) each."""
    from labkit import timing

    both = timing.compare({"eager": lambda: fn(*inputs), "graph": lambda: graph(*inputs)}, budget_s=2)
    spreads = {"eager_us": both["eager"].wall_us, "graph_us": both["graph"].wall_us, "speedup": both.ratio("eager", "graph")}
    return {name: (spread.median, spread.low, spread.high) for name, spread in spreads.items()}


def _difference(fn, graph, inputs):
    """Return the largest difference between eager and replay on new inputs, relative to the largest value."""
    import torch
    from torch.utils import _pytree as pytree

    from labkit import graphs

    def renewed(t):  # whole numbers may be places in a table: those stay as they are
        if not t.is_floating_point() or t.dtype.itemsize == 1 or t.layout != torch.strided:
            return t
        shuffled = t.flatten()[torch.randperm(t.numel(), device=t.device)]
        return torch.empty_like(t).copy_(shuffled.view(t.shape) * 1.25)

    new = pytree.tree_map_only(torch.Tensor, renewed, inputs)
    answers = []
    for call in (fn, graph):
        torch.manual_seed(7)
        answers.append(pytree.tree_map_only(torch.Tensor, torch.clone, call(*new)))
    sizes = [t.abs().max().item() for t in pytree.tree_leaves(answers[0])
             if isinstance(t, torch.Tensor) and t.numel() and t.is_floating_point() and t.dtype.itemsize > 1]
    apart = graphs.difference(*answers)
    return apart / max([size for size in sizes if 0 < size < float("inf")], default=1.0) if apart else apart


def _risks(fn, inputs):
    """Call fn once, eagerly, and return what it changes beside its result, in words."""
    import torch

    from labkit import graphs, watch

    places = [slot for slot in watch.slots(fn, "", 4, {}, (torch.Tensor, int, float, str, bool, torch.nn.Module))
              if not isinstance(slot[3], torch.nn.Module)]
    versions = [value._version if isinstance(value, torch.nn.Parameter) else None for *_, value in places]
    before = [value.clone() if isinstance(value, torch.Tensor) and version is None else value
              for (*_, value), version in zip(places, versions, strict=True)]
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    state = generator.get_state()
    fn(*inputs)
    risks = []
    for (holder, key, label, _), old, version in zip(places, before, versions, strict=True):
        new = watch.now(holder, key)
        if isinstance(old, torch.Tensor):
            changed = new._version != version if version is not None and new is old else graphs.difference(new, old) != 0
            if changed:
                risks.append(f"each call changes the tensor {label}: warm-up leaves its marks there, so reset it before use")
        elif new is not old and (type(new) is not type(old) or new != old):
            risks.append(f"each call changes {label} ({old!r} to {new!r}): Python runs at capture only, a replay does not")
    if not torch.equal(state, generator.get_state()):
        risks.append("it draws random numbers: each replay draws new ones, from the generator as it is then")
    return risks
