"""Failures are told by their first cause; the messages are torch's and CUDA's own, as seen on a GPU."""

import builtins
import json
from concurrent.futures import Future
from pathlib import Path

import pytest

from labkit import explain

TABLES = sorted(Path(explain.__file__).parent.glob("recordings/*/operation_table.json"))
WAITS = "CUDA error: operation not permitted when stream is capturing"
UNPINNED = "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned."
WRAPPER = "CUDA error: operation failed due to a previous error during capture"
SEEN = {
    WAITS: "the CPU waits for the GPU",
    "CUDA error: operation not permitted on an event last recorded in a capturing stream": "the CPU waits for the GPU",
    UNPINNED: "unpinned",
    "Attempt to increase offset for a CUDA generator not in capture mode.": "random generator",
    "Offset increment outside graph capture encountered unexpectedly.": "random generator",
    "CUDAGeneratorImpl::set_current_seed can be called during stream capture only if new seed is the same as the original "
    "seed.": "seeded inside the call",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`": "sets itself up",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED": "sets itself up",
    "cuFFT error: CUFFT_INTERNAL_ERROR": "sets itself up",
    "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`": "sets itself up",
    "CUDA error: initialization error when calling `cusparseCreate(handle)`": "sets itself up",
    "cusolver error: CUSOLVER_STATUS_EXECUTION_FAILED, when calling `cusolverDnSgesvdj(handle, ...)`": "linear algebra",
    "CUDA error: capturing stream has unjoined work": "never rejoins",
    "CUDA out of memory. Tried to allocate 4096.00 GiB.": "out of memory",
    "CUDA error: operation would make the legacy stream depend on a capturing blocking stream": "legacy default stream",
}


def raised(message, behind=None):
    """Return a RuntimeError as it arrives: raised, with the exception that was being handled behind it."""
    try:
        try:
            if behind:
                raise behind
        finally:
            raise RuntimeError(message)
    except RuntimeError as error:
        return error


@pytest.mark.parametrize("message", SEEN)
def test_messages_seen_on_a_gpu_have_their_explanation(message):
    kind, way_round = explain.explain(raised(message))
    assert SEEN[message] in kind and way_round


def test_the_first_cause_is_found_behind_the_wrapper():
    first = RuntimeError(WAITS)
    error = explain.CaptureError(raised(WRAPPER, behind=first))
    assert error.cause is first and "waits for the GPU" in error.kind
    assert "previous error" not in str(error) and "test_explain.py" in error.line and "way round" in str(error)
    assert "restart the kernel" not in str(error)
    assert "restart the kernel" in str(explain.CaptureError(first, repaired=False))


def test_a_swallowed_first_cause_is_said_to_be_missing():
    assert "your code caught itself" in explain.CaptureError(raised(WRAPPER)).kind


def test_an_unknown_error_is_told_as_what_it_is():
    assert explain.explain(KeyError("mine"))[0] == "KeyError raised by the call"
    assert explain.explain(raised("a generator of ideas ran dry"))[0] == "RuntimeError raised by the call"
    assert explain.first_cause(raised("something else")) is None
    assert "waits for the GPU" in explain.first_cause(raised(WRAPPER, raised(next(iter(SEEN)))))


def test_an_error_handled_before_is_not_the_cause():
    error = raised(WAITS, behind=KeyError("handled"))
    assert explain.CaptureError(error).cause is error
    assert "handled" not in str(explain.CaptureError(error))


YOURS = {
    "torch.cuda.synchronize()": "synchronise before or after the replay",
    "print(x)": "print that after the replay",
    "rows = mask.nonzero()": "nonzero_static",
    "kinds = i.unique()": "compare neighbours",
    "y = x[x > 0]": "torch.where(mask, x, 0)",
    "y = x[kind == 3]": "torch.where(mask, x, 0)",
    "y = x.masked_select(mask)": "torch.where(mask, x, 0)",
    "y = F.one_hot(i)": "one_hot(i, classes)",
    "y = x.repeat_interleave(n)": "output_size=n",
    "y = torch.linalg.solve(a, b)": "solve_ex",
    "y = torch.linalg.inv(a)": "inv_ex",
    "y = torch.linalg.cholesky(a)": "cholesky_ex",
    "y = x / x.max().item()": "use the tensor itself",
    "y = x * float(x.sum())": "use the tensor itself",
    "for _ in range(steps[3]):": "use the tensor itself",
    "y = x.cpu()": "read that after the replay",
    "rows = n.tolist()": "read that after the replay",
    "y = x + torch.tensor(2.0, device='cuda')": "torch.full(",
    "counts = torch.bincount(i)": "scatter_add_(0, x, ones)",
    "same = torch.equal(x, y)": "(a == b).all()",
    "if torch.allclose(x, y):": "torch.isclose(a, b).all()",
    "y = x.to_sparse()": "stay dense",
    "y = torch.cond(x.sum() > 0, up, down, (x,))": "conditional node",
    "if x.sum() > 0:": "pick with torch.where",
    "while error > 1e-3:": "pick with torch.where",
    "assert (x < 100).all()": "pick with torch.where",
    "y = f(x)": "do them before or after",
    "y = f(torch.linalg.solve_ex(a, b)[0])": "do them before or after",
    "y = f(torch.nonzero_static(x, size=8))": "do them before or after",
}


@pytest.mark.parametrize("source", YOURS)
def test_where_the_cpu_waits_your_own_line_picks_the_way_round(source):
    kind, way_round = explain.explain(raised(WAITS), f"lab.py, line 3: {source}")
    assert kind == explain.WAITS and YOURS[source] in way_round
    assert explain.explain(raised(WAITS), f"{source.replace(': ', '')}.py, line 3: y = f(x)") == explain.explain(raised(WAITS))


@pytest.mark.parametrize("source", ["y = x.cpu()", "y = x + torch.tensor(2.0, device='cuda')", "y = f(x)"])
def test_where_unpinned_memory_is_copied_it_does_too(source):
    kind, way_round = explain.explain(raised(UNPINNED), f"lab.py, line 3: {source}")
    assert kind == explain.COPIES and (YOURS[source] in way_round) == (source != "y = f(x)")
    assert ("use pin_memory()" in way_round) == (source == "y = f(x)")


@pytest.mark.parametrize("source", YOURS)
def test_your_own_line_picks_nothing_for_another_kind_of_failure(source):
    others = [raised(message) for message, kind in SEEN.items() if kind not in explain.WAITS + explain.COPIES]
    assert len(others) > 10
    for error in (*others, raised(WRAPPER), raised("something else"), KeyError("mine")):
        assert explain.explain(error, f"lab.py, line 3: {source}") == explain.explain(error)


def test_the_line_is_yours_even_where_a_library_raised():
    library = Future()
    library.set_exception(RuntimeError(WAITS))
    with pytest.raises(RuntimeError) as seen:
        float(library.result())
    error = explain.CaptureError(seen.value)
    assert error.line.startswith("test_explain.py") and error.line.endswith(": float(library.result())")
    assert "use the tensor itself" in error.way_round and error.way_round in str(error)


@pytest.mark.parametrize("behind", [WAITS, "CUDA out of memory. Tried to allocate 4096.00 GiB.", "a cable broke"])
def test_an_unknown_error_is_told_with_all_that_stands_behind_it(behind):
    error = explain.CaptureError(raised("the printer is on fire", raised(f"{behind}\nmore", KeyError("deepest"))))
    told = str(error).splitlines()
    assert told[0] == "the capture failed: RuntimeError raised by the call"
    assert told[2:5] == ["  cause: RuntimeError: the printer is on fire", f"  behind it: RuntimeError: {behind}",
                         "  behind it: KeyError: 'deepest'"]
    assert told[5:] == ["  way round: run the call without capture to see whether it fails there too"]


def test_memory_that_runs_out_without_a_capture_is_no_failed_capture():
    error = raised("CUDA out of memory. Tried to allocate 4096.00 GiB.")
    told = explain.first_cause(error)
    assert told.startswith("it failed: the GPU ran out of memory\n") and "capture failed" not in told
    assert str(explain.CaptureError(error)).startswith("the capture failed: the GPU ran out of memory\n")


@pytest.mark.skipif(not TABLES, reason="no operation_table is recorded yet")
@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.parent.name)
def test_each_failure_in_the_recorded_table_is_of_a_known_kind_and_explained_as_recorded(path):
    failing = [row for row in json.loads(path.read_text("utf-8"))["rows"] if not row["captured"]]
    assert len(failing) > 30
    known = {kind for _, kind, _ in explain.EXPLANATIONS}
    for row in failing:
        name, _, message = row["cause"].partition(": ")
        kind = getattr(builtins, name, None) or type(name, (RuntimeError,), {})
        assert explain.explain(kind(message))[0] == row["kind"], row
        assert row["kind"] in known, row


def test_a_chain_that_bites_its_own_tail_is_told_once():
    for message in (WRAPPER, "something else"):
        error = raised(message)
        error.__cause__ = error
        assert explain.CaptureError(error).cause is error
