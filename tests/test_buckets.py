"""Buckets pad to the next captured size and crop back; the graphs are eager stand-ins here, and need no GPU."""

import pytest
import torch
from torch.utils import _pytree as pytree

from labkit import buckets


class Eager:
    """What GraphedCallable is to buckets: it takes the shapes it was made with and no others, and notes its calls."""

    def __init__(self, fn, args, *, pool=None, **options):
        self.fn, self.shapes, self.pool, self.options, self.calls = fn, [t.shape for t in args], pool or object(), options, 0
        self.outputs = [t for t in pytree.tree_leaves(fn(*args)) if isinstance(t, torch.Tensor)]

    def __call__(self, *args):
        assert [t.shape for t in args] == self.shapes
        self.calls += 1
        return self.fn(*args)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(buckets, "GraphedCallable", Eager)


def model(x):
    return x.cumsum(-1) * 2 + 1


X = torch.arange(24.0).view(8, 3)


def made(fn=model, args=X, sizes=(2, 4, 8), **options):
    return buckets.BucketedGraphs(fn, args, sizes, **options)


@pytest.mark.parametrize("rows, size", [*enumerate((2, 2, 4, 4, 8, 8, 8, 8), 1)])
def test_a_call_is_padded_to_the_next_size_and_equals_eager_on_the_real_rows(rows, size):
    graphs = made()
    assert torch.equal(graphs(X[:rows]), model(X[:rows]))
    assert {size: graph.calls for size, graph in graphs.graphs.items()} == {2: 0, 4: 0, 8: 0} | {size: 1}
    assert graphs.size_for(rows) == size


def test_the_largest_is_captured_first_whatever_the_order_given():
    assert list(made(sizes=(4, 2, 8, 4)).graphs) == [8, 4, 2]


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_each_graph_has_its_size_whatever_the_size_of_the_example(rows):
    graphs = made(args=X[:rows]).graphs
    assert {size: graph.shapes for size, graph in graphs.items()} == {size: [(size, 3)] for size in (2, 4, 8)}


@pytest.mark.parametrize("shared, pools, held", [(True, 1, 100), (False, 3, 300)])
def test_graphs_share_one_pool_or_have_their_own(shared, pools, held, monkeypatch):
    monkeypatch.setattr(buckets, "pool_bytes", lambda pool: 100)
    graphs = made(shared=shared)
    assert len({graph.pool for graph in graphs.graphs.values()}) == pools and graphs.pool_bytes == held


def test_options_go_on_to_each_graph():
    assert [graph.options for graph in made(warmup=1, clone=False).graphs.values()] == [{"warmup": 1, "clone": False}] * 3


def test_several_inputs_and_outputs_are_padded_and_cropped_together():
    def fn(x, weight):
        return {"scaled": x * weight[:, None], "both": (weight + 1, [x])}
    weight = torch.arange(8)
    graphs = made(fn, (X, weight))
    for rows in range(1, 9):
        torch.testing.assert_close(graphs(X[:rows], weight[:rows]), fn(X[:rows], weight[:rows]), rtol=0, atol=0)


@pytest.mark.parametrize("dim", [1, -2])
def test_another_dimension_can_be_padded(dim):
    x = torch.arange(48.0).view(2, 8, 3)
    graphs = made(args=x, dim=dim, out_dim=dim)
    for length in range(1, 9):
        assert torch.equal(graphs(x[:, :length]), model(x[:, :length]))
    assert graphs.graphs[4].shapes == [(2, 4, 3)]


def test_the_outputs_may_vary_along_another_dimension_than_the_inputs():
    graphs = made(lambda x: x.t() + 1, out_dim=1)
    for rows in range(1, 9):
        assert torch.equal(graphs(X[:rows]), X[:rows].t() + 1)


def test_outputs_are_left_whole_with_no_out_dim_and_the_padding_has_the_value_asked_for():
    graphs = made(lambda x: (x, x.amin(0)), out_dim=None, pad=float("inf"))
    whole, least = graphs(X[5:])
    assert whole.shape == (4, 3) and torch.equal(whole[:3], X[5:]) and whole[3].isinf().all()
    assert torch.equal(least, X[5])
    assert not made(lambda x: x, out_dim=None)(X[5:])[3].any()


@pytest.mark.parametrize("sizes", [(), (0, 2), (2, -4), (2.0, 4), (True, 4)])
def test_sizes_that_are_none_are_refused(sizes):
    with pytest.raises(ValueError, match="sizes must be whole numbers above 0, not "):
        made(sizes=sizes)


def test_inputs_of_different_sizes_and_of_none_are_refused():
    graphs = made(lambda x, y: x + y, (X, X))
    with pytest.raises(ValueError, match=r"all inputs must have one size, above 0, in dimension 0, not \[2, 3\]"):
        graphs(X[:3], X[:2])
    with pytest.raises(ValueError, match=r"all inputs must have one size, above 0, in dimension 0, not \[0\]"):
        graphs(X[:0], X[:0])
    with pytest.raises(ValueError, match="all inputs must have one size"):
        graphs()
    assert not any(graph.calls for graph in graphs.graphs.values())


def test_more_than_the_largest_size_is_refused_with_what_to_do():
    graphs = made(sizes=(2, 4))
    with pytest.raises(ValueError, match="5 is more than the largest captured size, 4: capture a larger one, split the call, "
                                         "or run it eagerly"):
        graphs(X[:5])
    assert torch.equal(graphs(X[:4]), model(X[:4]))


@pytest.mark.parametrize("fn", [lambda x: torch.cat([x, x]), lambda x: (x, x.sum()), lambda x: x.t()])
def test_outputs_that_cannot_be_cropped_are_refused_before_any_call(fn):
    with pytest.raises(ValueError, match="set out_dim, or None"):
        made(fn)
    assert made(fn, out_dim=None).sizes == [2, 4, 8]


@pytest.mark.parametrize("sizes", [(2, None), (2, "4"), 8, [[2]], "24", (True,)])
def test_sizes_of_any_other_kind_are_refused_too(sizes):
    with pytest.raises(ValueError, match="whole numbers above 0"):
        made(sizes=sizes)
