"""What the batch explorer shows: a model, its size and a batch in; a curve, a chart and sentences out. No widgets, no torch."""

import asyncio
from contextlib import closing
from itertools import product
from math import log2

import pandas as pd
from traitlets import Any, Bool, HasTraits, Int, Unicode, observe

from labkit import charts, launch_model, machine, recordings
from labkit.experiments import sweeps
from labkit.experiments.sweeps import BATCHES, PRECISIONS
from labkit.experiments.sweeps import INPUTS as CURVE

SIZES = {"mlp": ([*product((2, 6, 12, 24, 48), (256, 512, 1024, 2048, 4096))], (1,)),  # what is offered live: (layers, width), lengths
         "transformer": ([*product((2, 6, 12, 24), (256, 512, 1024, 2048))], (16, 64, 256)),
         "gpt2": ([*product((6, 12, 24), (512, 768, 1024))], (128, 512, 1024)),
         "llama": ([(12, 768), (16, 2048), (32, 4096)], (128, 2048))}
VIEWS = ("speedup", "timeline", "roofline")


class Recorded:
    """Sweeps recorded on one GPU, {model: table}; a sweep is played back, a point every `pace` seconds."""
    live, verb = False, "played back"

    def __init__(self, tables, ceilings=None, pace=0.4):
        self.curves = {key: part.sort_values("batch") for table in tables.values()
                       for key, part in table.groupby(list(CURVE), sort=False)}
        self.ceilings, self.pace, self.partial = ceilings, pace, None

    def curve(self, key):
        """Return the recorded rows of a curve: all, or as many as were played back."""
        return self.curves[key][:self.partial]

    def start(self, key):
        """Begin with no point of a curve."""
        self.partial = 0

    def rows(self, key, batches):
        """Play a curve back: yields its rows."""
        for self.partial in range(1, 1 + len(self.curves[key])):
            if self.curves[key]["batch"].iloc[self.partial - 1] in batches:
                yield self.curves[key].iloc[self.partial - 1]

    def forget(self):
        """Show whole curves again."""
        self.partial = None


class Live:
    """Sweeps measured here by `points(model, layers, width, length, precision, batches)`, see experiments.sweeps.sweep_points.

    constants, ceilings: functions that measure what predictions and the roofline need; called once, after the first sweep.
    """
    live, verb, pace = True, "measured", 0.05  # seconds in which Stop and other messages get in

    def __init__(self, points=sweeps.sweep_points, constants=None, ceilings=None):
        self.points, self.ask = points, {"constants": constants, "ceilings": ceilings}
        self.curves = {(model, *size, length, precision): {} for model, (sizes, lengths) in SIZES.items()
                       for size, length, precision in product(sizes, lengths, PRECISIONS)}
        self.ceilings = self.constants = None
        self.told = recordings.provenance("sweep")

    def curve(self, key):
        """Return the rows measured so far on a curve."""
        table = pd.DataFrame(self.curves[key].values())
        table.attrs["provenance"] = self.told
        return table

    def start(self, key):
        """Begin with no point of a curve."""
        self.curves[key] = {}

    def rows(self, key, batches):
        """Measure a curve: yields rows, first without, then with traces, at last with predictions; and sentences meanwhile."""
        with closing(self.points(*key, batches)) as points:
            for row in points:
                if isinstance(row, dict):
                    self.curves[key][row["batch"]] = row
                yield row
        yield from self._measure_once("constants", "what a launch adds")
        for batch, row in self.curves[key].items():
            if row.get("eager_gpu_us") and self.constants:
                self.curves[key][batch] = row | launch_model.add_predictions(pd.DataFrame([row]), self.constants).iloc[0].to_dict()
                yield self.curves[key][batch]
        yield from self._measure_once("ceilings", "what this GPU can do at most")  # last: if they fail, predictions stay

    def forget(self):
        """Keep all: what was measured stays true."""

    def _measure_once(self, name, words):
        if self.ask[name]:
            setattr(self, name, (yield from sweeps.beside(self.ask[name], f"Measuring {words}, once: let the controls rest.")))
            self.ask[name] = None


class SweepModel(HasTraits):
    """One curve over batch sizes from one of several sources ({name: Recorded or Live}), and one point of it.

    A value that the source does not have moves to the nearest that it has, and `note` says so. `shown` counts what changed
    on the whole: look at it to draw again. Raises ValueError without a source, or for a wish that no control has.
    """
    gpu, model, precision, view = Unicode(), Unicode(), Unicode(), Unicode(VIEWS[0])
    layers, width, length, batch = Int(), Int(), Int(), Int(1)
    lowest, highest = Int(BATCHES[0]), Int(BATCHES[-1])
    table = Any()
    summary, status, note = Unicode(), Unicode(), Unicode()
    busy, shown = Bool(), Int()

    def __init__(self, sources, inches=charts.INCHES, **wishes):
        if not sources:
            raise ValueError("the explorer needs a recorded sweep or a GPU: there is neither here")
        _refuse(wishes, {"gpu": sources, "model": {key[0] for source in sources.values() for key in source.curves},
                         "precision": PRECISIONS, "view": VIEWS})
        self.inches = inches  # across a picture: fewer make its type larger
        self.sources, self._points, self._moving, self._progress, self._drawn = sources, None, True, "", {}
        start = {"gpu": next(iter(sources)), "model": "gpt2", "layers": 12, "width": 768, "length": 128, "precision": "float16"}
        super().__init__(**start | wishes)
        moved = self._snap("model")
        self.note, self._moving = moved if wishes.keys() & {*CURVE, "batch", "lowest", "highest"} else "", False
        self._show(self._resting())

    @property
    def source(self):
        """Return the chosen source: a Recorded or a Live."""
        return self.sources[self.gpu]

    @property
    def key(self):
        """Return the chosen curve: (model, layers, width, length, precision)."""
        return tuple(getattr(self, name) for name in CURVE)

    def options(self, name):
        """Return what a control offers, sorted: the batches of this range, or what the source has for this model."""
        if name == "gpu":
            return tuple(self.sources)
        if name == "batch":
            return tuple(b for b in self._batches() if self.lowest <= b <= self.highest)
        if name in ("lowest", "highest"):
            return self._batches()
        at = CURVE.index(name)
        found = {key[at] for key in self.source.curves if name == "model" or key[0] == self.model}
        return tuple(sorted(found, key={"model": list(SIZES).index, "precision": PRECISIONS.index}.get(name)))

    def _batches(self):
        return BATCHES if self.source.live else tuple(int(b) for b in self.source.curves[self.key]["batch"])

    @observe(*CURVE, "gpu", "batch", "lowest", "highest", "view")
    def _changed(self, change):
        if self._moving:  # by a move that is not over yet
            return
        self._moving, status, name = True, self.status, change["name"]
        try:
            if name == "gpu" and self.gpu not in self.sources or name == "view" and self.view not in VIEWS:
                setattr(self, name, change["old"])
            if name not in ("batch", "view"):
                status = self._close(f"Stopped after {self._progress}: a control was moved.")
                for source in self.sources.values():
                    source.forget()
            self.note = "" if name == "view" else self._snap(name)
        finally:
            self._moving = False
        self._show(status)

    def _snap(self, name):
        """Move to the nearest that the source has, `name` moving last; return what moved, in words."""
        wish = {n: getattr(self, n) for n in (*CURVE, "batch", "lowest", "highest")}
        order = sorted(CURVE, key=lambda n: (n != "model", n != name, n != "precision"))

        def far(key):
            here = dict(zip(CURVE, key))
            return [abs(log2(here[n] / max(1, wish[n]))) if isinstance(here[n], int) else here[n] != wish[n] for n in order]

        for n, value in zip(CURVE, min(self.source.curves, key=far)):
            setattr(self, n, value)
        self.lowest, self.highest = sorted((_nearest(self.lowest, self._batches()), _nearest(self.highest, self._batches())))
        outside = self.batch in self._batches() and not self.lowest <= self.batch <= self.highest
        self.batch = _nearest(self.batch, self.options("batch"))
        said = []
        if outside:
            said.append(f"Batch {wish['batch']:,} is outside of the range: moved to {self.batch:,}.")
            wish["batch"] = self.batch
        moved = [n for n in wish if wish[n] != getattr(self, n) and not (n == "length" and 1 in (wish[n], self.length))]
        asked, now = (", ".join(f"{n} {values[n]:,}" if isinstance(values[n], int) else f"{n} {values[n]}" for n in moved)
                      for values in (wish, {n: getattr(self, n) for n in moved}))
        if moved:
            said.append(f"Not {'offered' if self.source.live else 'recorded'} here: {asked}. Moved to {now}.")
        return " ".join(said)

    def _resting(self):
        """Say what stands there while no sweep runs."""
        if not self.source.live:
            return f"Recorded on {self.gpu}: Measure plays it back, point by point."
        return "Measured here." if self.source.curves[self.key] else "Not measured yet with these settings: press Measure."

    def _show(self, status=""):
        """Bring table and sentences in line with the inputs, and say that all is in line."""
        if self.busy:  # other points under the same settings
            self._drawn.clear()
        table = self.source.curve(self.key)
        self.table = table[table["batch"].between(self.lowest, self.highest)] if len(table) else table
        self.summary, self.status = self._say_point(), status or self._resting()
        self.shown += 1

    def _row(self):
        """Return the row of the chosen batch, or None."""
        rows = self.table[self.table["batch"] == self.batch] if len(self.table) else self.table
        return None if rows.empty else rows.iloc[0]

    def _say_point(self):
        row = self._row()
        here = f"{charts.curve_name(dict(zip(CURVE, self.key)))}, batch {self.batch:,}"
        if row is None:
            return f"{here}: not {self.source.verb} yet."
        if row["skipped"]:
            return f"{here}: left out ({row['skipped']})."
        done = charts.measured(self.table)[0]
        predicted = row.get("predicted_speedup")
        return (f"{here}: one step launches {int(row['kernels']):,} kernels. Eager, it takes {charts.time(row['eager_wall_us'])}, "
                f"as a graph {charts.time(row['graph_wall_us'])}: {row['speedup']:.2f} times as fast "
                f"({row['speedup_low']:.2f} to {row['speedup_high']:.2f}"
                + (f"; predicted {predicted:.2f}" if pd.notna(predicted) else "") + "). "
                + charts.say_overhead(done) + self._say_floor(row) * (self.view == "roofline")
                + " The timeline is the profiler's, which slows every launch, also the graph's one." * (self.view == "timeline"))

    def _say_floor(self, row):
        if self.source.ceilings is None:
            return ""
        try:
            floors = charts.floors_of(self.table[self.table["batch"] == self.batch], self.source.ceilings).iloc[0]
        except (ValueError, KeyError):  # the chart says what is missing
            return ""
        times = row[["eager_wall_us", "graph_wall_us"]] / floors.max()
        return f" The floor is {charts.time(floors.max())}: eager takes {times.iloc[0]:.3g} times that, the graph {times.iloc[1]:.3g} times."

    def chart(self):
        """Draw what is chosen: a Chart, or a sentence where there is nothing to draw. What is at rest is drawn once only."""
        here = (self.gpu, self.key, self.view, self.lowest, self.highest, len(self.table),
                self.view == "timeline" and self.batch)
        if (here, self.batch) not in self._drawn:
            if len(self._drawn) > 500:
                self._drawn.clear()
            try:
                plain = self._drawn.get(here) or self._draw()
            except ValueError as error:  # what is there lacks something: say so, and leave no other chart standing
                plain = f"This cannot be drawn: {error}."
            if isinstance(plain, str):
                return plain
            self._drawn |= {here: plain, (here, self.batch): plain.marked(self.batch)}
        return self._drawn[here, self.batch]

    def _draw(self):
        row, on = self._row(), {"dpi": charts.PIXELS * charts.INCHES // self.inches, "inches": self.inches}
        if not len(self.table) or charts.measured(self.table)[0].empty:
            return self.summary
        if self.view == "speedup":
            return charts.sweep(self.table, batches=self.options("batch"), **on)
        if self.view == "roofline":
            found = self.source.ceilings
            return "The ceilings of this GPU are not measured yet." if found is None else charts.roofline(
                self.table, found, batches=self.options("batch"), **on)
        if row is None or row["skipped"]:
            return self.summary
        if not isinstance(row.get("eager_gpu_us"), list):
            return f"There is no timeline of batch {self.batch:,}: it was not traced{' yet' * self.source.live}."
        return charts.timeline(charts.step_of(row, self.table), title=f"{charts.curve_name(row)}, batch {self.batch:,}", **on)

    async def measure(self):
        """Measure the curve here, or play its recording back, until it ends, fails or is stopped; while busy, do nothing."""
        if self.busy:
            return
        source, batches, done, said = self.source, self.options("batch"), set(), ""
        self._points = mine = source.rows(self.key, batches)
        self.busy, self.note = True, ""
        source.start(self.key)
        self._count(0, len(batches))
        try:
            await asyncio.sleep(0.05)  # the browser shows it
            while self._points is mine and (row := next(mine, None)) is not None:
                if isinstance(row, str):
                    self.status = row
                else:
                    done.add(int(row["batch"]))
                    self._count(len(done), len(batches))
                await asyncio.sleep(source.pace)
            said = f"Done: {self._progress}."
        except Exception as error:  # whatever a sweep dies of, the explorer lives on
            said = f"Stopped after {self._progress} by an error: {machine.first_line(error)}"
        finally:  # also when the task is cancelled or the cell interrupted: the next press must find nothing running
            if self._points is mine:
                said = self._close(said or f"Stopped after {self._progress}.")
                self._show(said)

    def _count(self, done, of):
        self._progress = f"{done} of {of} points {self.source.verb}"
        self._show(f"{self._progress}.{' Next, each is profiled once.' * (self.source.live and done == of)}")

    def stop(self):
        """End the sweep that runs, if any, and keep its points."""
        if said := self._close(f"Stopped after {self._progress}."):
            self._show(said)

    def _close(self, said=""):
        """Let go of the sweep that runs; return `said` if there was one."""
        if not self.busy:
            return ""
        points, self._points, self.busy = self._points, None, False
        try:
            points.close()
        except Exception as error:
            said += f" Then an error: {machine.first_line(error)}"
        return said


def _refuse(wishes, known):
    """Raise ValueError for a wish that no control has, or that none offers; numbers move to the nearest instead."""
    names = (*CURVE, "batch", "lowest", "highest", "view", "gpu")
    for name, value in wishes.items():
        if name not in names:
            raise ValueError(f"the explorer has no {name!r} to set; it has: {', '.join(names)}")
        if name in known and value not in known[name]:
            raise ValueError(f"{name} is one of {', '.join(sorted(known[name]))}, not {value!r}")
        if name not in known and not isinstance(value, int):
            raise ValueError(f"{name} is a whole number, not {value!r}")


def _nearest(value, choices):
    return min(choices, key=lambda choice: abs(log2(choice / max(1, value))))
