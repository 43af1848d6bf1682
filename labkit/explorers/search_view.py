"""A table to search in: one text field over its rows."""

from html import escape

import ipywidgets as widgets
import pandas
from IPython.display import display

from labkit.explorers.search_model import matching


def search(table, columns):
    """Show a text field, and the rows of a table (with provenance) that hold all words typed into it, in these columns."""
    words = widgets.Text(placeholder="type words, like: linalg fails", description="search").add_class("labkit-search")
    found = widgets.HTML(_html(table, columns, "")).add_class("labkit-found")
    words.observe(lambda change: setattr(found, "value", _html(table, columns, change["new"])), names="value")
    bundle = widgets.VBox([words, found])._repr_mimebundle_()
    data, *metadata = bundle if isinstance(bundle, tuple) else (bundle,)
    display({**data, "text/plain": f"A search field over {len(table)} rows: {', '.join(columns)}."}, *metadata, raw=True)


def _html(table, columns, text):
    found = matching(table, columns, text)
    with pandas.option_context("display.max_colwidth", None):  # else long cells are cut short
        rows = found.to_html(index=False, border=0, justify="left", escape=True)
    return (f'<p>{len(found)} of {len(table)} rows</p><div style="max-height:26em;overflow:auto">{rows}</div>'
            f'<small>{escape(table.attrs["provenance"]["label"])}</small>')
