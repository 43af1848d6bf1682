"""Capture a callable once as a CUDA graph, replay it with new inputs, and refuse whatever would be silently wrong.

What PyTorch asks of a capture: docs.pytorch.org/docs/stable/notes/cuda.html, "CUDA Graphs".
"""

import gc
import threading
import time
import traceback
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, cached_property, partial

import torch
from torch.utils import _pytree as pytree

from labkit import contents, machine
from labkit.explain import CaptureError
from labkit.watch import ReplayError, Watched, slots

_one_at_a_time = threading.RLock()
_failed = []


class GraphedCallable:
    """A callable captured as one CUDA graph: called like the original, it copies the inputs in and replays.

    fn: any callable or nn.Module, run in inference mode. args, kwargs: example inputs, any pytree of tensors on one GPU
    (other values are baked in, and checked). warmup: eager calls before the capture. clone: return copies; with False,
    the graph's own output buffers, which the next call overwrites. pool: share the memory pool of another graph
    (one in which a capture has failed may take no more captures).
    generators: torch.Generators that fn draws from. limit: how many calls are allowed (a cache's length), see `rewind`.

    Attributes: nodes, node_kinds, kernel_names, capture_seconds, pool, pool_bytes, inputs and outputs (static buffers).
    Raises NoGPU without a GPU, CaptureError when the capture fails, TypeError or ValueError for examples or results that no
    graph can take or give, and when inputs differ from the examples, and ReplayError when fn's modules or tensors changed
    since. One stream and one thread at a time, as for any graph.
    Watched are the modules and tensors that fn is, is bound to, closes over, names, or holds up to four steps deep; not
    plain Python values: those are baked in, as are hooks and autocast as they were.
    """

    def __init__(self, fn, args=(), kwargs=None, *, warmup=3, clone=True, pool=None, generators=(), limit=None):
        machine.require_gpu("Capturing a CUDA graph")
        if not isinstance(args, (torch.Tensor, tuple, list)):
            raise TypeError(f"args must be a tensor, or a tuple of the positional arguments, not a {type(args).__name__}")
        args, kwargs = (args,) if isinstance(args, torch.Tensor) else tuple(args), kwargs or {}
        leaves, self._structure = _flatten(args, kwargs)
        self.device = _only_device(leaves)
        self._flat = not kwargs and all(isinstance(a, torch.Tensor) for a in args)
        with torch.inference_mode(False):
            held = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._tensors = [(i, t, t.shape, t.dtype, t.get_device()) for i, t in enumerate(held) if isinstance(t, torch.Tensor)]
        self._constants = [(i, value) for i, value in enumerate(held) if not isinstance(value, torch.Tensor)]
        self.inputs = tuple(tensor for _, tensor, *_ in self._tensors)
        self._buffers = set(map(id, self.inputs))
        self._clone, self.limit, self._calls = clone, limit, 0
        self.pool = pool or torch.cuda.graph_pool_handle()
        args, kwargs = pytree.tree_unflatten(held, self._structure)
        with _one_at_a_time:
            self._graph, result, self.capture_seconds = _capture(partial(fn, *args, **kwargs), self.device, self.pool,
                                                                 generators, warmup, self.inputs)
        self._outputs, self._out_structure = pytree.tree_flatten(result)
        self.outputs = tuple(t for t in self._outputs if isinstance(t, torch.Tensor))
        _refuse_outputs(self._outputs, self.device)
        self._single = isinstance(result, torch.Tensor)
        self._watched = Watched(fn, [value for _, value in self._constants])

    def __call__(self, *args, **kwargs):
        """Check the inputs (structure, shape, dtype, device of the examples), copy them in, replay, return the outputs."""
        leaves = args if self._flat and not kwargs and len(args) == len(self.inputs) else self._leaves(args, kwargs)
        for i, _, shape, dtype, device in self._tensors:
            leaf = leaves[i]
            if not isinstance(leaf, torch.Tensor) or leaf.shape != shape or leaf.dtype is not dtype \
                    or leaf.get_device() != device:
                raise _mismatch(i, shape, dtype, device, leaf)
        for i, value in self._constants:
            if leaves[i] is not value and (type(leaves[i]) is not type(value) or leaves[i] != value):
                raise ValueError(f"input {i} was {value!r} at capture and is baked in; {leaves[i]!r} needs its own graph")
        self._watched.check()
        if len(leaves) > 1:  # an input may be another one's buffer, which is about to change
            leaves = [leaf.clone() if id(leaf) in self._buffers else leaf for leaf in leaves]
        for i, buffer, *_ in self._tensors:
            leaf = leaves[i]
            if leaf is not buffer:
                buffer.copy_(leaf.detach() if leaf.requires_grad else leaf)
        self.replay()
        if self._single:
            return self._outputs[0].clone() if self._clone else self._outputs[0]
        outputs = [t.clone() if self._clone and isinstance(t, torch.Tensor) else t for t in self._outputs]
        return pytree.tree_unflatten(outputs, self._out_structure)

    def _leaves(self, args, kwargs):
        leaves, structure = _flatten(args, kwargs)
        if structure != self._structure:
            raise TypeError(f"captured for inputs of the structure {self._structure}, called with {structure}")
        return leaves

    def replay(self):
        """Replay on the buffers as they are: no copy in, no copy out, no check but that of `limit`, beyond which it is a ReplayError."""
        if self.limit is not None and self._calls >= self.limit:
            raise ReplayError(f"replayed {self._calls} times, its limit: what the call writes to is full; reset it, then rewind()")
        self._calls += 1
        self._graph.replay()

    def rewind(self):
        """Count calls towards `limit` from zero again, after what the call writes to was reset."""
        self._calls = 0

    @property
    def raw_graph(self):
        """Return the address of the CUgraph, an int, for cuda.bindings."""
        return self._graph.raw_cuda_graph()

    @cached_property
    def nodes(self):
        """Return the nodes of the graph, in order: a list of contents.Node."""
        return contents.nodes(self._graph)

    @property
    def node_kinds(self):
        """Return how many nodes of each kind the graph has: a Counter."""
        return Counter(node.kind for node in self.nodes)

    @property
    def kernel_names(self):
        """Return the short names of the graph's kernels, in order."""
        return [node.name for node in self.nodes if node.kind == "kernel"]

    @property
    def pool_bytes(self):
        """Return the bytes of GPU memory that the graph's pool keeps reserved, for all graphs that share it."""
        return contents.pool_bytes(self.pool)


class SplitCallable:
    """A chain of callables, each captured as a graph of its own where it can be, and called eagerly where it cannot.

    pieces: each takes what the one before returned (a tuple: as its arguments). args: example inputs of the first, tensors
    on one GPU. eager: places of pieces that are not even tried, as a failed capture can leave a library unusable (cuSOLVER,
    for one). options: as of GraphedCallable. Attributes: pieces; reasons, None for a graph, else why it is none.
    Raises ValueError without a piece, IndexError for a place that there is not, and what a piece itself raises.
    """

    def __init__(self, pieces, *args, eager=(), **options):
        self.pieces, self.reasons, pieces = [], [], list(pieces)
        if not pieces:
            raise ValueError("SplitCallable needs at least one callable")
        eager = {range(len(pieces))[place] for place in eager}  # -1 is the last
        for place, piece in enumerate(pieces):
            call, reason = piece, "asked for" if place in eager else None
            if not reason and not all(isinstance(arg, torch.Tensor) for arg in args):
                reason = "its inputs are no tensors, and would be baked in"
            try:
                call = piece if reason else GraphedCallable(piece, args, **options)
            except (CaptureError, TypeError, ValueError) as error:
                reason = str(error)
            self.pieces.append(call)
            self.reasons.append(reason)
            with torch.inference_mode():
                args = _as_arguments(call(*args))
            if isinstance(call, GraphedCallable):
                call.rewind()  # this one call does not count towards `limit`

    def __call__(self, *args):
        """Run piece after piece; returns what the last one returned."""
        for piece in self.pieces:
            args = _as_arguments(result := piece(*args))
        return result


def difference(one, other):
    """Return the largest difference between two results, over all their tensors: 0.0 for the same numbers.

    It is infinite where they differ in structure, shape, type, device, or in what is no number; None for results without tensors.
    """
    (leaves, structure), (others, other_structure) = pytree.tree_flatten(one), pytree.tree_flatten(other)
    if not any(isinstance(leaf, torch.Tensor) for leaf in (*leaves, *others)):
        return None
    return max(map(_apart, leaves, others)) if structure == other_structure else float("inf")


def _apart(a, b):
    """Return the largest difference between two leaves of results."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return 0.0 if type(a) is type(b) and a == b else float("inf")
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return float("inf")
    a, b = (t.to_dense() if t.layout != torch.strided else t for t in (a, b))
    wide = torch.complex128 if a.is_complex() else torch.float64
    x, y = a.to(wide), b.to(wide)
    same = (x == y) | (x.isnan() & y.isnan()) if a.is_floating_point() or a.is_complex() else a == b
    apart = (x - y).abs().nan_to_num(float("inf"), float("inf"))
    apart = torch.where(apart == 0, 1.0, apart).masked_fill(same, 0)  # whole numbers may be too large to subtract
    return apart.max().item() if apart.numel() else 0.0


def _as_arguments(result):
    return result if isinstance(result, tuple) else (result,)


def _flatten(args, kwargs):
    """Return the leaves of the inputs and their structure, whatever the order of the keywords."""
    return pytree.tree_flatten((args, dict(sorted(kwargs.items()))))


def _refuse_outputs(leaves, device):
    """Raise for outputs that a replay could not hand out safely: off the GPU, or hidden in an object."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.device != device:
            raise ValueError(f"the call returns a tensor on {leaf.device}: return GPU tensors, and copy after the replay")
        if not isinstance(leaf, torch.Tensor) and any(isinstance(s[3], torch.Tensor) for s in slots(leaf, "", 4, {})):
            raise TypeError(f"the call returns a {type(leaf).__name__} that holds tensors: return them in a tuple, list or "
                            "dict, or register the class with torch.utils._pytree.register_pytree_node")


def _only_device(leaves):
    """Return the one GPU that all tensors among the example inputs are on."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and not leaf.is_cuda:
            raise ValueError(f"input {i} is on {leaf.device}: a graph reads GPU memory; move it with .cuda() first")
        if hasattr(leaf, "__array__") and not isinstance(leaf, torch.Tensor):
            raise TypeError(f"input {i} is a {type(leaf).__name__}: a graph reads GPU memory; make it a CUDA tensor first")
    devices = {t.device for t in tensors} or {torch.device("cuda", torch.cuda.current_device())}
    if len(devices) > 1:
        raise ValueError(f"the inputs are on several GPUs ({', '.join(map(str, devices))}): put them on one")
    return devices.pop()


def _mismatch(i, shape, dtype, device, leaf):
    """Return the error for an input that a graph cannot take."""
    wanted = f"input {i} was captured as {tuple(shape)} {dtype} on cuda:{device}"
    if not isinstance(leaf, torch.Tensor):
        return TypeError(f"{wanted}, not as a {type(leaf).__name__}")
    return ValueError(f"{wanted}, called with {tuple(leaf.shape)} {leaf.dtype} on {leaf.device}: "
                      "shapes are fixed in a graph; pad the input, or capture one graph for each shape")


@cache
def _side_stream(device):
    """Return the stream that all captures on a GPU use: each new one would keep a cuBLAS workspace of its own."""
    return torch.cuda.Stream(device)


@cache
def _kept(device):
    """Return a memory pool that stays as long as this process."""
    return torch.cuda.MemPool()


def _keep_workspaces(device):
    """Let cuBLAS's workspaces on this stream lie in memory that stays: a graph goes on writing there.

    Torch lets go of them, for all graphs at once, when a graph of the same stream is freed (from 2.12), or when one is
    recorded by torch.compile; what it lets go of in this pool is used by nothing else, and again by the next capture.
    """
    with torch.cuda.use_mem_pool(_kept(device)):
        ones = torch.ones(16, 16, device=device)
        torch.addmm(ones[0], ones, ones @ ones)  # by cuBLASLt, and by cuBLAS


def _capture(call, device, pool, generators, warmup, inputs):
    """Warm up and capture `call` on the side stream; returns (graph, its static outputs, seconds that all this took)."""
    side, graph, first, result = _side_stream(device), torch.cuda.CUDAGraph(keep_graph=True), None, None
    with _undisturbed(device, generators), _side_by_side(side):
        began, versions = time.perf_counter(), [t._version for t in inputs]
        _keep_workspaces(device)
        for _ in range(warmup):
            call()
        torch.cuda.synchronize()
        for generator in generators:
            graph.register_generator_state(generator)
        try:
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # raises in a pool that a failed capture left
            result = call()
        except BaseException as error:
            first = error
        torch.cuda.set_stream(side)  # wherever the call may have left us
        try:
            graph.capture_end()
            repaired = True
        except RuntimeError as error:
            first = first or error
            repaired = _repair(graph, side, pool, generators)
        if first is None and versions != [t._version for t in inputs]:
            first = ValueError("the call writes into its own input, and a replay would change only the graph's copy of it: "
                               "return the new value instead, or let the call close over the tensor")
            raise first
        if first is None and not contents.count(graph):
            first = RuntimeError("the graph is empty")
        if first is None:
            graph.instantiate()
            return graph, result, time.perf_counter() - began
    if not isinstance(first, Exception):
        raise first
    failure, result = CaptureError(first, repaired), None
    traceback.clear_frames(first.__traceback__)  # a notebook keeps tracebacks, and they would keep the pool's tensors
    raise failure from first


@contextmanager
def _side_by_side(side):
    """Work on the side stream after all that is queued on the current one, and before all that will be."""
    outside = torch.cuda.current_stream()
    side.wait_stream(outside)
    try:
        with torch.cuda.stream(side):
            yield
    finally:
        torch.cuda.set_stream(outside)
        outside.wait_stream(side)


@contextmanager
def _undisturbed(device, generators):
    """Hold garbage collection off, run in inference mode without the autocast cache, give back RNG states as they were."""
    collecting, cache = gc.isenabled(), torch.is_autocast_cache_enabled()
    gc.collect()
    with ExitStack() as stack:
        stack.enter_context(torch.cuda.device(device))
        for generator in (torch.cuda.default_generators[device.index], *generators):
            stack.callback(_set_state, generator, generator.get_state())
        stack.callback(torch.set_autocast_cache_enabled, cache)
        stack.callback(gc.enable if collecting else gc.disable)
        gc.disable()
        torch.set_autocast_cache_enabled(False)
        stack.enter_context(torch.inference_mode())
        yield


def _set_state(generator, state):
    with suppress(RuntimeError):  # a generator that a failed capture left unusable: CaptureError says so
        generator.set_state(state)


def _repair(failed, side, pool, generators):
    """Mend what torch leaves behind when capture_end raises; returns whether all of it could be mended.

    The allocator still routes allocations into the pool, which torch's own, private calls end. The default generator still
    believes in a capture, until a small one ends well. A generator that cannot draw even then gets a new state, which
    graphs captured earlier from it do not follow.
    """
    _failed.append(failed)  # never freed: newer versions of torch keep its address
    index, everyone = side.device.index, (torch.cuda.default_generators[side.device.index], *generators)
    for mend in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
        with suppress(RuntimeError):
            mend(index, pool)
    with suppress(RuntimeError):
        scratch, small = torch.zeros(1, device=side.device), torch.cuda.CUDAGraph()
        small.capture_begin(capture_error_mode="thread_local")
        scratch.add_(1)
        small.capture_end()
    for generator in everyone:
        if not _draws(generator):
            generator.graphsafe_set_state(torch.Generator(side.device).graphsafe_get_state())
    return not torch.cuda.is_current_stream_capturing() and all(map(_draws, everyone))


def _draws(generator):
    """Say whether a generator of a GPU can draw a number."""
    try:
        torch.rand(1, device=generator.device, generator=generator)
        torch.cuda.synchronize(generator.device)
    except RuntimeError:
        return False
    return True
