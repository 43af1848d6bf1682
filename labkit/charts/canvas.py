"""What all charts share: the empty figure, its looks and scales, and the finished Chart."""

import base64
import io
import re
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox
from matplotlib.transforms import blended_transform_factory as mixed
from PIL import Image

BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, GREY = (  # Okabe and Ito: told apart by every kind of colour vision
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#858585")
INK, QUIET, PALE = "#222222", "#666666", "#E6E6E6"
SERIES = tuple(zip((BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, GREY), "os^DvPX"))
CLOCKS = ("enqueue_us", "gpu_us", "wall_us")
WORDS = {"enqueue_us": "CPU, until it returns", "gpu_us": "GPU, working", "wall_us": "wall, start to finish",
         "eager_wall_us": "eager", "graph_wall_us": "graph", "padded_wall_us": "padded", "cost_us": "CPU time of one call",
         "saving_us": "saved, measured", "predicted_saving_us": "saved, predicted",
         "idle_share": "share of the time the GPU is idle", "nodes": "nodes in the graph",
         "size": "matrix size (rows and columns)", "batch": "batch size"}
FIXED = {name: look for look, names in {  # the same thing has the same look in every chart
    (ORANGE, "s"): ("enqueue_us", WORDS["enqueue_us"], "eager", "torch", "memcpy"),
    (BLUE, "o"): ("gpu_us", WORDS["gpu_us"], "graph", "driver", "kernel"),
    (GREY, "D"): ("wall_us", WORDS["wall_us"]), (GREEN, "^"): ("memset",)}.items() for name in names}
PIXELS, DPI = 110, 165  # pixels an inch as shown, and as drawn, so that a sharp screen gets a sharp picture
INCHES = 7  # across; type is never under 9 points, so that a projector shows it large enough (pages/slides.html)


@dataclass(frozen=True)
class Chart:
    """A drawn chart: its picture (PNG bytes), what it shows in words, and where its numbers come from."""
    png: bytes = field(repr=False)
    text: str
    provenance: dict
    dpi: int = DPI
    places: dict = field(default_factory=dict, repr=False)  # {value: boxes (left, right, top, bottom) in pixels}

    @property
    def width(self):
        """Return how many pixels it is across, as shown."""
        return int.from_bytes(self.png[16:20], "big") * PIXELS // self.dpi

    def _repr_mimebundle_(self, include=None, exclude=None):
        # The alt text stands where nbconvert's classic template, nbsphinx and others look for it. JupyterLab 4.6 and
        # nbconvert's lab template give no picture an alt text, so the words are the plain text of the output too.
        data = {"image/png": base64.b64encode(self.png).decode(), "text/plain": str(self)}
        return data, {"image/png": {"alt": str(self), "width": self.width}}

    def marked(self, at):
        """Return this chart with a shade over the place of `at`, if it has one: much quicker than drawing again."""
        if at not in self.places:
            return self
        picture = Image.open(io.BytesIO(self.png))
        colours, pixels = np.reshape(picture.getpalette(), (-1, 3)), np.array(picture)
        for left, right, top, bottom in self.places[at]:
            pixels[top:bottom, left:right] += len(colours)
        shaded = Image.fromarray(pixels)
        shaded.putpalette(np.vstack([colours, colours * 0.87]).astype(np.uint8).tobytes())
        return replace(self, png=_png(shaded, self.dpi))

    def __str__(self):
        return f"{self.text} {self.provenance['label']}."

    def save(self, path):
        """Write the picture to `path` (PNG) and return the path."""
        Path(path).write_bytes(self.png)
        return Path(path)


class Canvas(FigureCanvasAgg):
    """A canvas that draws with Renderer; its figure keeps its size."""

    @cache
    def get_renderer(self):
        """Return the one renderer of this canvas."""
        return Renderer(*self.figure.bbox.size, self.figure.dpi)


class Renderer(RendererAgg):
    """Draws every text once and copies it from then on: letters take most of the time of drawing a chart."""
    written = {}

    def draw_text(self, gc, x, y, s, prop, angle, ismath=False, mtext=None):
        """Draw a line of text that starts at x, y (pixels from the upper left corner)."""
        if mtext is None:
            return super().draw_text(gc, x, y, s, prop, angle, ismath)
        key = s, prop.copy(), angle, tuple(gc.get_rgb()), self.dpi
        if key not in self.written:
            if len(self.written) > 500:  # some 20 MB
                self.written.clear()
            box = mtext.get_window_extent(self).padded(3)
            left, above = round(x - box.x0), round(y - self.height + box.y1)
            paper = RendererAgg(box.width, box.height, self.dpi)
            blank_gc = paper.new_gc()
            blank_gc.set_foreground(gc.get_rgb(), isRGBA=True)
            paper.draw_text(blank_gc, left, above, s, prop, angle)
            self.written[key] = np.array(paper.buffer_rgba())[::-1].copy(), left, above  # images begin below
        picture, left, above = self.written[key]
        self.draw_image(gc, round(x) - left, self.height - (round(y) - above) - len(picture), picture)


def blank(height, rows=1, margins=None, dpi=DPI, inches=INCHES):
    """Return an empty figure and its axes; of fewer inches across, it is as much lower, and its type as much larger when shown.

    With margins (left, right, bottom, top, between, in inches) nothing looks for a layout, and the last such figure is
    emptied and used again: both make drawing twice as fast, for charts under sliders.
    """
    height *= inches / INCHES
    key = height, rows, margins, dpi, inches
    if margins and key in _KEPT:
        return _emptied(*_KEPT[key])
    figure = Figure(figsize=(inches, height), dpi=dpi, layout=None if margins else "constrained")
    (Canvas if margins else FigureCanvasAgg)(figure)
    if margins:
        left, right, bottom, top, between = margins
        each = (height - bottom - top - between * (rows - 1)) / rows
        figure.subplots_adjust(left / inches, bottom / height, 1 - right / inches, 1 - top / height, hspace=between / each)
    else:
        figure.get_layout_engine().set(w_pad=0.08, h_pad=0.06)
    for axes in np.atleast_1d(figure.subplots(rows, sharex=True)):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color("#BBBBBB")
        axes.tick_params(colors=QUIET, labelsize=9)
        for label in (axes.xaxis.label, axes.yaxis.label):
            label.set(color=QUIET, fontsize=9)
    if margins:
        _KEPT[key] = (figure, *figure.axes)
        for axes in figure.axes:  # where titles and labels stand is known, too
            axes.set_title("", loc="left", y=1 + 0.08 / each)
            axes.yaxis.set_label_coords(0.2 / inches, 0.5, mixed(figure.transFigure, axes.transAxes))
            axes.xaxis.set_label_coords(0.5, 0.34 / height, mixed(axes.transAxes, figure.transFigure))
            axes.xaxis.set_visible(axes is figure.axes[-1])
    return figure, *figure.axes


_KEPT = {}


def _emptied(figure, *every):
    """Take all that was drawn out of a figure; its ticks stay, and making those is what takes long."""
    for axes in every:
        for artist in (*axes.lines, *axes.collections, *axes.texts, *axes.patches):
            artist.remove()
        axes.dataLim, axes.ignore_existing_data_limits = Bbox.null(), True
        axes.set_autoscale_on(True)
        axes.set(xlabel="", ylabel="")
        axes.set_title("", loc="left", y=axes._left_title.get_position()[1])
    return figure, *every


def finish(figure, table, title, said, places=None):
    """Return a figure as a Chart of a table: with its title, its origin below, what it says (sentences), and its places."""
    provenance = table.attrs["provenance"]
    figure.suptitle(title[0].upper() + title[1:], x=0.012, ha="left", fontsize=min(11.5, 110 * figure.get_figwidth() / len(title)), weight="bold",
                    color=INK)
    figure.supxlabel(provenance["label"], x=0.012, ha="left", fontsize=min(9, 120 * figure.get_figwidth() / len(provenance["label"])), color=QUIET)
    parts = (figure, *figure.axes) if isinstance(figure.canvas, Canvas) else figure.findobj()  # the latter makes more ticks
    for text in (child for part in parts for child in part.get_children() if isinstance(child, Text)):
        text.set_parse_math(False)  # a $ in a name is a $
    figure.canvas.draw()
    picture = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB")
    picture = picture.quantize(96, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)  # a third of the bytes
    if isinstance(figure.canvas, Canvas):
        _emptied(figure, *figure.axes)  # now, so that its litter is young
    return Chart(_png(picture, figure.dpi), " ".join(said), provenance, int(figure.dpi), places or {})


def _png(picture, dpi):
    png = io.BytesIO()
    picture.save(png, "png", compress_level=6 if dpi > PIXELS else 3)  # under sliders, time counts more than bytes
    return png.getvalue()


def require(table, *columns):
    """Raise ValueError for a table without provenance or rows, or without these columns, or with numbers in them that are none."""
    if "provenance" not in table.attrs:
        raise ValueError("this table does not say where its numbers come from (attrs['provenance']), so it is not "
                         "drawn: use a table that labkit.experiments returned")
    for column in columns:
        if column not in table:
            raise ValueError(f"this chart needs the column {column!r}; the table has: {', '.join(table.columns)}")
        values = table[column].to_numpy()
        if values.dtype.kind in "iuf" and not np.isfinite(values).all():
            raise ValueError(f"the column {column!r} has values that are no numbers: leave those rows out")
    if table.empty:
        raise ValueError("the table has no rows, so there is nothing to draw")


def few(table, most=100):
    """Raise ValueError for more rows than bars can show."""
    if len(table) > most:
        raise ValueError(f"the table has {len(table):,} rows, and bars show up to {most}: pick some of them")


def time(us):
    """Write microseconds in the unit a person would use, to three figures."""
    size, unit = (1, "µs") if abs(us) < 999.5 else (1e3, "ms") if abs(us) < 999.5e3 else (1e6, "s")
    return f"{float(f'{us / size:.3g}'):g} {unit}"


def say(value, column):
    """Write a value in the unit its column's name ends with."""
    if column.endswith("_us"):
        return time(value)
    if column.endswith("share"):
        return f"{value:.0%}"
    if column.endswith("bytes"):
        mib = value / 2**20
        return f"{mib:,.0f} MiB" if mib >= 1000 else f"{mib:.3g} MiB"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def words(column):
    """Say a column's name in plain words, without its unit."""
    return WORDS.get(column) or re.sub("_(us|s|bytes)$", "", column).replace("_", " ")


def looks_of(names):
    """Give every name its colour and marker: always the same ones where the name has a meaning of its own."""
    free = iter([look for look in SERIES if look not in [FIXED.get(name) for name in names]] * (1 + len(names) // 3))
    return {name: FIXED.get(name) or next(free) for name in names}


def binary_ticks(axis, most):
    """Set ticks at round numbers of MiB, from 0 to `most` bytes."""
    axis.set_major_locator(FixedLocator(MaxNLocator(5).tick_values(0, most / 2**20) * 2**20))


def scale(axis, log, column, values):
    """Give an axis its scale and tick labels with units; ticks stand at the measured points where those are few."""
    points = places = np.unique(values)
    log = log and points[0] > 0
    axis.axes.set(**{f"{axis.axis_name}scale": "log" if log else "linear"})
    if log:
        places, decades = np.log(points), np.log10(points[-1] / points[0])
        subs = (1,) if decades > 2.5 else (1, 2, 5) if decades > 0.9 else (1, 1.5, 2, 3, 5, 7)
        axis.set_major_locator(LogLocator(subs=subs, numticks=12))
        axis.set_minor_locator(NullLocator())
    elif column.endswith("bytes"):
        binary_ticks(axis, points[-1])
    elif column.endswith("share"):
        axis.axes.set(**{f"{axis.axis_name}lim": (0, 1)})
    axis.set_major_formatter(lambda v, _: say(v, column))
    if axis.axis_name == "y":
        axis.axes.grid(axis="y", color=PALE, zorder=0)
    elif 1 < len(points) < 10 and np.diff(places).min() > 0.07 * np.ptp(places):
        axis.set_major_locator(FixedLocator(points))


def label_ends(axes, curves, looks, gap=0.075, leaders=True):
    """Write each line's name at its right end, moved up or down so that no two names touch, with leaders to the ends."""
    axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())
    ends = {name: (np.asarray(curve["x"])[-1], np.asarray(curve["y"])[-1]) for name, curve in curves.items()}
    heights = dict(zip(ends, (axes.transData + axes.transAxes.inverted()).transform(list(ends.values()))[:, 1]))
    names = sorted(ends, key=heights.get)
    steps = gap * np.arange(len(names))
    free = np.maximum.accumulate([heights[name] for name in names] - steps)
    for name, height in zip(names, np.minimum(free, 1 - steps[-1]) + steps):
        axes.annotate(name, ends[name], (1.03, height), textcoords="axes fraction", va="center", fontsize=9,
                      color=INK, arrowprops={"arrowstyle": "-", "color": looks[name][0], "linestyle": ":"} if leaders else None)
