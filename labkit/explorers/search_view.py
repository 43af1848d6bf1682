"""A table to search in: one text field over its rows, and all of them below for pages without widgets."""

from html import escape

import ipywidgets as widgets
import pandas
from IPython.display import HTML, display

from labkit.explorers.search_model import matching
from labkit.explorers.sweep_view import show_widget


def search(table, columns, example="linalg fails"):
    """Show a text field, with an example, and the rows of a table (with provenance) that hold all words typed into it, in these columns."""
    words = widgets.Text(placeholder=f"type words, like: {example}", description="search").add_class("labkit-search")
    found = widgets.HTML(_html(table, columns, "")).add_class("labkit-found")
    words.observe(lambda change: setattr(found, "value", _html(table, columns, change["new"])), names="value")
    show_widget(widgets.VBox([words, found]), f"A search in {len(table)} rows, which stand below.")
    display(HTML(f"<details><summary>All {len(table)} rows, without the search field</summary>"
                 f"{_html(table, columns, '')}</details>"))


def _html(table, columns, text):
    found = matching(table, columns, text)
    with pandas.option_context("display.max_colwidth", None):  # else long cells are cut short
        rows = found.to_html(index=False, border=0, escape=True).replace("<td>", '<td style="text-align:left">')
    rows = rows.replace("<th>", '<th style="text-align:left">') if len(found) else "No row holds all of these words."
    return (f'<p>{len(found)} of {len(table)} rows</p>'
            f'<div style="max-height:26em;overflow:auto" tabindex="0" role="region" aria-label="Rows found">{rows}</div>'
            f'<small>{escape(table.attrs["provenance"]["label"])}</small>')
