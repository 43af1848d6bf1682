"""What the decision page shows: a model, batches and a target in; a Decision out, a batch after the other. No widgets, no torch."""

import asyncio

from traitlets import Any, Bool, Float, HasTraits, Tuple, Unicode

from labkit import decide, machine


class DecideModel(HasTraits):
    """A question (model, batches, target_ms or 0, inputs) and its answer: `decision` grows by a batch at a time; `status` says more."""

    model, inputs, batches, target_ms = Unicode("gpt2"), Unicode(), Tuple((1, 8, 32)), Float(0.0)
    decision, status, busy = Any(None), Unicode("Choose, and press Decide."), Bool()

    async def answer(self):
        """Answer the question as it is now, until all batches are there or it is stopped."""
        if self.busy:
            return
        self.busy, self._going, self.decision, batches = True, True, None, self.batches
        self.status = "Each batch takes up to some minutes where it is measured."
        growing = decide.answers(self.model.strip(), batches, latency_us=self.target_ms * 1000 or None, inputs=tuple(self.inputs.split()))
        try:
            while self._going and (grown := await asyncio.to_thread(next, growing, None)):
                self.decision, self.status = grown, f"{len(grown.points)} of {len(batches)} batches."
            self.status = f"Done: {self.status}"
        except Exception as error:  # said, whatever it is: the page lives on
            self.status = f"No answer: {machine.first_line(error)}"
        finally:
            self.busy = False

    def stop(self):
        """End after the batch that is being measured."""
        self._going = False
