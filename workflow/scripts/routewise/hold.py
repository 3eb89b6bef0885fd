"""Holding a route's device for a job: the same for jobs that serve and jobs that replay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from routewise.claim import ClaimSpec, Held, hold_device, run_under_hold
from routewise.device import missing_devices
from routewise.errors import RoutewiseError


@contextmanager
def held_for_job(device: str | None, claim: ClaimSpec | None, name: str) -> Iterator[Held | None]:
    """Hold a route's device for a ``with`` block; None where the route claims none.

    ``device`` is what this host must have, None where it is another host's; ``name`` is the job's.
    To be called before a library of the device is loaded, and only where there is work for it: a
    hold command starts the job anew.

    Raises RoutewiseError where this host does not have the device.
    """
    if device is not None:
        for missing, sought in missing_devices([device]).items():
            raise RoutewiseError(
                f"{name}: this host has no {missing} device (looked for {sought})",
                "name the host that has it in the study (hosts, and the route's host)",
            )
    if claim is None:
        yield None
        return
    run_under_hold(claim, name)
    with hold_device(claim, name) as held:
        yield held
