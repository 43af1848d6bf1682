"""Results: what came out on one GPU, small enough to send to others, and how the results of several stand side by side.

A file of results (JSON) holds the machine without names or paths, the verdict on each claim, and the tables that GPUs are
compared by. What others send is checked before a word of it is shown.
"""

import datetime
import hashlib
import json
import statistics
from dataclasses import asdict, fields
from pathlib import Path

from labkit import claims, experiments, machine, recordings

KIND, SCHEMA = "labkit results", 1
LARGEST, MOST_ROWS, LONGEST = 2 * 2**20, 2000, 120  # bytes of a file, rows of a table, characters of a text
POINT = ("model", "layers", "width", "length", "precision", "batch")
TABLES = {  # which columns name a row, and which numbers of it travel, each with its interval
    "launch_cost": (("what", "layer", "kernels"), ("cost_us",)),
    "idle_sweep": (("layers", "width", "batch"), ("idle_share", "speedup")),
    **{f"sweep_{model}": (POINT, ("speedup", "eager_wall_us", "graph_wall_us")) for model in ("mlp", "transformer", "gpt2", "llama")}}
VERDICTS = (claims.HOLDS, claims.LIMITS, claims.FAILS, claims.OUTDATED, claims.UNKNOWN)
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
                missing[name] = (str(error).strip() or type(error).__name__).splitlines()[0]
    except KeyboardInterrupt:
        missing |= dict.fromkeys((name for name in wanted if name not in tables and name not in missing), "interrupted")
    if not tables:
        raise ResultsError(f"there is nothing to show: {next(iter(missing.values()), 'no experiment was asked for')}")
    return tables, missing


def sent():
    """Return the experiments that results hold or are judged from, in order."""
    wanted = {*TABLES, *(claim.experiment for claim in claims.CLAIMS.values())}
    return [name for name in experiments.EXPERIMENTS if name in wanted]


def judged(tables):
    """Return the Verdict on every claim, in order: "not measured" where its table is missing."""
    return [claims.judge(id, tables.get(claim.experiment)) for id, claim in claims.CLAIMS.items()]


def machine_of(tables):
    """Return the Machine that tables were measured on, as a dict: this one, or that of the newest recording among them."""
    told = [table.attrs["provenance"] for table in tables.values()]
    if any(one["live"] for one in told):
        return asdict(machine.describe())
    return recordings.load(max(told, key=lambda one: one["date"])["experiment"])["machine"]


def collect(tables):
    """Return results as a document to be sent: plain JSON, small, no host names, users or paths."""
    verdicts = {v.claim.id: {"verdict": v.verdict, **{end: _short(getattr(v, end)) for end in ("number", "low", "high")},
                             "unit": v.unit} for v in judged(tables)}
    rows = {name: _rows(tables[name], *columns) for name, columns in TABLES.items() if name in tables}
    known, described = {field.name for field in fields(machine.Machine)}, machine_of(tables)
    document = {"kind": KIND, "schema": SCHEMA, "made_at": datetime.date.today().isoformat(),
                "live": any(table.attrs["provenance"]["live"] for table in tables.values()),
                "machine": {name: value for name, value in described.items() if name in known},
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
    return float(f"{value:.6g}") if isinstance(value, float) else value


def read(path):
    """Return the results in a file; ResultsError says what is wrong with it, whoever made it."""
    path = Path(path)
    try:
        if (size := path.stat().st_size) > LARGEST:
            raise ResultsError(f"{path.name} is left out: it is {size / 2**20:.0f} MiB large, and results take at most {LARGEST >> 20}")
        document = json.loads(path.read_text("utf-8"), parse_constant=_no_number)
        wrong = _what_is_wrong(document)
    except (OSError, ValueError, RecursionError) as error:
        wrong = f"it cannot be read ({(str(error) or type(error).__name__).splitlines()[0][:LONGEST]})"
    if wrong:
        raise ResultsError(f"{path.name} is left out: {wrong}")
    return document


def read_all(paths):
    """Return the results in files and folders (of *.json), and why others are left out: ({name: document}, [reason])."""
    files, reasons, found, seen = [], [], {}, {}
    for path in map(Path, paths):
        files += sorted(path.glob("*.json")) if path.is_dir() else [path]
    for path in files:
        try:
            document = read(path)
        except ResultsError as error:
            reasons.append(str(error))
            continue
        mark = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
        if mark in seen:
            reasons.append(f"{path.name} is left out: it is the same as {seen[mark]}")
            continue
        seen[mark] = path.name
        found[_name(document, found)] = document
    return found, reasons


def _name(document, taken):
    """Return what to call results among others: the GPU, and what tells them apart."""
    about = document["machine"]
    gpu = about["gpu"]
    tries = (gpu, f"{gpu}, torch {about.get('torch')}", f"{gpu}, driver {about.get('driver')}", f"{gpu}, {document['made_at']}")
    return next((name for name in tries if name not in taken), f"{gpu} ({len(taken) + 1})")


def _no_number(word):
    raise ValueError(f"{word} is no number that results may hold")


def _what_is_wrong(document):
    """Return what keeps a document from being results that can be shown ("" if nothing)."""
    if not isinstance(document, dict) or document.get("kind") != KIND:
        return "it does not hold results of python -m labkit export"
    schema = document.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        newer = type(schema) is int and schema > SCHEMA
        said = schema if type(schema) is int else "that is no number"
        return f"it has schema {said}, and this labkit reads {SCHEMA}: {'update labkit here' if newer else 'export it anew'}"
    about, verdicts, tables = (document.get(name) for name in ("machine", "verdicts", "tables"))
    if not all(isinstance(part, dict) for part in (about, verdicts, tables)) or type(document.get("live")) is not bool:
        return "machine, verdicts or tables are not there, or not what they should be"
    if not _is_date(document.get("made_at")):
        return "its date is none"
    if not isinstance(about.get("gpu"), str) or not about["gpu"].strip():
        return "it does not say which GPU it comes from"
    known = {field.name for field in fields(machine.Machine)}
    if wrong := [name for name, value in about.items() if name not in known or not _is_plain(value)]:
        return f"its machine has {_quoted(wrong[0])}, which is unknown or no plain value"
    for id, verdict in verdicts.items():
        if id not in claims.CLAIMS:
            return f"it judges {_quoted(id)}, which is no claim here"
        if not isinstance(verdict, dict) or set(verdict) != {"verdict", "number", "low", "high", "unit"} \
                or verdict["verdict"] not in VERDICTS or not all(map(_is_plain, verdict.values())) \
                or any(isinstance(verdict[end], str) for end in ("number", "low", "high")):
            return f"its verdict on {id} is none"
    for name, rows in tables.items():
        if wrong := _wrong_table(name, rows):
            return f"its table {_quoted(name)} {wrong}"
    return ""


def _wrong_table(name, rows):
    if name not in TABLES:
        return "is unknown here"
    if not isinstance(rows, list) or not 0 < len(rows) <= MOST_ROWS:
        return f"has no rows, or more than {MOST_ROWS:,}"
    keys, numbers = TABLES[name]
    columns = {*keys, *(f"{number}{end}" for number in numbers for end in ("", "_low", "_high"))}
    for row in rows:
        if not isinstance(row, dict) or set(row) != columns or not all(map(_is_plain, row.values())):
            return "has a row with other columns or values than such a row has"
        for number in numbers:
            low, value, high = (row[f"{number}{end}"] for end in ("_low", "", "_high"))
            if not all(_is_number(v) for v in (low, value, high)) or not low <= value <= high:
                return f"has a row whose {number} is not within its interval"
    if len({tuple(row[key] for key in keys) for row in rows}) < len(rows):
        return "has the same row twice"
    return ""


def _is_number(value):
    return type(value) in (int, float) and abs(value) < 1e300


def _is_plain(value):
    """Say whether a value is a number, nothing, or a short line of text that means nothing to HTML or matplotlib."""
    if isinstance(value, str):
        return len(value) <= LONGEST and value.isprintable() and not set(value) & set("<>&\"'`$\\{}")
    return value is None or _is_number(value)


def _is_date(value):
    try:
        return isinstance(value, str) and datetime.date.fromisoformat(value).isoformat() == value
    except ValueError:
        return False


def _quoted(word):
    return ascii(str(word)[:40])


def disagreements(before, after):
    """Return (how many speedups both have, those whose intervals do not touch), for two runs on one machine.

    Each of those is (where, speedup before, speedup after), a speedup as (value, low, high). Raises ResultsError for other
    machines, or where nothing can be compared. Only ratios are held against each other: of raw times the interval holds one
    process, and the CPU can be slower a minute later.
    """
    if other := [name for name in SAME if before["machine"].get(name) != after["machine"].get(name)]:
        told = "; ".join(f"{name}: {before['machine'].get(name)} and {after['machine'].get(name)}" for name in other)
        raise ResultsError(f"these are not two runs on one machine ({told}): labkit compare puts different ones side by side")
    shared, apart = 0, []
    for name, (keys, numbers) in TABLES.items():
        if "speedup" not in numbers:
            continue
        old, new = ({tuple(row[key] for key in keys): tuple(row[f"speedup{end}"] for end in ("", "_low", "_high"))
                     for row in document["tables"].get(name, ())} for document in (before, after))
        for key in old.keys() & new.keys():
            shared += 1
            if old[key][1] > new[key][2] or new[key][1] > old[key][2]:
                where = ", ".join(f"{column} {value}" for column, value in zip(keys, key))
                apart.append((f"{name}: {where}", old[key], new[key]))
    if not shared:
        raise ResultsError("the two have no speedup in common that could be compared: export both with the same experiments")
    return shared, sorted(apart)


def side_by_side(documents):
    """Return what tells GPUs apart at a glance as a table, one column for each of {name: results}; None where not measured."""
    import pandas

    return pandas.DataFrame({name: _glance(document) for name, document in documents.items()}, dtype=object)


def _glance(document):
    tables, about = document["tables"], document["machine"]

    def middle(name, column, **wanted):
        rows = [row[column] for row in tables.get(name, ()) if all(row[key] == value for key, value in wanted.items())]
        return statistics.median(rows) if rows else None

    seen = {"exported": document["made_at"], "driver": about.get("driver"), "torch": about.get("torch"),
            "one launch, by PyTorch (µs)": middle("launch_cost", "cost_us", layer="torch", kernels=1),
            "one launch, the driver alone (µs)": middle("launch_cost", "cost_us", layer="driver", kernels=1),
            "GPU idle at batch 1, median over transformers": middle("idle_sweep", "idle_share", batch=1)}
    for name in TABLES:
        if name.startswith("sweep_"):
            for row in first_curve(tables.get(name, ())):
                if row["batch"] in (1, 32):
                    seen[f"{row['model']}, {row['layers']} layers of {row['width']:,}: speedup at batch {row['batch']}"] = row["speedup"]
    return {what: f"{value:.3g}" if isinstance(value, float) else value for what, value in seen.items()}


def first_curve(rows):
    """Return the rows of a sweep that belong to its first curve in float16."""
    half = [row for row in rows if row["precision"] == "float16"]
    return [row for row in half if all(row[key] == half[0][key] for key in POINT[:4])]
