"""One line that is kept up to date: at the foot of a terminal, or now and then in a file.

Jobs write to the same terminal. So the last row of it is taken out of what scrolls, as installers
do, and the line is drawn there: whatever else is written stays readable above it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TextIO

#: Seconds between lines in a file or a pipe.
EVERY_S = 10.0
_LEAST_ROWS = 4


class StatusLine:
    """A line that changes.

    Parameters
    ----------
    stream
        Where it is written. Other text goes to the same stream by itself, a whole line at a time.
    every_s
        In a file or a pipe: the least seconds between two lines.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._every_s = every_s
        self._clock = clock
        self._shown = ""
        self._shown_s = -every_s
        self._size: tuple[int, int] | None = None  # of the terminal that has a row taken out

    @property
    def in_terminal(self) -> bool:
        """Say whether there is a terminal to draw in."""
        return self._stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"

    @property
    def columns(self) -> int | None:
        """Return how many columns there are, or None where a line may have any length."""
        size = self._terminal_size()
        return None if size is None else size[1]

    def show(self, text: str) -> None:
        """Show the line as it is now; what has not changed, or not for long, is left as it is."""
        size = self._terminal_size()
        if size is not None:
            if size != self._size or text != self._shown:
                self._draw(text, size)
                self._shown = text
        elif text != self._shown and self._clock() - self._shown_s >= self._every_s:
            self._write(f"{text}\n")
            self._shown, self._shown_s = text, self._clock()

    def end(self, text: str) -> None:
        """Give the terminal's row back, and leave ``text`` as the last line; "" leaves none."""
        if self._size is not None:
            rows, _ = self._size
            # save the cursor, clear the row, let all rows scroll again, and put the cursor back
            self._write(f"\x1b7\x1b[{rows};1H\x1b[2K\x1b[r\x1b8")
            self._size = None
        if text:
            self._write(f"{text}\n")
        self._shown = ""

    def _terminal_size(self) -> tuple[int, int] | None:
        if not self.in_terminal:
            return None
        try:
            size = os.get_terminal_size(self._stream.fileno())
        except OSError:
            return None
        return (size.lines, size.columns) if size.lines >= _LEAST_ROWS else None

    def _draw(self, text: str, size: tuple[int, int]) -> None:
        rows, columns = size
        shown = text if len(text) < columns else f"{text[: columns - 2]}…"
        if size != self._size:
            # one row up where the cursor is on the last one; then that one is out of what scrolls
            self._write(f"\n\x1b7\x1b[1;{rows - 1}r\x1b8\x1b[1A")
            self._size = size
        self._write(f"\x1b7\x1b[{rows};1H\x1b[2K{shown}\x1b8")

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the terminal or the reader of the pipe is gone
            self._size = None
