"""The idle explorer's widgets: three sliders over the measured points, and what the model says about one."""

from html import escape

import ipywidgets as widgets
from IPython.display import display
from traitlets import link

from labkit import charts
from labkit.explorers.idle_model import INPUTS, IdleModel
from labkit.explorers.sweep_view import show_widget


def explore(table):
    """Show the explorer for the table of experiments.idle_sweep(), and below it a picture that needs no widgets."""
    model = IdleModel(table)
    show_widget(view(model), model.summary)
    display(model.picture())


def view(model):
    """Make the widgets of a model: sliders that move along what was measured, over bars and a sentence."""
    sliders = []
    for name in INPUTS:
        slider = widgets.SelectionSlider(options=model.choices[name], value=getattr(model, name), description=name)
        link((slider, "value"), (model, name))
        sliders.append(slider.add_class(f"labkit-{name}"))
    said = widgets.HTML(_html(model)).add_class("labkit-idle")
    model.observe(lambda _: setattr(said, "value", _html(model)), names=["summary"])
    return widgets.VBox([*sliders, said])


def _html(model):
    """Write the bars (blue: the GPU works, grey: it is idle; one scale) and the summary as HTML."""
    longest = max((us for _, us, _ in model.bars), default=1.0)
    rows = "".join(
        f'<div style="display:flex;align-items:center;margin:4px 0"><span style="width:4em">{name}</span>'
        f'<span style="display:flex;width:{60 * us / longest:.2f}%;height:1.3em;background:#d9d9d9">'
        f'<span style="width:{100 * works:.2f}%;background:{charts.BLUE}"></span></span>'
        f'<span style="margin-left:.6em">{charts.time(us)}, GPU idle {1 - works:.0%}</span></div>'
        for name, us, works in model.bars)
    key = (f'<div style="margin:4px 0 4px 4em"><span style="color:{charts.BLUE}">■</span> the GPU works '
           '<span style="color:#b0b0b0">■</span> the GPU is idle</div>' if model.bars else "")
    return (f'<div style="max-width:770px;line-height:1.5">{rows}{key}<p>{escape(model.summary)}</p>'
            f'<small>{escape(model.table.attrs["provenance"]["label"])}</small></div>')
