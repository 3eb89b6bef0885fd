"""The one error that a user's mistake, or a fault that a user can mend, ends in."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec

P = ParamSpec("P")

EXIT_AS_CLAIMED = 0
EXIT_DIFFERS = 1
EXIT_NOT_MEASURED = 2


class RoutewiseError(Exception):
    """A problem that names what was found, what was wanted, and the next thing to try.

    Parameters
    ----------
    problem
        What is wrong: the file, key or cell, the value found, the value wanted.
    hint
        The next thing to try, or None where nothing useful can be said.
    """

    def __init__(self, problem: str, hint: str | None = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint

    def __str__(self) -> str:
        return self.problem if self.hint is None else f"{self.problem}\n  try: {self.hint}"


class Misspoken(RoutewiseError):
    """A server answers, and not as its route promises: waiting does not mend that."""


def not_allowed(error: PermissionError) -> RoutewiseError:
    """Return the error for a file that belongs to somebody else: which, whose, and for whom."""
    path = Path(os.fsdecode(error.filename) if error.filename else ".").absolute()
    # what is not there yet is refused by the folder that it was to lie in
    there = next((found for found in (path, *path.parents) if os.path.lexists(found)), path)
    try:
        status = there.stat()
        whose = f"{there} belongs to user {status.st_uid}, mode {status.st_mode & 0o7777:o}"
    except OSError:
        whose = f"{there} cannot be looked at"
    return RoutewiseError(
        f"{path}: {error.strerror} for user {os.geteuid()} ({whose})",
        "have its owner open the folder to your group (chmod -R g+rwX, and umask 002 from then "
        "on), or run in a working folder of your own",
    )


def report_errors(main: Callable[P, int | None]) -> Callable[P, int]:
    """Wrap a script's ``main``: a RoutewiseError becomes a message and exit code 2."""

    @wraps(main)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return main(*args, **kwargs) or EXIT_AS_CLAIMED
        except RoutewiseError as error:
            print(f"routewise: {error}", file=sys.stderr)
            return EXIT_NOT_MEASURED
        except PermissionError as error:
            print(f"routewise: {not_allowed(error)}", file=sys.stderr)
            return EXIT_NOT_MEASURED
        except OSError as error:
            if error.errno is None:
                raise
            print(
                f"routewise: {error.strerror}: {error.filename or ''}\n"
                "  try: check free space (df) and permissions; what was measured is kept, "
                "run the same command again",
                file=sys.stderr,
            )
            return EXIT_NOT_MEASURED

    return wrapped
