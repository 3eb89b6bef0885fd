"""Snakemake's logger plugin: what it makes of records, quiet ones and broken ones among them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from routewise.run_view import Job
from snakemake.logging import LogEvent
from snakemake.settings.enums import Quietness
from snakemake.settings.types import OutputSettings
from snakemake_logger_plugin_routewise import LogHandler


def handler_of(**settings: Any) -> LogHandler:
    return LogHandler(
        OutputSettings(**{"nocolor": True, "show_failed_logs": True, **settings}), None
    )


def say(handler: LogHandler, text: str | None, event: Any = None, **said: Any) -> None:
    level = logging.ERROR if event == LogEvent.JOB_ERROR else logging.INFO
    record = logging.LogRecord("snakemake", level, "x.py", 1, text, None, None)
    vars(record).update(event=event, **said)
    handler.handle(record)


def start(handler: LogHandler, job_id: int, **changes: Any) -> None:
    said: dict[str, Any] = {
        "jobid": job_id,
        "rule_name": "draw_figure",
        "rule_msg": None,
        "wildcards": {"figure": "price", "key": "0123456789abcdef"},
        "threads": 1,
        "local": False,
        "is_checkpoint": False,
        "input": [],
        "output": [],
        "log": [],
        "benchmark": None,
        "reason": "why not",
        "priority": 0,
        "resources": {},
        **changes,
    }
    say(handler, "a job", LogEvent.JOB_INFO, **said)


def fail(handler: LogHandler, job_id: int, log: str) -> None:
    nothing: dict[str, Any] = {"input": [], "output": [], "conda_env": None, "shellcmd": "false"}
    said = {"jobid": job_id, "rule_name": "draw_figure", "rule_msg": None, "log": [log], "aux": {}}
    say(handler, "a job failed", LogEvent.JOB_ERROR, **nothing, **said)


def test_jobs_are_in_the_line_and_all_else_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    log = tmp_path / "job.log"
    log.write_text("what went wrong\n")
    handler = handler_of()
    say(handler, "Building DAG of jobs...")
    say(handler, "Job stats: ...", LogEvent.RUN_INFO, stats={"draw_figure": 3, "total": 3})
    say(handler, "Provided cores: 2", LogEvent.RESOURCES_INFO, cores=2)
    handler.expect_jobs(Job(i, "draw_figure", f"figure {i}") for i in range(3))
    say(handler, "Select jobs to execute...")
    say(handler, "Execute 1 jobs...", LogEvent.JOB_STARTED, jobs=[0])
    start(handler, 0)
    say(handler, "Finished jobid: 0", LogEvent.JOB_FINISHED, job_id=0)
    say(handler, "None", LogEvent.PROGRESS, done=1, total=3)
    start(handler, 1)
    fail(handler, 1, str(log))
    say(handler, "Complete log(s): x")
    handler.close()
    handler.close()  # as the interpreter does once more
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["Building DAG of jobs...", "Job stats: ..."]
    assert "what went wrong" in lines
    assert "Complete log(s): x" in lines
    text = "\n".join(lines)
    for hidden in ("Provided cores", "Select jobs", "Execute", "Finished", "why not", "steps"):
        assert hidden not in text
    assert lines[-1].startswith("done 1 of 3, 1 failed in ")
    assert len([line for line in lines if line.startswith("done ")]) >= 2


def test_a_dry_run_is_snakemakes_own(capsys: pytest.CaptureFixture[str]) -> None:
    handler = handler_of(dryrun=True, stdout=True)
    start(handler, 0)
    handler.close()
    out, err = capsys.readouterr()
    assert "rule draw_figure:" in out
    assert "done" not in out + err


@pytest.mark.parametrize("word", [Quietness.ALL, Quietness.PROGRESS])
def test_a_quiet_run_has_no_line(capsys: pytest.CaptureFixture[str], word: Quietness) -> None:
    handler = handler_of(quiet={word, Quietness.RULES})
    start(handler, 0)
    say(handler, "Finished jobid: 0", LogEvent.JOB_FINISHED, job_id=0)
    handler.close()
    assert capsys.readouterr() == ("", "")


def test_a_record_of_another_snakemake_breaks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    handler = handler_of()
    for event in LogEvent:
        if event not in (LogEvent.JOB_ERROR, LogEvent.GROUP_ERROR, LogEvent.WORKFLOW_STARTED):
            say(handler, "a sentence", event)
    say(handler, "and on it goes")
    handler.close()
    assert "and on it goes" in capsys.readouterr().err
