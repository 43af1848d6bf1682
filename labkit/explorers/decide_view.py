"""The decision page's widgets: a field for the model, its batches and a target, Decide and Stop, and the answer below."""

import ipywidgets as widgets
from traitlets import dlink, link

from labkit import decide
from labkit.experiments.sweeps import BATCHES
from labkit.explorers.decide_model import DecideModel
from labkit.explorers.sweep_view import announced, show_widget, start


def page(**wishes):
    """Show the decision page; wishes: what a DecideModel begins with."""
    show_widget(view(DecideModel(**wishes)), "The decision page: choose a model and batches, and press Decide.")


def view(model):
    """Make the widgets of a model; each carries a CSS class labkit-decide-<name>."""
    style, wide = {"description_width": "8em"}, {"width": "40em"}
    made = {"model": widgets.Combobox(options=[*decide.SIZES], description="model", style=style, layout=wide,
                                      placeholder="one of ours, a folder with config.json, or module:callable"),
            "inputs": widgets.Text(description="its inputs", style=style, layout=wide,
                                   placeholder="of module:callable only: Bx128:float16, B for the batch"),
            "batches": widgets.SelectMultiple(options=BATCHES, rows=5, description="batches", tooltip="several: Shift or Ctrl", style=style),
            "target_ms": widgets.FloatText(description="target, in ms", tooltip="0: none", style=style, layout={"width": "16em"})}
    buttons = {"decide": widgets.Button(description="Decide", button_style="primary"), "stop": widgets.Button(description="Stop")}
    said = {"status": widgets.HTML(), "answer": widgets.HTML()}
    for name, widget in {**made, **buttons, **said}.items():
        widget.add_class(f"labkit-decide-{name.removesuffix('_ms')}")
    for name, widget in made.items():
        link((model, name), (widget, "value"))
    dlink((model, "status"), (said["status"], "value"), announced)
    dlink((model, "decision"), (said["answer"], "value"), lambda decision: decision._repr_html_() if decision else "")
    buttons["decide"].on_click(lambda _: start(model.answer()))
    buttons["stop"].on_click(lambda _: model.stop())
    return widgets.VBox([*made.values(), widgets.HBox([*buttons.values(), said["status"]]), said["answer"]])
