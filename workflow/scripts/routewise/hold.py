"""Holding a route's device for a job: the same for jobs that serve and jobs that replay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from routewise.claim import ClaimSpec, Held, hold_device, run_under_hold, visible_units
from routewise.device import identify_device, kinds_of_units, missing_devices
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


def identify_held(device: str, held: Held | None) -> dict[str, Any]:
    """Return what is known of the units that a job holds; of all where it holds none."""
    return identify_device(device, () if held is None else held.units)


def before_it_is_held(device: str, claim: ClaimSpec | None) -> list[dict[str, Any]]:
    """Return what a job's device may turn out to be once it is held, each kind once.

    A box may have unlike units, and nobody knows which one will be free. Empty where the claim
    could get none: the claim itself then says why.
    """
    if claim is None or device == "cpu":
        return [identify_device(device)]
    try:
        units = visible_units(claim)
    except RoutewiseError:
        return []
    found = identify_device(device, units)
    return [found] if claim.whole else kinds_of_units(found)
