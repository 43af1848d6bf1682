"""What a step would take on another machine: a traced row and three factors in, predictions and words out. No widgets."""

from traitlets import Float, HasTraits, Int, Tuple, Unicode, observe, validate

from labkit import charts, launch_model
from labkit.explorers.sweep_model import CURVE

FACTORS = {"cpu": (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0), "gpu": (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0),
           "more_layers": (1, 2, 3, 4)}
CHANGES = {"cpu": "a CPU {} times as fast", "gpu": "a GPU {} times as fast", "more_layers": "{} times as many layers"}


class WhatIfModel(HasTraits):
    """One traced row of sweeps, picked by `curve` (words) and batch, with CPU, GPU and number of layers changed by factors.

    Out come `times`, (name, predicted time in us) for eager and graph as it is and as it would be, and `summary` (words).
    Raises ValueError for a table without traces, for a curve that is not in it, or a factor that no slider has.
    """
    curve, batch = Unicode(), Int()
    cpu, gpu, more_layers = Float(1.0), Float(1.0), Int(1)
    times, summary = Tuple(), Unicode()

    def __init__(self, table, constants, **wishes):
        traced = table[launch_model.traced(table)]
        if traced.empty:
            raise ValueError("what-if needs a sweep with traces (eager_gpu_us and others), and this table has none")
        self.constants, self.provenance = constants, table.attrs["provenance"]
        self.curves = {charts.curve_name(dict(zip(CURVE, key))): part.set_index("batch", drop=False)
                       for key, part in traced.groupby(list(CURVE), sort=False)}
        curve = wishes.setdefault("curve", next(iter(self.curves)))
        if curve not in self.curves:
            raise ValueError(f"no traced curve is called {curve!r}; there are: {'; '.join(self.curves)}")
        for name, value in wishes.items():
            if value not in FACTORS.get(name, [value]):
                raise ValueError(f"{name} is one of {', '.join(map(str, FACTORS[name]))}, not {value!r}")
        super().__init__(**{"batch": int(self.curves[curve].index[0])} | wishes)
        self._predict()

    def batches(self):
        """Return the traced batches of this curve."""
        return tuple(int(batch) for batch in sorted(self.curves[self.curve].index))

    @validate("batch")
    def _traced(self, proposal):
        return min(self.batches(), key=lambda batch: abs(batch - proposal["value"]))

    @validate(*FACTORS)
    def _nearest(self, proposal):
        return min(FACTORS[proposal["trait"].name], key=lambda factor: abs(factor - proposal["value"]))

    @observe("curve", "batch", *FACTORS)
    def _predict(self, _change=None):
        if self.batch not in self.batches():
            self.batch = self.batch  # is moved to a traced one, and that predicts
            return
        row = self.curves[self.curve].loc[self.batch]
        eager, graph = launch_model.predict(row, self.constants)
        if_eager, if_graph = launch_model.predict(row, self.constants, cpu=self.cpu, gpu=self.gpu, layers=self.more_layers)
        self.times = (("eager", eager), ("graph", graph), ("eager, what if", if_eager), ("graph, what if", if_graph))
        changed = [words.format(f"{getattr(self, name):g}") for name, words in CHANGES.items() if getattr(self, name) != 1]
        here = f"{self.curve}, batch {self.batch:,}, predicted"
        now = f"eager {charts.time(eager)}, graph {charts.time(graph)}: a graph is {eager / graph:.2f} times as fast"
        if not changed:
            self.summary = f"{here}: {now}. Move a slider."
            return
        then, before = if_eager / if_graph, eager / graph
        gain = "gains about as much" if 0.95 < then / before < 1.05 else "gains more" if then > before else "gains less"
        self.summary = (f"{here}, as it is: {now}. With {' and '.join(changed)}: eager {charts.time(if_eager)}, graph "
                        f"{charts.time(if_graph)}, {then:.2f} times as fast. The graph {gain}.")
