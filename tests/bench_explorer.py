"""Print how long the batch explorer takes from a moved control to the picture sent: python -m tests.bench_explorer

Over the recorded sweeps; where there are none, over made-up ones. Each move is one that was never made before, so that
nothing is drawn already, and then the same again.
"""

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import made_up

from labkit.explorers import sweep_model, sweep_view


def moves(model):
    """Yield (control, value) for a walk over every control: each model, size, precision, batch, range and view."""
    for view in sweep_model.VIEWS:
        for name in model.options("model"):
            yield "model", name
            yield "view", view
            for trait in ("layers", "width", "length", "precision", "batch", "lowest", "highest"):
                yield from ((trait, value) for value in (*model.options(trait)[1:], model.options(trait)[0])[:4])
            yield "highest", model.options("highest")[-1]
    yield from (("gpu", gpu) for gpu in model.options("gpu"))


def walk(sources):
    """Return the time (ms) of each move, {control: [ms]}."""
    model, taken = sweep_model.SweepModel(sources), {}
    sweep_view.view(model)
    for name, value in moves(model):
        start = time.perf_counter()
        setattr(model, name, value)
        taken.setdefault(name, []).append((time.perf_counter() - start) * 1e3)
    return taken


def main():
    sources = {name: source for name, source in sweep_view.at_hand().items() if not source.live}
    print(f"from a moved control to the picture sent, ms, over {'recorded' if sources else 'made-up'} sweeps")
    sources = sources or made_up.sources()
    walk(sources)  # fonts are read once a process
    for name, times in (taken := walk(sources)).items():
        print(f"{name:10} {len(times):4} moves   median {statistics.median(times):6.1f}   worst {max(times):6.1f}")
    every = [ms for times in taken.values() for ms in times]
    print(f"{'all':10} {len(every):4} moves   median {statistics.median(every):6.1f}   worst {max(every):6.1f}")


if __name__ == "__main__":
    main()
