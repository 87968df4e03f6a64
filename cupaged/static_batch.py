"""StaticBatchScheduler: batches as they were before continuous batching, to be compared with (FasterTransformer).

A batch takes as many waiting requests as fit, and nobody joins it before the last of it has ended. All else is the
scheduler's own. A request that ends early gives its blocks back at once, which such systems do not: the comparison errs
in their favour.
"""

from __future__ import annotations

from cupaged.scheduler import Scheduler
from cupaged.sequence import Request
from cupaged.step_plan import StepPlan


class StaticBatchScheduler(Scheduler):
    """Admits only where nothing runs. A batch is filled in one step: its prompts together must fit the token budget."""

    _open = True

    def schedule(self) -> StepPlan:
        self._open = not self.running
        return super().schedule()

    def _admit(self, request: Request) -> bool:
        return self._open and super()._admit(request)
