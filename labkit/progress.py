"""A learner's progress: what checks said is kept beside the labs, a line each, and counted.

A line is appended in one stroke, so notebooks that run side by side lose nothing, and a damaged line costs only itself.
"""

import contextlib
import datetime
import json
import re
from pathlib import Path

FILE = "labkit-progress.jsonl"
DONE, TRIED = "correct", "not yet"
CHECKED = re.compile(r"""\bcheck\.(?:value|function)\(\s*"(\w+)\"""")


def note(name, verdict):
    """Keep what a check said of an exercise, in the folder of the labs that it runs in; where that cannot be, do nothing."""
    with contextlib.suppress(OSError):  # a folder that is gone, a read-only place, a full disk
        here = Path.cwd()
        if here.name == "solutions" or not any(here.glob("[0-9][0-9]_*.ipynb")):
            return
        line = json.dumps({"exercise": name, "verdict": verdict, "at": datetime.datetime.now().isoformat(timespec="seconds")})
        with open(here / FILE, "ab", buffering=0) as file:
            file.write(f"\n{line}\n".encode())  # a new line first: what lies before it may have been cut off


def exercises(folder):
    """Return {lab: names of its exercises, in order} for the labs in a folder; what is no notebook, and a second copy, is left out."""
    labs = {}
    for path in sorted(Path(folder).glob("[0-9][0-9]_*.ipynb"), key=lambda path: path.stem):
        try:
            code = "\n".join("".join(cell["source"]) for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == "code")
        except (OSError, ValueError, KeyError, TypeError):
            continue
        names = list(dict.fromkeys(CHECKED.findall(code)))
        if not any(set(names) & set(others) for others in labs.values()):
            labs[path.stem] = names
    return labs


def verdicts(folder):
    """Return {exercise: "correct" or "not yet"} from the file in a folder; what was once correct stays so."""
    found = {}
    try:
        lines = Path(folder, FILE).read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:
        try:
            name, verdict = (str(json.loads(line)[key]) for key in ("exercise", "verdict"))
        except (ValueError, KeyError, TypeError):  # an empty or a damaged line
            continue
        if verdict in (DONE, TRIED) and found.get(name) != DONE:
            found[name] = verdict
    return found


def bars(folder="."):
    """Return a line for each lab of a folder: a bar, how many of its exercises are correct, and which were tried."""
    labs, said = exercises(folder), verdicts(folder)
    rows = [(lab.replace("_", " "), names) for lab, names in labs.items() if names]
    rows += [("all", [name for names in labs.values() for name in names])] if rows else []
    width, lines = max((len(title) for title, _ in rows), default=0), []
    for title, names in rows:
        done, tried = ([name for name in names if said.get(name) == verdict] for verdict in (DONE, TRIED))
        filled = 10 * len(done) // len(names)
        more = f"; not yet: {', '.join(tried)}" if tried and title != "all" else ""
        lines.append(f"{title:{width}}  {'█' * filled}{'░' * (10 - filled)}  {len(done)} of {len(names)} correct{more}")
    return "\n".join(lines) or "There are no labs here."
