"""The batch explorer's widgets: menus, sliders, Measure and Stop over a chart and what it says in words."""

import asyncio
import base64
import gc
from html import escape

import ipywidgets as widgets
from IPython.display import HTML, display
from traitlets import dlink

from labkit import charts, experiments, launch_model, machine, recordings, report
from labkit.experiments import sweeps
from labkit.explorers.sweep_model import VIEWS, Live, Recorded, SweepModel

LABELS = {"model": "model", "layers": "layers", "width": "width", "length": "length", "precision": "precision",
          "batch": "batch", "range": "batches", "gpu": "GPU", "view": "view"}
SHOWN = {**charts.MODELS, "speedup": "time and speedup", "timeline": "timeline of one step", "roofline": "roofline"}
_RUNNING = set()  # asyncio keeps no task alive by itself


def explore(*, sources=None, still=True, **wishes):
    """Show the explorer over what is recorded, and what can be measured here; below it (still) a picture and the summary."""
    model = SweepModel(sources or at_hand(), **wishes)
    show_widget(view(model), model.summary)
    if still and isinstance(chart := model.chart(), charts.Chart):
        display(HTML("<small>How the explorer began, for pages without widgets:</small>"))
        display(chart)


def at_hand():
    """Return the sources that this machine offers, {name: source}: measuring here first, then each recorded GPU that can be read.

    Where there is none, the trouble with the last is raised (a RecordingError, say).
    """
    slugs = sorted({slug for model in charts.MODELS for slug in recordings.available(f"sweep_{model}")},
                   key=lambda slug: (slug != recordings.chosen(), slug))
    found, trouble = {}, None
    if machine.mode().live:
        sweeps.get_ready()
        found["measure here"] = Live(constants=lambda: launch_model.fit(experiments.launch_constants()), ceilings=experiments.ceilings)
    for slug in slugs:
        try:
            gpu, source = _source(slug)
        except (recordings.RecordingError, KeyError, TypeError, ValueError) as error:  # damaged, or it lacks something
            trouble = error
            print(f"Left out: {slug} ({type(error).__name__}: {error})")
        else:
            found[f"{gpu} ({slug})" if gpu in found else gpu] = source
    if trouble and not found:
        raise trouble
    gc.collect()  # here, and not, for as long as a chart takes, when a control is moved
    return found


def _source(slug):
    """Return the name of a recorded GPU, and its sweeps with what predictions and the roofline need, where that is recorded."""
    tables = {model: experiments.as_recorded(f"sweep_{model}", slug) for model in charts.MODELS if slug in recordings.available(f"sweep_{model}")}
    gpu = next(iter(tables.values())).attrs["provenance"]["gpu"]
    if slug in recordings.available("launch_constants"):
        constants = launch_model.fit(experiments.as_recorded("launch_constants", slug))
        tables = {model: launch_model.add_predictions(table, constants) for model, table in tables.items()}
    return gpu, Recorded(tables, experiments.as_recorded("ceilings", slug) if slug in recordings.available("ceilings") else None)


def view(model):
    """Make the widgets of a model; each carries a CSS class labkit-<name>."""
    for model.view in (*VIEWS, model.view):
        model.chart()  # the first chart of each kind takes longest: now, and not when the menu is moved
    style = {"description_width": "6em"}
    made = {name: (widgets.Dropdown if name in ("gpu", "model", "precision", "view") else widgets.SelectionSlider)(
        options=_options(model, name), value=getattr(model, name), description=LABELS[name], tooltip=LABELS[name], style=style,
        layout={"width": "30em"})
        for name in LABELS if name != "range"}
    made["range"] = widgets.SelectionRangeSlider(options=model.options("lowest"), value=(model.lowest, model.highest),
                                                 description=LABELS["range"], tooltip=LABELS["range"], style=style, layout={"width": "30em"})
    buttons = {name: widgets.Button(description=name.capitalize(), tooltip=words) for name, words in (
        ("measure", "measure this curve, or play its recording back"), ("stop", "end the sweep and keep its points"))}
    said = {name: widgets.HTML(layout={"min_height": "1.8em"}) for name in ("status", "note", "chart", "summary")}  # nothing jumps
    for name, widget in {**made, **buttons, **said}.items():
        widget.add_class(f"labkit-{name}")
    moving = []

    def moved(change, name):
        if not moving:
            for trait, value in zip(("lowest", "highest"), change["new"]) if name == "range" else ((name, change["new"]),):
                setattr(model, trait, value)

    def show(_=None):
        moving.append(True)
        for name, widget in made.items():
            options = _options(model, "lowest" if name == "range" else name)
            value = (model.lowest, model.highest) if name == "range" else getattr(model, name)
            if widget.options != options:
                widget.options = options
            widget.disabled = len(options) == 1
            if widget.value != value:
                widget.value = value
        made["length"].layout.display = "none" if model.options("length") == (1,) else None
        moving.clear()
        said["note"].value, said["summary"].value = escape(model.note), f"<p>{escape(model.summary)}</p>"
        collecting = gc.isenabled()
        gc.disable()  # else the litter of a drawing grows old, and one move in a hundred waits for a full collection
        try:
            said["chart"].value = picture(model.chart())
        finally:
            if collecting:
                gc.enable(), gc.collect(1)

    for name, widget in made.items():
        widget.observe(lambda change, name=name: moved(change, name), names="value")
    model.observe(show, names="shown")
    dlink((model, "status"), (said["status"], "value"), announced)
    next_press(model, "busy", *buttons.values())
    buttons["measure"].on_click(lambda _: start(model.measure()))
    buttons["stop"].on_click(lambda _: model.stop())
    show()
    made["gpu"].layout.display = None if len(model.sources) > 1 else "none"
    columns = [widgets.VBox([made[n] for n in names]) for names in (("gpu", "model", "precision", "view"),
                                                                    ("layers", "width", "length", "range", "batch"))]
    row = widgets.Layout(flex_flow="row wrap", align_items="center")
    return widgets.VBox([widgets.HBox(columns, layout=widgets.Layout(flex_flow="row wrap")), said["note"],
                         widgets.HBox([*buttons.values(), said["status"]], layout=row), said["chart"], said["summary"]]).add_class("labkit-explorer")


def _options(model, name):
    """Return what a menu or slider offers; menus show words."""
    if name == "view":
        return tuple((SHOWN[v], v) for v in VIEWS)
    options = model.options(name)
    return tuple((SHOWN[o], o) for o in options) if name == "model" else options


def show_widget(widget, words):
    """Display a widget, usable by keys alone, with words for pages that have none."""
    aids = {"output_type": "display_data", "data": {"application/javascript": (report.PAGES / "widgets.js").read_text("utf-8")}, "metadata": {}}
    widget = widgets.VBox([widget, widgets.Output(outputs=(aids,))]).add_class("labkit")
    display({**widget._repr_mimebundle_(), "text/plain": words}, raw=True)


def announced(status):
    """Write a status as HTML that is also read aloud when it changes."""
    return f'<span role="status">{escape(status)}</span>'


def next_press(model, running, go, stop):
    """Let the button stand out that is to be pressed next; the other stays enabled, as it would lose the keyboard's focus."""
    dlink((model, running), (go, "button_style"), lambda on: "" if on else "primary")
    dlink((model, running), (stop, "button_style"), lambda on: "primary" if on else "")


def start(measuring):
    """Run a coroutine beside the cells, and keep it alive."""
    task = asyncio.ensure_future(measuring)
    _RUNNING.add(task)
    task.add_done_callback(_RUNNING.discard)


def picture(chart):
    """Write a chart as a picture with its words for those who cannot see it, or a sentence where there is none."""
    if isinstance(chart, str):
        return f'<p style="min-height:8em">{escape(chart)}</p>'
    data = base64.b64encode(chart.png).decode()
    return (f'<img decoding="sync" style="max-width:100%;width:{chart.width}px" alt="{escape(str(chart))}" '
            f'src="data:image/png;base64,{data}">')
