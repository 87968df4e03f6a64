"""Stop strings in a growing text: find them, and never show any part of one.

The end of the text so far may be the beginning of a stop string, so as much of it is held back as could still become
one; when it does not, it is shown with what follows. A stop string matches where it ends first, which makes the
result independent of how the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """Watches one answer's text for stop strings. The pieces shown join to the text up to the first match.

    Of several strings that end at the same character the longest one counts.
    """

    def __init__(self, stop: Sequence[str] = (), include_stop: bool = False) -> None:
        """`stop`: strings, none of them empty. `include_stop`: show the matched string too, but nothing after it."""
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str, may_stop: bool = True) -> tuple[str, str | None]:
        """Take the next piece of text: what may be shown now, and the stop string that it completes, or None.

        With `may_stop` false (an answer shorter than min_tokens) a stop string that ends in this piece is ordinary
        text; one that only begins here can still match later. After a match the checker is done.
        """
        seen, whole = len(self._held), self._held + text
        if may_stop and (match := self._first_match(whole, seen)):
            start, stop = match
            self._held = ""
            return whole[: start + len(stop) if self._include_stop else start], stop
        shown = len(whole) - max((_overlap(whole, stop) for stop in self._stop), default=0)
        self._held = whole[shown:]
        return whole[:shown], None

    def flush(self) -> str:
        """The text still held back, when the answer ends without a match."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, whole: str, seen: int) -> tuple[int, str] | None:
        """Start and string of the match that ends first, among those that end behind the first `seen` characters."""
        found = []
        for stop in self._stop:
            start = whole.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, all of `stop` excepted."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
