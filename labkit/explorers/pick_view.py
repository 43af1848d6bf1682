"""A chart of one point of a table, and a menu or a slider for each column that the point is picked by."""

import ipywidgets as widgets
from IPython.display import display

from labkit.explorers.pick_model import PickModel
from labkit.explorers.sweep_view import picture, show_widget


def pick(table, by, draw, **wishes):
    """Show what `draw` makes of the rows at one point of a table: a Chart; the point is picked by the columns `by`.

    Below the widgets stands the chart that it begins with, for pages without them.
    """
    model = PickModel(table, by, **wishes)
    first = draw(model.rows)
    show_widget(view(model, draw), str(first))
    display(first)


def view(model, draw):
    """Make the widgets of a model; each carries a CSS class labkit-pick-<column>."""
    style, made, moving = {"description_width": "6em"}, {}, []
    for name in model.by:
        kind = widgets.Dropdown if isinstance(model.picked[name], str) else widgets.SelectionSlider
        made[name] = kind(options=model.options[name], value=model.picked[name], description=name, tooltip=name, style=style,
                          layout={"width": "30em"}).add_class(f"labkit-pick-{name}")
    chart = widgets.HTML().add_class("labkit-pick-chart")

    def show(_=None):
        moving.append(True)
        for name, widget in made.items():
            if widget.options != model.options[name]:
                widget.options = model.options[name]
            widget.value = model.picked[name]
            widget.disabled = len(widget.options) == 1
        moving.clear()
        chart.value = picture(draw(model.rows))

    for name, widget in made.items():
        widget.observe(lambda change, name=name: moving or model.pick(**{name: change["new"]}), names="value")
    model.observe(show, names="picked")
    show()
    return widgets.VBox([*made.values(), chart])
