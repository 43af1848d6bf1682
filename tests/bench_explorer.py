"""Print how long the batch explorer takes from a moved control to the picture sent: python -m tests.bench_explorer

Over the recorded sweeps; where there are none, over made-up ones. Only moves that bring a picture never drawn before count:
one that changes nothing, or goes back to a picture that is kept, would flatter. The last column is the CPU time of the worst
move by that clock, which other processes do not lengthen (but a slower CPU clock does).
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
                yield from ((trait, value) for value in (*model.options(trait)[1:], model.options(trait)[0]))
            yield "highest", model.options("highest")[-1]
            for other in sweep_model.VIEWS:
                yield "view", other
            yield "view", view
    yield from (("gpu", gpu) for gpu in model.options("gpu"))


def walk(sources):
    """Return the wall and CPU time (ms) of each move that draws a new picture, {control: [(wall, CPU)]}."""
    model, taken, seen = sweep_model.SweepModel(sources), {}, set()
    box, = (part for part in sweep_view.view(model).children if "labkit-chart" in part._dom_classes)
    for name, value in moves(model):
        wall, cpu = time.perf_counter(), time.process_time()
        setattr(model, name, value)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if box.value not in seen and box.value.startswith("<img"):
            taken.setdefault(name, []).append((wall * 1e3, cpu * 1e3))
        seen.add(box.value)
    return taken


def main():
    sources = {name: source for name, source in sweep_view.at_hand().items() if not source.live}
    print(f"from a moved control to the picture sent, ms, over {'recorded' if sources else 'made-up'} sweeps")
    sources = sources or made_up.sources()
    taken = walk(sources)
    for name, times in {**taken, "all": [pair for times in taken.values() for pair in times]}.items():
        wall, cpu = (sorted(clock) for clock in zip(*times))
        print(f"{name:10} {len(wall):4} moves   median {statistics.median(wall):6.1f}   95 % under "
              f"{wall[len(wall) * 95 // 100]:6.1f}   worst {wall[-1]:6.1f}   worst CPU {cpu[-1]:6.1f}")


if __name__ == "__main__":
    main()
