"""The report: one HTML page that holds all it shows, for one GPU; and the board, on which the results of several stand."""

import base64
import datetime
import html
import re
from collections import Counter
from pathlib import Path

import jinja2
import markupsafe
import pandas

from labkit import __version__, charts, claims, experiments, launch_model, recordings, results

PAGES = Path(__file__).with_name("pages")
TEMPLATES = jinja2.Environment(loader=jinja2.FileSystemLoader(PAGES), autoescape=jinja2.select_autoescape(["html"]),
                               undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
TEMPLATES.filters["whole"] = lambda text: markupsafe.Markup(re.sub(r"--[\w-]+", r'<span class="whole">\g<0></span>', str(markupsafe.escape(text))))
LARGEST = 5 * 2**20  # bytes of a page
MARKS = {claims.HOLDS: "✓", claims.LIMITS: "≈", claims.FAILS: "✗", claims.OUTDATED: "↺", claims.UNKNOWN: "○"}
MACHINE = {"gpu": "GPU", "sm_count": "multiprocessors", "memory_gib": "memory (GiB)", "driver": "driver", "cuda": "CUDA",
           "power_limit_w": "power limit (W)", "max_sm_clock_mhz": "highest clock (MHz)", "cpu": "CPU", "cores": "cores",
           "os": "system", "python": "Python", "torch": "PyTorch", "transformers": "transformers", "labkit": "labkit"}


def page(tables, missing=None, folder="."):
    """Return the report on {experiment: table} as HTML; `missing` says why others are not in it: {experiment: reason}.

    folder: where the page will lie: it links to the labs in `notebooks` there, and nowhere else.
    Raises results.ResultsError for a page of more than LARGEST bytes.
    """
    told = [table.attrs["provenance"] for table in tables.values()]
    about, pictures, reasons = results.machine_of(tables), [], dict(missing or {})
    verdicts, unknown = [], []
    for verdict in results.judged(tables):
        (unknown if verdict.verdict == claims.UNKNOWN else verdicts).append(verdict)
    for wanted, draw in PICTURES:
        if all(name in tables for name in wanted):
            try:
                pictures.append(_picture(draw(*(tables[name] for name in wanted)), wanted))
            except (ValueError, KeyError) as error:  # a table without what this picture shows
                reasons.setdefault(" and ".join(wanted), str(error).splitlines()[0])
    return _filled("report.html", folder, title=f"CUDA Graphs on {about['gpu']}", labels=list(dict.fromkeys(one["label"] for one in told)),
                   machine={name: about[key] for key, name in MACHINE.items() if about.get(key) is not None}, verdicts=verdicts,
                   unknown=unknown, marks=MARKS, counts=Counter(v.verdict for v in verdicts), say=number, pictures=pictures, traced="step_trace" in tables,
                   method=_method(tables), tables=list(map(_download, tables.values(), tables)), missing=reasons)


def board(documents, left_out=(), folder="."):
    """Return {name: results} side by side as HTML, with what was left out and why; folder and errors as of `page`."""
    pictures = []
    for name in results.TABLES:
        if name.startswith("sweep_") and (drawn := speedups(documents, name)):
            chart, others = drawn
            pictures.append(_picture(chart, (name,), others))
    verdicts = [(claim, [document["verdicts"].get(id) for document in documents.values()]) for id, claim in claims.CLAIMS.items()]
    return _filled("board.html", folder, title="CUDA Graphs on several GPUs", names=list(documents), marks=MARKS, say=number, pictures=pictures,
                   labels=["as their owners sent them: their numbers are not ours"],
                   glance=results.side_by_side(documents), verdicts=verdicts, left_out=list(left_out))


def _filled(template, folder, **given):
    labs = {path.name[:2]: f"notebooks/{path.name}" for path in Path(folder, "notebooks").glob("[0-9]*.ipynb")}
    written = TEMPLATES.get_template(template).render(labs=labs, today=datetime.date.today().isoformat(), version=__version__, **given)
    if (size := len(written.encode())) > LARGEST:
        raise results.ResultsError(f"the page would take {size / 2**20:.1f} MiB, and a page takes at most {LARGEST >> 20}: put less on it")
    return written


def _picture(chart, names, others=()):
    return {"png": base64.b64encode(chart.png).decode(), "width": chart.width, "text": str(chart),
            "measured": [(name, _purpose(name)) for name in names], "others": list(others)}


def _purpose(name):
    """Return in one sentence what an experiment does."""
    return (experiments.EXPERIMENTS[name].__doc__ or "").partition("\n")[0]


def grid(rows, head=()):
    """Write {what: [a text for each column]} as an HTML table; whatever stands in it is text."""
    left = 'style="text-align:left;vertical-align:top;max-width:24em;white-space:pre-wrap"'
    top = "".join(f'<th scope="col" {left}>{html.escape(name)}</th>' for name in head)
    body = "".join(f'<tr><th scope="row" {left}>{html.escape(what)}</th>' + "".join(f"<td {left}>{html.escape(text)}</td>" for text in texts) + "</tr>"
                   for what, texts in rows.items())
    return f'<div style="overflow-x:auto"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def number(value, unit):
    """Return a number with its unit as one reads it: three digits, thousands apart, shares in percent."""
    if value is None or value != value:
        return ""
    if unit == "share":
        return f"{value:.0%}"
    return f"{value:,.0f} {unit}" if float(value).is_integer() or abs(value) >= 1000 else f"{value:.3g} {unit}"


def _method(tables):
    """Return how the numbers were measured, {what: how}: as the recordings say, or as the clock here says."""
    recorded = [table.attrs["provenance"] for table in tables.values() if not table.attrs["provenance"]["live"]]
    if recorded:
        return recordings.load(recorded[0]["experiment"])["method"]
    from labkit import timing
    return timing.METHOD


def _download(table, name):
    """Return a table as a file to keep: its name, rows, where it is from, and its numbers as CSV, lists left out."""
    lists = [column for column in table if table[column].map(lambda value: isinstance(value, (list, dict))).any()]
    csv = table.drop(columns=lists).to_csv(index=False)
    return {"name": name, "purpose": _purpose(name), "rows": len(table), "label": table.attrs["provenance"]["label"], "left_out": lists,
            "csv": base64.b64encode(csv.encode()).decode()}


def speedups(documents, sweep):
    """Return the chart of one sweep on each GPU, speedup against batch size, and the GPUs that are not in it; None without any.

    Drawn is the size that most of them have first.
    """
    curves = {gpu: results.first_curve(document["tables"].get(sweep, ())) for gpu, document in documents.items()}
    sizes = Counter(tuple(rows[0][key] for key in results.POINT[:5]) for rows in curves.values() if rows)
    if not sizes:
        return None
    size = sizes.most_common(1)[0][0]
    drawn = [gpu for gpu, rows in curves.items() if rows and tuple(rows[0][key] for key in results.POINT[:5]) == size][:len(charts.SERIES)]
    table = pandas.DataFrame([row | {"gpu": gpu} for gpu in drawn for row in sorted(curves[gpu], key=lambda row: row["batch"])])
    table.attrs["provenance"] = {"label": "; ".join(f"{gpu}: {results.when(documents[gpu])}" for gpu in drawn)}
    chart = charts.lines(table, "batch", "speedup", by="gpu", log=("x",), y_label="times as fast as eager", x_label="batch size",
                         title=f"{charts.curve_name(curves[drawn[0]][0])}: speedup by a graph")
    return chart, [gpu for gpu in documents if gpu not in drawn]


def _curve(table):
    """Return the first curve of a sweep in float16, as a table."""
    curve = pandas.DataFrame(results.first_curve(table.to_dict("records")))
    curve.attrs = table.attrs
    return curve


def _idle(table):
    one = table[(table["batch"] == 1) & (table["layers"] == table["layers"].max())]
    one = one.assign(model=one["width"].map(f"{table['layers'].max()} layers, width {{}}".format))
    return charts.bars(one, "model", "idle_share", value_label="share of the step that the GPU is idle",
                       title="How long the GPU has nothing to do, eager mode, batch 1")


def _saving(table):
    one = table[(table["model"] == "transformer") & (table["batch"] == 1)]
    return charts.lines(one, "kernels", ["eager_wall_us", "graph_wall_us"], log=(), x_label="kernels in one step",
                        title="One step of a transformer, eager and replayed")


def _break_even(table):
    return charts.lines(table.dropna(subset="break_even_calls"), "kernels", "break_even_calls", log=("x",), y_label="calls",
                        x_label="kernels in the graph", title="Calls until a capture has paid for itself")


def _again(table):
    table = table.assign(process=table["run"].map("process {}".format))
    return charts.bars(table, "process", "speedup", title="The same speedup, measured six times",
                       value_label="times as fast as eager")


def _predictions(chains, *sweeps):
    rows = pandas.concat(sweeps, ignore_index=True)
    rows.attrs = chains.attrs
    return charts.predictions(launch_model.add_predictions(rows, launch_model.fit(chains)))


# Which tables a picture is drawn from, and how, in the order of the page.
PICTURES = (
    (("first_win",), charts.compare),
    (("launch_cost",), lambda t: charts.bars(t, "what", "cost_us", by="layer", title="What one kernel costs the CPU",
                                             value_label="CPU time to launch one kernel")),
    (("step_trace",), charts.timeline),
    (("idle_sweep",), _idle),
    (("step_saving",), _saving),
    (("replay_cost",), lambda t: charts.lines(t, "nodes", ["enqueue_us", "gpu_us"], x_label="nodes in the graph",
                                              title="One replay, by the number of nodes")),
    (("capture_cost",), _break_even),
    (("padding_cost",), lambda t: charts.lines(t, "length", ["graph_wall_us", "padded_wall_us"], log=("x",), x_label="tokens",
                                               y_label="time of one step",
                                               title="One step at many lengths: a graph for each, or padded")),
    (("bucket_pools",), lambda t: charts.lines(t, "graphs", "pool_bytes", by="how", log=(), x_label="graphs captured so far",
                                               y_label="GPU memory of the pools", title="What eight captured sizes keep reserved")),
    (("operation_table",), lambda t: charts.outcomes(t, "group", "result", what="operations",
                                                     title="What becomes of operations in a capture, by kind")),
    (("sweep_transformer",), lambda t: charts.sweep(_curve(t))),
    (("sweep_gpt2",), lambda t: charts.sweep(_curve(t))),
    (("sweep_gpt2", "ceilings"), lambda t, ceilings: charts.roofline(_curve(t), ceilings)),
    (("launch_constants", "sweep_mlp", "sweep_transformer", "sweep_gpt2", "sweep_llama"), _predictions),
    (("repeatability",), _again),
)
