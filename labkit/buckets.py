"""One graph for each of a few sizes: a call is padded to the next size, replayed, and cropped back."""

import bisect

import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from labkit.contents import pool_bytes
from labkit.graphs import GraphedCallable


class BucketedGraphs:
    """A callable whose inputs vary along one dimension, captured at a few sizes of it.

    fn: as for GraphedCallable; it must treat what it is padded with as not there (rows of a batch do, later tokens of a
    causal model do, keys of plain attention do not). args: example tensors. sizes: of dimension `dim`, which all inputs
    have. out_dim: the dimension of the outputs that is cropped back, None for none. pad: the value to pad with.
    shared: one memory pool for all graphs, the largest captured first, so that the smaller ones fit into its memory.

    A call pads to the next size, never more, and returns clones. Raises ValueError for sizes that are none, for inputs that
    differ in size, for more than the largest size, or for outputs that cannot be cropped; CaptureError like GraphedCallable.
    """

    def __init__(self, fn, args, sizes, *, dim=0, out_dim=0, pad=0, shared=True, **options):
        if not isinstance(sizes, (tuple, list, range)) or not sizes or not all(type(n) is int and n > 0 for n in sizes):
            raise ValueError(f"sizes must be whole numbers above 0, not {sizes!r}")
        self.sizes, self.dim, self.out_dim, self.pad, self.graphs = sorted(set(sizes)), dim, out_dim, pad, {}
        args, pool = (args,) if isinstance(args, torch.Tensor) else tuple(args), None
        for size in reversed(self.sizes):
            example = [self._padded(t.narrow(dim, 0, min(size, t.shape[dim])), size) for t in args]
            graph = self.graphs[size] = GraphedCallable(fn, example, pool=pool, **options)
            if out_dim is not None and any(t.dim() <= out_dim or t.shape[out_dim] != size for t in graph.outputs):
                raise ValueError(f"an output, of {[tuple(t.shape) for t in graph.outputs]}, does not have the size {size} in "
                                 f"dimension {out_dim}: set out_dim, or None to leave outputs whole")
            pool = self.graphs[size].pool if shared else None

    def __call__(self, *args):
        """Pad, replay the graph of the next size, crop; returns what fn would have, equal on the real rows."""
        size = self.size_for(count := self._count(args))
        result = self.graphs[size](*(self._padded(t, size) for t in args))
        if self.out_dim is None or size == count:
            return result
        return pytree.tree_map_only(torch.Tensor, lambda t: t.narrow(self.out_dim, 0, count), result)

    def size_for(self, count):
        """Return the captured size that a call of `count` is padded to; ValueError where that is more than the largest."""
        if count > self.sizes[-1]:
            raise ValueError(f"{count} is more than the largest captured size, {self.sizes[-1]}: capture a larger one, "
                             "split the call, or run it eagerly")
        return self.sizes[bisect.bisect_left(self.sizes, count)]

    @property
    def pool_bytes(self):
        """Return the bytes of GPU memory that all graphs together keep reserved."""
        return sum(map(pool_bytes, {graph.pool for graph in self.graphs.values()}))

    def _count(self, args):
        counts = {t.shape[self.dim] for t in args}
        if len(counts) != 1 or counts == {0}:
            raise ValueError(f"all inputs must have one size, above 0, in dimension {self.dim}, not {sorted(counts)}")
        return counts.pop()

    def _padded(self, tensor, size):
        """Pad one input at the end of dimension `dim`."""
        missing, later = size - tensor.shape[self.dim], tensor.dim() - 1 - self.dim % tensor.dim()
        return F.pad(tensor, [0, 0] * later + [0, missing], value=self.pad) if missing else tensor
