"""The charts of times, outcomes, kernels and graphs."""

import textwrap
from graphlib import TopologicalSorter

import numpy as np
import pandas as pd
from matplotlib.colors import to_rgba
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, PathPatch
from matplotlib.path import Path as Line
from matplotlib.ticker import MaxNLocator

from labkit.charts.canvas import (BLUE, CLOCKS, DPI, FIXED, INCHES, INK, ORANGE, PALE, QUIET, SERIES, WORDS, binary_ticks, blank, few,
                                  finish, label_ends, looks_of, require, say, scale, time, words)


def compare(table, title=None):
    """Draw the CPU, GPU and wall time of each row (`name`) as grouped bars with intervals, and the speedup."""
    require(table, "name", *CLOCKS)
    few(table)
    figure, axes = blank(0.9 + 1.15 * len(table))
    drawn, said = [], []
    for top, (_, row) in zip(np.arange(len(table)) * 4.3, table.iterrows()):
        axes.text(0, top - 0.75, row["name"], weight="bold", va="center", color=INK)
        drawn += [(top + i, WORDS[c], row, c, FIXED[c][0], time(row[c])) for i, c in enumerate(CLOCKS)]
        said.append(f"{row['name']}: " + ", ".join(f"{time(row[c])} ({WORDS[c]})" for c in CLOCKS) + ".")
    _bars(axes, drawn, "time of one call")
    axes.set_ylim(top=-1.3)
    if "speedup" in table:
        speed = (f"{row['name']} is {row.speedup:.2f} times as fast as {table['name'].iloc[0]} "
                 f"({row.speedup_low:.2f} to {row.speedup_high:.2f})")
        said.append(f"By wall time, {speed}.")
        axes.set_title(speed, loc="left", fontsize=10, color=INK)
    return finish(figure, table, title or "Where the time of one call goes", said)


def bars(table, label, value, by=None, title=None, value_label=None):
    """Draw one bar a row, in the table's order; `by` names a column that colours and marks them."""
    require(table, label, value, *filter(None, [by]))
    few(table)
    figure, axes = blank(1.1 + 0.34 * len(table))
    looks = looks_of(table[by].unique()) if by else {}
    value_label, drawn = value_label or words(value), []
    for place, (_, row) in enumerate(table.iterrows()):
        colour, note = (looks[row[by]][0], f"   {row[by]}" if by != label else "") if by else (BLUE, "")
        drawn.append((place, row[label], row, value, colour, say(row[value], value) + note))
    _bars(axes, drawn, value_label)
    names = [f"{name} ({say(size, value)})" for name, size in zip(table[label], table[value])]
    said = [f"{len(names)} bars: {', '.join(names)}.", f"The longest is {names[table[value].to_numpy().argmax()]}."]
    return finish(figure, table, title or value_label, said)


def outcomes(table, group, result, what="rows", title=None):
    """Draw how the rows (`what` they are) of each group came out, as stacked bars; most of the rarer outcomes first.

    Raises ValueError for more different outcomes than there are colours.
    """
    require(table, group, result)
    counts = pd.crosstab(table[group].fillna("none").astype(str), table[result].fillna("none").astype(str))
    if len(counts.columns) > len(SERIES):
        raise ValueError(f"{result!r} has {len(counts.columns)} different values, and this chart shows up to {len(SERIES)}")
    counts = counts[counts.sum().sort_values(ascending=False).index]
    counts = counts.sort_values([*counts.columns[1:], counts.columns[0]], ascending=False)
    figure, axes = blank(1.3 + 0.3 * len(counts))
    start, hatches = np.zeros(len(counts)), ("", "///", "xx", "..", "\\\\", "++", "--")
    for (name, column), (colour, _), hatch in zip(counts.items(), SERIES, hatches):
        axes.barh(counts.index, column, 0.72, start, color=to_rgba(colour, 0.85), hatch=hatch, edgecolor="white", label=name)
        start += column.to_numpy()
    axes.invert_yaxis()
    axes.tick_params(axis="y", left=False, labelcolor=INK)
    axes.set(xlabel=what)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.legend(loc="lower right", frameon=False, fontsize=9, labelcolor=INK)
    said = [f"{len(table)} {what}: " + ", ".join(f"{count} {name}" for name, count in counts.sum().items()) + "."]
    said += [f"{name}: " + ", ".join(f"{n} {how}" for how, n in row.items() if n) + "." for name, row in counts.iterrows()]
    return finish(figure, table, title or f"{result} by {group}", said)


def lines(table, x, y, by=None, log=("x", "y"), crossing=False, title=None, x_label=None, y_label=None):
    """Draw `y` (a column or several) against `x`, a line for each value of `by`, with intervals if any."""
    columns = [y] if isinstance(y, str) else list(y)
    require(table, x, *columns, *filter(None, [by]))
    curves = dict(_curves(table, x, columns, by))
    figure, axes = blank(3.6)
    looks = looks_of(list(curves))
    for name, curve in curves.items():
        colour, marker = looks[name]
        axes.plot(curve.x, curve.y, color=colour, marker=marker, markersize=5, linewidth=1.8, zorder=3)
        axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.22, linewidth=0)
    scale(axes.xaxis, "x" in log, x, table[x])
    scale(axes.yaxis, "y" in log, columns[0], pd.concat([table[column] for column in columns]))
    x_label, y_label = x_label or words(x), y_label or (words(y) if isinstance(y, str) else "time of one call")
    axes.set(xlabel=x_label, ylabel=y_label)
    said = [f"{name}: {say(curve.y.iloc[0], columns[0])} at {x_label} {say(curve.x.iloc[0], x)}, "
            f"{say(curve.y.iloc[-1], columns[0])} at {say(curve.x.iloc[-1], x)}." for name, curve in curves.items()]
    said += [_mark_crossing(axes, x, x_label, curves)] if crossing else []
    if len(curves) > 1:
        label_ends(axes, curves, looks)
    return finish(figure, table, title or f"{y_label}, against {x_label}", said)


def timeline(table, window_us=None, title=None, dpi=DPI, inches=INCHES):
    """Draw when the CPU launches and when the GPU works; `window_us` (microseconds) zooms in on that long a start."""
    require(table, "name", "launch_at_us", "launch_us", "start_us", "gpu_us")
    parts = list(table.groupby("how", sort=False)) if "how" in table else [("", table)]
    figure, *all_axes = blank(0.9 + 1.35 * len(parts), len(parts), (1.05, 0.25, 0.62, 0.53, 0.36), dpi, inches)
    ends, said = zip(*(_lanes(axes, *part, window_us or np.inf) for part, axes in zip(parts, all_axes)))
    window_us = window_us or max(ends)
    all_axes[-1].set(xlim=(0, window_us), xlabel="time since the first launch (µs); grey: the GPU has nothing to do")
    said += (f"The picture shows the first {time(window_us)}; where the lower lane is grey, no kernel works.",)
    return finish(figure, table, title or "One step, CPU above and GPU below, on one clock", said)


def durations(table, title=None):
    """Draw how long the kernels of one step work, as a histogram over GPU time (microseconds, log scale).

    Raises ValueError without kernels.
    """
    require(table, "name", "gpu_us")
    if "how" in table:  # a graph replays the same kernels: counting them twice would say nothing new
        table = table[table["how"] == table["how"].iloc[0]]
    times = table[~_copies(table) & (table["gpu_us"] > 0)]["gpu_us"]
    if times.empty:
        raise ValueError("the table has no kernels, so there is nothing to draw")
    figure, axes = blank(3.0)
    median = times.median()
    edges = np.geomspace(times.min() * 0.8, times.max() * 1.25, 25)
    axes.hist(times, edges, color=BLUE, edgecolor="white", linewidth=0.6)
    axes.axvline(median, color=INK, linewidth=1.6, linestyle="--")
    axes.text(median, 1.02, f"median {time(median)}", transform=axes.get_xaxis_transform(), ha="center", color=INK)
    scale(axes.xaxis, True, "gpu_us", edges)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set(xlabel="GPU time of one kernel", ylabel="kernels")
    said = [f"{len(times)} kernels work for {time(times.min())} to {time(times.max())} each.",
            f"Half of them take less than {time(median)}, and {(times < 10).sum()} take less than 10 µs."]
    return finish(figure, table, title or "How long each kernel of the step works", said)


def graph_drawing(table, limit=40, title=None):
    """Draw the first `limit` nodes of a graph as boxes, each after those it waits for; long chains wrap into rows."""
    require(table, "node", "kind", "name", "after")
    nodes, level = table.set_index("node"), {}
    for node in TopologicalSorter(nodes["after"].to_dict()).static_order():
        level[node] = 1 + max((level[other] for other in nodes["after"][node]), default=-1)
    shown = sorted(level, key=lambda node: (level[node], node))[:limit]
    spots, height = _spots({node: level[node] for node in shown})
    figure, axes = blank(0.75 + 0.6 * height)
    for node, (column, row) in spots.items():
        kind, middle = nodes["kind"][node], {"fontsize": 6.75, "ha": "center", "va": "center", "zorder": 4}
        colour = looks_of([kind])[kind][0]
        axes.add_patch(FancyBboxPatch((column, row), 0.8, 0.72, boxstyle="round,pad=0,rounding_size=0.07", zorder=3,
                                      facecolor=to_rgba(colour, 0.15), edgecolor=colour, linewidth=1.2))
        first, second, *more = [*textwrap.wrap(nodes["name"][node].replace("_", "_ "), 12), "", ""]
        lines = first, second.rstrip("_")[:10] + "…" if any(more) else second
        axes.text(column + 0.4, row + 0.15, f"{node} {kind}"[:12], color=QUIET, **middle)
        axes.text(column + 0.4, row + 0.45, "\n".join(lines).replace("_ ", "_"), color=INK, **middle)
        for other in set(nodes["after"][node]) & spots.keys():
            _arrow(axes, spots[other], spots[node])
    axes.set(xlim=(-0.15, 8.05), ylim=(height + 0.05, -0.15))
    axes.axis("off")
    longest, title = max(level.values()) + 1, title or "What waits for what inside the graph"
    counts = ", ".join(f"{n} {kind}{'s' if n > 1 else ''}" for kind, n in table["kind"].value_counts().items())
    said = [f"{len(level)} nodes: {counts}; {table['after'].map(len).sum()} arrows.",
            f"The longest chain has {longest} of the nodes."]
    if len(level) > limit:
        said, title = [*said, f"The picture shows the first {limit}."], f"{title}: the first {limit} nodes"
    return finish(figure, table, title, said)


def _bars(axes, drawn, label):
    """Draw bars with their intervals: (place, name, row, column, colour, note) each, times or all of one column."""
    for place, _, row, column, colour, note in drawn:
        low, high = (row.get(column + end, row[column]) for end in ("_low", "_high"))
        axes.barh(place, row[column], 0.72, color=colour)
        if high > low:
            axes.plot([low, high], [place, place], color=INK, marker="|", linewidth=1.2, markersize=6)
        axes.annotate(note, (high, place), (6, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks([place for place, *_ in drawn], [name for _, name, *_ in drawn], color=INK)
    axes.tick_params(axis="y", left=False)
    axes.set(xlim=(0, axes.dataLim.xmax * 1.28), ylim=(drawn[-1][0] + 0.6, -0.6), xlabel=label)
    axes.xaxis.set_major_formatter(lambda v, _: say(v, column))
    if column.endswith("bytes"):
        binary_ticks(axes.xaxis, axes.get_xlim()[1])


def _curves(table, x, columns, by):
    """Yield (name, curve) for each line; a curve has x, y and the interval low, high (y itself if none)."""
    for key, part in table.groupby(by, sort=False) if by else [("", table)]:
        part = part.sort_values(x)
        for column in columns:
            name = " ".join(filter(None, (str(key), words(column) if len(columns) > 1 or not by else "")))
            yield name, pd.DataFrame({"x": part[x], "y": part[column], "low": part.get(column + "_low", part[column]),
                                      "high": part.get(column + "_high", part[column])})


def _mark_crossing(axes, x, x_label, curves):
    """Mark where the first two lines cross for the last time, and say it in a sentence."""
    first, second = [*curves.values(), *curves.values()][:2]
    both = first.merge(second, on="x").query("x > 0 and y_x > 0 and y_y > 0")
    gap, places = np.log(both.y_x / both.y_y), np.log(both.x)
    turns = np.flatnonzero(np.diff(gap < 0))
    if not turns.size:
        return "The two lines do not cross here."
    around = slice(turns[-1], turns[-1] + 2)
    meet = np.exp(np.interp(0, *zip(*sorted(zip(gap[around], places[around])))))
    axes.axvline(meet, color=QUIET, linewidth=1.2, linestyle=":")
    axes.text(meet, 1, f"equal near {say(meet, x)}", transform=axes.get_xaxis_transform(), ha="center", fontsize=9)
    return f"The two are equal near {x_label} {say(meet, x)}."


def _copies(table):
    return table["name"].str.startswith(("Memcpy", "Memset"))


def _lanes(axes, name, part, window):
    """Draw one step's launches above its kernels; return its end (from the first launch) and its counts in words."""
    part = part.sort_values("start_us")
    launch, launching, start, work = part[["launch_at_us", "launch_us", "start_us", "gpu_us"]].to_numpy(float).T
    start, launch = start - launch.min(), launch - launch.min()
    reached = np.maximum.accumulate(start + work)
    end, idle = reached[-1], np.maximum(start - np.append(0, reached[:-1]), 0).sum() / reached[-1]  # while no kernel works
    for bottom, left, width, colour in ((0, np.zeros(1), end, PALE), (0, start, work, BLUE), (1, launch, launching, ORANGE)):
        _boxes(axes, left, width, bottom, colour)
    first = np.unique(launch, return_index=True)[1]
    first = first[launch[first] < window]
    if len(first) <= 24:  # few enough to be told apart: a line from each launch to its kernel
        ends = np.minimum(launch + launching, start)  # a graph's first kernel starts while it is launched
        for pair in zip(ends[first], start[first]):
            axes.plot(pair, [1, 0.8], color=QUIET, linewidth=0.9)
    axes.set_yticks([0.4, 1.4], ["GPU works", "CPU launches"], color=INK)
    axes.set_ylim(-0.08, 1.9)
    axes.tick_params(left=False)
    axes.xaxis.set_major_formatter(lambda v, _: f"{v:,.10g}")
    kernels = ~_copies(part).to_numpy()  # a copy has a launch of its own
    launches = len(np.unique(launch[kernels]))
    line = (f"{name and name + ': '}{kernels.sum()} kernels, {launches} launch{'es' if launches > 1 else ''}, "
            f"the GPU is idle {idle:.0%} of {time(end)}")
    axes.set_title(line, loc="left", fontsize=min(10, 100 * axes.figure.get_figwidth() / len(line)), color=INK)
    return end, f"{line[0].upper()}{line[1:]}."


def _boxes(axes, left, width, bottom, colour):
    """Fill boxes of one height as one shape, however many they are."""
    corners = np.empty((len(left), 4, 2))
    corners[..., 0] = np.column_stack([left, left, left + width, left + width])
    corners[..., 1] = np.array([0, 0.8, 0.8, 0]) + bottom
    axes.add_artist(PathPatch(Line.make_compound_path_from_polys(corners), facecolor=colour, linewidth=0,
                               snap=len(left) < 100))  # snapped to pixels, thin ones among many would vanish


def _spots(level, across=8):
    """Place nodes, one column a level, wrapped into bands: {node: (column, row)} and the height in rows."""
    depth = pd.Series(level)
    band, row = depth // across, depth.groupby(depth).cumcount()
    heights = row.groupby(band).max() + 1
    return dict(zip(level, zip(depth % across, row + band.map(heights.cumsum() - heights)))), heights.sum()


def _arrow(axes, source, target):
    (x, y), (to_x, to_y) = (source[0] + 0.8, source[1] + 0.36), (target[0], target[1] + 0.36)
    around = [(x + 0.1, y), (x + 0.1, to_y - 0.5), (to_x - 0.1, to_y - 0.5), (to_x - 0.1, to_y)]
    next_door = 0 < to_x - x < 0.5  # else the arrow goes back, or past others, along the gap above its target
    axes.add_patch(FancyArrowPatch(path=Line([(x, y), *([] if next_door else around), (to_x, to_y)]), color=QUIET,
                                   arrowstyle="-|>", mutation_scale=7, linewidth=0.9, fill=True, joinstyle="miter"))
