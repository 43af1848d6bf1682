"""labkit: measure CUDA Graphs on your own GPU, record what was measured, show it.

Importing labkit loads nothing heavy: rooms (`labkit.timing`) and the names below are fetched at their first use.
"""

from importlib import import_module

__version__ = "0.1.0"

_ROOMS = ("machine", "timing", "explain", "watch", "contents", "graphs", "buckets", "models", "architectures",
          "sharing", "decoding", "decode", "batching", "serving", "trace", "launch_model", "vllm_runs", "isolate", "operations", "examine", "experiments", "recordings", "record",
          "claims", "results", "charts", "report", "decide", "notebook", "progress", "check", "build", "guide")
_NAMES = {"banner": "notebook", "GraphedCallable": "graphs", "CaptureError": "graphs", "ReplayError": "graphs",
          "BucketedGraphs": "buckets", "diagnose": "examine", "measure": "timing",
          "compare": "timing", "doctor": "machine", "NoGPU": "machine", "RecordingError": "recordings"}

__all__ = [*_ROOMS, *_NAMES]


def __getattr__(name):
    if name in _ROOMS:
        return import_module(f"labkit.{name}")
    if name in _NAMES:
        return getattr(import_module(f"labkit.{_NAMES[name]}"), name)
    raise AttributeError(f"labkit has no {name!r}; it has: {', '.join(__all__)}")


def __dir__():
    return sorted(__all__)
