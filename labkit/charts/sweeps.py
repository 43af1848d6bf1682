"""The charts of sweeps over batch sizes: one curve, its floors, and how far predictions of many are off."""

import textwrap

import numpy as np
import pandas as pd
from matplotlib.patches import Polygon
from matplotlib.ticker import FixedLocator, NullLocator

from labkit.charts.canvas import (DPI, FIXED, GREEN, INCHES, INK, PALE, PURPLE, QUIET, blank, finish, label_ends, require, say,
                                  scale, time)
from labkit.experiments.sweeps import INPUTS, TRACE

MODELS = {"mlp": "MLP", "transformer": "Transformer encoder", "gpt2": "GPT-2 decode step", "llama": "Llama-style decode step"}
LENGTHS = {"transformer": ", {:,} tokens", "gpt2": ", context {:,}", "llama": ", context {:,}"}
HOWS = {"eager": "■ eager", "graph": "● graph"}
MARGINS = (0.84, 0.98, 0.66, 0.62, 0.30)  # inches


def curve_name(row):
    """Say in words which curve of a sweep a row belongs to."""
    length = LENGTHS.get(row["model"], "").format(int(row["length"]))
    return (f"{MODELS.get(row['model'], row['model'])}, {row['layers']} layers, width {row['width']:,}{length}, "
            f"{row['precision']}")


def sweep(table, batches=None, title=None, dpi=DPI, inches=INCHES):
    """Draw one curve: time per step and speedup against batch, measured and predicted.

    batches: what the axis shows, also where some of them are not measured yet.
    """
    _one_curve(table)
    done, left_out = measured(table)
    columns = ("eager_wall_us", "graph_wall_us", "speedup")
    require(done, "batch", *columns)
    done.attrs = {}  # pandas copies them at every step
    figure, top, below = blank(5.0, 2, MARGINS, dpi, inches)
    predicted = [_line(top, done, f"{how}_wall_us", *FIXED[how], f"predicted_{how}_us") for how in HOWS]
    predicted += [_line(below, done, "speedup", GREEN, "^", "predicted_speedup")]
    _over_batches(below, table, batches)
    scale(top.yaxis, True, "eager_wall_us", np.concatenate([done["eager_wall_us"], done["graph_wall_us"]]))
    scale(below.yaxis, True, "speedup", np.append(done["speedup"], 1.0))
    top.set(ylabel="time of one step"), below.set(xlabel="batch size", ylabel="speedup")
    below.axhline(1, color=QUIET, linewidth=1)
    _name_ends(top, done, {words: f"{how}_wall_us" for how, words in HOWS.items()})
    _name_ends(below, done, {"▲ speedup": "speedup"})
    key = "filled: measured, with 95 % intervals" + "; hollow, dashed: predicted" * any(predicted)
    top.set_title(key, loc="left", fontsize=9, color=QUIET)
    said = [_first_last(done, column, words) for column, words in zip(columns, ("Eager", "Graph", "Speedup"))]
    _mark_low_overhead(top, below, done)
    said += [say_overhead(done), *_mark_left_out(top, left_out)]
    return finish(figure, table, title or curve_name(table.iloc[0]), said, _places(table, batches, top, below))


def roofline(table, ceilings, batches=None, title=None, dpi=DPI, inches=INCHES):
    """Draw time per step of one curve against batch, over the time that its bytes and its FLOPs take at the ceilings."""
    _one_curve(table)
    done, left_out = measured(table)
    require(done, "batch", "eager_wall_us", "graph_wall_us", "bytes", "flops")
    done.attrs = {}
    floors = floors_of(done, ceilings)
    every = np.concatenate([done["eager_wall_us"], done["graph_wall_us"], *floors.to_numpy()])
    figure, axes = blank(3.9, 1, MARGINS, dpi, inches)
    for how in HOWS:
        _line(axes, done, f"{how}_wall_us", *FIXED[how])
    for (name, floor), style, colour in zip(floors.items(), ("-.", ":"), (PURPLE, INK)):
        axes.plot(done["batch"], floor, color=colour, linestyle=style, linewidth=2, marker="_" if len(done) == 1 else "", markersize=16)
        ends = [(done["batch"].iloc[i], every.min() / 1.6) for i in (-1, 0)]
        axes.add_artist(Polygon([*zip(done["batch"], floor), *ends], color=PALE, linewidth=0, zorder=0))
    highest = floors.max(axis=1)
    _over_batches(axes, table, batches)
    scale(axes.yaxis, True, "wall_us", every)
    axes.set_ylim(every.min() / 1.6, every.max() * 1.6)
    axes.set(xlabel="batch size", ylabel="time of one step")
    axes.set_title("grey: no step can be faster than this GPU's measured ceilings allow", loc="left", fontsize=9, color=QUIET)
    _name_ends(axes, done.assign(**floors), {**{words: f"{how}_wall_us" for how, words in HOWS.items()},
                                             "-·- read": "read", "··· multiply": "multiply"}, 0.08)
    over, by = done["graph_wall_us"] / highest, floors.idxmax(axis=1)
    said = [f"At batch {done['batch'].iloc[i]:,} the floor is {time(highest.iloc[i])}, set by what the step must "
            f"{by.iloc[i]}; the graph takes {over.iloc[i]:.3g} times that, eager "
            f"{done['eager_wall_us'].iloc[i] / highest.iloc[i]:.3g} times." for i in sorted({0, len(done) - 1})]
    said += _mark_left_out(axes, left_out)
    return finish(figure, table, title or curve_name(table.iloc[0]), said, _places(table, batches, axes))


def _one_curve(table):
    """Raise ValueError for rows of several curves: one line through them would be a zigzag."""
    named = [name for name in INPUTS if name in table]
    if named and len(curves := table.drop_duplicates(named)) > 1:
        names = "; ".join(curve_name(row) for _, row in curves.iterrows())
        raise ValueError(f"this chart shows one curve, and the table has {len(curves)}: {names}")


def predictions(table, title=None):
    """Draw how far predictions are off, eager and graph, for every traced row of sweeps, over bands of 5, 10 and 20 %."""
    require(table, "eager_wall_us" if table.empty else "model")
    done, _ = measured(table)
    done = done.dropna(subset=[name for name in ("eager_error", "graph_error") if name in done])
    require(done, "eager_error", "graph_error", "eager_wall_us", "graph_wall_us")
    figure, *panels = blank(5.0, 2, (0.84, 0.62, 0.66, 0.62, 0.36))
    reach, said = max(0.25, *done[["eager_error", "graph_error"]].abs().max() * 1.1), []
    for axes, how in zip(panels, HOWS):
        for band, grey, side in ((0.2, "#E9E9E9", 1), (0.1, "#D8D8D8", -1), (0.05, "#C2C2C2", 1)):  # sides: no names touch
            axes.axhspan(-band, band, color=grey, linewidth=0, zorder=0)
            axes.annotate(f"±{band:.0%}", (1.01, side * band), xycoords=("axes fraction", "data"), fontsize=9, color=QUIET,
                          va="center")
        for (model, part), marker in zip(done.groupby("model", sort=False), "osD^"):
            axes.plot(part[f"{how}_wall_us"], part[f"{how}_error"], marker, color=FIXED[how][0], markersize=3.8, alpha=0.8,
                      markeredgecolor=INK, markeredgewidth=0.4, label=MODELS.get(model, model))
        axes.axhline(0, color=QUIET, linewidth=1)
        axes.set(ylim=(-reach, reach), ylabel="predicted / measured - 1")
        axes.yaxis.set_major_formatter(lambda v, _: f"{v:+.0%}" if v else "0%")
        off = done[f"{how}_error"].abs()
        said.append(f"{how.capitalize()}: median error {off.median():.1%}, {(off < 0.1).mean():.0%} of {len(off)} within 10%, "
                    f"worst {off.max():.0%}.")
        axes.set_title(said[-1].rstrip("."), loc="left", fontsize=10, color=INK)
    panels[1].legend(loc="lower left", ncols=4, frameon=False, fontsize=9, handletextpad=0, columnspacing=1, labelcolor=INK)
    scale(panels[1].xaxis, True, "wall_us", done[["eager_wall_us", "graph_wall_us"]].to_numpy())
    panels[1].set(xlabel="measured time of one step")
    worst = done.loc[done["eager_error"].abs().idxmax()], done.loc[done["graph_error"].abs().idxmax()]
    said += [f"Worst {how}: {curve_name(row)}, batch {row['batch']:,}." for how, row in zip(HOWS, worst)]
    return finish(figure, table, title or "How far the launch model's predictions are off", said)


def step_of(row, table):
    """Return the traces of one row of a sweep (`table`) as a table for `timeline`, eager and graph."""
    made = pd.concat([pd.DataFrame({part: row[f"{how}_{part}"] for part in TRACE}).assign(
        how=how, name=np.where(row[f"{how}_kernel"], "kernel", "Memset")) for how in HOWS], ignore_index=True)
    made.attrs["provenance"] = table.attrs["provenance"]
    return made


def measured(table):
    """Return the rows of a sweep that were measured, by batch, and those that were left out."""
    table = table.sort_values("batch", ignore_index=True)
    out = table["skipped"].fillna("").astype(bool) if "skipped" in table else pd.Series(False, table.index)
    return table[~out], table[out]


def floors_of(table, ceilings):
    """Return the least time (µs) of each row's bytes ("read") and FLOPs ("multiply") at the ceilings of its precision.

    Raises ValueError where the ceilings lack one.
    """
    precision = table["precision"].iloc[0]

    def per_second(what):
        found = [(other != precision, value) for name, other, value in ceilings[["what", "precision", "per_second"]].to_numpy()
                 if name == what and (other == precision or what != "multiply")]
        if not found:
            raise ValueError(f"the ceilings have no row for {what!r} in {precision}")
        return min(found, key=lambda row: row[0])[1]
    return pd.DataFrame({"read": table["bytes"] / per_second("read") * 1e6,
                         "multiply": table["flops"] / per_second("multiply") * 1e6})


def first_low_overhead(done, share=0.1):
    """Return the first batch at which a graph saves less than this share (0 to 1) of eager time, or None."""
    low = done[1 - done["graph_wall_us"] / done["eager_wall_us"] < share]
    return None if low.empty else int(low["batch"].iloc[0])


def _line(axes, done, column, colour, marker, predicted=None):
    """Draw a measured column with its interval, and its prediction where there is one; return whether there is."""
    low, high = (done.get(column + end, done[column]) for end in ("_low", "_high"))
    batches, gaps = done["batch"].to_numpy(), np.full(len(done), np.nan)
    axes.plot(np.repeat(batches, 3), np.column_stack([low, high, gaps]).ravel(), color=INK, linewidth=1.2, zorder=5)
    axes.plot(batches, done[column].to_numpy(), color=colour, marker=marker, markersize=5, linewidth=1.8, zorder=3)
    if predicted not in done or done[predicted].isna().all():
        return False
    axes.plot(batches, done[predicted].to_numpy(), color=INK, linestyle=(0, (4, 3)), linewidth=1.1, marker=marker, markersize=8.5,
              markerfacecolor="none", markeredgewidth=1.1, zorder=2)
    return True


def _over_batches(axes, table, batches):
    batches = np.unique(table["batch"] if batches is None else batches)
    axes.set(xscale="log", xlim=(batches[0] / 1.25, batches[-1] * 1.25))
    axes.xaxis.set_major_locator(FixedLocator(batches))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda v, _: f"{v:,.0f}")


def _places(table, batches, *every):
    """Return where in the picture each batch stands: for Chart.marked."""
    batches = np.unique(table["batch"] if batches is None else batches)
    height, half = every[0].figure.bbox.height, every[0].figure.dpi / 16
    middles = every[0].transData.transform([(batch, 1) for batch in batches])[:, 0]
    return {int(batch): [(round(x - half), round(x + half), round(height - axes.bbox.y1), round(height - axes.bbox.y0))
                         for axes in every] for batch, x in zip(batches, middles)}


def _name_ends(axes, done, columns, gap=0.12):
    curves = {name: {"x": done["batch"], "y": done[column]} for name, column in columns.items()}
    label_ends(axes, curves, {}, gap, leaders=False)


def _first_last(done, column, words):
    ends = [done.iloc[i] for i in sorted({0, len(done) - 1})]
    return f"{words}: " + ", ".join(f"{say(row[column], column)} at batch {row['batch']:,}" for row in ends) + "."


def say_overhead(done):
    """Say at which of the batches shown overhead first falls under 10 %."""
    batch, first = first_low_overhead(done), int(done["batch"].min())
    if batch is None:
        return f"Overhead stays above 10% up to batch {int(done['batch'].max()):,}."
    return f"Overhead is under 10% from batch {batch:,} on, the first shown." if batch == first > 1 else (
        f"Overhead first falls under 10% at batch {batch:,}.")


def _mark_low_overhead(top, below, done):
    batch = first_low_overhead(done)
    if batch is None or batch == done["batch"].min() > 1:
        return
    for axes in (top, below):
        axes.axvline(batch, color=INK, linewidth=1.3, linestyle=":")
    right = below.transData.transform((batch, 1))[0] < below.transAxes.transform((0.6, 0))[0]
    below.annotate(f"overhead under 10 % at {batch:,}", (batch, 1), (6 if right else -6, 3), fontsize=9, color=INK,
                   xycoords=("data", "axes fraction"), textcoords="offset points", ha="left" if right else "right")


def _mark_left_out(axes, left_out):
    """Mark the batches that were left out by crosses and the first one's reason; return a sentence for each reason."""
    if left_out.empty:
        return []
    height, to_axes, reason = 0.06, axes.get_xaxis_transform(), left_out["skipped"].iloc[0]
    axes.plot(left_out["batch"], [height] * len(left_out), "x", color=INK, markersize=7, markeredgewidth=2, transform=to_axes)
    words = f"left out: {textwrap.shorten(reason, 60, placeholder=' …')}"
    words = words.removesuffix(" …") + " …" if (left_out["skipped"] != reason).any() else words
    last = axes.transAxes.inverted().transform(axes.transData.transform((left_out["batch"].iloc[-1], 1)))[0]
    needed = 0.07 * len(words) * axes.figure.dpi / axes.bbox.width  # stays within the left edge
    axes.annotate(words, (max(last, needed), height), (4, 7), xycoords="axes fraction",
                  textcoords="offset points", ha="right", fontsize=9, color=INK)
    return [f"Left out: batch {', '.join(f'{batch:,}' for batch in part['batch'])} ({reason})."
            for reason, part in left_out.groupby("skipped", sort=False)]
