"""The widgets of what-if: a traced step, three sliders, and what the launch model predicts."""

from html import escape

import ipywidgets as widgets
from IPython.display import HTML, display
from traitlets import link

from labkit import charts
from labkit.explorers.sweep_view import show_widget
from labkit.explorers.whatif_model import FACTORS, WhatIfModel

LABELS = {"cpu": "CPU speed ×", "gpu": "GPU speed ×", "more_layers": "layers ×"}
CLASSES = {"cpu": "labkit-cpu", "gpu": "labkit-gpu-speed", "more_layers": "labkit-more-layers"}


def whatif(table, constants, **wishes):
    """Show what-if over a sweep with traces and the machine's launch_model.Constants; below it the same without widgets."""
    model = WhatIfModel(table, constants, **wishes)
    show_widget(view(model), model.summary)
    display(HTML(f"<details><summary>Without the sliders</summary>{_html(model)}</details>"))


def view(model):
    """Make the widgets of a model; each carries a CSS class labkit-<name>."""
    style = {"description_width": "8em"}
    curve = widgets.Dropdown(options=tuple(model.curves), description="step", style=style,
                             layout={"width": "40em"}).add_class("labkit-whatif-curve")
    batch = widgets.SelectionSlider(options=model.batches(), value=model.batch, description="batch",
                                    style=style).add_class("labkit-whatif-batch")
    sliders = {name: widgets.SelectionSlider(options=[(f"{v:g}", v) for v in values], description=LABELS[name],
                                             style=style).add_class(CLASSES[name])
               for name, values in FACTORS.items()}
    said = widgets.HTML().add_class("labkit-whatif")

    def show(_=None):
        if batch.options != model.batches():
            wish = model.batch
            batch.options = model.batches()
            model.batch = wish
        batch.value = model.batch
        said.value = _html(model)

    for name, widget in {"curve": curve, **sliders}.items():
        link((model, name), (widget, "value"))
    batch.observe(lambda change: setattr(model, "batch", change["new"]), names="value")
    model.observe(show, names="summary")
    show()
    return widgets.VBox([curve, batch, *sliders.values(), said])


def _html(model):
    """Write the times as bars of one scale, and the summary, as HTML; what if is only outlined."""
    longest = max(us for _, us in model.times)
    looks = {"eager": charts.ORANGE, "graph": charts.BLUE}
    rows = "".join(
        f'<div style="display:flex;align-items:center;margin:4px 0"><span style="width:9em">{name}</span>'
        f'<span style="width:{55 * us / longest:.2f}%;height:1.2em;border:2px solid {looks[name[:5]]};'
        f'background:{"transparent" if "if" in name else looks[name[:5]]}"></span>'
        f'<span style="margin-left:.6em">{charts.time(us)}</span></div>' for name, us in model.times)
    return (f'<div style="max-width:770px;line-height:1.5">{rows}<p>{escape(model.summary)}</p>'
            f'<small>Predicted from a trace. {escape(model.provenance["label"])}</small></div>')
