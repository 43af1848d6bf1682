"""The board's widgets: a table, a chart and what was left out, drawn again whenever the folder changes; Watch and Stop."""

from html import escape

import ipywidgets as widgets
from IPython.display import HTML, display
from traitlets import dlink, link

from labkit import charts, report
from labkit.explorers.board_model import BoardModel
from labkit.explorers.sweep_view import announced, next_press, picture, show_widget, start


def board(folder, own=None):
    """Show the board of a folder, and `own` results (a document of results.collect) first; below it the same without widgets."""
    model = BoardModel(folder, own)
    show_widget(view(model), "\n".join([model.status, *model.left_out]))
    display(HTML(f"<details><summary>Without the buttons</summary>{table(model)}</details>"))
    start(model.watch())
    return model


def view(model):
    """Make the widgets of a model; each carries a CSS class labkit-board-<name>."""
    sweep = widgets.Dropdown(options=[(words, f"sweep_{kind}") for kind, words in charts.MODELS.items()], description="chart")
    buttons = {name: widgets.Button(description=name.capitalize(), tooltip=words) for name, words in (
        ("watch", "look at the folder every second"), ("stop", "leave the board as it is"))}
    said = {name: widgets.HTML() for name in ("status", "table", "chart")}
    for name, widget in {"sweep": sweep, **buttons, **said}.items():
        widget.add_class(f"labkit-board-{name}")

    def show(_=None):
        said["table"].value, said["chart"].value = table(model), picture(model.chart())

    link((model, "sweep"), (sweep, "value"))
    model.observe(show, names="shown")
    dlink((model, "status"), (said["status"], "value"), announced)
    next_press(model, "running", *buttons.values())
    buttons["watch"].on_click(lambda _: model.running or start(model.watch()))
    buttons["stop"].on_click(lambda _: model.stop())
    show()
    return widgets.VBox([widgets.HBox([*buttons.values(), said["status"]]), said["table"], sweep, said["chart"]])


def table(model):
    """Write a model's table, the verdicts that differ, and what was left out, as HTML; whatever a file says is text."""
    marked = {f"claim {id}": [f"{report.MARKS[verdict]} {verdict}" for verdict in verdicts] for id, verdicts in model.apart.items()}
    left_out = "".join(f"<li>{escape(reason)}</li>" for reason in model.left_out)
    return report.grid({**model.table, **marked}, ["What", *model.documents]) + (f"<p>Left out:</p><ul>{left_out}</ul>" if left_out else "")
