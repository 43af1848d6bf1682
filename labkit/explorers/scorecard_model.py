"""The scorecard: guesses and tables in, verdicts, surprises and the claims still open out; it runs what is missing. No widgets."""

import asyncio
from functools import partial

from traitlets import Any, Bool, HasTraits, Int, Unicode

from labkit import claims, experiments, machine, results

GUESSES = claims.VERDICTS[:4]
FAR = {claims.HOLDS: 0, claims.LIMITS: 1, claims.FAILS: 2, claims.OUTDATED: 2}  # how far from what the article says


class ScorecardModel(HasTraits):
    """Verdicts on all claims, judged on `tables` ({experiment: table}), beside `guesses` ({claim id: verdict}); both are the caller's.

    Tables that come are put into `tables`, so that what was measured stays when a scorecard is made again. verdicts: a Verdict for each
    claim, in order; missing: {experiment: why it has no table}. `shown` counts what changed: look at it to draw again.
    Raises ValueError for a guess that is none, or for no claim.
    """
    verdicts, missing = Any(()), Any()
    status, busy, shown = Unicode(), Bool(), Int()

    def __init__(self, tables, guesses):
        super().__init__()
        if wrong := {id: guess for id, guess in guesses.items() if id not in claims.CLAIMS or guess not in GUESSES}:
            raise ValueError(f"guesses are {', '.join(GUESSES)}, each for a claim; these are none: {wrong}")
        self.tables, self.guesses, self.missing, self._going = tables, guesses, {}, False
        self.refresh()

    def guess(self, id, verdict):
        """Keep a guess, one of GUESSES; "" takes it back."""
        self.guesses[id] = verdict
        if not verdict:
            del self.guesses[id]
        self.refresh()

    def wanted(self):
        """Return the experiments that verdicts or results to send need, and that have no table yet, in order."""
        return [name for name in results.sent() if name not in self.tables]

    def refresh(self, status=""):
        """Judge anew, and say how far we are."""
        self.verdicts = tuple(results.judged(self.tables))
        known = sum(verdict.verdict != claims.UNKNOWN for verdict in self.verdicts)
        self.status = status or f"{known} of {len(self.verdicts)} claims are judged; {len(self.guesses)} guessed."
        self.shown += 1

    def surprises(self, most=3):
        """Return the verdicts that are furthest from what was guessed; where nothing was, the article's word counts as the guess."""
        off = {v.claim.id: abs(FAR[v.verdict] - FAR[self.guesses.get(v.claim.id, claims.HOLDS)]) for v in self.verdicts if v.verdict in FAR}
        guessed_first = sorted((v for v in self.verdicts if off.get(v.claim.id)), key=lambda v: (-off[v.claim.id], v.claim.id not in self.guesses))
        return guessed_first[:most]

    def load(self):
        """Load the recordings of all that is missing, at once."""
        for name in self.wanted():
            self._keep(name, partial(experiments.as_recorded, name))

    async def fill(self, recorded=False):
        """Get what is missing, one experiment after the other, until all are there or it is stopped: measured, or (recorded) loaded."""
        if self.busy:
            return
        self.busy, self._going, wanted = True, True, self.wanted()
        try:
            for number, name in enumerate(wanted, 1):
                self.status = f"{'Loading' if recorded else 'Measuring'} {name}, {number} of {len(wanted)}."
                get = partial(experiments.as_recorded, name) if recorded else experiments.EXPERIMENTS[name]
                done = asyncio.ensure_future(asyncio.to_thread(get))
                await asyncio.wait([done])
                self._keep(name, done.result)
                if not self._going:
                    break
        finally:
            self.busy = False
            self.refresh()

    def _keep(self, name, get):
        """Keep a table, or why there is none: one that fails must not cost the others."""
        try:
            self.tables[name] = get()
            self.missing.pop(name, None)
        except Exception as error:
            self.missing[name] = machine.first_line(error)
        self.refresh(self.status if self.busy else "")

    def stop(self):
        """End after the experiment that runs, whose table is kept."""
        self._going = False
        if self.busy:
            self.status = "Stopping after this one."
