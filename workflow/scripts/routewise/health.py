"""What a server's health address means: a fact of its route, known before there is a server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Health:
    """What a route's health address means.

    ``path`` is None where a route has no such address: then the tiny completion alone decides.
    ``ready`` are the HTTP statuses that say 'loaded'; ``alive`` those that are no sign of trouble
    later on (one engine says 503 whenever it is idle).
    """

    path: str | None = "/health"
    ready: tuple[int, ...] = (200,)
    alive: tuple[int, ...] = (200, 503)


#: llama-server's.
USUAL = Health()
