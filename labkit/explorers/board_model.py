"""The board of a class: a folder that results are put into; side by side out, again whenever a file comes, changes or goes. No widgets."""

import asyncio
import contextlib
import functools
import shlex
from pathlib import Path

from traitlets import Any, Bool, HasTraits, Int, Unicode, observe

from labkit import report, results


class BoardModel(HasTraits):
    """The results in a folder (files of `labkit export`), and `own`, a document or None, always first.

    documents: {name: results}; left_out: [reason]; table: {what: [a text for each name]}; apart: the claims on which they
    differ, {claim id: [a verdict for each name]}. `shown` counts what changed: look at it to draw again.
    """
    documents, left_out, table, apart = Any(), Any(()), Any(), Any()
    sweep, status = Unicode("sweep_gpt2"), Unicode()
    running, shown = Bool(), Int()

    def __init__(self, folder, own=None):
        super().__init__()
        self.folder, self.own, self._seen, self._task = Path(folder).absolute(), own, ..., None  # the same wherever one is
        self._read = functools.lru_cache(results.MOST_FILES)(lambda path, seen: results.read(path))
        self.poll()

    def poll(self):
        """Look at names, sizes and times of the folder's files, read them again if any is other than before, and say if so."""
        if changed := (seen := self._look()) != self._seen:
            self._take(seen, *self._gather(seen))
        return changed

    def _look(self):
        """Return {name: (bytes, time of the last change)} of the files that would be read; {} where there is no folder."""
        found = {}
        for path in results.in_folder(self.folder):
            found[path.name] = None
            with contextlib.suppress(OSError):  # a link that leads nowhere, or a file that goes just now
                found[path.name] = path.stat().st_size, path.stat().st_mtime_ns
        return found

    def _gather(self, seen):
        return results.read_all([self.folder] if seen else [], lambda path: self._read(path, seen.get(path.name)))

    def _take(self, seen, found, left_out):
        """Put what was read in place of what was there."""
        self._seen, self.left_out = seen, left_out
        mine = {} if self.own is None or self.own in found.values() else {f"{self.own['machine']['gpu']}, as in this lab": self.own}
        self.documents = mine | found
        self.table = results.side_by_side(self.documents)
        self.apart = results.apart(self.documents)
        self.status = (f"{len(found)} in {self.folder.name}, {len(self.left_out)} left out." if seen else
                       f"Nothing in {self.folder.name} yet. To add a GPU: python -m labkit export --out {shlex.quote(str(self.folder / 'NAME.json'))}")
        self.shown += 1

    @observe("sweep")
    def _other_sweep(self, _change):
        self.shown += 1

    def chart(self):
        """Draw the chosen sweep of all that have it: a Chart, or a sentence."""
        drawn = report.speedups(self.documents, self.sweep)
        return drawn[0] if drawn else "None of these has that sweep."

    async def watch(self, every_s=1.0):
        """Poll the folder until stopped; whatever goes wrong with it is said, and the next look comes all the same."""
        self.running, self._task = True, (mine := object())
        while self._task is mine:
            try:
                if (seen := self._look()) != self._seen:
                    self._take(seen, *await asyncio.to_thread(self._gather, seen))  # many files would hold up all else in the notebook
            except Exception as error:  # a board on a wall must not die of one file
                self._seen, self.status = ..., f"This look at the folder failed: {type(error).__name__}: {error}"
            await asyncio.sleep(every_s)

    def stop(self):
        """End the watching."""
        self.running, self._task = False, None
