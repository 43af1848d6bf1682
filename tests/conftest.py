"""What all tests share: which run first, why GPU tests are skipped, and that no test sees another's idea of the machine."""

import os
import signal

import pytest

from labkit import machine

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell started us in the background: tests press Ctrl-C all the same
    signal.signal(signal.SIGINT, signal.default_int_handler)
FIRST = ("test_browser", "test_notebooks", "test_hub")  # they take longest: the other process works through the rest meanwhile


def no_gpu_tests():
    """Return why GPU tests cannot run here, or None."""
    here = machine.mode()
    if not here.live:
        return f"needs an NVIDIA GPU: {here.reason}"
    if "PYTEST_XDIST_WORKER" in os.environ:  # pytest -n, as in make test
        return "measures time and must run alone: .venv/bin/python -m pytest -m gpu"
    return None


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.stem not in FIRST)
    if why := no_gpu_tests():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="module")
def one_thread():
    """Keep tiny models on one core: handing their work to a second one takes longer than doing it."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fresh_machine(monkeypatch):
    """Forget what machine.py has found out, before and after a test that pretends another machine."""
    cached = (machine.mode, machine._nvml, machine.writable_environment)
    for function in cached:
        function.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    for function in cached:
        function.cache_clear()
