"""What all tests share: GPU tests say why they are skipped, and no test sees another's idea of the machine."""

import pytest

from labkit import machine


def pytest_collection_modifyitems(items):
    here = machine.mode()
    if not here.live:
        why = pytest.mark.skip(reason=f"needs an NVIDIA GPU: {here.reason}")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(why)


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
