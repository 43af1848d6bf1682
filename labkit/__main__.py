"""The commands: python -m labkit doctor | lab | progress | hub | run | diagnose | decide | record | report | export | compare | build | guide."""

import argparse
import difflib
import importlib.util
import itertools
import json
import logging
import os
import platform
import re
import sys
import time
from dataclasses import asdict
from pathlib import Path

import labkit
from labkit import build as notebooks
from labkit import machine, recordings, results
from labkit.hub import HubError
from labkit.recordings import RecordingError

PAGES = Path(__file__).with_name("pages")


class Refusal(Exception):
    """One line for the person at the keyboard: what is wrong and what to do."""


def doctor(args):
    """Print every check with its fix; 1 only if something installed is broken."""
    checks = machine.doctor()
    try:
        recordings.about()
    except RecordingError as error:
        checks.append(machine.Check("recordings", "warning", "cannot be used", str(error)))
    if args.json:
        print(json.dumps([asdict(check) for check in checks], indent=1))
    else:
        print_checks(checks)
    return int(any(check.status == "problem" for check in checks))


def print_checks(checks):
    """Print checks, each on a line - status, name, what was found - and its fix below."""
    for check in checks:
        print(f"{check.status:8} {check.name:18} {check.found}")
        if check.fix:
            print(f"{'':27} -> {check.fix}")


def notebooks_folder():
    """Return the notebooks folder: of the folder one is in, else of the clone that labkit stands in; Refusal where neither has labs."""
    for folder in (Path.cwd(), Path(labkit.__file__).parents[1]):
        if list(folder.glob("notebooks/*.ipynb")):
            return folder / "notebooks"
    raise Refusal("there is no folder `notebooks` here: go to the folder of your clone first")


def lab(args):
    """Become JupyterLab at the first lab, on localhost with a token; what follows `lab` goes on to Jupyter (or Voila)."""
    server = "voila" if args.app else "jupyterlab"
    if not importlib.util.find_spec(server):
        raise ModuleNotFoundError(name=server)
    command = [sys.executable, "-m", *(voila_command() if args.app else jupyterlab_command()), *args.jupyter]
    print_checks([check for check in machine.doctor() if check.name == "mode" or check.status != "ok"])
    sys.stdout.flush()
    os.execv(sys.executable, command)


def jupyterlab_command():
    """Return the arguments of Python that start JupyterLab at the first lab; where its port is busy, it takes the next."""
    folder = notebooks_folder()
    first = min(path.name for path in folder.glob("*.ipynb"))
    root = ["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    return ["jupyterlab", "--ip=127.0.0.1", f"--ServerApp.root_dir={folder.parent}",
            f"--LabApp.default_url=/lab/tree/notebooks/{first}", *root]


def voila_command():
    """Return the arguments of Python that start Voila with the explorer; where its port is busy, it takes another."""
    page = Path(labkit.__file__).with_name("explorers") / "app.ipynb"
    return ["labkit.explorers.app", str(page), "--Voila.ip=127.0.0.1", "--token"]


def progress(args):
    """Say which exercises of which labs are solved."""
    from labkit import progress
    print(progress.bars(args.folder or ("." if progress.exercises(".") else notebooks_folder())))


def hub(args):
    """Become JupyterHub for a class on this server: a list of names, one password, a folder and a share of a GPU for each."""
    from labkit import hub
    settings = hub.prepare(notebooks_folder(), args.learners, args.folder, ip=args.ip, port=args.port, ssl_key=args.ssl_key,
                           ssl_cert=args.ssl_cert, behind_proxy=args.behind_proxy, idle=args.idle, allow_root=args.allow_root)
    host = platform.node() if args.ip in ("0.0.0.0", "::") else args.ip
    command = hub.command(args.folder)
    print(f"{hub.budget(len(settings['names']))}\nLearners sign in at http{'s' * bool(args.ssl_key)}://{host}:{args.port} with their "
          f"name and the password in {Path(args.folder, 'password.txt')}. Ctrl-C ends it all.", flush=True)
    os.execv(sys.executable, [sys.executable, *command])


def find_labs(names, folder):
    """Return the paths of the notebooks meant by names ("10", "10_measure_launch_overhead"), none means all; Refusal for others."""
    labs = {path.stem: path for path in sorted(folder.glob("*.ipynb"))}
    if not labs:
        raise Refusal(f"there are no labs in {folder}")
    found = []
    for name in names:
        stem = Path(name).stem
        meant = [lab for lab in labs if lab == stem or lab.split("_")[0] == stem]
        if not meant:
            close = difflib.get_close_matches(stem, labs, cutoff=0.4) or labs
            raise Refusal(f"there is no lab {name!r}; did you mean {' or '.join(close)}?")
        found += [labs[lab] for lab in meant]
    return list(dict.fromkeys(found)) or list(labs.values())


def run(args):
    """Execute labs without a browser, live or recorded; keep the executed copies and one page of them all."""
    import nbformat
    folder = notebooks_folder()
    labs = find_labs(args.labs, folder / "solutions" if args.solutions else folder)
    out = Path(args.out or time.strftime("runs/%Y-%m-%dT%H-%M-%S"))
    if out.resolve() in (folder.resolve(), (folder / "solutions").resolve()):
        raise Refusal(f"{out} holds the labs themselves: name another folder for the executed copies")
    out.mkdir(parents=True, exist_ok=True)
    print(f"Labs run {'LIVE' if machine.mode().live else 'RECORDED'}: {machine.mode().reason}.")
    done, failures, stopped = [], [], ""
    try:
        for path in labs:
            try:
                done.append(nbformat.read(path, as_version=4))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                failures.append(f"{path.name} is no notebook ({machine.first_line(error)}): restore it from git, or build it")
                continue
            try:
                notebooks.execute(path, done[-1])
            except notebooks.BuildError as error:
                failures.append(error)
            finally:
                nbformat.write(done[-1], out / path.name)
    except KeyboardInterrupt:
        logging.disable()  # asyncio would report the cell that it was waiting for
        stopped = "Interrupted: what had run until then is kept. "
    cells = [cell for notebook in done for cell in notebook.cells]
    (out / "labs.html").write_text(slides(cells) if args.slides else page(cells), "utf-8")
    print(f"{stopped}Executed copies and one page of them: {out / 'labs.html'}")
    for failure in failures:
        print(f"labkit: {failure}", file=sys.stderr)
    return 130 if stopped else int(bool(failures))


def page(cells):
    """Return the cells of notebooks as an HTML page, a text."""
    import nbformat
    from nbconvert import HTMLExporter
    exporter = HTMLExporter(template_file=str(PAGES / "labs.html"), mathjax_url="", require_js_url="")  # which would be fetched
    whole = nbformat.v4.new_notebook(cells=cells, metadata={"title": "CUDA Graphs Lab"})
    written = exporter.from_notebook_node(whole)[0]
    return re.sub(r'(<div class="jp-[^>]*) tabindex="0"', r"\1", written)  # else Tab stops at every cell, where nothing can be done


def slides(cells):
    """Return cells as an HTML page for a projector: sections at the top of the screen, large type, nothing for teachers only."""
    import nbformat
    shown = []
    for cell in cells:
        if "instructor" not in cell.metadata.get("tags", ()):
            parts = re.split(r"^(?=###? )", cell.source, flags=re.M) if cell.cell_type == "markdown" else ()
            shown += [nbformat.v4.new_markdown_cell(part) for part in parts if part.strip()] or [cell]
    return page(shown).replace("</head>", (PAGES / "slides.html").read_text("utf-8") + "</head>", 1)


def diagnose(args):
    """Try to capture module:callable as a CUDA graph, in a child process; 1 if it cannot be captured."""
    from labkit.decide import example, imported
    from labkit.examine import diagnose
    machine.require_gpu("A trial capture")
    sys.path.insert(0, "")
    try:
        fn, inputs = imported(args.callable), [*map(example, args.input)]
        found = diagnose(fn, *inputs, here=args.here, timeout_s=args.timeout)
    except ValueError as error:
        raise Refusal(error) from error
    print(found)
    return int(not found.capturable)


def decide(args):
    """Say whether a model should use CUDA graphs, and why: measured here, or of our models looked up among the recordings."""
    from labkit import decide
    sys.path.insert(0, "")
    options = {name: getattr(args, name) for name in ("layers", "width", "length", "precision")}
    try:
        print(decide.decide(args.model, args.batch, latency_us=args.latency_us, inputs=args.input, compiled=not args.no_compile,
                            timeout_s=args.timeout, **options))
    except ValueError as error:
        raise Refusal(error) from error


def above_zero(word):
    """Read a time: a number above 0, else argparse.ArgumentTypeError."""
    if number := machine.above_zero(word):
        return number
    raise argparse.ArgumentTypeError(f"a time is a number above 0, not {word!r}")


def record(args):
    """Measure experiments and labs on this GPU and keep them as recordings."""
    from labkit.record import record
    paths = record(args.names, commit=args.commit, out=args.out)
    print(f"Recorded {len(paths)}: {', '.join(str(path) for path in paths)}")


def report(args):
    """Write one HTML page: every claim judged, charts, machine, method, tables; or (--check) hold two runs against each other."""
    from labkit import report
    if args.after is not None and args.check is None:
        raise Refusal("--after goes with --check BEFORE")
    if args.check is not None:  # one that is empty is no file, and says so
        return check(args)
    _writable(args.out)
    tables, missing = _tables(args.names)
    out = Path(args.out or _new("report", results.machine_of(tables), ".html"))
    _keep(out, report.page(tables, missing, out.parent))
    return _interrupted(missing)


def check(args):
    """Say which speedups of two runs on one machine have intervals that do not overlap; 1 if there are any, 2 where it cannot be said."""
    before = results.read(args.check)
    if args.after is None and not recordings.tables_are_live():
        raise Refusal(f"--check measures here, and nothing is measured: {machine.mode().reason}; --after FILE compares two files")
    tables, missing = _tables(args.names or results.sent()) if args.after is None else ({}, {})
    after = results.collect(tables) if args.after is None else results.read(args.after)
    shared, lost, apart = results.disagreements(before, after)
    changed = [f"{name} {before['machine'].get(name)} -> {after['machine'].get(name)}" for name in ("driver", "cuda", "torch")
               if before["machine"].get(name) != after["machine"].get(name)]
    for where, *both in apart:
        print(f"{where}: speedup {' -> '.join('{:.2f} ({:.2f} to {:.2f})'.format(*speedup) for speedup in both)}")
    print(f"{len(apart)} of {shared} speedups have intervals that do not overlap; changed: {', '.join(changed) or 'nothing'}.")
    if lost:
        print(f"{lost} that were measured before are not in the second run.")
    return _interrupted(missing) or (1 if apart else 2 if missing else 0)


def export(args):
    """Write one small file of results to send to others: no host name, user or path in it."""
    _writable(args.out)
    tables, missing = _tables(results.sent())
    document = results.collect(tables)
    text = json.dumps(document, indent=0, ensure_ascii=False) + "\n"
    _keep(args.out or _new("results", document["machine"], ".json"), text)
    return _interrupted(missing)


def compare(args):
    """Put the results in files and folders side by side, here and (--out) as a page; files that are no results are named."""
    import pandas

    from labkit import report
    if args.out and Path(args.out).suffix == ".json":
        raise Refusal(f"--out {args.out}: the page is HTML, and .json are results")
    _writable(args.out)
    found, left_out = results.read_all(args.paths)
    for reason in left_out:
        print(f"labkit: {reason}", file=sys.stderr)
    if not found:
        raise Refusal("there are no results to compare: python -m labkit export makes a file of them")
    print(pandas.DataFrame.from_dict(results.side_by_side(found), orient="index", columns=list(found)).to_string())
    for id, verdicts in results.apart(found).items():
        print(f"{id}: {'; '.join(map('{} ({})'.format, verdicts, found))}")
    if args.out:
        _keep(args.out, report.board(found, left_out, Path(args.out).parent))
    else:
        print("The whole curves, drawn: --out PAGE.html")


def _tables(names):
    """Gather tables, saying beforehand where they come from, and what is missing."""
    print("Measuring here, which takes many minutes if no experiment is named; LABKIT_MODE=recorded takes recordings instead."
          if recordings.tables_are_live() else f"From recordings of {recordings.chosen()}: {machine.mode().reason}.", file=sys.stderr)
    tables, missing = results.gather(names)
    for name, reason in missing.items():
        print(f"labkit: {name} is left out: {reason}", file=sys.stderr)
    return tables, missing


def _interrupted(missing):
    return 130 * ("interrupted" in missing.values())


def _writable(out):
    """Refuse, before anything is measured, a path to which nothing could be written."""
    path = Path(out or ".", "x" * (not out))
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if path.exists() and not path.is_file():
        raise Refusal(f"--out {out} is there, and is no file: name a file")
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise Refusal(f"nothing can be written in {parent}: {'name another --out' if out else 'go to a folder of yours'}")


def _new(kind, about, ending):
    """Return a path here, named after the GPU and the day, at which there is no file yet."""
    name = f"{kind}-{machine.slug(about['gpu'])}-{time.strftime('%Y-%m-%d')}"
    paths = (Path(f"{name}{more}{ending}") for more in itertools.chain([""], map("-{}".format, itertools.count(2))))
    return next(path for path in paths if not path.exists())


def _keep(path, text):
    """Write a text, and say where."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    notebooks.write(Path(path), text)
    print(f"Written: {path} ({len(text.encode()) / 1024:,.0f} KiB)")


def build(args):
    """Write the learner's copies from the solutions, or (--check) only say what would change."""
    if args.check:
        differences = notebooks.check()
        print("\n".join(differences) or "Every learner's copy is what its solution makes.")
        return int(bool(differences))
    changed = notebooks.build(execute=args.execute)
    print(f"Written: {', '.join(str(path) for path in changed) or 'nothing, all was up to date'}")


def guide(args):
    """Write the instructor's guide as a page to print, and bring the guide and the README's routes and pictures up to date."""
    from labkit import guide
    print(f"Written: {', '.join(map(str, guide.write())) or 'nothing, all was up to date'}")
    _keep(args.out, guide.html())


def parser():
    """Return the parser of all commands, whose docstrings are what --help says."""
    parser = argparse.ArgumentParser(prog="labkit", description="CUDA Graphs Lab: check, open, run, record.")
    every = (doctor, lab, progress, hub, run, diagnose, decide, record, report, export, compare, build, guide)
    commands = parser.add_subparsers(dest="command", required=True, metavar=" | ".join(fn.__name__ for fn in every))
    add = {fn: commands.add_parser(fn.__name__, help=fn.__doc__, description=fn.__doc__, prog=f"labkit {fn.__name__}")
           for fn in every}
    for fn, command in add.items():
        command.set_defaults(fn=fn)
    add[lab].add_argument("--app", action="store_true", help="serve the explorer alone, for a projector (Voila)")
    add[progress].add_argument("folder", nargs="?", help="a folder of labs (else the one here)")
    add[hub].add_argument("learners", metavar="FILE", help="the learners' names, one a line")
    add[hub].add_argument("--folder", default="class", metavar="DIR", help="where all of this class lies (else ./class)")
    add[hub].add_argument("--ip", default="127.0.0.1", help="the address to listen on (else this machine only)")
    add[hub].add_argument("--port", type=int, default=8000, help="the port (else 8000); the two after it are used, too")
    add[hub].add_argument("--ssl-key", metavar="FILE", help="the key of a certificate, for another --ip")
    add[hub].add_argument("--ssl-cert", metavar="FILE", help="the certificate")
    add[hub].add_argument("--behind-proxy", action="store_true", help="another --ip without TLS: a proxy in front does it")
    add[hub].add_argument("--idle", type=above_zero, default=60, metavar="MINUTES", help="stop what nobody uses after these (else 60)")
    add[hub].add_argument("--allow-root", action="store_true", help="run as root, which learners then do, too")
    add[doctor].add_argument("--json", action="store_true", help="print the checks as JSON")
    add[run].add_argument("labs", nargs="*", metavar="LAB", help="a lab's name or number; none: all")
    add[run].add_argument("--solutions", action="store_true", help="run the solutions, not the learner's copies")
    add[run].add_argument("--slides", action="store_true", help="make the page one for a projector: arrow keys go from section to section")
    add[run].add_argument("--out", metavar="DIR", help="where to write (else runs/<time>)")
    add[diagnose].add_argument("callable", metavar="MODULE:CALLABLE", help="what to capture, importable from this folder")
    add[diagnose].add_argument("--input", action="append", default=[], metavar="SHAPE:TYPE",
                               help="an example input, like 1x128:float16; once for each argument")
    add[diagnose].add_argument("--timeout", type=above_zero, default=120.0, metavar="SECONDS", help="for the child process")
    add[diagnose].add_argument("--here", action="store_true", help="try it in this process, for what cannot be sent")
    add[decide].add_argument("model", metavar="MODEL", help="mlp, transformer, causal, gpt2 or llama (ours); a folder or config.json of "
                             "transformers, for its decode step; or MODULE:CALLABLE")
    add[decide].add_argument("--batch", nargs="+", type=int, default=[1, 8, 32], metavar="N", help="batch sizes (else 1 8 32)")
    add[decide].add_argument("--latency-us", type=above_zero, metavar="N", help="a target for one step, in microseconds")
    add[decide].add_argument("--input", action="append", default=[], metavar="SHAPE:TYPE",
                             help="of MODULE:CALLABLE: like Bx128:float16, B for the batch; once for each argument")
    add[decide].add_argument("--layers", type=int, metavar="N", help="of one of ours")
    add[decide].add_argument("--width", type=int, metavar="N", help="of one of ours")
    add[decide].add_argument("--length", type=int, metavar="N", help="tokens of a step, or of the context of a decode step")
    add[decide].add_argument("--precision", default="float16", metavar="TYPE", help="float16, float32 or bfloat16")
    add[decide].add_argument("--no-compile", action="store_true", help="leave torch.compile out, which takes longest")
    add[decide].add_argument("--timeout", type=above_zero, default=120.0, metavar="SECONDS", help="for each capture and compilation")
    add[record].add_argument("names", nargs="*", metavar="NAME", help="an experiment or a lab; none: all")
    add[record].add_argument("--commit", help="the commit measured, in a copy without git")
    add[record].add_argument("--out", metavar="DIR", help="where to write (else labkit/recordings)")
    add[report].add_argument("names", nargs="*", metavar="NAME", help="an experiment; none: all")
    add[report].add_argument("--out", metavar="FILE", help="where to write (else report-<gpu>-<day>.html)")
    add[report].add_argument("--check", metavar="BEFORE", help="a file of export: measure again; 1 if intervals do not overlap, 2 where it cannot be said")
    add[report].add_argument("--after", metavar="FILE", help="with --check: a second file of export, instead of measuring")
    add[export].add_argument("--out", metavar="FILE", help="where to write (else results-<gpu>-<day>.json)")
    add[compare].add_argument("paths", nargs="+", metavar="FILE|FOLDER", help="files of export, or folders of them")
    add[compare].add_argument("--out", metavar="FILE", help="write a page with charts, too")
    add[guide].add_argument("--out", metavar="FILE", default="instructors-guide.html", help="the page (else instructors-guide.html)")
    add[build].add_argument("--check", action="store_true", help="change nothing; 1 if something would change")
    add[build].add_argument("--execute", action="store_true", help="run the solutions first, on recordings")
    return parser


def main(argv=None):
    """Run one command and return its exit status; trouble that was foreseen is one line on stderr."""
    args, others = parser().parse_known_args(argv)
    if others and args.command != "lab":
        parser().error(f"unknown: {' '.join(others)}")
    args.jupyter = others
    os.environ.update(machine.writable_environment())
    trouble = 2 if args.command == "report" and args.check is not None else 1  # 1 says that two runs disagree
    try:
        if (wrong := machine.wrong_settings()) and args.command != "doctor":
            raise Refusal(wrong)
        return args.fn(args) or 0
    except (Refusal, HubError, RecordingError, results.ResultsError, notebooks.BuildError, machine.NoGPU, OSError) as error:
        print(f"labkit: {error}", file=sys.stderr)
        return trouble
    except ModuleNotFoundError as error:
        print(f"labkit: {error.name} is not installed: `make lab` with a network installs it, or "
              f"{sys.executable} -m pip install {error.name}", file=sys.stderr)
        return trouble
    except KeyboardInterrupt:
        print("labkit: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
