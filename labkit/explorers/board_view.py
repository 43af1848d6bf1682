"""The board's widgets: a table, a chart and what was left out, drawn again whenever the folder changes; Watch and Stop."""

from html import escape

import ipywidgets as widgets
from IPython.display import HTML, display

from labkit import charts, report
from labkit.explorers.board_model import BoardModel
from labkit.explorers.sweep_view import picture, start

LEFT = 'style="text-align:left;vertical-align:top;max-width:20em"'


def board(folder, own=None, watch=True):
    """Show the board of a folder, and `own` results (a document of results.collect) first; below it the same without widgets."""
    model = BoardModel(folder, own)
    bundle = view(model)._repr_mimebundle_()
    data, *metadata = bundle if isinstance(bundle, tuple) else (bundle,)
    display({**data, "text/plain": "\n".join([model.status, *model.left_out])}, *metadata, raw=True)
    display(HTML(f"<details><summary>Without the buttons</summary>{table(model)}</details>"))
    if watch:
        start(model.watch())
    return model


def view(model):
    """Make the widgets of a model; each carries a CSS class labkit-board-<name>."""
    sweep = widgets.Dropdown(options=[(words, f"sweep_{kind}") for kind, words in charts.MODELS.items()], value=model.sweep, description="chart")
    buttons = {name: widgets.Button(description=name.capitalize(), tooltip=words) for name, words in (
        ("watch", "look at the folder every second"), ("stop", "leave the board as it is"))}
    said = {name: widgets.HTML() for name in ("status", "table", "chart")}
    for name, widget in {"sweep": sweep, **buttons, **said}.items():
        widget.add_class(f"labkit-board-{name}")

    def show(_=None):
        said["table"].value, said["chart"].value = table(model), picture(model.chart())

    def tell(_=None):
        said["status"].value = f'<span role="status">{escape(model.status)}</span>'
        buttons["watch"].button_style, buttons["stop"].button_style = ("", "primary")[::1 if model.running else -1]

    sweep.observe(lambda change: setattr(model, "sweep", change["new"]), names="value")
    model.observe(show, names="shown")
    model.observe(tell, names=["status", "running"])
    buttons["watch"].on_click(lambda _: model.running or start(model.watch()))
    buttons["stop"].on_click(lambda _: model.stop())
    show(), tell()
    return widgets.VBox([widgets.HBox([*buttons.values(), said["status"]]), said["table"], sweep, said["chart"]])


def table(model):
    """Write a model's table, the verdicts that differ, and what was left out, as HTML; whatever a file says is text."""
    head = "".join(f'<th scope="col" {LEFT}>{escape(name)}</th>' for name in model.documents)
    marked = {f"claim {id}": [f"{report.MARKS[verdict]} {verdict}" for verdict in verdicts] for id, verdicts in model.apart.items()}
    rows = "".join(f'<tr><th scope="row" {LEFT}>{escape(what)}</th>' + "".join(f"<td {LEFT}>{escape(text)}</td>" for text in texts) + "</tr>"
                   for what, texts in {**model.table, **marked}.items())
    left_out = "".join(f"<li>{escape(reason)}</li>" for reason in model.left_out)
    return (f'<div style="overflow-x:auto"><table><thead><tr><th {LEFT}>What</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
            + (f"<p>Left out:</p><ul>{left_out}</ul>" if left_out else ""))
