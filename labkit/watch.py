"""What a callable depends on: the modules and tensors it reaches, and whether they are still what they were."""

import dis
import sys
import types
from collections import deque
from contextlib import suppress
from functools import partial
from itertools import chain
from operator import getitem, itemgetter

import torch

_TRAINING = itemgetter("training")
_MODULES_OWN = set(vars(torch.nn.Module()))
_INDIFFERENT = {torch.nn.Linear, torch.nn.ReLU, torch.nn.GELU, torch.nn.SiLU, torch.nn.LayerNorm, torch.nn.Embedding,
                torch.nn.Sequential, torch.nn.ModuleList}  # modules that do the same whatever their `training` says


class ReplayError(RuntimeError):
    """A replay refused because it would not compute what the callable would compute now."""


def _pointers_equal(tensors, pointers, _, each=torch.Tensor.data_ptr):
    return list(map(each, tensors)) == pointers


_pointers_equal = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", _pointers_equal)  # torch's own is 5x faster


class Watched:
    """The modules and tensors that a callable depends on, as they were at capture; kept alive as long as the graph.

    Checked at every call, so by a few loops in C over lists that are made here.
    """

    def __init__(self, fn, constants):
        self._slots = [slot for held in (fn, constants) for slot in slots(held, "", 4, {})]  # (holder, key, label, object)
        modules = {id(m): m for m in (fn, *(s[3] for s in self._slots)) if isinstance(m, torch.nn.Module)}.values()
        dicts = [d for m in modules for d in (m._parameters, m._buffers) if d]
        whole, children = [d for d in dicts if None not in d.values()], [m._modules for m in modules if m._modules]
        known = set(map(id, (*whole, *children)))
        loose = [s for s in self._slots if id(s[0]) not in known]
        none = [(d, k) for d in dicts for k, v in d.items() if v is None]
        self._tensors = _Reader(whole, [s for s in loose if isinstance(s[3], torch.Tensor)])
        self._others = _Reader(children, [*(s for s in loose if isinstance(s[3], torch.nn.Module)), *none])
        self._tensors_then, self._others_then = self._tensors(), self._others()
        self._pointers = [t.data_ptr() for t in self._tensors_then]
        self._indices = list(range(len(self._pointers)))
        self._states = [vars(m) for m in modules if m is fn or type(m) not in _INDIFFERENT]
        self._training = list(map(_TRAINING, self._states))

    def check(self):
        """Raise ReplayError if a tensor was moved or replaced, a module exchanged, or `training` flipped."""
        try:
            now = self._tensors()  # lists are equal at once where their items are the very same objects
            if (now == self._tensors_then and _pointers_equal(now, self._pointers, self._indices)
                    and self._others() == self._others_then and list(map(_TRAINING, self._states)) == self._training):
                return
        except (LookupError, TypeError, ValueError, RuntimeError):  # a name is gone, or holds something else
            pass
        raise ReplayError(f"{self._culprit()} since the capture, and the graph would not see it: capture again")

    def _culprit(self):
        """Return what changed, in words."""
        pointers = dict(zip(map(id, self._tensors_then), self._pointers, strict=True))
        for holder, key, label, was in self._slots:
            is_now = now(holder, key)
            if is_now is not was or isinstance(is_now, torch.Tensor) and is_now.data_ptr() != pointers[id(is_now)]:
                return f"{label} was {'exchanged' if isinstance(was, torch.nn.Module) else 'moved or replaced'}"
        return "a module or weight was added, or train() or eval() was called,"


class _Reader:
    """Lists what some dicts hold, then what stands at single places, as it is now."""

    def __init__(self, dicts, slots):
        self._views = [d.values() for d in dicts]  # a view follows its dict
        self._holders, self._keys = [s[0] for s in slots], [s[1] for s in slots]

    def __call__(self):
        return [*chain.from_iterable(self._views), *map(getitem, self._holders, self._keys)]


class _Cell:
    """A closure's variable, read like a mapping."""

    def __init__(self, cell):
        self._cell = cell

    def __getitem__(self, _):
        return self._cell.cell_contents


def now(holder, key):
    """Return what stands in a place, `holder[key]`, today; None if it is gone."""
    with suppress(LookupError, ValueError):
        return holder[key]
    return None


def slots(value, label, depth, seen, kinds=(torch.nn.Module, torch.Tensor)):
    """Yield (holder, key, label, what is there) for all of these kinds that `value` reaches in `depth` steps."""
    if depth <= seen.get(id(value), -1):
        return
    places = _places(value) if id(value) not in seen else []
    seen[id(value)] = depth
    for holder, key in places:
        inner = now(holder, key)
        path = f"{label}.{key}" if label else str(key)
        if isinstance(inner, kinds) and not (isinstance(inner, torch.Tensor) and inner.layout != torch.strided):
            yield holder, key, path, inner
        yield from slots(inner, path, 4 if isinstance(inner, torch.nn.Module) else depth - 1, seen, kinds)


def _places(value):
    """List the (holder, key) pairs through which `value` holds other objects; libraries' own code is not followed."""
    kind = type(value)
    if isinstance(value, torch.nn.Module):
        holders = (value._parameters, value._buffers, value._modules)
        own = [(vars(value), name) for name in vars(value) if name not in _MODULES_OWN]
        return [(h, k) for h in holders for k, v in h.items() if v is not None] + own + [({"forward": kind.forward}, "forward")]
    if isinstance(value, types.FunctionType):
        if (value.__module__ or "").startswith("torch."):
            return []
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return ([(value.__globals__, n) for n in _globals_read(value.__code__) if n in value.__globals__]
                + [(_Cell(cell), name) for name, cell in cells]
                + [({"defaults": d}, "defaults") for d in (value.__defaults__, value.__kwdefaults__) if d])
    if isinstance(value, types.MethodType):
        return [({"self": value.__self__}, "self"), ({"function": value.__func__}, "function")]
    if isinstance(value, partial):
        return [({"function": value.func}, "function"), ({"args": value.args}, "args"), ({"kwargs": value.keywords}, "kwargs")]
    if isinstance(value, (list, tuple, dict, deque)):
        keys = value if isinstance(value, dict) else range(len(value))
        return [(value, key) for key in keys] if len(value) <= 1000 else []
    if isinstance(value, (torch.Tensor, type)) or kind.__module__.partition(".")[0] in sys.stdlib_module_names:
        return []
    called = [({"__call__": kind.__call__}, "__call__")] if callable(value) else []
    return [(vars(value), name) for name in getattr(value, "__dict__", ())] + called


def _globals_read(code):
    """Return the names that a function's code, and code nested in it, reads as globals."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return names.union(*(_globals_read(c) for c in code.co_consts if isinstance(c, types.CodeType)))
