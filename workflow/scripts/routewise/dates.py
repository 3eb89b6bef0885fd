"""Files dated ahead of this host's clock, as a host whose clock is fast leaves them.

Snakemake fails a job, and removes what it made, where the output is dated before an input. What a
file holds is known by digests here, so that its date may be set to what it can be at most: now.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path


def pull_back(paths: Iterable[Path], now_s: float | None = None) -> dict[Path, float]:
    """Date files that lie ahead of ``now_s`` (seconds since 1970) to it; return by how much (s).

    All get one date, and those of the past keep theirs: none becomes newer than another that it
    was not newer than before. A link is dated itself, never the file that it names; what is not
    there, or is another user's, stays as it is.
    """
    now_s = time.time() if now_s is None else now_s
    ahead_s = {}
    for path in paths:
        try:
            over_s = path.lstat().st_mtime - now_s
            if over_s > 0:
                os.utime(path, (now_s, now_s), follow_symlinks=False)
                ahead_s[path] = over_s
        except OSError:
            continue
    return ahead_s
