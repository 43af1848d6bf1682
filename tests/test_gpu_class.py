"""A class on one GPU: eight kernels that measure at once wait for each other, and get what one alone gets."""

import json
import queue
from concurrent.futures import ThreadPoolExecutor

import pytest

pytestmark = pytest.mark.gpu
pytest.importorskip("torch")
client = pytest.importorskip("jupyter_client.manager")

LEARNERS = 8
SETUP = """
import json, torch
from labkit import compare, experiments, models
pair, graph = experiments.registry.as_pair(*models.build("transformer", layers=12, width=256, batch=1))
"""
MEASURE = """
with torch.inference_mode():
    ratio = compare(pair, budget_s=3).ratio("eager", "graph")
print(json.dumps([ratio.low, ratio.high]))
"""


def printed(kernel, code, timeout_s=240):
    """Run code in a kernel; returns what it printed. An error in it is raised here."""
    told = []

    def hear(message):
        if message["msg_type"] == "stream":
            told.append(message["content"]["text"])
        if message["msg_type"] == "error":
            raise AssertionError("\n".join(message["content"]["traceback"]))
    try:
        kernel.execute_interactive(code, timeout=timeout_s, output_hook=hear)
    except queue.Empty:
        raise AssertionError(f"no answer: {told}") from None
    return "".join(told)


@pytest.fixture
def kernels():
    """Eight kernels, each with its model captured."""
    started = []
    try:
        for _ in range(LEARNERS):
            started.append(client.start_new_kernel(kernel_name="python3", startup_timeout=120))
        with ThreadPoolExecutor(LEARNERS) as pool:
            list(pool.map(lambda one: printed(one[1], SETUP), started))
        yield [one for _, one in started]
    finally:
        for manager, one in started:
            one.stop_channels()
            manager.shutdown_kernel(now=True)


def test_eight_kernels_at_once_get_the_ratio_of_one_alone(kernels):
    alone = json.loads(printed(kernels[0], MEASURE).splitlines()[-1])
    with ThreadPoolExecutor(LEARNERS) as pool:
        texts = list(pool.map(lambda one: printed(one, MEASURE), kernels))
    ratios = [json.loads(text.splitlines()[-1]) for text in texts]
    print("alone", alone, "together", ratios)
    assert all(low <= alone[1] and high >= alone[0] for low, high in ratios), (alone, ratios)
    waited = [text.count("before yours") for text in texts]
    assert sorted(map(bool, waited)) == [False] + [True] * (LEARNERS - 1), waited  # one began at once, and each other was told its place
    assert max(waited) >= LEARNERS - 3  # the last one saw the queue move
