"""A line that is kept up to date: sparse in a file, one row of a terminal."""

from __future__ import annotations

import fcntl
import io
import os
import struct
import termios
from collections.abc import Iterator
from typing import TextIO

import pytest
from routewise.status_line import StatusLine


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_in_a_file_it_is_written_on_change_and_not_too_often() -> None:
    stream, clock = io.StringIO(), Clock()
    line = StatusLine(stream, every_s=10, clock=clock)
    for now_s, text in [(0, "a"), (1, "a"), (5, "b"), (9, "c"), (10, "c"), (30, "c"), (31, "d")]:
        clock.now_s = now_s
        line.show(text)
    assert stream.getvalue() == "a\nc\nd\n"
    line.end("over")
    assert stream.getvalue() == "a\nc\nd\nover\n"
    assert "\x1b" not in stream.getvalue()


def test_a_reader_that_is_gone_is_no_error() -> None:
    stream = io.StringIO()
    stream.close()
    line = StatusLine(stream, clock=Clock())
    with pytest.raises(ValueError, match="closed"):
        stream.write("x")
    line.end("over")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, TextIO]]:
    monkeypatch.setenv("TERM", "xterm")
    reader, writer = os.openpty()
    resize(writer, 24, 40)
    with os.fdopen(writer, "w") as stream:
        yield reader, stream
    os.close(reader)


def resize(descriptor: int, rows: int, columns: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def read(reader: int) -> str:
    return os.read(reader, 65536).decode()


def test_in_a_terminal_one_row_is_taken_drawn_and_given_back(
    terminal: tuple[int, TextIO],
) -> None:
    reader, stream = terminal
    line = StatusLine(stream)
    line.show("done 1 of 2")
    text = read(reader)
    assert "\x1b[1;23r" in text  # the last of 24 rows does not scroll
    assert text.endswith("\x1b7\x1b[24;1H\x1b[2Kdone 1 of 2\x1b8")
    line.show("done 1 of 2")
    line.show("done 2 of 2 " + "x" * 60)
    text = read(reader)
    assert "\x1b[1;23r" not in text
    shown = text.removeprefix("\x1b7\x1b[24;1H\x1b[2K").removesuffix("\x1b8")
    assert shown.startswith("done 2 of 2 xxx")
    assert shown.endswith("x…")
    assert len(shown) < 40  # a longer one would wrap
    resize(stream.fileno(), 30, 40)
    line.show("done 2 of 2")
    assert "\x1b[1;29r" in read(reader)
    line.end("all done")
    text = read(reader)
    assert "\x1b[30;1H\x1b[2K\x1b[r" in text
    assert text.endswith("all done\r\n")


@pytest.mark.parametrize("term", ["dumb", None])
def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(
    terminal: tuple[int, TextIO], monkeypatch: pytest.MonkeyPatch, term: str | None
) -> None:
    reader, stream = terminal
    if term is None:
        monkeypatch.delenv("TERM")
    else:
        monkeypatch.setenv("TERM", term)
    StatusLine(stream).show("done 1 of 2")
    assert read(reader) == "done 1 of 2\r\n"
