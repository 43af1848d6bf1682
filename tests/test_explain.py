"""Failures are told by their first cause; the messages are torch's and CUDA's own, as seen on a GPU."""

import pytest

from labkit import explain

WRAPPER = "CUDA error: operation failed due to a previous error during capture"
SEEN = {
    "CUDA error: operation not permitted when stream is capturing": "the CPU waits for the GPU",
    "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned.": "unpinned",
    "Attempt to increase offset for a CUDA generator not in capture mode.": "random generator",
    "Offset increment outside graph capture encountered unexpectedly.": "random generator",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`": "sets itself up",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED": "sets itself up",
    "cuFFT error: CUFFT_INTERNAL_ERROR": "sets itself up",
    "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`": "sets itself up",
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
    first = RuntimeError("CUDA error: operation not permitted when stream is capturing")
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
    error = raised("CUDA error: operation not permitted when stream is capturing", behind=KeyError("handled"))
    assert explain.CaptureError(error).cause is error
