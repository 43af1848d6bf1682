"""What the decision page shows: a model, batches and a target in; a Decision out, a batch after the other. No widgets, no torch."""

import asyncio

from traitlets import Any, Bool, Float, HasTraits, Tuple, Unicode

from labkit import decide


class DecideModel(HasTraits):
    """A question (model, batches, target_ms or 0, inputs) and its answer: `decision` grows by a batch at a time; `status` says more."""

    model, inputs, batches, target_ms = Unicode("gpt2"), Unicode(), Tuple((1, 8, 32)), Float(0.0)
    decision, status, busy = Any(None), Unicode("Choose, and press Decide."), Bool()

    async def answer(self):
        """Answer the question as it is now, until all batches are there or it is stopped."""
        if self.busy:
            return
        self.busy, self._going, found = True, True, []
        asked = {"latency_us": self.target_ms * 1000 or None, "inputs": tuple(self.inputs.split())}
        try:
            for number, batch in enumerate(self.batches, 1):
                self.status = f"{self.model}, batch {batch}, {number} of {len(self.batches)}. This takes up to some minutes where it is measured."
                part = await asyncio.to_thread(decide.decide, self.model.strip(), (batch,), **asked)
                found += part.points
                self.decision = decide.Decision(part.model, tuple(found), part.label, part.latency_us, part.memory_bytes)
                if not self._going:
                    break
            self.status = f"Done: {len(found)} of {len(self.batches)} batches."
        except Exception as error:  # said, whatever it is: the page lives on
            self.status = f"No answer: {str(error).partition(chr(10))[0] or type(error).__name__}"
        finally:
            self.busy = False

    def stop(self):
        """End after the batch that is being measured."""
        self._going = False
