"""The notebook's side: banner(), and the `%%gpu` and `%%isolated` cells, live on a GPU or as recorded on one."""

import argparse
import contextlib
import html
import shlex
import sys

from IPython import get_ipython
from IPython.core.error import UsageError
from IPython.display import publish_display_data

from labkit import allowance, isolate, machine, recordings


class IsolatedError(Exception):
    """An isolated cell that failed, or did not fail as its author expected."""

    def _render_traceback_(self):
        return [f"IsolatedError: {self}"]


def banner(cells=True):
    """Say if this lab runs LIVE or RECORDED, why, and how to change that; make `%%gpu` and `%%isolated` work.

    cells: whether there are cells to speak of; an app shows none.
    """
    if shell := get_ipython():
        shell.register_magic_function(gpu, "cell")
        shell.register_magic_function(isolated, "cell")
        if _run_gpu_cells_natively not in shell.input_transformers_cleanup:
            shell.input_transformers_cleanup.append(_run_gpu_cells_natively)
            shell.events.register("post_run_cell", _hint_at_order)
    here = machine.mode()
    if wrong := machine.wrong_settings():
        print(f"Careful: {wrong}.")
    if here.live:
        import torch
        allowance.keep(torch)
        try:
            recordings.chosen()
        except recordings.RecordingError as error:
            print(f"Careful: {error}.")
        said = "unless its label says RECORDED" if recordings.tables_are_live() else "but for tables: LABKIT_TABLES=recorded is set"
        return _show("LIVE", f"LIVE on {here.reason}. Everything below is measured here, now, {said}.")
    try:
        about = recordings.about()
        said = (f"RECORDED on {about['gpu']}, {about['date']}. "
                + ("Cells marked %%gpu show their output from that GPU; nothing" if cells else "Nothing") + " is measured here.")
    except recordings.RecordingError as error:
        said = f"RECORDED. But {error}."
    _show("RECORDED", f"{said} Why: {here.reason}. {here.fix}")


def _run_gpu_cells_natively(lines):
    """Where there is a GPU, make the `%%gpu` line a comment: the cell is then a cell like any other."""
    if lines and lines[0].strip() == "%%gpu" and machine.mode().live:
        return ["# %%gpu: live\n", *lines[1:]]
    return lines


def _hint_at_order(result):
    """After a NameError, say what is most often behind it."""
    if isinstance(result.error_in_exec, NameError):
        without = "" if machine.mode().live else "; what a %%gpu cell defines exists only where there is a GPU"
        print(f"Hint: run the cells above first{without}.", file=sys.stderr)


def gpu(line, cell):
    """Show what this very cell put out on the recording GPU (with a GPU, the cell runs and this is not called).

    Raises UsageError for words after %%gpu, RecordingError where the recording cannot be read.
    """
    if line.strip():
        raise UsageError(f"%%gpu takes nothing after it, not {line.strip()!r}")
    _replay(f"%%gpu\n{cell}")


def isolated(line, cell):
    """Run the cell in a child process that is thrown away; `--timeout SECONDS`, `--expect TEXT` of the failure.

    Raises IsolatedError where it fails and was not to, or the other way round, UsageError for other words, RecordingError.
    """
    wanted = _arguments(line)
    source = f"%%isolated {line}".rstrip() + f"\n{cell}"
    if not machine.mode().live:
        return _replay(source, wanted.expect)
    result = isolate.run(f"\n{cell}", wanted.timeout)  # so that line numbers are the cell's
    print(result.stdout, end="")
    for output in result.outputs:
        publish_display_data(output["data"], output["metadata"])
    if result.error:
        print(f"The child process failed; this notebook's own process is untouched.\n{result.cause or ''}".rstrip())
        print(f"\n{result.error}")
    _judge(f"{result.cause}\n{result.error}\n{result.how_it_ended}" if result.error else "", wanted.expect)


def _seconds(word):
    if seconds := machine.above_zero(word):
        return seconds
    raise argparse.ArgumentTypeError(f"wants seconds above 0, not {word!r}")


def _arguments(line):
    parser = argparse.ArgumentParser("%%isolated", add_help=False, exit_on_error=False)
    parser.add_argument("--timeout", type=_seconds, default=60.0)
    parser.add_argument("--expect")
    try:
        wanted, others = parser.parse_known_args(shlex.split(line))
        if others:
            raise ValueError(f"it knows --timeout SECONDS and --expect TEXT, not {' '.join(others)}")
    except (argparse.ArgumentError, ValueError) as error:
        raise UsageError(f"%%isolated: {error}") from None
    return wanted


def _judge(failure, expect):
    """Raise unless a child failed as expected: `failure` is all that it said of itself, "" if it finished."""
    if expect and expect.lower() not in failure.lower():
        raise IsolatedError(f"this cell was to fail with {expect!r}, but it "
                            f"{'failed in another way' if failure else 'did not fail'}")
    if failure and not expect:
        raise IsolatedError("the child process failed (a cell that is meant to fail says --expect TEXT)")


def _replay(source, expect=None):
    """Show the recorded outputs of a cell under their label, or say that there are none."""
    if not (found := recordings.cell_outputs(source)):
        return _show("RECORDED", "This cell has no recording (changed, or never recorded): it needs an NVIDIA GPU.")
    told, outputs = found
    _show("RECORDED", told["label"])
    for output in outputs:
        if output["output_type"] == "stream":
            print(output["text"], end="", file=getattr(sys, output["name"]))
        elif "data" in output:
            publish_display_data(output["data"], output["metadata"])
    if expect:
        _judge("".join(output.get("text", "") for output in outputs), expect)


def _show(mode, text):
    """Display one line under a coloured edge: green for LIVE, orange for RECORDED."""
    edge = {"LIVE": "#009E73", "RECORDED": "#E69F00"}[mode]
    style = f"border-left: 4px solid {edge}; padding: 2px 10px; font-size: 90%"
    publish_display_data({"text/plain": text, "text/html": f'<div style="{style}">{html.escape(text)}</div>'},
                         {"labkit": "label"})
