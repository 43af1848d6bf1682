"""Whose turn it is to measure on this GPU: who shares one waits in a queue, and is told the place in it."""

import contextlib
import os
import tempfile
import threading
import time
import warnings
from pathlib import Path

import filelock

from labkit import machine

_LOOK_S = 0.1  # how often a place is looked up


@contextlib.contextmanager
def turn():
    """Wait until no other measurement runs on this GPU, first come, first served; where no lock can be made, say so and go on.

    The queue is a folder of files, one for each who waits or measures, locked as long as its process lives.
    """
    with contextlib.ExitStack() as held:
        try:
            folder = Path(tempfile.gettempdir(), "labkit-locks")  # not a folder with a sticky bit: every user may lock in it
            folder.mkdir(exist_ok=True)
            with contextlib.suppress(PermissionError):
                os.chmod(folder, 0o777)
            ticket = _ticket(folder, machine.gpu_uuid())
            held.callback(_leave, ticket)
            _wait(folder, Path(ticket.lock_file))
            held.enter_context(filelock.FileLock(folder / f"{machine.gpu_uuid()}.lock", mode=0o666))
        except OSError as error:
            warnings.warn(f"measuring without a lock, so others may measure on this GPU at once: {error}", stacklevel=7)
        yield


def _ticket(folder, uuid):
    """Return a new, locked file at the end of a GPU's queue; its name says when it came."""
    while True:
        path = folder / f"{uuid}.{time.time_ns():020d}-{os.getpid()}-{threading.get_ident()}.ticket"
        ticket = filelock.FileLock(path, mode=0o666)
        with contextlib.suppress(filelock.Timeout):  # somebody looked at it before it was locked, and may take it away
            ticket.acquire(timeout=0)
            if path.exists():
                return ticket
            ticket.release()


def _leave(ticket):
    with contextlib.suppress(OSError):
        os.unlink(ticket.lock_file)
    ticket.release()


def _wait(folder, mine):
    """Return when nobody's ticket is older than mine, and say the place meanwhile, whenever it changes."""
    said = 0
    while before := _before(folder, mine):
        if before != said:
            print(f"Waiting for this GPU: {before} measurement{'s' * (before > 1)} before yours.")
        said = before
        time.sleep(_LOOK_S)


def _before(folder, mine):
    """Count the tickets before mine, and take away those whose process is gone."""
    uuid, living = mine.name.partition(".")[0], 0
    for path in folder.glob(f"{uuid}.*.ticket"):
        if path.name < mine.name:
            other = filelock.FileLock(path, mode=0o666)
            try:
                other.acquire(timeout=0)
            except filelock.Timeout:
                living += 1
            except OSError:  # it has just left
                pass
            else:
                _leave(other)
    return living
