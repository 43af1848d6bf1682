"""The widgets of the serving explorer: a policy, a number of graphs and a rate over one chart and what it says in words."""

from html import escape

import ipywidgets as widgets
from IPython.display import display

from labkit.explorers.serve_model import QUANTITIES, ServeModel
from labkit.explorers.sweep_view import picture, show_widget

LABELS = {"policy": "policy", "graphs": "graphs", "rate": "requests / s", "quantity": "shown"}


def serve_sizes(ways, steps, pools, **wishes):
    """Show the explorer over the tables of serving_ways, serving_step_cost and serving_pools; below it a picture, for pages without widgets."""
    model = ServeModel(ways, steps, pools, **wishes)
    show_widget(view(model), model.summary)
    display(model.chart())


def view(model):
    """Make the widgets of a model; each carries a CSS class labkit-serve-<name>."""
    made, moving = {}, []
    for name, label in LABELS.items():
        kind = widgets.Dropdown if name in ("policy", "quantity") else widgets.SelectionSlider
        made[name] = kind(options=_offered(model, name), value=getattr(model, name), description=label, tooltip=label,
                          style={"description_width": "6em"}, layout={"width": "30em"}).add_class(f"labkit-serve-{name}")
    said = {name: widgets.HTML().add_class(f"labkit-serve-{name}") for name in ("summary", "chart")}

    def show(_=None):
        moving.append(True)
        for name, widget in made.items():
            if widget.options != (options := _offered(model, name)):
                widget.options = options
            widget.value = getattr(model, name)
        moving.clear()
        said["summary"].value = f'<p role="status">{escape(model.summary)}</p>'
        if said["chart"].value != (drawn := picture(model.chart())):
            said["chart"].value = drawn

    for name, widget in made.items():
        widget.observe(lambda change, name=name: moving or setattr(model, name, change["new"]), names="value")
    model.observe(show, names=["summary", "quantity"])
    show()
    return widgets.VBox([*made.values(), said["summary"], said["chart"]])


def _offered(model, name):
    options = model.options(name)
    return tuple((QUANTITIES[option], option) for option in options) if name == "quantity" else options
