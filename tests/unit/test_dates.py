"""Files dated ahead of the clock are dated to it, and nothing else is touched."""

from __future__ import annotations

import os
from pathlib import Path

from routewise.dates import pull_back

NOW_S = 1_800_000_000.0


def dated(path: Path, seconds: float) -> Path:
    if not path.is_symlink():
        path.write_text(path.name)
    os.utime(path, (NOW_S + seconds, NOW_S + seconds), follow_symlinks=False)
    return path


def test_what_is_ahead_is_dated_to_now_and_the_past_stays(tmp_path: Path) -> None:
    ahead = [dated(tmp_path / "a", 600), dated(tmp_path / "b", 90_000)]
    past = dated(tmp_path / "c", -600)
    found = pull_back([*ahead, past, tmp_path / "not there"], NOW_S)
    assert found == {ahead[0]: 600.0, ahead[1]: 90_000.0}
    assert [path.stat().st_mtime for path in ahead] == [NOW_S, NOW_S]
    assert past.stat().st_mtime == NOW_S - 600
    assert pull_back([*ahead, past], NOW_S) == {}


def test_a_link_is_dated_and_not_the_users_file(tmp_path: Path) -> None:
    file = dated(tmp_path / "model.gguf", 600)
    link = tmp_path / "link"
    link.symlink_to(file)
    dated(link, 600)
    assert list(pull_back([link], NOW_S)) == [link]
    assert file.stat().st_mtime == NOW_S + 600
    assert link.lstat().st_mtime == NOW_S
