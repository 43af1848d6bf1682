"""Charts: a table in, a picture with a description in words and a line saying where its numbers come from out."""

import base64
import io
import re
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator
from PIL import Image

BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, GREY = (  # Okabe and Ito: told apart by every kind of colour vision
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#858585")
INK, QUIET, PALE = "#222222", "#666666", "#E6E6E6"
SERIES = tuple(zip((BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, GREY), "os^DvPX"))
FIXED = {"enqueue_us": (ORANGE, "s"), "gpu_us": (BLUE, "o"), "wall_us": (GREY, "D"), "eager": (ORANGE, "s"),
         "graph": (BLUE, "o"), "torch": (ORANGE, "s"), "driver": (BLUE, "o"), "kernel": (BLUE, "o"),
         "memcpy": (ORANGE, "s"), "memset": (GREEN, "^")}  # the same thing has the same look in every chart
WORDS = {"enqueue_us": "CPU, until it returns", "gpu_us": "GPU, working", "wall_us": "wall, start to finish",
         "eager_wall_us": "eager", "graph_wall_us": "graph", "cost_us": "CPU time of one call",
         "idle_share": "share of the time the GPU is idle", "nodes": "nodes in the graph",
         "size": "matrix size (rows and columns)", "batch": "batch size"}
FIXED |= {WORDS[name]: look for name, look in FIXED.items() if name in WORDS}
PIXELS, DPI = 110, 165  # pixels an inch as shown, and as drawn, so that a sharp screen gets a sharp picture


@dataclass(frozen=True)
class Chart:
    """A drawn chart: its picture (PNG bytes), what it shows in words, and where its numbers come from."""
    png: bytes = field(repr=False)
    text: str
    provenance: dict

    def _repr_mimebundle_(self, include=None, exclude=None):
        # The alt text stands where nbconvert's classic template, nbsphinx and others look for it. JupyterLab 4.6 and
        # nbconvert's lab template give no picture an alt text, so the words are the plain text of the output too.
        width = int.from_bytes(self.png[16:20], "big") * PIXELS // DPI
        data = {"image/png": base64.b64encode(self.png).decode(), "text/plain": str(self)}
        return data, {"image/png": {"alt": str(self), "width": width}}

    def __str__(self):
        return f"{self.text} {self.provenance['label']}."

    def save(self, path):
        """Write the picture to `path` (PNG) and return the path."""
        Path(path).write_bytes(self.png)
        return Path(path)


def compare(table, title=None):
    """Draw the CPU, GPU and wall time of each row (`name`) as grouped bars with intervals, and the speedup."""
    _require(table, "name", "wall_us")
    columns = [c for c in ("enqueue_us", "gpu_us", "wall_us") if c in table]
    figure, axes = _figure(0.9 + len(table) * (0.34 + 0.27 * len(columns)))
    spots, labels = [], []
    for group, (_, row) in enumerate(table.iterrows()):
        top = group * (len(columns) + 1.3)
        axes.text(0, top - 0.75, row["name"], weight="bold", va="center", color=INK)
        for place, column in enumerate(columns):
            _bar(axes, top + place, row, column, FIXED[column][0], time(row[column]))
            spots, labels = [*spots, top + place], [*labels, WORDS[column]]
    _bar_axes(axes, spots, labels, "time of one call")
    axes.set_ylim(spots[-1] + 0.6, -1.3)
    said = [f"{row['name']}: " + ", ".join(f"{time(row[c])} ({WORDS[c]})" for c in columns) + "."
            for _, row in table.iterrows()]
    if "speedup" in table:
        row = table.iloc[-1]
        spread = f" ({row.speedup_low:.2f} to {row.speedup_high:.2f})" if "speedup_low" in table else ""
        speed = f"{row['name']} is {row.speedup:.2f} times as fast as {table.iloc[0]['name']}{spread}"
        said.append(f"By wall time, {speed}.")
        axes.set_title(speed, loc="left", fontsize=10, color=INK)
    return _chart(figure, table, title or "Where the time of one call goes", said)


def bars(table, label, value, by=None, title=None, value_label=None):
    """Draw one bar a row, in the table's order; `by` names a column that colours and marks them."""
    _require(table, label, value, *([by] if by else []))
    figure, axes = _figure(1.1 + 0.34 * len(table))
    looks = _looks(list(dict.fromkeys(table[by]))) if by else {}
    for place, (_, row) in enumerate(table.iterrows()):
        note = f"   {row[by]}" if by else ""
        _bar(axes, place, row, value, looks[row[by]][0] if by else BLUE, _say(row[value], value) + note)
    _bar_axes(axes, range(len(table)), list(table[label]), value_label or _words(value), value)
    axes.set_ylim(len(table) - 0.4, -0.6)
    low, high = table.loc[table[value].idxmin()], table.loc[table[value].idxmax()]
    each = ", ".join(f"{row[label]} {_say(row[value], value)}" for _, row in table.iterrows())
    said = [f"{each}." if len(table) < 9 else f"{len(table)} bars.",
            f"The longest bar is {high[label]} ({_say(high[value], value)}), the shortest {low[label]} "
            f"({_say(low[value], value)})."]
    return _chart(figure, table, title or value_label or _words(value), said)


def lines(table, x, y, by=None, log=("x", "y"), crossing=False, title=None, x_label=None, y_label=None):
    """Draw `y` (a column or several) against `x`, a line for each value of `by`, with intervals if any."""
    columns = [y] if isinstance(y, str) else list(y)
    _require(table, x, *columns, *([by] if by else []))
    curves = dict(_curves(table, x, columns, by))
    figure, axes = _figure(3.6)
    looks = _looks(list(curves))
    for name, curve in curves.items():
        colour, marker = looks[name]
        axes.plot(curve.x, curve.y, color=colour, marker=marker, markersize=5, linewidth=1.8, zorder=3)
        axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.22, linewidth=0)
    _scale(axes.xaxis, "x" in log, x, table[x])
    _scale(axes.yaxis, "y" in log, columns[0], pd.concat([table[column] for column in columns]))
    x_label, many = x_label or _words(x), "time of one call" if columns[0].endswith("_us") else "value"
    y_label = y_label or (_words(columns[0]) if len(columns) == 1 else many)
    axes.set(xlabel=x_label, ylabel=y_label)
    said = [f"{name}: {_say(curve.y.iloc[0], columns[0])} at {x_label} {_say(curve.x.iloc[0], x)}, "
            f"{_say(curve.y.iloc[-1], columns[0])} at {_say(curve.x.iloc[-1], x)}." for name, curve in curves.items()]
    said += [_mark_crossing(axes, x, x_label, curves)] if crossing else []
    if len(curves) > 1:
        _label_ends(axes, curves, looks)
    return _chart(figure, table, title or f"{y_label}, against {x_label}", said)


def timeline(table, window_us=None, title=None):
    """Draw when the CPU launches and when the GPU works; `window_us` (a length, or start and end) zooms in."""
    _require(table, "name", "launch_at_us", "launch_us", "start_us", "gpu_us")
    parts = [(str(key), part) for key, part in table.groupby("how", sort=False)] if "how" in table else [("", table)]
    figure, all_axes = _figure(0.9 + 1.35 * len(parts), len(parts))
    steps = [_step(name, part) for name, part in parts]
    window = (0, max(step["end"] for step in steps)) if window_us is None else (
        tuple(window_us) if isinstance(window_us, (tuple, list)) else (0, window_us))
    for step, axes in zip(steps, np.atleast_1d(all_axes)):
        axes.broken_barh([(0, step["end"])], (0, 0.8), facecolor=PALE)
        axes.broken_barh(step["kernels"], (0, 0.8), facecolor=BLUE, linewidth=0)
        axes.broken_barh(step["launches"], (1, 0.8), facecolor=ORANGE, linewidth=0)
        _join(axes, step, window)
        axes.set_yticks([0.4, 1.4], ["GPU works", "CPU launches"], color=INK)
        axes.set(xlim=window, ylim=(-0.08, 1.9))
        axes.tick_params(left=False)
        axes.set_title(step["line"], loc="left", fontsize=10, color=INK)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.4g}"))
    np.atleast_1d(all_axes)[-1].set_xlabel("time since the first launch (µs); grey: the GPU has nothing to do")
    said = [step["text"] for step in steps] + ["Where the lower lane is grey, the GPU has nothing to do."]
    said += [f"The picture shows {time(window[0])} to {time(window[1])} of it."] if window_us is not None else []
    return _chart(figure, table, title or "One step, CPU above and GPU below, on one clock", said)


def durations(table, title=None):
    """Draw how long the kernels of one step work, as a histogram over GPU time (microseconds, log scale)."""
    _require(table, "gpu_us")
    if "how" in table:  # a graph replays the same kernels: counting them twice would say nothing new
        table = table[table["how"] == table["how"].iloc[0]]
    times = table["gpu_us"].to_numpy(float)
    figure, axes = _figure(3.0)
    edges = np.geomspace(times.min() * 0.8, times.max() * 1.25, 25)
    axes.hist(times, edges, color=BLUE, edgecolor="white", linewidth=0.6)
    median, short = float(np.median(times)), int(np.sum(times < 10))
    axes.axvline(median, color=INK, linewidth=1.6, linestyle="--")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.18)
    right = np.log(median / edges[0]) > 0.55 * np.log(edges[-1] / edges[0])
    axes.annotate(f"median {time(median)}", (median, 1), (-6 if right else 6, -4), va="top", color=INK,
                  ha="right" if right else "left", xycoords=("data", "axes fraction"), textcoords="offset points")
    _scale(axes.xaxis, True, "gpu_us", pd.Series(edges))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set(xlabel="GPU time of one kernel", ylabel="kernels")
    said = [f"{len(times)} kernels work for {time(times.min())} to {time(times.max())} each.",
            f"Half of them take less than {time(median)}, and {short} take less than 10 µs."]
    return _chart(figure, table, title or "How long each kernel of the step works", said)


def graph_drawing(table, limit=40, title=None):
    """Draw the first `limit` nodes of a graph as boxes, each after those it waits for; long chains wrap into rows."""
    _require(table, "node", "kind", "name", "after")
    nodes, level = table.set_index("node"), _levels(table)
    order = sorted(level, key=lambda n: (level[n], n))
    shown = order[:limit]
    spots, height = _spots(shown, level)
    figure, axes = _figure(0.75 + 0.6 * height)
    for node in shown:
        (column, row), kind = spots[node], nodes.loc[node, "kind"]
        colour, middle = _looks([kind])[kind][0], {"fontsize": 5.9, "ha": "center", "va": "center", "zorder": 4}
        axes.add_patch(FancyBboxPatch((column, row), 0.8, 0.72, boxstyle="round,pad=0,rounding_size=0.07", zorder=3,
                                      facecolor=_tint(colour), edgecolor=colour, linewidth=1.2))
        axes.text(column + 0.4, row + 0.15, f"{node} {kind}"[:14], color=QUIET, **middle)
        axes.text(column + 0.4, row + 0.45, _two_lines(nodes.loc[node, "name"]), color=INK, **middle)
        for other in set(nodes.loc[node, "after"]) & spots.keys():
            _arrow(axes, spots[other], spots[node])
    axes.set(xlim=(-0.15, 8.05), ylim=(height + 0.05, -0.15))
    axes.axis("off")
    kinds = table["kind"].value_counts()
    edges, left = sum(map(len, table["after"])), len(order) - len(shown)
    counts = ", ".join(f"{n} {kind}{'s' if n > 1 else ''}" for kind, n in kinds.items())
    said = [f"{len(order)} nodes: {counts}; {edges} arrows.",
            "Every node waits for the one before it, in a single chain." if max(level.values()) + 1 == len(order)
            else f"The longest chain has {max(level.values()) + 1} nodes; the others stand beside it."]
    if left:
        said.append(f"The picture shows the first {len(shown)}; {left} more follow.")
        axes.set_title(f"the first {len(shown)} of {len(order)} nodes; {left} more follow", loc="left", fontsize=9)
    return _chart(figure, table, title or "What waits for what inside the graph", said)


def _figure(height, rows=1):
    figure = Figure(figsize=(7, height), dpi=DPI, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.06)
    axes = figure.subplots(rows, sharex=True)
    for one in np.atleast_1d(axes):
        one.spines[["top", "right", "left"]].set_visible(False)
        one.spines["bottom"].set_color("#BBBBBB")
        one.tick_params(colors=QUIET, labelsize=9)
        one.xaxis.label.set(color=QUIET, fontsize=9)
        one.yaxis.label.set(color=QUIET, fontsize=9)
    return figure, axes


def _chart(figure, table, title, said):
    provenance, png = table.attrs["provenance"], io.BytesIO()
    figure.suptitle(title[0].upper() + title[1:], x=0.012, ha="left", fontsize=11.5, weight="bold", color=INK)
    figure.supxlabel(provenance["label"], x=0.012, ha="left", fontsize=7.5, color=QUIET)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    picture.quantize(96, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(png, "png")  # a third of the bytes
    return Chart(png.getvalue(), " ".join(said), provenance)


def _require(table, *columns):
    if "label" not in table.attrs.get("provenance", {}):
        raise ValueError("this table does not say where its numbers come from (attrs['provenance']), so it is not "
                         "drawn: use a table that labkit.experiments returned")
    missing = [column for column in columns if column not in table]
    if missing:
        raise ValueError(f"this chart needs the column {missing[0]!r}; the table has: {', '.join(table.columns)}")
    if table.empty:
        raise ValueError("the table has no rows, so there is nothing to draw")


def time(us):
    """Write microseconds in the unit a person would use, to three figures."""
    size, unit = (1, "µs") if abs(us) < 999.5 else (1e3, "ms") if abs(us) < 999.5e3 else (1e6, "s")
    return f"{float(f'{us / size:.3g}'):g} {unit}"


def _say(value, column):
    """Write a value in the unit its column's name ends with."""
    if column.endswith("_us"):
        return time(value)
    if column.endswith("share"):
        return f"{value:.0%}"
    if column.endswith("bytes"):
        return f"{value / 2**20:.3g} MiB"
    if column.endswith("_s"):
        return time(value * 1e6)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _words(column):
    """Say a column's name in plain words, without its unit."""
    return WORDS.get(column) or re.sub("_(us|s|bytes)$", "", column).replace("_", " ")


def _looks(names):
    """Give every name its colour and marker: always the same ones where the name has a meaning of its own."""
    free = iter([look for look in SERIES if look not in [FIXED.get(name) for name in names]] * (1 + len(names) // 3))
    return {name: FIXED.get(name) or next(free) for name in names}


def _bar(axes, place, row, column, colour, note):
    low, high = row.get(column + "_low", row[column]), row.get(column + "_high", row[column])
    axes.barh(place, row[column], 0.72, color=colour)
    if high > low:
        axes.plot([low, high], [place, place], color=INK, marker="|", linewidth=1.2, markersize=6)
    axes.annotate(note, (max(high, row[column]), place), (6, 0), textcoords="offset points", va="center", fontsize=9)


def _bar_axes(axes, spots, labels, label, column="_us"):
    axes.set_yticks(list(spots), labels, color=INK)
    axes.tick_params(axis="y", left=False)
    axes.set_xlim(0, axes.dataLim.xmax * 1.28)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: _say(v, column)))
    axes.set_xlabel(label)


def _scale(axis, log, column, values):
    """Give an axis its scale and tick labels with units; ticks stand at the measured points where those are few."""
    low, high = float(values.min()), float(values.max())
    if log and low > 0:
        getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
        axis.set_minor_locator(NullLocator())
        decades = np.log10(high / low)
        subs = (1,) if decades > 2.5 else (1, 2, 5) if decades > 0.9 else (1, 1.5, 2, 3, 5, 7)
        axis.set_major_locator(LogLocator(subs=subs, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda v, _: _say(v, column)))
    points = np.unique(values)
    places = np.log(points) if log and low > 0 else points
    if axis.axis_name == "x" and 1 < len(points) < 10 and np.diff(places).min() > 0.07 * np.ptp(places):
        axis.set_major_locator(FixedLocator(points))
    if column.endswith("share"):
        getattr(axis.axes, f"set_{axis.axis_name}lim")(0, 1)
    if axis.axis_name == "y":
        axis.axes.grid(axis="y", color=PALE, zorder=0)


def _curves(table, x, columns, by):
    """Yield (name, curve) for each line; a curve has x, y and the interval low, high (y itself if none)."""
    for key, part in table.groupby(by, sort=False) if by else [("", table)]:
        part = part.sort_values(x)
        for column in columns:
            name = " ".join(filter(None, (str(key), _words(column) if len(columns) > 1 or not by else "")))
            yield name, pd.DataFrame({"x": part[x], "y": part[column], "low": part.get(column + "_low", part[column]),
                                      "high": part.get(column + "_high", part[column])})


def _label_ends(axes, curves, looks, gap=0.075):
    """Write each line's name at its right end, moved up or down so that no two names touch."""
    axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())
    last = {name: curve[["x", "y"]].iloc[-1].to_numpy() for name, curve in curves.items()}
    spot = {name: (axes.transData + axes.transAxes.inverted()).transform(end)[1] for name, end in last.items()}
    order = sorted(spot, key=spot.get)
    for below, name in zip(order, order[1:]):
        spot[name] = max(spot[name], spot[below] + gap)
    for above, name in zip([None, *order[::-1]], order[::-1]):
        spot[name] = min(spot[name], spot[above] - gap if above else 1.0)
    for name in order:
        axes.annotate(name, last[name], (1.03, spot[name]), textcoords="axes fraction", va="center", fontsize=9,
                      color=INK, arrowprops={"arrowstyle": "-", "color": looks[name][0], "linestyle": ":"})


def _mark_crossing(axes, x, x_label, curves):
    """Mark where the first two lines cross for the last time, and say it in a sentence."""
    (one, first), (two, second) = list(curves.items())[:2]
    both = first.merge(second, on="x")
    gap, places = np.log(both.y_x / both.y_y).to_numpy(), np.log(both.x).to_numpy()
    turns = np.flatnonzero((gap[:-1] < 0) != (gap[1:] < 0))
    if not turns.size:
        return f"The two lines do not cross here: {one if gap[-1] > 0 else two} is the higher one at the end."
    i = turns[-1]
    meet = float(np.exp(places[i] - gap[i] * (places[i + 1] - places[i]) / (gap[i + 1] - gap[i])))
    axes.axvline(meet, color=QUIET, linewidth=1.2, linestyle=":")
    axes.annotate(f"equal near {_say(meet, x)}", (meet, 1), (-5, -3), xycoords=("data", "axes fraction"), ha="right",
                  textcoords="offset points", va="top", fontsize=9, color=INK)
    return f"The two are equal near {x_label} {_say(meet, x)}."


def _step(name, part):
    """Work out one panel: launches and kernels as (start, length) from the first launch, and the idle share."""
    part = part.sort_values("start_us")
    zero = part["launch_at_us"].min()
    kernels = list(zip(part["start_us"] - zero, part["gpu_us"]))
    first = part.drop_duplicates(["launch_at_us", "launch_us"])
    launches = list(zip(first["launch_at_us"] - zero, first["launch_us"]))
    end, busy, reached = max(start + length for start, length in kernels), 0.0, 0.0
    for start, length in kernels:  # kernels may overlap: count the time when at least one works
        busy += max(0.0, start + length - max(start, reached))
        reached = max(reached, start + length)
    copy = part["name"].str.startswith(("Memcpy", "Memset"))  # each has a launch of its own
    sent = len(part[~copy].drop_duplicates(["launch_at_us", "launch_us"]))
    counts = f"{(~copy).sum()} kernels, {sent} launch{'es' if sent > 1 else ''}"
    counts += f", {copy.sum()} cop{'ies' if copy.sum() > 1 else 'y'}" if copy.any() else ""
    line = f"{name + ': ' if name else ''}{counts}, the GPU is idle {1 - busy / end:.0%} of {time(end)}"
    return {"kernels": kernels, "launches": launches, "end": end, "line": line,
            "text": line[0].upper() + line[1:] + ".", "pairs": list(zip(launches, first["start_us"] - zero))}


def _join(axes, step, window):
    """Draw a line from each launch to its kernel, where the window holds few enough to be told apart."""
    pairs = [(at + length, start) for (at, length), start in step["pairs"] if at < window[1] and start >= window[0]]
    if len(pairs) <= 24:
        for launched, start in pairs:
            axes.plot([launched, start], [1, 0.8], color=QUIET, linewidth=0.9)


def _levels(table):
    """Find how many nodes stand before each node on its longest chain: {node: level}."""
    waits, level = dict(zip(table["node"], table["after"])), {}
    for node in TopologicalSorter(waits).static_order():
        if node not in waits:
            raise ValueError(f"a node waits for node {node}, which is not in the table")
        level[node] = 1 + max((level[other] for other in waits[node]), default=-1)
    return level


def _spots(shown, level, across=8, tall=8):
    """Place nodes, one column a level, wrapped into bands: {node: (column, row)} and the height in rows."""
    columns = []
    for depth in sorted({level[node] for node in shown}):
        same = [node for node in shown if level[node] == depth]
        columns += [same[i:i + tall] for i in range(0, len(same), tall)]
    spots, top = {}, 0
    for start in range(0, len(columns), across):
        band = columns[start:start + across]
        spots.update({node: (x, top + y) for x, column in enumerate(band) for y, node in enumerate(column)})
        top += max(map(len, band))
    return spots, top


def _arrow(axes, source, target):
    (x, y), (to_x, to_y) = (source[0] + 0.8, source[1] + 0.36), (target[0], target[1] + 0.36)
    if to_x <= x:  # on to the next band: round the right edge, back along the gap, into the box from the left
        gap = to_y - 0.5
        axes.plot([x, x + 0.1, x + 0.1, to_x - 0.1, to_x - 0.1, to_x], [y, y, gap, gap, to_y, to_y],
                  color=QUIET, linewidth=0.9, zorder=1)
        x, y = to_x - 0.08, to_y
    bend = -0.25 if to_y == y and to_x - x > 0.5 else 0
    axes.annotate("", (to_x, to_y), (x, y), zorder=2, arrowprops={
        "arrowstyle": "-|>", "color": QUIET, "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 7,
        "connectionstyle": f"arc3,rad={bend}"})


def _tint(colour):
    return tuple(1 - 0.15 * (1 - part) for part in to_rgb(colour))


def _two_lines(name, letters=11):
    """Break a kernel's name into two lines that fit its box, after a "_" where there is one."""
    if len(name) <= letters:
        return name
    split = name.rfind("_", 4, letters) + 1 or letters
    rest = name[split:]
    return name[:split] + "\n" + (rest if len(rest) <= letters else rest[:letters - 1] + "…")
