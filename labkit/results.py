"""Results: what came out on one GPU, small enough to send to others, and how the results of several stand side by side.

A file of results (JSON) holds the machine without names or paths, the verdict on each claim, and the tables that GPUs are
compared by. What others send is checked before a word of it is shown.
"""

import itertools
import json
import math
import stat
from dataclasses import asdict, fields, replace
from pathlib import Path

from labkit import claims, experiments, machine, recordings
from labkit.experiments.sweeps import INPUTS

KIND, SCHEMA = "labkit results", 1
LARGEST, MOST_FILES = 2 * 2**20, 200  # bytes of a file
POINT = (*INPUTS, "batch")
SPEEDS = ("speedup", "eager_wall_us", "graph_wall_us")
TABLES = {  # which columns name a row, and which numbers of it travel, each with its interval
    "launch_cost": (("what", "layer", "kernels"), ("cost_us",)), "idle_sweep": (("layers", "width", "batch"), ("idle_share", "speedup")),
    **{f"sweep_{model}": (POINT, SPEEDS) for model in ("mlp", "transformer", "gpt2", "llama")}}
PLAIN = r"\A[^<>&\"'`$\\{}\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]*\Z"  # nothing to HTML or matplotlib
SAID = {"pattern": "it is empty, or has characters that could be markup", "maxLength": "it is too long", "anyOf": "it is no number, short text or null",
        "minItems": "it has no rows", "maxItems": "it has more rows than such a table has", "enum": "it is none of those there are"}
SAME = ("gpu", "sm_count", "cpu", "cores")  # what makes two runs runs on one machine; driver and torch may have changed


class ResultsError(Exception):
    """A file that holds no results that can be used, or results that cannot be compared: the message says why."""


def gather(names=()):
    """Return the tables of experiments (default: all), measured here or as recorded, and why others are missing.

    ({name: table}, {name: reason}). Ctrl-C keeps what is there. Raises ResultsError for an unknown name.
    """
    from tqdm import tqdm

    if unknown := set(names) - experiments.EXPERIMENTS.keys():
        raise ResultsError(f"no experiment is called {', '.join(sorted(unknown))}; there are: {', '.join(experiments.EXPERIMENTS)}")
    tables, missing = {}, {}
    wanted = [name for name in experiments.EXPERIMENTS if not names or name in names]
    try:
        for name in (bar := tqdm(wanted, unit="table", disable=None, leave=False)):
            bar.set_description(name)
            try:
                tables[name] = experiments.EXPERIMENTS[name]()
            except Exception as error:  # one that fails must not cost the others
                missing[name] = machine.first_line(error)
    except KeyboardInterrupt:
        missing |= dict.fromkeys((name for name in wanted if name not in tables and name not in missing), "interrupted")
    if not tables:
        raise ResultsError(f"there is nothing to show: {next(iter(missing.values()), 'no experiment was asked for')}")
    return tables, missing


def sent():
    """Return the experiments that results hold or are judged from, in order."""
    wanted = {*TABLES, *(name for claim in claims.CLAIMS.values() for name in claim.experiments)}
    return [name for name in experiments.EXPERIMENTS if name in wanted]


def judged(tables):
    """Return the Verdict on every claim, in order: "not measured", and why, where its table is missing or lacks something."""
    found = []
    for id, claim in claims.CLAIMS.items():
        try:
            found.append(claims.judge(id, *map(tables.get, claim.experiments)))
        except ValueError as error:
            found.append(claims.judge(id))
            found[-1] = replace(found[-1], why=str(error))
    return found


def machine_of(tables):
    """Return the Machine that tables were measured on, as a dict: this one, or that of the newest recording among them."""
    told = [table.attrs["provenance"] for table in tables.values()]
    if any(one["live"] for one in told):
        return asdict(machine.describe())
    return recordings.load(max(told, key=lambda one: one["date"])["experiment"])["machine"]


def collect(tables):
    """Return results as a document to be sent: plain JSON, small, no host names, users or paths; ResultsError for what cannot be."""
    told, known = [table.attrs["provenance"] for table in tables.values()], {field.name for field in fields(machine.Machine)}
    dates, verdicts = [one["date"] for one in told], {
        v.claim.id: {"verdict": v.verdict, **{end: _short(getattr(v, end)) for end in ("number", "low", "high")}, "unit": v.unit}
        for v in judged(tables)}
    rows = {name: _rows(tables[name], *columns) for name, columns in TABLES.items() if name in tables}
    document = {"kind": KIND, "schema": SCHEMA, "measured_from": min(dates), "measured_until": max(dates),
                "live": any(one["live"] for one in told), "older_code": any(one["stale"] for one in told),
                "machine": {name: value for name, value in machine_of(tables).items() if name in known},
                "verdicts": verdicts, "tables": {name: found for name, found in rows.items() if found}}
    if wrong := _what_is_wrong(document):
        raise ResultsError(f"these results cannot be sent: {wrong}")
    return document


def _rows(table, keys, numbers):
    """Return the rows of a table that have all their numbers, with only what travels."""
    columns = [*keys, *(f"{number}{end}" for number in numbers for end in ("", "_low", "_high"))]
    return [{name: _short(value) for name, value in row.items()} for row in table[columns].dropna().to_dict("records")]


def _short(value):
    """Return a number of Python with six digits, or the text or None that it is."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


# ---- what others send

def read(path):
    """Return the results in a file; ResultsError says what is wrong with it, whoever made it."""
    path = Path(path)
    try:
        wrong = "it is no file"
        if stat.S_ISREG(path.stat().st_mode):
            with path.open("rb") as file:
                content = file.read(LARGEST + 1)
            document = json.loads(content.decode("utf-8-sig"), parse_constant=recordings.no_number) if len(content) <= LARGEST else None
            wrong = _what_is_wrong(document) if len(content) <= LARGEST else "it is larger than 2 MiB, and results are not"
    except (OSError, ValueError, RecursionError) as error:
        said = getattr(error, "strerror", None) or str(error) or type(error).__name__
        wrong = f"it cannot be read ({ascii(said)[1:-1][:120]})"
    if wrong:
        raise ResultsError(f"{_plain(path.name)} is left out: {wrong}")
    return document


def read_all(paths, read=read):
    """Return the results in files and folders, and why others are left out: ({name: document}, [reason]).

    A name is the GPU's; where several have the same GPU, the file's stands behind it. read: reads one file.
    """
    files, reasons, found = [], [], {}
    for path in map(Path, paths):
        files += in_folder(path) if path.is_dir() else [path]
    for path in (files := list(dict.fromkeys(path.absolute() for path in files)))[:MOST_FILES]:
        try:
            document = read(path)
        except ResultsError as error:
            reasons.append(str(error))
            continue
        twin = next((other for other, one in found.items() if one == document), None)
        if twin:
            reasons.append(f"{_plain(path.name)} is left out: it holds the same as {_plain(twin.name)}")
        else:
            found[path] = document
    if len(files) > MOST_FILES:
        reasons.append(f"{len(files) - MOST_FILES} files are left out: {MOST_FILES} are looked at")
    gpus, named = [document["machine"]["gpu"] for document in found.values()], {}
    for path, document in found.items():
        gpu = document["machine"]["gpu"]
        name = gpu if gpus.count(gpu) == 1 else f"{gpu} ({_plain(path.stem)})"
        more = (f"{name}, {number}" for number in itertools.count(2))
        named[name if name not in named else next(one for one in more if one not in named)] = document
    return named, reasons


def in_folder(folder):
    """Return what lies in a folder and may hold results, *.json first: all but other folders, and names that begin with a dot."""
    found = [path for path in Path(folder).glob("[!.]*") if path.suffix == ".json" or not path.is_dir()]
    return sorted(found, key=lambda path: (path.suffix != ".json", path))


def _plain(text):
    """Return a text with nothing in it that HTML or matplotlib would take for more than letters."""
    return "".join(letter if letter.isalnum() or letter in " ._-" else "_" for letter in text)[:60]


def _shape():
    """Return the JSON Schema of results: short plain texts, numbers that are some, no columns but those that are known."""
    text = {"type": "string", "maxLength": 120, "pattern": PLAIN}
    number = {"type": "number", "minimum": -1e12, "maximum": 1e12}
    value, maybe = {"anyOf": [text, number, {"type": "null"}]}, {"anyOf": [number, {"type": "null"}]}
    count, above = {"type": "integer", "minimum": 1, "maximum": 2**31}, number | {"exclusiveMinimum": 0}

    def exactly(**properties):
        return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}

    def rows(keys, numbers):
        ends = {f"{name}{end}": number if name == "idle_share" else above for name in numbers for end in ("", "_low", "_high")}
        kinds = {key: text if key in ("what", "layer", "model", "precision") else count for key in keys}
        return {"type": "array", "minItems": 1, "maxItems": 2000, "items": exactly(**kinds, **ends)}

    verdict = exactly(verdict={"enum": list(claims.VERDICTS)}, number=maybe, low=maybe, high=maybe, unit=text)
    about = dict.fromkeys((field.name for field in fields(machine.Machine)), value) | {"gpu": text | {"pattern": rf"(?=.*\S){PLAIN}"}}
    date = {"type": "string", "format": "date"}
    return exactly(kind={"const": KIND}, schema={"const": SCHEMA}, measured_from=date, measured_until=date, live={"type": "boolean"},
                   older_code={"type": "boolean"},
                   machine={"type": "object", "properties": about, "required": ["gpu"], "additionalProperties": False},
                   verdicts={"type": "object", "additionalProperties": verdict, "maxProperties": 99},  # another version may judge others
                   tables={"type": "object", "additionalProperties": False,
                           "properties": {name: rows(*columns) for name, columns in TABLES.items()}})


def _what_is_wrong(document):
    """Return what keeps a document from being results that can be shown ("" if nothing)."""
    import jsonschema

    if not isinstance(document, dict) or document.get("kind") != KIND:
        return "it does not hold results of python -m labkit export"
    schema = document.get("schema")
    if type(schema) is int and schema != SCHEMA:
        return f"it has schema {str(schema)[:9]}, and this labkit reads {SCHEMA}: {'update labkit' if schema > SCHEMA else 'export it anew'}"
    checker = jsonschema.Draft202012Validator(_shape(), format_checker=jsonschema.FormatChecker(["date"]))
    if error := next(checker.iter_errors(document), None):
        where = ".".join(ascii(step)[:40].strip("'") for step in error.absolute_path) or "the file"
        return f"{where} is not what it should be: {SAID.get(error.validator) or ascii(error.message)[1:-1][:150]}"
    for name, rows in document["tables"].items():
        keys, numbers = TABLES[name]
        for row in rows:
            for number in numbers:
                if not row[f"{number}_low"] <= row[number] <= row[f"{number}_high"]:
                    return f"table {name} has a row whose {number} is not within its interval"
        if len({tuple(row[key] for key in keys) for row in rows}) < len(rows):
            return f"table {name} has the same row twice"
    return ""


# ---- several side by side

def disagreements(before, after):
    """Return (how many speedups both have, how many only the first has, those whose intervals do not overlap), of one machine.

    Each of those is (where, speedup before, speedup after), a speedup as (value, low, high). Raises ResultsError for other
    machines, or where nothing can be compared. Only ratios are held against each other: of raw times the interval holds one
    process, and the CPU can be slower a minute later.
    """
    one, two = ([document["machine"].get(name) for name in SAME] for document in (before, after))
    if other := [name for name, was, now in zip(SAME, one, two) if was != now or was is None]:
        told = "; ".join(f"{name}: {before['machine'].get(name)} and {after['machine'].get(name)}" for name in other)
        raise ResultsError(f"these are not two runs on one machine ({told}): labkit compare puts different ones side by side")
    shared, lost, apart = 0, 0, []
    for name, (keys, numbers) in TABLES.items():
        if "speedup" not in numbers:
            continue
        old, new = ({tuple(row[key] for key in keys): tuple(row[f"speedup{end}"] for end in ("", "_low", "_high"))
                     for row in document["tables"].get(name, ())} for document in (before, after))
        lost += len(old.keys() - new.keys())
        for key in old.keys() & new.keys():
            shared += 1
            if old[key][1] > new[key][2] or new[key][1] > old[key][2]:
                where = ", ".join(f"{column} {value}" for column, value in zip(keys, key))
                apart.append((f"{name}: {where}", old[key], new[key]))
    if not shared:
        raise ResultsError("the two have no speedup in common that could be compared: export both with the same experiments")
    return shared, lost, sorted(apart)


def side_by_side(documents):
    """Return what tells GPUs apart at a glance, {what: [a text for each of {name: results}]}; "" where not measured."""
    found = list(map(_glance, documents.values()))
    return {what: [one.get(what, "") for one in found] for what in dict.fromkeys(what for one in found for what in one)}


def apart(documents):
    """Return the claims on which results differ, {claim id: [a verdict for each]}; not to have measured one is no difference."""
    judged = {id: [one["verdicts"].get(id, {}).get("verdict", claims.UNKNOWN) for one in documents.values()] for id in claims.CLAIMS}
    return {id: verdicts for id, verdicts in judged.items() if len({*verdicts} - {claims.UNKNOWN}) > 1}


def _glance(document):
    from labkit.charts import curve_name, time

    tables, about = document["tables"], document["machine"]

    def middle(name, column, **wanted):
        rows = sorted(row[column] for row in tables.get(name, ()) if all(row[key] == value for key, value in wanted.items()))
        return (rows[(len(rows) - 1) // 2] + rows[len(rows) // 2]) / 2 if rows else None

    idle = middle("idle_sweep", "idle_share", batch=1)
    costs = {who: middle("launch_cost", "cost_us", layer=layer, kernels=1) for who, layer in (("PyTorch", "torch"), ("the driver alone", "driver"))}
    seen = {"measured": when(document), "driver": about.get("driver"), "PyTorch": about.get("torch"),
            **{f"one launch, by {who}": cost and time(cost) for who, cost in costs.items()},
            "GPU idle at batch 1, eager, median of the transformers": idle and f"{idle:.0%}"}
    for name in TABLES:
        for row in first_curve(tables[name]) if name.startswith("sweep_") and name in tables else ():
            if row["batch"] in (1, 32):
                at = f"{curve_name(row)}, batch {row['batch']}"
                seen[at] = (f"{row['speedup']:.2f} ({row['speedup_low']:.2f} to {row['speedup_high']:.2f}) times as fast, "
                            f"{time(row['eager_wall_us'])} eager, {time(row['graph_wall_us'])} as a graph")
    return {what: str(value) for what, value in seen.items() if value is not None}


def when(document):
    """Say when results were measured, and how one knows."""
    days = dict.fromkeys((document["measured_from"], document["measured_until"]))
    return f"{' to '.join(days)}, {'live' if document['live'] else 'recorded'}{', by an earlier version' * document['older_code']}"


def first_curve(rows):
    """Return the rows of a sweep that belong to its first curve in float16."""
    half = [row for row in rows if row["precision"] == "float16"]
    return [row for row in half if all(row[key] == half[0][key] for key in POINT[:4])]
