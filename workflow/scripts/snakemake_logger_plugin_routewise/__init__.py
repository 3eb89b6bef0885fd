"""Snakemake's logger plugin ``routewise``: a line of progress in place of a block for each job.

Errors, warnings and the table of jobs stay as Snakemake writes them, and its own log file under
.snakemake/log has everything. A dry run is left as it is. What the line says is made in
``routewise.run_view``, how it is shown in ``routewise.status_line``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterable
from typing import Any

from routewise.claim import claims_folder
from routewise.errors import RoutewiseError
from routewise.run_view import Job, RunView, job_name, outsiders
from routewise.status_line import StatusLine
from snakemake.logging import ColorizingTextHandler, DefaultFilter, DefaultFormatter
from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent

#: What the line says better.
_IN_THE_LINE = frozenset(
    (
        LogEvent.JOB_INFO,
        LogEvent.GROUP_INFO,
        LogEvent.JOB_STARTED,
        LogEvent.JOB_FINISHED,
        LogEvent.PROGRESS,
        LogEvent.RESOURCES_INFO,
    )
)
_EACH_ROUND = "Select jobs to execute"
_TICK_S = 0.5
#: Seconds between two looks at who holds a device.
_CLAIMS_S = 3.0


class LogHandler(LogHandlerBase):
    """Feeds a view of the run with events, and shows it."""

    def __post_init__(self) -> None:
        """Make what shows text as Snakemake does, and the line."""
        settings = self.common_settings
        stream = sys.stdout if settings.stdout else sys.stderr
        quiet = {str(word) for word in settings.quiet or ()}
        self._quiet = bool(quiet & {"all", "progress"})
        self._plain = settings.dryrun
        self._text = ColorizingTextHandler(
            nocolor=settings.nocolor,
            stream=stream,
            filter=DefaultFilter(
                settings.quiet,
                settings.debug_dag,
                settings.verbose,
                settings.dryrun,
                settings.printshellcmds,
            ),
            formatter=DefaultFormatter(settings.quiet, settings.show_failed_logs),
        )
        self._view = RunView()
        self._line = StatusLine(stream)
        self._lock_view = threading.RLock()
        self._stopped = threading.Event()
        self._ticker: threading.Thread | None = None
        self._outsiders: list[str] = []

    def expect_jobs(self, jobs: Iterable[Job]) -> None:
        """Take all jobs of the run; the workflow knows them when it starts."""
        with self._lock_view:
            self._view.expect(jobs)

    def emit(self, record: logging.LogRecord) -> None:
        """Take one record: into the line, or onto the screen as Snakemake writes it."""
        if self._plain or self._quiet:
            self._text.handle(record)
            return
        with self._lock_view:
            event = getattr(record, "event", None)
            with contextlib.suppress(AttributeError, KeyError, TypeError):  # of another Snakemake
                self._take(event, vars(record))
            if event not in _IN_THE_LINE and not record.getMessage().startswith(_EACH_ROUND):
                self._text.handle(record)

    def _take(self, event: LogEvent | None, said: dict[str, Any]) -> None:
        view = self._view
        if event == LogEvent.RUN_INFO:
            view.total = view.total or int(said["stats"]["total"])
        elif event == LogEvent.RESOURCES_INFO:
            view.cores = said.get("cores", view.cores)
            view.submits = view.submits or "nodes" in said
            limits = said.get("provided_resources") or {}
            view.limits |= {
                name: number
                for name, value in limits.items()
                if isinstance(number := getattr(value, "value", value), int)
            }
        elif event == LogEvent.JOB_INFO:
            name = job_name(said["rule_name"], said["wildcards"] or {})
            view.started(said["jobid"], said["rule_name"], name, said["threads"] or 1)
            self._start_ticking()
        elif event == LogEvent.JOB_FINISHED:
            view.finished(said["job_id"])
            if view.over:
                self._stop()
        elif event == LogEvent.JOB_ERROR:
            view.failed(said["jobid"])
        elif event == LogEvent.GROUP_ERROR:
            for one in said["job_error_info"]:
                view.failed(one["jobid"])

    def _start_ticking(self) -> None:
        if self._ticker is None:
            self._line.show(self._view.line(self._outsiders))  # a short run has its line too
            self._ticker = threading.Thread(target=self._tick, name="progress line", daemon=True)
            self._ticker.start()

    def _tick(self) -> None:
        looks = 0
        while not self._stopped.is_set():
            with self._lock_view:
                claims = self._view.claims_in_use()
            if looks % round(_CLAIMS_S / _TICK_S) == 0:  # not under the lock: it may take a moment
                self._outsiders = self._who_holds(claims)
            looks += 1
            with self._lock_view:
                if not self._stopped.is_set():
                    text = self._view.line(self._outsiders, self._line.columns)
                    self._line.show(text)
            self._stopped.wait(_TICK_S)

    def _who_holds(self, claims: set[str]) -> list[str]:
        if not claims or self._view.submits:
            return []
        try:
            return outsiders(claims, claims_folder(), os.getpid())
        except RoutewiseError:
            return []

    def _stop(self) -> None:
        with self._lock_view:
            if self._ticker is not None and not self._stopped.is_set():
                self._stopped.set()
                self._line.end(self._view.last_line())

    def close(self) -> None:
        """Leave the last line, and the terminal as it was."""
        self._stop()
        super().close()

    @property
    def writes_to_stream(self) -> bool:
        """Say that no other handler is to write to the screen."""
        return True

    @property
    def writes_to_file(self) -> bool:
        """Say that nothing goes to a file: Snakemake keeps its own."""
        return False

    @property
    def has_filter(self) -> bool:
        """Say that what is quiet is left out here: the line needs what Snakemake would drop."""
        return True

    @property
    def has_formatter(self) -> bool:
        """Say that the text is laid out here."""
        return True

    @property
    def needs_rulegraph(self) -> bool:
        """Say that the graph of rules is not needed."""
        return False
