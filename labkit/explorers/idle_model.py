"""What the idle explorer shows: layers, width and batch in, one measured step in words and bars out. No widgets."""

from traitlets import HasTraits, Int, Tuple, Unicode, observe, validate

from labkit import charts

INPUTS = ("layers", "width", "batch")


class IdleModel(HasTraits):
    """One row of the idle sweep, picked by layers, width and batch; a value not measured moves to the nearest one.

    Out come `summary` (words) and `bars`: (name, wall time in us, share of it the GPU works) for eager and graph.
    Raises ValueError for a table without rows, or without a column of theirs.
    """
    layers, width, batch = Int(), Int(), Int()
    summary = Unicode()
    bars = Tuple()

    def __init__(self, table):
        missing = [name for name in (*INPUTS, "eager_wall_us", "graph_wall_us", "gpu_us") if name not in table]
        if missing or table.empty:
            raise ValueError(f"this explorer needs experiments.idle_sweep(): no {', '.join(missing) or 'rows'} here")
        self.table = table
        self.choices = {name: tuple(int(v) for v in sorted(table[name].unique())) for name in INPUTS}
        middle = self.choices["width"][len(self.choices["width"]) // 2]
        super().__init__(layers=self.choices["layers"][-1], width=middle, batch=self.choices["batch"][0])
        self._look_up()

    @validate(*INPUTS)
    def _nearest(self, proposal):
        return min(self.choices[proposal["trait"].name], key=lambda choice: abs(choice - proposal["value"]))

    @observe(*INPUTS)
    def _look_up(self, _change=None):
        found = self.table.query("layers == @self.layers and width == @self.width and batch == @self.batch")
        asked = f"{self.layers} layers, width {self.width:,}, batch {self.batch}"
        if found.empty:
            self.summary, self.bars = f"{asked}: this combination was not measured.", ()
            return
        row = found.iloc[0]
        self.bars = (("eager", float(row.eager_wall_us), float(1 - row.idle_share)),
                     ("graph", float(row.graph_wall_us), float(min(1, row.gpu_us / row.graph_wall_us))))
        self.summary = (
            f"{asked}: one step launches {int(row.kernels):,} kernels. "
            f"Eager, it takes {charts.time(row.eager_wall_us)}, and the GPU is idle {row.idle_share:.0%} of that. "
            f"As a graph it takes {charts.time(row.graph_wall_us)}: "
            f"{row.speedup:.2f} times as fast ({row.speedup_low:.2f} to {row.speedup_high:.2f}).")

    def picture(self):
        """Draw the idle share against the batch size, one line for each number of layers, at this width: a Chart."""
        part = self.table[self.table["width"] == self.width]
        part = part.assign(model=part["layers"].map("{} layers".format))
        return charts.lines(part, "batch", "idle_share", by="model", log=("x",), y_label="share the GPU is idle",
                            title=f"How long the GPU waits in eager mode, width {self.width:,}")
