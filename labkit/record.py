"""Make recordings on a machine with a GPU: every experiment, and every lab's `%%gpu` and `%%isolated` cells, live."""

import datetime
import functools
import inspect
import json
import re
import shutil
import subprocess
import time
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from labkit import build, experiments, machine, recordings
from labkit.recordings import RecordingError

ROOT = Path(__file__).parents[1]


def record(names=(), commit=None, out=None):
    """Record experiments and labs by name (default: all) into `out` (default: labkit/recordings); return the paths.

    Needs a GPU (else NoGPU) and a clean git tree, or `commit` in a copy without git (else RecordingError, as for a name that
    is none). What was recorded before a failure is kept; the RecordingError at the end names what failed.
    """
    machine.require_gpu("recording")
    from labkit import timing
    jobs = _jobs(names)
    about = {"schema": recordings.SCHEMA, "command": " ".join(["python -m labkit record", *names]),
             "commit": _commit(commit), "recorded_at": datetime.date.today().isoformat(),
             "machine": asdict(machine.describe()), "method": dict(timing.METHOD), "params": {}}
    folder = Path(out or recordings.FOLDER) / machine.slug(about["machine"]["gpu"])
    paths, failed = [], {}
    for name, job in (bar := tqdm(jobs.items(), unit="recording")):
        bar.set_description(name)
        start = time.perf_counter()
        try:
            document = {**about, "name": name, **job()}
            if wrong := recordings.what_is_wrong(document):
                raise RecordingError(f"what it gave {wrong}; it is not kept")
            paths.append(save(folder / f"{name}.json", document))
        except Exception as error:  # one broken experiment must not cost the others
            failed[name] = machine.first_line(error)
        bar.write(f"{'FAILED  ' if name in failed else 'recorded'} {name} in {time.perf_counter() - start:.1f} s")
    if failed:
        told = "; ".join(f"{name.removeprefix('lab-')} ({why})" for name, why in failed.items())
        raise RecordingError(f"{len(failed)} of {len(jobs)} could not be recorded, the rest is in {folder}: {told}")
    return paths


def _jobs(names):
    """Return {file name: call that measures it} for experiments and labs; an unknown name is a RecordingError."""
    jobs = {name: functools.partial(_experiment, fn) for name, fn in experiments.EXPERIMENTS.items()}
    jobs |= {f"lab-{path.stem}": functools.partial(_lab, path) for path in build.solutions()
             if any(map(recordings.is_recorded, build.code_cells(path)))}
    known = [name.removeprefix("lab-") for name in jobs]
    if unknown := set(names) - {*known, *jobs}:
        raise RecordingError(f"nothing here is called {', '.join(sorted(unknown))}; there are: {', '.join(known)}")
    return {name: job for name, job in jobs.items() if not names or {name, name.removeprefix("lab-")} & set(names)}


def _commit(handed_in):
    """Return the commit that the measuring code stands at: git's on a clean tree, else the one handed in."""
    def git(*args):
        return subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True)
    if not shutil.which("git") or git("ls-files", "--error-unmatch", "labkit/recordings.py").returncode:
        if not handed_in:
            raise RecordingError("this copy is not under git: say which commit it is a copy of, with --commit")
        if not re.fullmatch("[0-9a-f]{7,40}", handed_in):
            raise RecordingError(f"--commit takes the hash of a commit, 7 to 40 hex digits, not {handed_in!r}")
        return handed_in
    if changed := git("status", "--porcelain", "--", ".", ":(exclude)labkit/recordings").stdout.splitlines():
        raise RecordingError(f"commit first: a recording names the commit it was made with, and {len(changed)} "
                             f"file(s) differ from it ({changed[0][3:]}, ...)")
    return git("rev-parse", "HEAD").stdout.strip()


def _experiment(fn):
    return {"kind": "experiment", "code_hash": recordings.code_hash(fn.source), "rows": fn.measure(),
            "params": {name: parameter.default for name, parameter in inspect.signature(fn).parameters.items()}}


def _lab(path):
    """Run a solution notebook live, on tables that are recorded where they are; return what its recorded cells put out."""
    slug = machine.slug(machine.describe().gpu)
    given = {"LABKIT_TABLES": "recorded", "LABKIT_RECORDING": slug} if slug in recordings.available() else {}
    ran = [cell for cell in build.execute(path, **given).cells
           if cell.cell_type == "code" and recordings.is_recorded(cell.source)]
    cells = {recordings.cell_key(cell.source): {"code_hash": recordings.code_hash(cell.source),
                                                "outputs": build.plain_outputs(cell.outputs)} for cell in ran}
    if len(cells) < len(ran):
        raise RecordingError("two %%gpu or %%isolated cells of this lab have the same text; make them differ")
    return {"kind": "cells", "code_hash": recordings.lab_hash(build.code_cells(path)), "cells": cells}


def save(path, document):
    """Write a recording in one stroke, scrubbed of host names and paths, and return its path."""
    text = json.dumps(build.scrub(document), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    text = re.sub(r"\[\n[-+\d.eE,\s]+\]", lambda m: " ".join(m[0].split()), text)  # a list of numbers on one line
    path.parent.mkdir(parents=True, exist_ok=True)
    build.write(path, text)
    return path
