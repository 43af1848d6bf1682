"""One function per question, each giving one tidy table: measured here, or as recorded on a GPU that was.

A lab calls `experiments.name()`; `python -m labkit record` calls its `.measure()` and keeps what that returns.
"""

from labkit.experiments import capture, decoding_steps, limits, overhead, serving_steps, sweeps  # noqa: F401  each registers its experiments
from labkit.experiments.decoding_steps import decode_ladder  # noqa: F401
from labkit.experiments.registry import EXPERIMENTS, as_recorded, measured_or_recorded  # noqa: F401
from labkit.experiments.serving_steps import of_vllm  # noqa: F401

globals().update(EXPERIMENTS)
