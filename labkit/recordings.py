"""Recordings: what a real GPU measured, kept with how and when, checked, and shown under its label.

A file holds one experiment's rows, or what the `%%gpu` and `%%isolated` cells of one lab printed and drew.
"""

import ast
import datetime
import functools
import hashlib
import json
import os
import re
from pathlib import Path

SCHEMA = 1
FOLDER = Path(__file__).parent / "recordings"
MEASURING = ("timing", "graphs", "buckets", "models", "decode", "trace", "isolate", "experiments")
FIELDS = {"schema": int, "kind": str, "name": str, "command": str, "commit": str, "code_hash": str,
          "recorded_at": str, "machine": dict, "method": dict, "params": dict}


class RecordingError(Exception):
    """A recording that is missing, damaged or not what was asked for."""

    def _render_traceback_(self):
        return [f"RecordingError: {self}"]


# ---- which code measured it

def code_hash(source, beside=()):
    """Return a hash of `source` and of all code it reaches by name in the measuring rooms and in the cells `beside`.

    Comments, docstrings and blanks do not count, so only changed behaviour asks for a new recording.
    """
    named, seen, nodes = {}, set(), [ast.parse(code_of(source))]
    rooms = [Path(__file__).with_name(f"{room}.py") for room in MEASURING]
    for text in (*(path.read_text("utf-8") for path in rooms if path.exists()), *map(code_of, beside)):
        for statement in ast.parse(text).body:
            for name in _defined(statement):
                named.setdefault(name, []).append(statement)
    for node in nodes:  # grows while names lead to more code
        for name in _identifiers(node) & named.keys() - seen:
            seen.add(name)
            nodes += named[name]
    return hashlib.sha256("\n".join(sorted({repr(_shape(node)) for node in nodes})).encode()).hexdigest()[:16]


def lab_hash(sources):
    """Return the hash of a lab's recorded cells and of the other cells that make the names they use."""
    return code_hash("\n".join(code_of(s) for s in sources if is_recorded(s)), beside=sources)


def is_recorded(source):
    """Say whether a cell is one whose output is recorded: it opens with `%%gpu` or `%%isolated`."""
    return source.lstrip().startswith(("%%gpu", "%%isolated"))


def code_of(source):
    """Return a cell's source without the `%%magic` on its first line."""
    return re.sub(r"\A\s*%%.*", "", source)


def _defined(node):
    """Return the names that a top-level statement defines; a def or class defines its own name only."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.Expr)):
        return set()
    stored = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return stored.union(*(_defined(n) for n in ast.walk(node) if hasattr(n, "name") and n is not node))


def _identifiers(node):
    """Return every name, attribute, imported name and string constant that occurs in a piece of code."""
    found = set()
    for n in ast.walk(node):
        found |= {v for v in (getattr(n, "id", None), getattr(n, "attr", None), getattr(n, "value", None))
                  if isinstance(v, str)}
        if isinstance(n, ast.alias):
            found.add(n.name.rpartition(".")[2])
    return found


def _shape(node):
    """Return code as nested tuples, without docstrings and positions, the same under every version of Python."""
    if isinstance(node, list):
        return tuple(map(_shape, node))
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {k: v for k, v in ast.iter_fields(node) if v not in (None, []) and k not in ("kind", "type_comment")}
    if isinstance(node, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        if ast.get_docstring(node, clean=False) is not None:
            fields["body"] = fields["body"][1:]
    return (type(node).__name__, *((k, _shape(v)) for k, v in sorted(fields.items())))


# ---- reading

def available():
    """Return the GPUs that recordings are at hand for, as slugs ("nvidia-h200"), sorted."""
    return sorted({path.parent.name for path in FOLDER.glob("*/*.json")})


def chosen():
    """Return the slug of the recordings in use: the one in LABKIT_RECORDING, else the first."""
    slugs, wish = available(), os.environ.get("LABKIT_RECORDING")
    if not slugs:
        raise RecordingError("there are no recordings here; with an NVIDIA GPU, run: python -m labkit record")
    if wish and wish not in slugs:
        raise RecordingError(f"LABKIT_RECORDING names {wish!r}, and the recordings are: {', '.join(slugs)}")
    return wish or slugs[0]


def about():
    """Return {"gpu", "date"} of the recordings in use: the date of the newest one that can be read."""
    found, trouble = [], RecordingError("")
    for path in sorted((FOLDER / chosen()).glob("*.json")):
        try:
            document = load(path.stem)
            found.append({"gpu": document["machine"]["gpu"], "date": document["recorded_at"]})
        except RecordingError as error:
            trouble = error
    if not found:
        raise trouble
    return max(found, key=lambda one: one["date"])


def load(name):
    """Return one checked recording as a dict, or raise a RecordingError that says what is wrong and what to run."""
    path = FOLDER / chosen() / f"{name}.json"
    if not path.exists():
        raise RecordingError(f"{path.parent.name} has no recording of {name}; on a machine with an NVIDIA GPU run: "
                             f"python -m labkit record {name.removeprefix('lab-')}")
    return _read(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _read(path, _changed_at):
    again = f"restore it from git, or run: python -m labkit record {path.stem.removeprefix('lab-')}"
    where = f"the recording {path.parent.name}/{path.name}"
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise RecordingError(f"{where} cannot be read ({error}); {again}") from None
    if wrong := _what_is_wrong(document):
        raise RecordingError(f"{where} {wrong.replace('AGAIN', again)}")
    return document


def _what_is_wrong(document):
    """Return what keeps a document from being a recording of this schema ("" if nothing)."""
    if not isinstance(document, dict):
        return "is not a recording; AGAIN"
    schema = document.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        return f"has schema {schema}, newer than this labkit's {SCHEMA}; update labkit: git pull, then make lab"
    if schema is not None and schema != SCHEMA:
        return f"has schema {schema!r} and this labkit reads {SCHEMA}; AGAIN"
    fields = FIELDS | ({"cells": dict} if document.get("kind") == "cells" else {"rows": list})
    for field, kind in fields.items():
        if field not in document:
            return f"has no field {field!r}; AGAIN"
        if not isinstance(document[field], kind):
            return f"has a field {field!r} that is no {kind.__name__}; AGAIN"
    if not isinstance(document["machine"].get("gpu"), str):
        return "does not say which GPU it was measured on; AGAIN"
    if not all(isinstance(row, dict) for row in document.get("rows", ())):
        return "has rows that are no dicts; AGAIN"
    for cell in document.get("cells", {}).values():
        if not isinstance(cell, dict) or {"code_hash": str, "outputs": list} != {k: type(v) for k, v in cell.items()}:
            return "has a cell without code_hash or outputs; AGAIN"
    return ""


def provenance(name, document=None, stale=False):
    """Return where a table or output comes from, as a dict: this machine's GPU now, or the recording `document`."""
    if document is None:
        from labkit import machine
        gpu, date = machine.describe().gpu, datetime.date.today().isoformat()
        label = f"LIVE on {gpu}"
    else:
        gpu, date = document["machine"]["gpu"], document["recorded_at"]
        label = f"RECORDED on {gpu}, {date}: not measured here" + " (measured by an earlier version)" * stale
    return {"live": document is None, "gpu": gpu, "date": date, "experiment": name, "stale": stale, "label": label}


def live_or_recorded(experiment, params, measure, source):
    """Return the table of an experiment: `measure()` run now on this GPU, or its recording, with provenance in attrs.

    `measure` returns rows (dicts); a row's "samples" stay out of the table. Without a GPU, or where LABKIT_TABLES is
    "recorded", it is the recording, and `params` must be the recorded ones (RecordingError otherwise).
    """
    import pandas

    from labkit import machine
    if machine.mode().live and os.environ.get("LABKIT_TABLES") != "recorded":
        rows, told = measure(), provenance(experiment)
    else:
        document = load(experiment)
        if json.loads(json.dumps(params)) != document["params"]:
            raise RecordingError(f"{experiment} was recorded with {_spell(document['params'])}, not with "
                                 f"{_spell(params)}; other values need an NVIDIA GPU")
        rows, told = document["rows"], provenance(experiment, document, document["code_hash"] != code_hash(source))
    table = pandas.DataFrame([{k: v for k, v in row.items() if k != "samples"} for row in rows])
    table.attrs["provenance"] = told
    return table


def _spell(params):
    return ", ".join(f"{k}={v}" for k, v in params.items()) or "no parameters"


def samples(experiment):
    """Return the raw samples of a recorded experiment: one entry per row of its table ([] where a row kept none)."""
    return [row.get("samples", []) for row in load(experiment)["rows"]]


def cell_key(source):
    """Return the key of a cell: a hash of its text, blind to blanks at line ends and around it."""
    lines = [line.rstrip() for line in source.strip().splitlines()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def cell_outputs(source):
    """Return (provenance, outputs) of the recorded cell with exactly this text, or None when there is none."""
    key, damaged = cell_key(source), None
    for path in sorted((FOLDER / chosen()).glob("lab-*.json")):
        try:
            document = load(path.stem)
        except RecordingError as error:  # matters only if no other file has the cell
            damaged = error
            continue
        if cell := document["cells"].get(key):
            stale = cell["code_hash"] != code_hash(source)
            return provenance(path.stem.removeprefix("lab-"), document, stale), cell["outputs"]
    if damaged:
        raise damaged
    return None
