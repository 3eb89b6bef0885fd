"""Progress lines: what is done, how fast, and what is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

MEGABYTE = 1_000_000


class Progress:
    """One long step's progress line: rewritten in place on a terminal, sparse lines elsewhere.

    Parameters
    ----------
    label
        What is going on, such as ``downloading model.gguf``.
    total
        How much there is in all, or None where nobody knows; then nothing is said of what is left.
    unit
        The word after the counts. ``MB`` counts bytes and shows megabytes.
    every_s
        Seconds between lines; by default 0.2 on a terminal and 10 elsewhere.
    """

    def __init__(
        self,
        label: str,
        total: int | None,
        unit: str = "MB",
        *,
        stream: TextIO | None = None,
        every_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.label = label
        self.total = total
        self.unit = unit
        self.done = 0
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._every_s = (0.2 if self._terminal else 10.0) if every_s is None else every_s
        self._clock = clock
        self._start_s = self._shown_s = clock()
        self._start_done = 0
        self._width = 0

    def start_at(self, done: int) -> None:
        """Take up at ``done``, which an earlier try brought and which counts for no rate."""
        self.done = self._start_done = done
        self._start_s = self._clock()

    def advance(self, amount: int) -> None:
        """Count ``amount`` more as done, and show a line when it is time for one."""
        self.move_to(self.done + amount)

    def move_to(self, done: int) -> None:
        """Set what is done in all, and show a line when it is time for one."""
        self.done = done
        now_s = self._clock()
        if now_s - self._shown_s >= self._every_s:
            self._shown_s = now_s
            self._show(self.line(), end="")

    def finish(self) -> None:
        """Show the last line, with the time that the whole step took."""
        took_s = self._clock() - self._start_s
        self._show(f"{self.label} {self._counts()}, done in {duration(took_s)}", end="\n")

    def line(self) -> str:
        """Return the line as it stands now."""
        text = f"{self.label} {self._counts()}"
        passed_s = self._clock() - self._start_s
        moved = self.done - self._start_done
        if passed_s <= 0 or moved <= 0:
            return text
        rate = moved / passed_s
        shown = rate / MEGABYTE if self.unit == "MB" else rate
        text += f", {shown:.3g} {self.unit}/s" if shown < 100 else f", {shown:.0f} {self.unit}/s"
        if self.total is not None:
            text += f", {duration(max(0, self.total - self.done) / rate)} left"
        return text

    def _counts(self) -> str:
        if self.unit != "MB":
            return f"{self.done}{'' if self.total is None else f'/{self.total}'} {self.unit}"
        whole = "" if self.total is None else f"/{self.total / MEGABYTE:.1f}"
        return f"{self.done / MEGABYTE:.1f}{whole} MB"

    def _show(self, text: str, end: str) -> None:
        if self._terminal:
            self._stream.write(f"\r{text.ljust(self._width)}{end}")
            self._width = len(text)
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()


def duration(seconds: float) -> str:
    """Return a time for people: ``5 s``, ``3 min 20 s``, ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 2 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
