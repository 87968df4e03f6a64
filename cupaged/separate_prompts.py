"""SeparatePromptScheduler: steps that compute prompts and steps that compute answers, as engines had before they shared a
budget between the two, to be compared with.

Whoever can begin does so at once, and everybody else waits for that step. Where many short requests come, nearly every step
of answers then has a step of prompts before it. All else is the scheduler's own.
"""

from __future__ import annotations

from cupaged.scheduler import Scheduler
from cupaged.step_plan import StepPlan


class SeparatePromptScheduler(Scheduler):
    """Never computes a prompt and the next token of an answer in one step."""

    def schedule(self) -> StepPlan:
        draft = self._plan_running([r for r in self.running if any(s.remaining > 1 for s in r.live)])
        self._plan_waiting(draft)
        if not draft.items and not draft.preempted:
            draft = self._plan_running(self.running)
        return self._take_off(draft)
