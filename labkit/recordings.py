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

from labkit import machine

SCHEMA = 1
FOLDER = Path(__file__).parent / "recordings"
MEASURING = ("timing", "explain", "watch", "contents", "graphs", "buckets", "models", "architectures", "sharing", "decoding", "decode", "batching",
             "serving", "trace", "vllm_runs", "isolate", "operations", "examine", "experiments")
WRITTEN_ON = "nvidia-h200"  # the labs' prose and stored outputs are those of this GPU
FIELDS = {"schema": int, "kind": str, "name": str, "command": str, "commit": str, "code_hash": str,
          "recorded_at": str, "machine": dict, "method": dict, "params": dict}


class RecordingError(Exception):
    """A recording that is missing, damaged or not what was asked for."""

    def _render_traceback_(self):
        return [f"RecordingError: {self}"]


def code_hash(source, beside=()):
    """Return a hash (16 hex digits) of `source` and of all code it reaches by name in the measuring rooms and in the cells `beside`.

    Comments, docstrings and blanks do not count, so only changed behaviour asks for a new recording.
    """
    named, reached = {}, ["\n".join(text for _, text in _statements(source))]
    house = Path(__file__).parent
    rooms = [path.read_text("utf-8") for room in MEASURING for path in (house / f"{room}.py", *(house / room).glob("*.py"))
             if path.exists()]
    for names, text in (statement for code in (*rooms, *beside) for statement in _statements(code)):
        for name in names:
            named.setdefault(name, []).append(text)
    named["csv"] = [path.read_text("utf-8") for path in house.glob("*.csv")]
    for text in reached:  # grows while names, attributes, imports and strings lead to more code
        for found in re.finditer(r"\b(?:id|attr|value|alias\(name)='(?:[\w.]*\.)?(\w+)'|\.(\w+)\(", text):
            reached += named.pop(found[found.lastindex], [])  # \.(\w+)\( is a call in code that is sent to a child
    return hashlib.sha256("\n".join(sorted(set(reached))).encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=256)
def _statements(source):
    """List (names it defines, its tree as text) for each top-level statement of some code, without docstrings."""
    tree, definitions = ast.parse(code_of(source)), (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, *definitions)) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    found = []
    for statement in tree.body:  # a def defines its own name only, an assignment, try or if all names in it
        nodes = [statement] if isinstance(statement, (*definitions, ast.Expr)) else list(ast.walk(statement))
        names = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        names |= {n.name for n in nodes if isinstance(n, definitions)}
        # Which empty fields a dump shows depends on the version of Python: without them it is the same under each.
        found.append((names, re.sub(r"\w+=(\[\]|Load\(\))(, )?", "", ast.dump(statement)).replace(", )", ")")))
    return found


def lab_hash(sources):
    """Return the hash of a lab's recorded cells and of the other cells that make the names they use."""
    return code_hash("\n".join(code_of(s) for s in sources if is_recorded(s)), beside=sources)


def is_recorded(source):
    """Say whether a cell is one whose output is recorded: it opens with `%%gpu` or `%%isolated`."""
    return source.lstrip().startswith(("%%gpu", "%%isolated"))


def code_of(source):
    """Return a cell's source without the `%%magic` on its first line."""
    return re.sub(r"\A\s*%%.*", "", source)


def available(name="*"):
    """Return the GPUs that recordings (of this name) are at hand for, as slugs ("nvidia-h200"), sorted."""
    return sorted({path.parent.name for path in FOLDER.glob(f"*/{name}.json")})


def chosen():
    """Return the slug of the recordings in use: LABKIT_RECORDING, else those that the labs were written on, else the first.

    RecordingError without any, or without the one that is named.
    """
    slugs, wish = available(), os.environ.get("LABKIT_RECORDING")
    if not slugs:
        raise RecordingError("there are no recordings here; with an NVIDIA GPU, run: python -m labkit record")
    if wish and wish not in slugs:
        raise RecordingError(f"LABKIT_RECORDING names {wish!r}, and the recordings are: {', '.join(slugs)}")
    return wish or (WRITTEN_ON if WRITTEN_ON in slugs else slugs[0])


def about():
    """Return the provenance of the newest recording in use that can be read; RecordingError where none can."""
    documents, trouble = _readable("*.json")
    if not documents:
        raise trouble
    newest = max(documents, key=lambda document: document["recorded_at"])
    return provenance(newest["name"], newest)


def load(name, gpu=None):
    """Return one checked recording (of the GPU in use, or of another slug) as a dict; RecordingError says what is wrong."""
    path = FOLDER / (gpu or chosen()) / f"{name}.json"
    if not path.exists():
        raise RecordingError(f"{path.parent.name} has no recording of {name}; on a machine with an NVIDIA GPU run: "
                             f"python -m labkit record {name.removeprefix('lab-')}")
    return _read(path, path.stat().st_mtime_ns)


def _readable(pattern):
    """Return the recordings in use whose file names fit, and the last error of those that cannot be read, or None."""
    documents, trouble = [], None
    for path in sorted((FOLDER / chosen()).glob(pattern)):
        try:
            documents.append(load(path.stem))
        except RecordingError as error:
            trouble = error
    return documents, trouble


@functools.lru_cache(maxsize=64)
def _read(path, _changed_at):
    try:
        document = json.loads(path.read_text("utf-8"), parse_constant=no_number)
        wrong = what_is_wrong(document)
    except (OSError, ValueError, RecursionError) as error:
        wrong = f"cannot be read ({error})"
    if wrong:
        fix = ("update labkit: git pull, then make lab" if "newer" in wrong else
               f"restore it from git, or run: python -m labkit record {path.stem.removeprefix('lab-')}")
        raise RecordingError(f"the recording {path.parent.name}/{path.name} {wrong}; {fix}")
    return document


def no_number(word):
    """Refuse NaN and Infinity, which JSON does not know: for json.loads(parse_constant=...); always raises ValueError."""
    raise ValueError(f"{word} is no number that may stand there")


def what_is_wrong(document):
    """Return what keeps a document from being a recording of this schema ("" if nothing)."""
    if not isinstance(document, dict):
        return "is not a recording"
    schema = document.get("schema")
    if type(schema) is int and schema != SCHEMA:
        return f"has schema {schema}, {'newer' if schema > SCHEMA else 'older'} than this labkit's {SCHEMA}"
    fields = FIELDS | ({"cells": dict} if document.get("kind") == "cells" else {"rows": list})
    for field, kind in fields.items():
        if not isinstance(document.get(field), kind) or document[field] is True:
            return f"has {'a wrong' if field in document else 'no'} field {field!r} (it is a {kind.__name__})"
    if not isinstance(document["machine"].get("gpu"), str):
        return "does not say which GPU it was measured on"
    parts = [*document.get("rows", ()), *document.get("cells", {}).values()]
    if not all(isinstance(part, dict) for part in parts):
        return "has rows or cells that are no dicts"
    if "rows" in fields and not parts:
        return "has no rows"
    if "cells" in fields and any({"code_hash", "outputs"} - part.keys() for part in parts):
        return "has a cell without code_hash or outputs"
    if "cells" in fields and not all(isinstance(p["outputs"], list) and all(map(_is_output, p["outputs"])) for p in parts):
        return "has a cell with outputs that are none"
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", document["recorded_at"]):
        return "has a date that is none"
    return ""


def _is_output(output):
    """Say whether something is a cell's output of the kinds that recordings keep; no scripts, no live widgets."""
    if not isinstance(output, dict):
        return False
    if output.get("output_type") == "stream":
        return output.get("name") in ("stdout", "stderr") and isinstance(output.get("text"), str)
    data = output.get("data")
    return isinstance(data, dict) and isinstance(output.get("metadata"), dict) and data.keys() <= {
        "text/plain", "text/html", "image/png"} and "<script" not in str(data.get("text/html", "")).lower()


def provenance(name, document=None, stale=False):
    """Return where a table or output comes from, as a dict: this machine's GPU now, or the recording `document`."""
    if document is None:
        gpu, date = machine.describe().gpu, datetime.date.today().isoformat()
        label = f"LIVE on {gpu}"
    else:
        gpu, date = document["machine"]["gpu"], document["recorded_at"]
        label = f"RECORDED on {gpu}, {date}: not measured here" + " (measured by an earlier version)" * stale
    return {"live": document is None, "gpu": gpu, "date": date, "experiment": name, "stale": stale, "label": label}


def live_or_recorded(experiment, params, measure, source):
    """Return the table of an experiment: `measure()` run now on this GPU, or its recording, with provenance in attrs.

    `measure` returns rows (dicts); a row's "samples" stay out of the table. Without a GPU, or where LABKIT_TABLES is
    "recorded" and there is one, it is the recording, and `params` must be the recorded ones (RecordingError otherwise).
    """
    if tables_are_live() or machine.mode().live and not (FOLDER / chosen() / f"{experiment}.json").exists():
        return table(measure(), provenance(experiment))
    document = load(experiment)
    if json.loads(json.dumps(params)) != document["params"]:
        raise RecordingError(f"{experiment} was recorded with {document['params']}, not with {params}; "
                             "other values need an NVIDIA GPU")
    return recorded(experiment, source)


def recorded(experiment, source, gpu=None):
    """Return the recorded table of an experiment, also where labs run live, and of any GPU (a slug) that has one; else RecordingError.

    Where labs run live, and the GPU in use has no recording of it, it is that of the GPU which the labs were written on.
    """
    if gpu is None and machine.mode().live and not (FOLDER / chosen() / f"{experiment}.json").exists():
        gpu = WRITTEN_ON
    document = load(experiment, gpu)
    return table(document["rows"], provenance(experiment, document, document["code_hash"] != code_hash(source)))


def tables_are_live():
    """Say whether tables are measured: labs run LIVE, and LABKIT_TABLES is not "recorded"."""
    return machine.mode().live and os.environ.get("LABKIT_TABLES", "").strip().lower() != "recorded"


def table(rows, told):
    """Return rows (dicts) as a table without their raw samples, with `told`, its provenance, in attrs."""
    import pandas
    made = pandas.DataFrame([{k: v for k, v in row.items() if k != "samples"} for row in rows])
    made.attrs["provenance"] = told
    return made


def cell_key(source):
    """Return the key of a cell: a hash of its text, blind to blanks at line ends and around it."""
    text = "\n".join(line.rstrip() for line in source.strip().splitlines())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def cell_outputs(source):
    """Return (provenance, outputs) of the recorded cell with exactly this text, or None when there is none.

    Raises RecordingError where it may stand in a recording that is damaged.
    """
    documents, damaged = _readable("lab-*.json")
    for document in documents:
        if cell := document["cells"].get(cell_key(source)):
            stale = cell["code_hash"] != code_hash(source)
            return provenance(document["name"].removeprefix("lab-"), document, stale), cell["outputs"]
    if damaged:  # it may have been in there
        raise damaged
