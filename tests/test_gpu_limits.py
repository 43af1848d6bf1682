"""What lab 30 stands on, on a GPU: buckets, split chains, the doctor, every operation of the table, every silent trap."""

import functools
import threading

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")


@pytest.fixture
def x():
    return torch.randn(8, 64, device="cuda")


@pytest.fixture
def model():
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)
    return torch.nn.Sequential(*layers).cuda().eval().requires_grad_(False)


def capture(*args, **kwargs):
    from labkit.graphs import GraphedCallable
    return GraphedCallable(*args, **kwargs)


# ---- ways round

def test_buckets_equal_eager_on_the_real_rows_and_share_one_pool(model, x):
    from labkit.buckets import BucketedGraphs
    shared, apart = (BucketedGraphs(model, x, (1, 2, 4, 8), shared=shared) for shared in (True, False))
    for rows in (1, 3, 5, 8, 2, 7):
        for graphs in (shared, apart):
            torch.testing.assert_close(graphs(x[:rows]), model(x[:rows]))
    assert shared.pool_bytes < apart.pool_bytes
    assert list(shared.graphs) == [8, 4, 2, 1] and len({g.pool for g in shared.graphs.values()}) == 1


def test_a_causal_model_may_be_padded_in_length_and_a_plain_one_may_not():
    from labkit import buckets, models
    for kind, right in (("causal", True), ("transformer", False)):
        model, x = models.build(kind, layers=2, tokens=64)
        graphs = buckets.BucketedGraphs(model, x, (32, 64), dim=1, out_dim=1)
        with torch.inference_mode():
            off = (graphs(x[:, :20]) - model(x[:, :20])).abs().max().item()
        assert (off < 0.02) == right, off


def test_a_split_chain_keeps_what_cannot_be_captured_eager(model, x):
    from labkit.graphs import SplitCallable
    chain = SplitCallable([model, lambda t: t / t.abs().max().item(), model], x)
    middle = model(x)
    torch.testing.assert_close(chain(x), model(middle / middle.abs().max().item()))
    assert [reason is None for reason in chain.reasons] == [True, False, True]
    assert ".item()" in chain.reasons[1]
    assert SplitCallable([model, lambda t: t + 1], x, eager=(1,)).reasons == [None, "asked for"]


# ---- the doctor

def scaled(t):
    return t * 2


def asks(t):
    if t.sum() > 0:
        return t * 2
    return t


class Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros(1, device="cuda"))

    def forward(self, t):
        self.calls += 1
        self.seen.add_(1)
        return t * self.calls + torch.rand_like(t) * 0


def test_a_capturable_call_is_measured_and_compared(x):
    import labkit
    found = labkit.diagnose(scaled, x)
    assert found.capturable and found.where == "in a child process" and found.largest_difference == 0
    assert found.kernels == 1 and found.nodes == {"kernel": 1} and not found.risks
    assert found.speedup[1] <= found.speedup[0] <= found.speedup[2]
    assert found.speedup[0] == pytest.approx(found.eager_us[0] / found.graph_us[0], rel=0.5)
    assert "Capturable" in str(found) and "Not always seen from outside" in str(found)


def test_a_call_that_fails_is_told_by_its_first_cause(x):
    import labkit
    found = labkit.diagnose(asks, x)
    assert not found.capturable and "waits for the GPU" in found.failure and "if t.sum() > 0" in found.failure
    assert "torch.where" in found.failure


def test_what_would_go_silently_wrong_is_named(x):
    import labkit
    found = labkit.diagnose(Counts(), x)
    told = "\n".join(found.risks)
    assert "changes calls" in told and "changes the tensor seen" in told and "draws random numbers" in told
    assert "baked in" in told and "RISK" in str(found)


def test_a_call_that_fails_without_a_capture_says_so(x):
    import labkit
    assert "fails without a capture, too: RuntimeError" in labkit.diagnose(lambda t: t @ t, x[:, :3]).failure


def test_what_cannot_be_sent_says_so_and_can_be_tried_here(x):
    import labkit
    call = functools.partial(lambda lock, t: t * 2, threading.Lock())
    with pytest.raises(ValueError, match="here=True"):
        labkit.diagnose(call, x)
    with pytest.warns(UserWarning, match="in this process"):
        assert labkit.diagnose(call, x, here=True).capturable


def test_a_child_that_dies_is_reported(x):
    import labkit

    def dies(t):
        import os
        os.abort()

    assert "SIGABRT" in labkit.diagnose(dies, x).failure
    assert "timed out" in labkit.diagnose(lambda t: [t.add_(0) for _ in iter(int, 1)], x, timeout_s=3).failure


# ---- the table

@pytest.fixture(scope="module")
def table():
    from labkit import experiments
    return {row["operation"]: row for row in experiments.operation_table.measure()}


def test_each_operation_fares_as_recorded(table):
    from labkit import recordings
    told = {row["operation"]: row for row in recordings.load("operation_table")["rows"]}
    assert told.keys() == table.keys()
    differ = {name: (row["result"], told[name]["result"]) for name, row in table.items()
              if (row["result"], row.get("kind")) != (told[name]["result"], told[name].get("kind"))}
    assert not differ


def test_each_way_round_is_captured_and_equals_eager(table):
    failing = {name: row for name, row in table.items() if row["result"] != "captured"}
    assert len(failing) > 30
    wrong = {name: row["instead"] for name, row in failing.items()
             if not row["instead_captured"] or not row["instead_difference"] < 1e-3}
    assert not wrong


def test_each_failure_is_mended_and_explained(table):
    from labkit import explain
    known = {kind for _, kind, _ in explain.EXPLANATIONS}
    failing = [row for row in table.values() if not row["captured"]]
    assert not [row for row in failing if row["kind"] not in known or not row["repaired"]]


# ---- silently wrong: raw PyTorch gives the wrong numbers; GraphedCallable refuses, or does the right thing

def raw(call):
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = call()
    return graph, out


def test_rebound_and_stale_inputs(x):
    given = x
    graph, out = raw(lambda: given * 2)
    given = torch.full_like(x, 50)
    graph.replay()
    assert torch.equal(out, x * 2) and torch.equal(capture(lambda t: t * 2, x)(given), given * 2)


def test_a_broadcast_input(x):
    static = x.clone()
    graph, out = raw(lambda: static.sum(-1))
    static.copy_(torch.ones(1, 64, device="cuda"))
    graph.replay()
    assert out.shape == (8,) and out.eq(64).all()
    with pytest.raises(ValueError, match="captured as"):
        capture(lambda t: t.sum(-1), x)(torch.ones(1, 64, device="cuda"))


def test_overwritten_outputs(x):
    static = x.clone()
    graph, out = raw(lambda: static * 2)
    graph.replay()
    kept = out
    static.add_(1)
    graph.replay()
    assert not torch.equal(kept, x * 2)
    ours = capture(lambda t: t * 2, x)
    kept = ours(x)
    ours(x + 1)
    assert torch.equal(kept, x * 2)


def test_a_freed_input():
    static = torch.ones(1 << 20, device="cuda")
    graph, out = raw(lambda: static * 2)
    address = static.data_ptr()
    del static
    other = torch.full((1 << 20,), 99.0, device="cuda")
    graph.replay()
    assert other.data_ptr() == address and out[0].item() == 198
    held = torch.ones(1 << 20, device="cuda")
    ours = capture(lambda t: t * 2, held)
    del held, other
    assert ours(torch.ones(1 << 20, device="cuda"))[0].item() == 2


def test_autocast_casts_that_were_cached():
    weight, x = torch.nn.Parameter(torch.eye(16, device="cuda")), torch.ones(16, 16, device="cuda")
    with torch.autocast("cuda", torch.float16):
        x @ weight
        graph, (stale, ours) = torch.cuda.CUDAGraph(), (None, capture(lambda t: t @ weight, x))
        with torch.cuda.graph(graph):
            stale = x @ weight
    with torch.no_grad():
        weight.mul_(10)
    graph.replay()
    assert stale[0, 0].item() == 1 and ours(x)[0, 0].item() == 10


def test_a_shared_pool_replayed_out_of_order():
    x, pool = torch.ones(1 << 20, device="cuda"), torch.cuda.graph_pool_handle()
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(first, pool=pool):
        kept = (x * 2) + 1  # what is between goes back to the pool
    with torch.cuda.graph(second, pool=pool):
        other = x * 100
    second.replay()
    first.replay()
    assert other[0].item() != 100
    one = capture(lambda t: (t * 2) + 1, x)
    two = capture(lambda t: t * 100, x, pool=one.pool)
    answer = two(x)
    one(x)
    assert answer[0].item() == 100 and kept is not None


def test_what_python_does_is_done_at_capture_only(x):
    calls = []

    def step(t):
        calls.append(1)
        return t * len(calls)

    graph = capture(step, x, warmup=1)
    graph(x), graph(x)
    assert len(calls) == 2 and torch.equal(graph(x), x * 2)


def test_what_warm_up_did_to_a_cache_stays_and_warmup_0_avoids_all_but_the_capture():
    count, x = torch.zeros(1, device="cuda"), torch.ones(1, device="cuda")
    graph = capture(lambda t: count.add_(t), x)
    assert count.item() == 3  # a capture runs nothing
    count.zero_()
    graph(x)
    assert count.item() == 1


def test_a_flag_baked_in_is_refused_as_an_argument(x):
    graph = capture(lambda t, up: t * 10 if up else t / 10, (x, True))
    with pytest.raises(ValueError, match="baked in"):
        graph(x, False)


def test_a_limit_refuses_to_run_past_a_cache():
    from labkit.graphs import ReplayError
    cache, at = torch.zeros(4, device="cuda"), torch.zeros(1, dtype=torch.long, device="cuda")

    def append(t):
        cache.index_copy_(0, at, t)
        at.add_(1)
        return cache.sum()

    x = torch.ones(1, device="cuda")
    graph = capture(append, x, warmup=1, limit=4)
    at.zero_(), cache.zero_()
    for _ in range(4):
        graph(x)
    with pytest.raises(ReplayError, match="its limit"):
        graph(x)
    assert cache.tolist() == [1, 1, 1, 1]


def test_the_padding_that_lab_30_builds_does_what_the_packaged_one_does():
    from labkit import buckets, build, graphs, recordings
    cells = build.code_cells(build.NOTEBOOKS / "solutions" / "30_meet_the_five_limitations.ipynb")
    names = {"torch": torch, "GraphedCallable": graphs.GraphedCallable}
    exec(recordings.code_of(next(cell for cell in cells if "def padded_call" in cell)), names)
    packaged = buckets.BucketedGraphs(names["model"], names["x"], names["sizes"], dim=1, out_dim=1)
    for tokens in (1, 64, 300, 512):
        new = torch.randn_like(names["x"][:, :tokens])
        assert torch.equal(names["padded_call"](new), packaged(new))
