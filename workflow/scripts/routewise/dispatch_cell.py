"""A dispatch cell: which kernels a server's log says ran, three lives of the server a width.

Each (width, repeat) has a server life of its own in which nothing else runs, as some engines name
a kernel only the first time that it is used. The rows are evidence and no measurement: they say
nothing about bits or time, and are never adopted from the store.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

from routewise.block import Block
from routewise.claim import Held
from routewise.client import Client
from routewise.dispatch import LOGS, DispatchLog, Observation, dispatch_columns, read_since
from routewise.errors import RoutewiseError
from routewise.schema.dispatch import DISPATCH
from routewise.schema.file import read_table, table_of, write_table
from routewise.schema.prompts import PROMPTS
from routewise.serve import ServingJob, held_device, serving_provenance
from routewise.serve_cell import ServeCell, ServeInputs
from routewise.server import Server


def measure_dispatch(cell: ServeCell, inputs: ServeInputs, output: Path) -> None:
    """Run each block once in a server life of its own, and write what its log says.

    Raises RoutewiseError where the server cannot be started or answers badly.
    """
    started_at = datetime.now(UTC)
    prompts, prompt_provenance = read_table(inputs.prompts, PROMPTS)
    job = ServingJob(cell, inputs, prompts.to_pylist()[:1])
    seen: list[Observation] = []
    reason = None if cell.serving.dispatch else "the route names no log of its kernels (dispatch)"
    if reason is None and job.refused:
        reason = job.refused[0]["reason"]
    if reason is None:
        log = LOGS[str(cell.serving.dispatch)]
        with held_device(cell) as held:
            job.know(held)
            for fragment in job.fragments:
                seen.append(_observe(job, fragment.block, log, held))
    provenance = serving_provenance(job, started_at, prompt_provenance)
    provenance["unsupported"] = reason or provenance["unsupported"]
    write_table(output, DISPATCH, table_of(DISPATCH, dispatch_columns(seen)), provenance)


def _observe(job: ServingJob, block: Block, log: DispatchLog, held: Held | None) -> Observation:
    path = job.log_of(block.life)
    with job.server(block.life, held, logging=True) as server:
        start = 0 if log.whole_life else path.stat().st_size
        asyncio.run(_ask(job, block, server))
        job.progress.advance(1)
    section = read_since(path, start, log)
    repeat = sum(
        other.life < block.life and other.width == block.width for other in job.cell.blocks
    )
    return Observation(block.life, block.width, repeat, log.name, section.counts)


async def _ask(job: ServingJob, block: Block, server: Server) -> None:
    (fragment,) = [one for one in job.fragments if one.block == block]
    speech = job.cell.serving.speech
    async with Client(server.url, speech, stall_s=job.cell.serving.stall_s) as client:
        one = await job.ask_round(server, client, fragment.rounds[0])
        bad = [reply.reason for reply in one.replies if reply.status != "ok"]
        if bad:
            raise RoutewiseError(
                f"{job.cell.name}: width {block.width}: {bad[0]}",
                f"look into the server's log in {job.inputs.logs}",
            )
