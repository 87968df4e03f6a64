"""RequestStream: one request's outputs as they come, pulling the engine along."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from cupaged.outputs import RequestOutput


class RequestStream(Iterator[RequestOutput]):
    """Yields the growing output of one request until it is finished; closing (or dropping) it aborts the request.

    Steps of the engine fill the mailboxes of all its streams; `pull` computes one step, `abort` ends this request.
    """

    def __init__(self, pull: Callable[[], object], abort: Callable[[], object]) -> None:
        self.mailbox: deque[RequestOutput] = deque()
        self._pull = pull
        self._abort = abort
        self._done = False

    def __next__(self) -> RequestOutput:
        if self._done:
            raise StopIteration
        while not self.mailbox:
            self._pull()
        output = self.mailbox.popleft()
        self._done = output.finished
        return output

    def close(self) -> None:
        """End the request now, if it is still running; nothing more is yielded."""
        self._done = True
        self._abort()

    def __del__(self) -> None:
        self.close()
