"""A class on real GPUs: eight kernels that measure at once wait for each other, and get what one alone gets; who gets which GPU, and how much."""

import json
import os
import queue
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")
client = pytest.importorskip("jupyter_client.manager")
from labkit import hub, machine  # noqa: E402

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


def in_own_python(home, code, **env):
    """Run code in the Python that a learner gets, and return the words that it prints."""
    hub.own_python(home)
    done = subprocess.run([home / "env/bin/python", "-c", code], env={**os.environ, **env}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_memory_beyond_the_share_is_refused(tmp_path):
    code = ("import torch; free, total = torch.cuda.mem_get_info(); assert free > total // 3, 'others fill this GPU'\n"
            "def take(part): return torch.empty(int(part * total), dtype=torch.uint8, device='cuda').nbytes\n"
            "take(0.05); print('within')\n"
            "try: take(0.2)\nexcept torch.OutOfMemoryError: print('refused')")
    assert in_own_python(tmp_path, code, LABKIT_GPU_SHARE="0.1") == ["within", "refused"]


def test_a_learner_sees_the_gpu_that_is_least_loaded(tmp_path):
    if len(here := list(machine.gpus())) < 2:
        pytest.skip("needs two NVIDIA GPUs: there is one")
    full = torch.ones(4 * 2**30, dtype=torch.uint8, device="cuda:0")
    first = hub.least_loaded([])
    assert first in here and first != f"GPU-{torch.cuda.get_device_properties(full.device).uuid}"
    assert hub.least_loaded([first]) != first  # fewest learners first
    seen = in_own_python(tmp_path, "import torch; from labkit import machine; print(machine.gpu_uuid(), torch.cuda.device_count())",
                         CUDA_VISIBLE_DEVICES=first)
    assert seen == [first, "1"]
