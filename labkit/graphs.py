"""Capture a callable once as a CUDA graph, replay it with new inputs, and refuse whatever would be silently wrong."""

import ctypes
import dis
import gc
import re
import time
import types
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import chain
from operator import getitem, itemgetter

import torch
from torch.utils import _pytree as pytree

from labkit import machine
from labkit.explain import CaptureError

_TRAINING = itemgetter("training")
_INDIFFERENT = {torch.nn.Linear, torch.nn.ReLU, torch.nn.GELU, torch.nn.SiLU, torch.nn.LayerNorm, torch.nn.Embedding,
                torch.nn.Sequential, torch.nn.ModuleList}  # modules that do the same whatever their `training` says

class ReplayError(RuntimeError):
    """A replay refused because it would not compute what the callable would compute now."""


@dataclass(frozen=True)
class Node:
    """One node of a graph: what kind of work, the kernel's name (or ""), its grid, and the nodes it waits for."""

    kind: str
    name: str
    grid: tuple
    after: tuple


def nodes(graph):
    """List the nodes of a `torch.cuda.CUDAGraph` made with keep_graph=True, in the order that CUDA gives them."""
    from cuda.bindings import driver

    handle = driver.CUgraph(graph.raw_cuda_graph())
    count = _cuda(driver.cuGraphGetNodes(handle, 0))[-1]
    found = _cuda(driver.cuGraphGetNodes(handle, count))[0] if count else []
    index = {int(node): i for i, node in enumerate(found)}
    after = {i: [] for i in index.values()}
    edges = _cuda(driver.cuGraphGetEdges(handle, 0))[-1]
    if edges:
        sources, targets = _cuda(driver.cuGraphGetEdges(handle, edges))[:2]
        for source, target in zip(sources, targets, strict=False):
            after[index[int(target)]].append(index[int(source)])
    return [_node(driver, node, after[i]) for i, node in enumerate(found)]


def _node(driver, handle, after):
    kind = _cuda(driver.cuGraphNodeGetType(handle))[0]
    name, grid = "", ()
    if kind == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
        p = _cuda(driver.cuGraphKernelNodeGetParams(handle))[0]
        raw = _cuda(driver.cuFuncGetName(p.func) if int(p.func) else driver.cuKernelGetName(p.kern))[0]
        name, grid = short_name(_demangled(raw.decode())), (p.gridDimX, p.gridDimY, p.gridDimZ)
    return Node(kind.name.removeprefix("CU_GRAPH_NODE_TYPE_").lower(), name, grid, tuple(sorted(after)))


def _cuda(answer):
    """Return what a call of cuda.bindings answered behind its status, or raise the status by name."""
    status, *values = answer
    if int(status):
        raise RuntimeError(f"the CUDA driver answered {status.name}")
    return values


def _demangled(name):
    """Return a C++ symbol as written in its source, where the C++ runtime is there to say so."""
    with suppress(OSError, AttributeError):
        demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
        demangle.restype = ctypes.c_void_p
        found = demangle(name.encode(), None, None, None)
        if found:
            return ctypes.string_at(found).decode()
    return name


def short_name(name):
    """Return a kernel's name without return type, namespaces, template and call arguments."""
    name = re.sub(r"\(anonymous namespace\)|\{lambda[^}]*\}", "", name)
    while re.search(r"<[^<>]*>|\([^()]*\)", name):
        name = re.sub(r"<[^<>]*>|\([^()]*\)", "", name)
    words = [word.split("::")[-1] for word in name.split() if word not in ("void", "const")]
    return words[0] if words else name


def pool_bytes(pool):
    """Return the bytes of GPU memory that a graph's memory pool (its id, a pair of ints) keeps reserved."""
    return sum(s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(pool))


class GraphedCallable:
    """A callable captured as one CUDA graph: called like the original, it copies the inputs in and replays.

    fn: any callable or nn.Module, run in inference mode. args, kwargs: example inputs, any pytree of tensors on one GPU
    (other values are baked in, and checked). warmup: eager calls before the capture. clone: return copies; with False,
    the graph's own output buffers, which the next call overwrites. pool: share the memory pool of another graph.
    generators: torch.Generators that fn draws from. limit: how many calls are allowed (a cache's length), see `rewind`.

    Attributes: nodes, node_kinds, kernel_names, capture_seconds, pool, pool_bytes, inputs and outputs (static buffers).
    Raises CaptureError when the capture fails, TypeError or ValueError when inputs differ from the examples, and
    ReplayError when fn's modules or tensors changed since. One stream and one thread at a time, as for any graph.
    Watched are the modules and tensors that fn is, is bound to, closes over, names, or holds up to four steps deep.
    """

    def __init__(self, fn, args=(), kwargs=None, *, warmup=3, clone=True, pool=None, generators=(), limit=None):
        machine.require_gpu("Capturing a CUDA graph")
        args = (args,) if isinstance(args, torch.Tensor) else tuple(args)
        leaves, self._structure = pytree.tree_flatten((args, kwargs or {}))
        self.device = _only_device(leaves)
        self._flat = not kwargs and all(isinstance(a, torch.Tensor) for a in args)
        held = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._tensors = [(i, t, t.shape, t.dtype, t.get_device()) for i, t in enumerate(held) if isinstance(t, torch.Tensor)]
        self._constants = [(i, value) for i, value in enumerate(held) if not isinstance(value, torch.Tensor)]
        self.inputs = tuple(tensor for _, tensor, *_ in self._tensors)
        self._clone, self.limit, self._calls = clone, limit, 0
        self.pool = pool or torch.cuda.graph_pool_handle()
        args, kwargs = pytree.tree_unflatten(held, self._structure)
        began = time.perf_counter()
        self._graph, result = _capture(partial(fn, *args, **kwargs), self.device, self.pool, generators, warmup, self.inputs)
        self.capture_seconds = time.perf_counter() - began
        self._outputs, self._out_structure = pytree.tree_flatten(result)
        self.outputs = tuple(t for t in self._outputs if isinstance(t, torch.Tensor))
        if any(t.device != self.device for t in self.outputs):
            raise ValueError("the call returns a tensor that is not on the GPU: return GPU tensors, copy after the replay")
        self._single = isinstance(result, torch.Tensor)
        self._watched = _Watched(fn)

    def __call__(self, *args, **kwargs):
        """Check the inputs (structure, shape, dtype, device of the examples), copy them in, replay, return the outputs."""
        leaves = args if self._flat and not kwargs and len(args) == len(self.inputs) else self._leaves(args, kwargs)
        for i, _, shape, dtype, device in self._tensors:
            leaf = leaves[i]
            if not isinstance(leaf, torch.Tensor) or leaf.shape != shape or leaf.dtype is not dtype \
                    or leaf.get_device() != device:
                raise _mismatch(i, shape, dtype, device, leaf)
        for i, value in self._constants:
            if leaves[i] is not value and leaves[i] != value:
                raise ValueError(f"input {i} was {value!r} at capture and is baked in; {leaves[i]!r} needs its own graph")
        self._watched.check()
        if self.limit is not None and self._calls >= self.limit:
            raise ReplayError(f"replayed {self._calls} times, its limit: what the call writes to is full; reset it, then rewind()")
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
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if structure != self._structure:
            raise TypeError(f"captured for inputs of the structure {self._structure}, called with {structure}")
        return leaves

    def replay(self):
        """Replay on the buffers as they are: no check, no copy in, no copy out."""
        self._calls += 1
        self._graph.replay()

    def rewind(self):
        """Count calls towards `limit` from zero again, after what the call writes to was reset."""
        self._calls = 0

    @property
    def raw_graph(self):
        """The address of the CUgraph, for cuda.bindings."""
        return self._graph.raw_cuda_graph()

    @cached_property
    def nodes(self):
        """The nodes of the graph, in order: a list of Node."""
        return nodes(self._graph)

    @property
    def node_kinds(self):
        """How many nodes of each kind the graph has: a Counter."""
        return Counter(node.kind for node in self.nodes)

    @property
    def kernel_names(self):
        """The short names of the graph's kernels, in order."""
        return [node.name for node in self.nodes if node.kind == "kernel"]

    @property
    def pool_bytes(self):
        """Bytes that the graph's memory pool keeps reserved, together with the graphs that share it."""
        return pool_bytes(self.pool)


def _only_device(leaves):
    """Return the one GPU that all tensors among the example inputs are on."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    for i, tensor in enumerate(tensors):
        if not tensor.is_cuda:
            raise ValueError(f"input {i} is on {tensor.device}: a graph reads GPU memory; move it with .cuda() first")
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


def _capture(call, device, pool, generators, warmup, inputs):
    """Warm up and capture `call` on one side stream; returns (graph, what the call returned: its static buffers)."""
    side, graph, first, result = _side_stream(device), torch.cuda.CUDAGraph(keep_graph=True), None, None
    with _undisturbed(device, generators):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            versions = [t._version for t in inputs]
            for _ in range(warmup):
                call()
            if versions != [t._version for t in inputs]:
                raise ValueError("the call writes into its own input: a replay would change only the graph's copy of it; "
                                 "return the new value instead, or let the call close over the tensor")
            torch.cuda.synchronize()
            for generator in generators:
                graph.register_generator_state(generator)
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = call()
            except BaseException as error:
                first = error
            try:
                graph.capture_end()
                repaired = True
            except RuntimeError as error:
                first, repaired = first or error, None
        torch.cuda.current_stream().wait_stream(side)
        repaired = _repair(device, pool) if repaired is None else True
    if first is None and not nodes(graph):
        first = RuntimeError("the graph is empty")
    if first is None:
        graph.instantiate()
        return graph, result
    if isinstance(first, Exception):
        raise CaptureError(first, repaired) from first
    raise first


@contextmanager
def _undisturbed(device, generators):
    """Hold garbage collection off, run in inference mode without the autocast cache, give back RNG states as they were."""
    collecting, cache = gc.isenabled(), torch.is_autocast_cache_enabled()
    gc.collect()
    with ExitStack() as stack:
        stack.enter_context(torch.cuda.device(device))
        for generator in (torch.cuda.default_generators[device.index], *generators):
            stack.callback(generator.set_state, generator.get_state())
        stack.callback(torch.set_autocast_cache_enabled, cache)
        stack.callback(gc.enable if collecting else gc.disable)
        gc.disable()
        torch.set_autocast_cache_enabled(False)
        stack.enter_context(torch.inference_mode())
        yield


def _repair(device, pool):
    """Mend what torch leaves behind when capture_end raises; returns whether all of it could be mended.

    The allocator still routes allocations into the pool, and the default generator still believes in a capture: both are
    reset through calls of torch's own, partly private. The stream was put back by its context manager.
    """
    try:
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)
        fresh = torch.Generator(device).graphsafe_get_state()
        torch.cuda.default_generators[device.index].graphsafe_set_state(fresh)
        torch.randn(1, device=device)
        torch.cuda.synchronize(device)
    except (AttributeError, RuntimeError):
        return False
    return True


def _pointers_equal(tensors, pointers, _, each=torch.Tensor.data_ptr):
    return list(map(each, tensors)) == pointers


_pointers_equal = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", _pointers_equal)  # torch's own is 5x faster


class _Watched:
    """The modules and tensors that a callable depends on, as they were at capture; kept alive as long as the graph.

    Checked at every call, so by a few loops in C over lists that are made here.
    """

    def __init__(self, fn):
        slots = list(_slots(fn, "", 4, set()))
        self._tensors = [s for s in slots if isinstance(s[3], torch.Tensor) and s[3].is_cuda and s[3].layout == torch.strided]
        self._then = [s[3].data_ptr() for s in self._tensors]
        self._modules = [s for s in slots if isinstance(s[3], torch.nn.Module)]
        modules = {id(m): m for m in (fn, *(s[3] for s in self._modules)) if isinstance(m, torch.nn.Module)}.values()
        self._children = [m._modules for m in modules if m._modules]
        self._children_then = [dict(children) for children in self._children]
        known = set(map(id, self._children))
        loose = [s for s in self._modules if id(s[0]) not in known]
        self._parents, self._names, self._loose = ([s[i] for s in loose] for i in (0, 1, 3))
        whole = [d for m in modules for d in (m._parameters, m._buffers) if d and None not in d.values()]
        inside = set(map(id, whole))
        single = [s for s in self._tensors if id(s[0]) not in inside]
        self._whole, self._holders, self._keys = whole, [s[0] for s in single], [s[1] for s in single]
        self._pointers = [t.data_ptr() for t in self._now()]
        self._indices = list(range(len(self._pointers)))
        self._states = [vars(m) for m in modules if m is fn or type(m) not in _INDIFFERENT]
        self._training = list(map(_TRAINING, self._states))

    def check(self):
        """Raise ReplayError if a tensor was moved or replaced, a module exchanged, or `training` flipped."""
        try:
            if (_pointers_equal(self._now(), self._pointers, self._indices)
                    and self._children == self._children_then
                    and list(map(getitem, self._parents, self._names)) == self._loose
                    and list(map(_TRAINING, self._states)) == self._training):
                return
        except (LookupError, TypeError, ValueError, RuntimeError):  # a name is gone, or holds something else
            pass
        raise ReplayError(f"{self._culprit()} since the capture, and the graph would not see it: capture again")

    def _now(self):
        """List the watched tensors as they are now: whole dicts of modules first, then what is held elsewhere."""
        return [*chain.from_iterable(map(dict.values, self._whole)), *map(getitem, self._holders, self._keys)]

    def _culprit(self):
        """Return what changed, in words."""
        for holder, key, path, module in self._modules:
            if _now(holder, key) is not module:
                return f"{path} was exchanged"
        for (holder, key, path, _), pointer in zip(self._tensors, self._then, strict=True):
            now = _now(holder, key)
            if not isinstance(now, torch.Tensor) or now.data_ptr() != pointer:
                return f"{path} was moved or replaced"
        return "a module was added, or train() or eval() was called,"


class _Cell:
    """A closure's variable, read like a mapping."""

    def __init__(self, cell):
        self._cell = cell

    def __getitem__(self, _):
        return self._cell.cell_contents


def _now(holder, key):
    with suppress(LookupError, ValueError):
        return holder[key]
    return None


def _slots(value, label, depth, seen):
    """Yield (holder, key, label, what is there) for each tensor and module that `value` reaches in `depth` steps."""
    if depth < 0 or id(value) in seen:
        return
    seen.add(id(value))
    for holder, key in _places(value):
        inner = _now(holder, key)
        path = f"{label}.{key}" if label else str(key)
        if isinstance(inner, (torch.Tensor, torch.nn.Module)):
            yield holder, key, path, inner
        yield from _slots(inner, path, 4 if isinstance(inner, torch.nn.Module) else depth - 1, seen)


def _places(value):
    """List the (holder, key) pairs through which `value` holds other objects."""
    if isinstance(value, (torch.Tensor, type, types.ModuleType, str, bytes)):
        return []
    if isinstance(value, torch.nn.Module):
        holders = (value._parameters, value._buffers, value._modules)
        return [(h, k) for h in holders for k, v in h.items() if v is not None] + _attributes(value)
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return ([(value.__globals__, n) for n in _globals_read(value.__code__) if n in value.__globals__]
                + [(_Cell(cell), name) for name, cell in cells] + [({"default": value.__defaults__}, "default")])
    if isinstance(value, types.MethodType):
        return [({"self": value.__self__}, "self"), ({"function": value.__func__}, "function")]
    if isinstance(value, partial):
        return [({"function": value.func}, "function"), ({"args": value.args}, "args"), ({"kwargs": value.keywords}, "kwargs")]
    if isinstance(value, (list, tuple, dict)):
        keys = value if isinstance(value, dict) else range(len(value))
        return [(value, key) for key in keys] if len(value) <= 1000 else []
    return _attributes(value)


def _attributes(value):
    return [(vars(value), name) for name in getattr(value, "__dict__", ()) if not name.startswith("_")]


def _globals_read(code):
    """Return the names that a function's code, and code nested in it, reads as globals."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return names.union(*(_globals_read(c) for c in code.co_consts if isinstance(c, types.CodeType)))
