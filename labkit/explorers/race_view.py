"""Texts that were written at different speeds, shown side by side at the pace they were written at."""

from html import escape

from IPython.display import display

HIDE = "<style>@keyframes labkit-wait{from,to{visibility:hidden}}</style>"  # a token is hidden for as long as it took to come


def race(table):
    """Show the texts of experiments.streamed_text(), each token when it came; run the cell again to see it again."""
    lanes, told = [], []
    for how, part in table.groupby("how", sort=False):
        words = "".join(f'<span style="animation:labkit-wait {at:.3f}s">{escape(text)}</span>'
                        for at, text in zip(part["at_us"] / 1e6, part["text"]))
        took = f"{how}: {len(part)} tokens in {part['at_us'].max() / 1e6:.2f} s, {len(part) / part['at_us'].max() * 1e6:.0f} a second"
        told.append(took)
        lanes.append(f'<div style="flex:1;min-width:18em"><b>{escape(took)}</b><p style="white-space:pre-wrap">{words}</p></div>')
    first, label = table.iloc[0], table.attrs["provenance"]["label"]
    display({"text/plain": "\n".join([*told, label]), "text/html": (
        f'{HIDE}<div style="max-width:770px"><i>{escape(first.model)}: {escape(first.question)}</i>'
        f'<div style="display:flex;gap:2em;flex-wrap:wrap">{"".join(lanes)}</div><small>{escape(label)}</small></div>')}, raw=True)
