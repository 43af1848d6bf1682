"""What the doctor sends to its child comes through whole, and its report says what is known and what is not."""

import linecache

import pytest
import torch

from labkit.examine import Diagnosis, _send


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn), requires_grad=False)
        self.whole = torch.zeros(4)
        self.part = self.whole[:2]  # shares its memory

    def forward(self, x):
        return x


def sent(path, fn, *inputs):
    _send(path / "call", fn, inputs)
    return torch.load(path / "call", weights_only=False)


def test_types_and_shared_memory_come_through(tmp_path):
    fn, (x,), _ = sent(tmp_path, Small(), torch.ones(2, dtype=torch.uint16))
    assert fn.weight.dtype == torch.float8_e4m3fn and x.dtype == torch.uint16
    assert fn.part.data_ptr() == fn.whole.data_ptr()


def test_functions_of_a_notebook_come_with_their_lines(tmp_path):
    names, source = {"__name__": "__main__"}, "def step(x):\n    return (lambda y: y * 2)(x)\n"
    linecache.cache["<cell 7>"] = len(source), None, source.splitlines(keepends=True), "<cell 7>"
    exec(compile(source, "<cell 7>", "exec"), names)
    step, _, cells = sent(tmp_path, names["step"], torch.ones(1))
    inner = next(part for part in step.__code__.co_consts if hasattr(part, "co_filename"))
    assert step.__code__.co_filename == inner.co_filename == "<cell 7>" and step(2) == 4
    assert cells["<cell 7>"][1] == "    return (lambda y: y * 2)(x)\n"


@pytest.mark.parametrize("apart, said", [(None, "are no tensors"), (0.0, "the same numbers as eager"), (0.25, "up to 0.25 off")])
def test_a_report_says_how_far_the_results_are_apart(apart, said):
    report = str(Diagnosis(True, "here", nodes={"kernel": 3}, kernels=3, largest_difference=apart, risks=("it counts",)))
    assert said in report and "3 kernel" in report and "RISK     it counts" in report and "speedup" not in report
