"""The scorecard's widgets: a menu of guesses for each claim, and the table of verdicts that fills in; Measure, Load and Stop."""

from html import escape
from pathlib import Path

import ipywidgets as widgets
from IPython.display import HTML, display
from traitlets import dlink

from labkit import claims, machine, report
from labkit.explorers.scorecard_model import GUESSES
from labkit.explorers.sweep_view import announced, show_widget, start

LEFT = 'style="text-align:left;vertical-align:top"'


def guess(model):
    """Show a menu of verdicts for each claim, and the guesses as a line of code to keep."""
    kept, rows = widgets.HTML().add_class("labkit-guesses"), []
    for id, claim in claims.CLAIMS.items():
        menu = widgets.Dropdown(options=[("no guess", ""), *((verdict, verdict) for verdict in GUESSES)], value=model.guesses.get(id, ""),
                                description=id, tooltip=claim.statement, style={"description_width": "8em"}, layout={"width": "21em"})
        menu.observe(lambda change, id=id: model.guess(id, change["new"]), names="value")
        rows.append(widgets.HBox([menu.add_class(f"labkit-guess-{id}"), widgets.HTML(escape(claim.statement), layout={"flex": "1"})]))

    def show(_=None):
        kept.value = (f"<p>{len(model.guesses)} of {len(claims.CLAIMS)} guessed. They are in <code>guesses</code>; to keep them for another run of this "
                      f"lab, copy this into the cell above: <code>guesses = {escape(repr(model.guesses))}</code></p>")

    model.observe(show, names="shown")
    show()
    show_widget(widgets.VBox([*rows, kept]), f"{len(claims.CLAIMS)} claims to guess: {', '.join(claims.CLAIMS)}")


def scorecard(model):
    """Show the verdicts beside the guesses, and fill them in: where nothing is measured from the recordings, at once."""
    buttons = {name: widgets.Button(description=words.partition(":")[0], tooltip=words, layout={"width": "auto"}) for name, words in (
        ("measure", "Measure what is missing: one experiment after another, for many minutes"),
        ("load", "Load recordings instead: of what is missing"), ("stop", "Stop: after the experiment that runs"))}
    said = {"status": widgets.HTML(), "table": widgets.HTML()}
    for name, widget in {**buttons, **said}.items():
        widget.add_class(f"labkit-score-{name}")

    def show(_=None):
        said["table"].value = table(model)

    model.observe(show, names="shown")
    dlink((model, "status"), (said["status"], "value"), announced)
    buttons["measure"].on_click(lambda _: start(model.fill()))
    buttons["load"].on_click(lambda _: start(model.fill(recorded=True)))
    buttons["stop"].on_click(lambda _: model.stop())
    show()
    live = machine.mode().live
    show_widget(widgets.VBox([widgets.HBox([*buttons.values()] if live else []), said["status"], said["table"]]), "The scorecard:")
    if not live:
        model.load()
    display(HTML(f"<details><summary>The scorecard as it is now, for pages without widgets</summary>{table(model)}</details>"))


def table(model):
    """Write the scorecard as an HTML table: claim, guess, verdict, number with its range, GPU, why, its rule, and the lab that measures it."""
    rows = "".join(_row(v, model.guesses.get(v.claim.id), model.missing) for v in model.verdicts)
    head = "".join(f'<th scope="col" {LEFT}>{name}</th>' for name in ("Claim", "Your guess", "Verdict", "Number, and its range", "Why"))
    return f'<div style="overflow-x:auto"><table style="width:100%"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _row(verdict, guess, missing):
    claim, number = verdict.claim, report.number(verdict.number, verdict.unit)
    span = "" if verdict.low == verdict.high else f"{report.number(verdict.low, verdict.unit)} to {report.number(verdict.high, verdict.unit)}"
    why = " ".join(map(escape, [verdict.why, *(f"{missing[name]}." for name in claim.experiments if name in missing)]))
    rule = f'<details><summary aria-label="The rule: {escape(claim.id)}">The rule</summary>{escape(claim.bounds)}</details>'
    cells = (escape(guess or "none"), f"<b>{report.MARKS[verdict.verdict]} {escape(verdict.verdict)}</b>",
             f'{escape(number)}<br><small>{escape(span)}</small>', f"{why}<br><small>{escape(verdict.provenance['label'])}</small>{rule}")
    return (f'<tr><th scope="row" {LEFT}>{escape(claim.statement)}<br><small>{escape(claim.id)}, {_lab(claim.lab)}</small></th>'
            + "".join(f"<td {LEFT}>{cell}</td>" for cell in cells) + "</tr>")


def _lab(number):
    """Link to the lab of this number, where it stands beside the notebook that asks."""
    found = next(iter(sorted(Path().glob(f"{number}_*.ipynb"))), None)
    return f'<a href="{escape(found.name)}" target="_blank" style="text-decoration:underline">lab {escape(number)}</a>' if found else f"lab {escape(number)}"
