"""What PyTorch may take of a GPU's memory: in a class, every Python of a learner keeps to LABKIT_GPU_SHARE.

Each of them has `watch` called as it starts, by a line that hub.py writes: so this room imports next to nothing, and never torch.
"""

import contextlib
import sys
from importlib.machinery import PathFinder


class _Watch:
    """A finder that finds torch as Python does, and has it keep to the share as soon as it is imported."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = PathFinder.find_spec(name, path) if name == "torch" else None
        if spec and spec.origin:  # a mere folder of that name has none
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (execute(module), keep(module))
        return spec


def watch():
    """Have torch keep to the share, whenever this process imports it."""
    sys.meta_path.insert(0, _Watch)


def keep(torch):
    """Let torch take no more than LABKIT_GPU_SHARE of the GPU's memory: from now on or, where CUDA has not started, once it starts."""
    from labkit import machine
    with contextlib.suppress(ValueError):  # a wrong setting, which the banner names
        if (share := machine.share_of_memory()) < 1 and hasattr(torch, "cuda"):  # a learner's torch.py has none
            torch.cuda._lazy_call(lambda: torch.cuda.set_per_process_memory_fraction(share))
