"""What a list of captured sizes would cost a server: a policy, a number of graphs and a rate in, sentences and a chart out. No widgets.

Computed from recorded or measured tables: how often each batch occurred at a rate, and what a step, a capture and a pool cost at each size.
"""

import numpy as np
import pandas as pd
from traitlets import Any, HasTraits, Int, Unicode, observe, validate

from labkit import batching, charts

POLICIES = {"powers of two": batching.powers_of_two, "vLLM's list": batching.vllm_sizes, "chosen sizes": None, "every size": batching.every_size}
QUANTITIES = {"step_us": "time of one step, mean over tokens", "padding_share": "share of padding", "pool_bytes": "memory of the pool",
              "capture_s": "seconds to capture"}


class ServeModel(HasTraits):
    """One list of sizes at one rate: the first `graphs` sizes of a policy's list, or as many chosen for that rate's steps.

    ways, steps, pools: the tables of serving_ways, serving_step_cost and serving_pools. `options` has what each input offers;
    out come `row` (the numbers of this point, a dict) and `summary` (words). A value that is not offered moves to the nearest.
    Raises ValueError where no way served with every size, and for a policy or quantity that there is not, to begin with.
    """
    policy, graphs, rate, quantity = Unicode("powers of two"), Int(6), Int(), Unicode("step_us")
    row, summary = Any(), Unicode()

    def __init__(self, ways, steps, pools, **wishes):
        self.ways, self.provenance = ways, ways.attrs["provenance"]
        every = ways[ways["way"] == "every size"]
        if every.empty:
            raise ValueError("this explorer needs a table in which every size was served")
        self.counts = {int(rate): _counted(part["batches"]) for rate, part in every.groupby("rate")}
        self.most = max(every["sizes"].iloc[0])
        self.costs = _costs(steps, pools, self.most)
        self.table = pd.DataFrame([self._at(policy, number, rate) for rate in self.counts for policy in POLICIES
                                   for number in range(1, 1 + self._longest(policy, rate))])
        self.table.attrs["provenance"] = self.provenance
        self._drawn = {}
        for name, known in (("policy", POLICIES), ("quantity", QUANTITIES)):
            if wishes.get(name, next(iter(known))) not in known:
                raise ValueError(f"there is no {name} {wishes[name]!r}: there are {', '.join(known)}")
        super().__init__(rate=max(self.counts))
        for name in ("policy", "rate", "graphs", "quantity"):  # one by one: which numbers of graphs there are depends on the others
            if name in wishes:
                setattr(self, name, wishes[name])
        self._look()

    def options(self, name):
        """Return what an input offers."""
        return {"policy": tuple(POLICIES), "quantity": tuple(QUANTITIES), "rate": tuple(self.counts),
                "graphs": tuple(range(1, 1 + self._longest(self.policy, self.rate)))}[name]

    def sizes(self, policy, number, rate):
        """Return the sizes that are captured."""
        return POLICIES[policy](self.most)[:number] if POLICIES[policy] else batching.best_sizes(self.counts[rate], number)

    def _longest(self, policy, rate):
        return len(self.sizes(policy, self.most, rate))

    def _at(self, policy, number, rate):
        """Return the numbers of one point."""
        sizes, counts = self.sizes(policy, number, rate), self.counts[rate]
        batches, steps = np.array(list(counts)), np.array(list(counts.values()))
        run = np.array([batching.at_least(sizes, batch) for batch in batches])
        us = np.where(run <= sizes[-1], self.costs["graph"][run], self.costs["eager"][run])
        return {"policy": policy, "graphs": number, "rate": rate, "sizes": sizes, "padding_share": batching.wasted_share(sizes, counts),
                "replayed_share": steps[batches <= sizes[-1]].sum() / steps.sum(), "step_us": np.average(us, weights=batches * steps),
                "capture_s": self.costs["capture"][sizes].sum(),
                "pool_bytes": self.costs["alone"][sizes[-1]] + self.costs["beside"][sizes[:-1]].sum()}

    @validate("policy", "quantity")
    def _known(self, proposal):
        offered = self.options(proposal["trait"].name)
        return proposal["value"] if proposal["value"] in offered else offered[0]

    @validate("rate", "graphs")
    def _nearest(self, proposal):
        return min(self.options(proposal["trait"].name), key=lambda value: abs(value - proposal["value"]))

    @observe("policy", "graphs", "rate")
    def _look(self, _change=None):
        if self.graphs not in self.options("graphs"):
            self.graphs = self.graphs  # moves, and looks again
            return
        self.row = self._at(self.policy, self.graphs, self.rate)
        self.summary = self._say()

    def _say(self):
        row = self.row
        served = self.ways[(self.ways["rate"] == self.rate) & self.ways["sizes"].map(lambda sizes: list(sizes) == row["sizes"])]
        said = (f"{self.policy}, {self.graphs} graph{'s' * (self.graphs > 1)} ({_listed(row['sizes'])}), {self.rate} requests a second: {row['padding_share']:.1%} of the rows "
                f"are padding, {row['replayed_share']:.1%} of the steps are replays, and a step takes {charts.time(row['step_us'])}. "
                f"The pool takes {row['pool_bytes'] / 2**20:,.0f} MiB, the captures {row['capture_s']:.1f} s. Computed from what each size costs.")
        if served.empty:
            return said
        return (f"{said} Served with just these sizes: {served['padding_share'].mean():.1%} padding, {served['itl_ms_p50'].mean():.2f} ms between two tokens "
                f"(median; prefills of others lie between some), pool {served['pool_mib'].iloc[0]:,.0f} MiB, {served['capture_s'].iloc[0]:.1f} s.")

    def chart(self):
        """Return the chart of one quantity against the number of graphs, a line a policy, at this rate."""
        key = self.rate, self.quantity
        if key not in self._drawn:
            self._drawn[key] = charts.lines(self.table[self.table["rate"] == self.rate], "graphs", self.quantity, by="policy", log=("x",),
                                            x_label="number of graphs", y_label=QUANTITIES[self.quantity],
                                            title=f"{QUANTITIES[self.quantity]}, {self.rate} requests a second (computed)")
        return self._drawn[key]


def _counted(runs):
    """Return {batch: steps at it} over several runs, each a list of [batch, steps]."""
    counts = {}
    for run in runs:
        for batch, steps in run:
            counts[int(batch)] = counts.get(int(batch), 0) + int(steps)
    return dict(sorted(counts.items()))


def _costs(steps, pools, most):
    """Return what each size from 0 to `most` costs, as arrays: a step (µs), a capture (s), its bytes alone and in a pool of larger ones."""
    every = np.arange(most + 1)

    def between(rows, at, value):
        rows = rows.sort_values(at)
        return np.interp(every, rows[at], rows[value])

    graph, eager = (steps[steps["way"] == way] for way in ("graph", "eager"))
    found = {"graph": between(graph, "batch", "wall_us"), "eager": between(eager, "batch", "wall_us"), "capture": between(graph, "batch", "capture_s")}
    for name, how in (("alone", "a pool for each"), ("beside", "one pool, largest first")):
        rows = pools[pools["how"] == how].sort_values("graphs")
        rows = rows.assign(own=rows["pool_bytes"].diff().fillna(rows["pool_bytes"]))
        found[name] = between(rows.iloc[1:] if name == "beside" else rows, "size", "own")
    return found


def _listed(sizes):
    words = [str(size) for size in sizes]
    return ", ".join(words if len(words) <= 8 else [*words[:4], "...", words[-1]])
