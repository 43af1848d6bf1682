"""What a captured graph holds: its nodes and what waits for what, and the memory that its pool keeps.

Nodes are read by the calls of the CUDA driver API (Graph Management), through cuda.bindings.
"""

import ctypes
import re
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """One node of a graph: what kind of work, the kernel's name (or ""), its grid (blocks in x, y, z), and the nodes it waits for."""

    kind: str
    name: str
    grid: tuple
    after: tuple


def count(graph):
    """Count the nodes of a `torch.cuda.CUDAGraph` made with keep_graph=True; RuntimeError names another answer of the driver."""
    from cuda.bindings import driver

    return _cuda(driver.cuGraphGetNodes(driver.CUgraph(graph.raw_cuda_graph()), 0))[-1]


def nodes(graph):
    """List the nodes of a `torch.cuda.CUDAGraph` made with keep_graph=True, in the order that CUDA gives them.

    `after` of a Node holds places in this list. Raises RuntimeError with what else the driver answers.
    """
    from cuda.bindings import driver

    handle, many = driver.CUgraph(graph.raw_cuda_graph()), count(graph)
    found = _cuda(driver.cuGraphGetNodes(handle, many))[0] if many else []
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
    """Return the bytes of GPU memory that a graph's memory pool (its id, a pair of ints) keeps reserved, by torch.cuda.memory_snapshot()."""
    import torch

    return sum(s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(pool))
