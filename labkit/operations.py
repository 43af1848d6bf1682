"""The operations that `experiments.operation_table` tries to capture (operations.csv), and how one is tried.

In the list, `code` is an expression of x, a (64, 64) float32 tensor on the GPU, and of the names that `table_names` makes;
`before` is a statement that runs ahead of it; `instead` does the same, or what one wants of it, and can be captured.
"""

import csv
import linecache
from pathlib import Path


def listed():
    """Return the operations as dicts: group, operation, before, code, instead ("" where nothing but a split helps)."""
    with open(Path(__file__).with_name("operations.csv"), newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def table_names():
    """Return what the expressions are written with, as a dict; it uses no library that sets itself up."""
    import torch
    from torch.nn import functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.manual_seed(0)
    cuda = {"device": "cuda"}

    def then(_, result):
        return result

    def autocast(call):
        with torch.autocast("cuda", torch.float16):
            return call()

    def attend(backend, x):
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return F.scaled_dot_product_attention(*[x.half().view(1, 2, 64, 32)] * 3)

    def halve(x):
        while x.abs().max() > 1:
            x = x / 2
        return x

    def halve_at_most(x, times):
        for _ in range(times):
            x = torch.where(x.abs().max() > 1, x / 2, x)
        return x

    def routed(x):
        out, chosen = torch.zeros_like(x), x.argmax(-1) % 4
        for expert in range(4):
            out[chosen == expert] = x[chosen == expert] @ experts[expert].float().mT
        return out

    def stamp():
        event = torch.cuda.Event()
        event.record()
        return event

    def check(x):
        assert (x < 100).all()

    def aside(x, join):
        side, here = torch.cuda.Stream(), torch.cuda.current_stream()
        while side == here:  # streams come from a pool, and may be the one in use
            side = torch.cuda.Stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            y = x + 1
        if join:
            here.wait_stream(side)
        return y

    def on_default(x):
        with torch.cuda.stream(torch.cuda.default_stream()):
            return x + 1

    def library_copy(x, stream):
        from cuda.bindings import runtime
        y, kind = torch.empty_like(x), runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        runtime.cudaMemcpyAsync(y.data_ptr(), x.data_ptr(), x.nbytes, kind, stream)  # its answer is not looked at
        return y

    def gradient(x):
        with torch.inference_mode(False), torch.enable_grad():
            leaf = x.clone().requires_grad_()
            return torch.autograd.grad((leaf * leaf).sum(), leaf)[0]

    x, i, experts = torch.randn(64, 64, **cuda), torch.arange(63, -1, -1, **cuda), torch.randn(4, 64, 64, **cuda).bfloat16()
    return {name: value for name, value in locals().items() if name not in ("cuda", "SDPBackend", "sdpa_kernel")} | {
        "state": torch.zeros(64, 64, **cuda), "one": torch.ones((), **cuda), "fp8": torch.float8_e4m3fn,
        "spd": torch.eye(64, **cuda) * 3 + 0.1, "window": torch.ones(32, **cuda), "kernel": torch.ones(1, 1, 3, 3, **cuda),
        "mean": torch.zeros(64, **cuda), "rows": torch.arange(64, **cuda), "twos": torch.full((64,), 2.0, **cuda),
        "generator": torch.Generator("cuda").manual_seed(1), "host": torch.ones(64, 64),
        "pinned": torch.ones(64, 64).pin_memory(), "offsets": torch.tensor([16, 32, 48, 64], dtype=torch.int32, **cuda)}


def capture_trial(before, code, options="", split=False, like=""):
    """Capture an operation in this process, cold and then warm, and hold the replay against eager; returns a dict.

    captured, cold: whether it was captured, warm and cold. difference: the largest from eager, on new values of x. Where the
    capture failed: kind, cause, way_round, repaired. options: of GraphedCallable, as in a call. split: run it eagerly
    behind a graph. same: whether the replay gives what the expression `like` gives in eager mode.
    """
    import torch

    from labkit import graphs
    from labkit.explain import CaptureError

    given, found = table_names(), {"torch": torch.__version__, "cold": True}
    exec(before, given)
    call, original = _callable(code, given), _callable(like or code, given)
    x, options = given["x"], eval(f"dict({options})", given)
    if split:
        graph = graphs.SplitCallable([lambda x: x * 1, call], x, eager=(1,))
    else:
        try:
            graphs.GraphedCallable(call, x, warmup=0, **options)
        except CaptureError:
            found["cold"] = False
        try:
            graph = graphs.GraphedCallable(call, x, **options)
        except CaptureError as error:
            cause = f"{type(error.cause).__name__}: {str(error.cause).strip().splitlines()[0]}"
            return found | {"captured": False, "kind": error.kind, "cause": cause, "way_round": error.way_round,
                            "repaired": error.repaired}
    replayed, eager, wanted = _results((graph, call, original), torch.randn_like(x), given)
    same = graphs.difference(replayed, wanted)
    return found | {"captured": True, "difference": graphs.difference(replayed, eager), "same": same is not None and same < 1e-3}


def _callable(code, given):
    """Return a function of x that a failed capture can show the line of."""
    text, name = f"lambda x: {code}", f"<operation {code}>"
    linecache.cache[name] = len(text), None, [text], name
    return eval(compile(text, name, "eval"), given)


def _results(calls, new, given):
    """Return what each call gives for new values of x, from the same seeds and the same state."""
    import torch
    from torch.utils import _pytree as pytree

    results = []
    for call in calls:
        torch.manual_seed(7)
        given["generator"].manual_seed(7)
        given["state"].zero_()
        results.append(pytree.tree_map_only(torch.Tensor, torch.clone, call(new)))
    return results
