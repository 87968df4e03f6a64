"""RequestStream: one request's outputs as they come, pulling the engine along."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from cupaged.outputs import RequestOutput


class RequestStream(Iterator[RequestOutput]):
    """Yields the growing output of one request until it is finished; closing it aborts the request.

    Steps of the engine fill the mailboxes of all its streams; `pull` computes one step, `abort` ends this request.
    A stream that is dropped calls `forget` instead, which must be safe at any moment: it may be the garbage collector's.
    """

    def __init__(
        self, mailbox: deque[RequestOutput], pull: Callable[[], object], abort: Callable[[], object], forget: Callable[[], object]
    ) -> None:
        self._mailbox = mailbox
        self._pull = pull
        self._abort = abort
        self._forget = forget
        self._done = False

    def __next__(self) -> RequestOutput:
        if self._done:
            raise StopIteration
        while not self._mailbox:
            self._pull()
        output = self._mailbox.popleft()
        self._done = output.finished
        return output

    def close(self) -> None:
        """End the request now, if it is still running; nothing more is yielded."""
        self._done = True
        self._abort()

    def __del__(self) -> None:
        if not self._done:
            self._forget()
