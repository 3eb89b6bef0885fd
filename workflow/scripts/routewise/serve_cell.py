"""A serving cell: what one job asks of one server configuration, and the files that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from routewise.block import Block
from routewise.digest import DigestCache, tree_digest
from routewise.engine import Settings
from routewise.route import Serving


def command_files(serving: Serving, cache: DigestCache | None = None) -> dict[str, str]:
    """Return the digests of the files and folders that a route's command names, by name.

    Those are the words of the command that are files, and all of its ``identity_files``.
    """
    named = [word for word in serving.argv if Path(word).is_file()]
    return {name: tree_digest(Path(name), cache) for name in [*named, *serving.identity_files]}


@dataclass(frozen=True)
class ServeCell:
    """What one job asks of one server configuration.

    ``refused`` names blocks that the route cannot do, with the reason; they are in no row.
    """

    sweep: str
    route: str
    model: str
    variant: str
    prompts: str
    digest: str
    kind: str  # build | command | endpoint
    settings: Settings
    env: dict[str, str]
    serving: Serving
    parallel: int
    blocks: tuple[Block, ...]
    refused: tuple[dict[str, Any], ...]  # {"block": {...}, "reason": "..."}
    n_probs: int
    n_tokens: int | None
    seed: int

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> ServeCell:
        """Read a cell back from the JSON value that :meth:`document` made."""
        return cls(
            **{
                **document,
                "settings": Settings(**document["settings"]),
                "serving": Serving.from_document(document["serving"]),
                "blocks": tuple(Block(**block) for block in document["blocks"]),
                "refused": tuple(document["refused"]),
            }
        )

    def document(self) -> dict[str, Any]:
        """Return the cell as plain values, for JSON."""
        return asdict(self)

    @property
    def name(self) -> str:
        """Return the cell's name for people."""
        return f"{self.sweep} {self.route} {self.model} {self.variant}"


@dataclass(frozen=True)
class ServeInputs:
    """The files that a serving cell is measured from, and the store it is measured through."""

    server: Path | None  # folder of the build's server part; None for other kinds of route
    model: Path
    model_record: dict[str, Any]
    prompts: Path
    store: Path
    logs: Path  # folder of the server's own logs, one a life
    code_digest: str
    planned: dict[str, Any] = field(default_factory=dict)  # by inputs.py, for a later plan to read
