"""The cluster of the tests: its configuration, what it needs, and that nothing of it is left."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from . import slurm as cluster
from .conftest import REQUIRED, do_without
from .slurm import NODES, Slurm, what_is_left, what_is_missing


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "PROGRAMS", ("sh", "no-such-program"))
    assert what_is_missing() == "these programs are missing: no-such-program"
    monkeypatch.setattr(cluster, "PROGRAMS", ("sh",))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert what_is_missing() == "it takes root"


def test_a_cluster_that_is_missing_skips_or_fails_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match="it takes root"):
        do_without("it takes root")
    monkeypatch.setenv(REQUIRED, "required")
    with pytest.raises(pytest.fail.Exception, match="it takes root"):
        do_without("it takes root")


def test_nodes_have_names_and_devices_of_their_own(slurm: Slurm) -> None:
    assert set(slurm.states()) == {node.name for node in NODES}
    assert what_is_left() != []  # it sees what is there
    for node in NODES:
        said = cluster.ask("srun", f"--nodelist={node.name}", "hostname").strip()
        assert said == node.name
        shown = cluster.ask("scontrol", "show", "node", node.name)
        assert re.search(rf"Gres={node.device}:1\b", shown), shown


def test_what_lay_in_the_folder_is_put_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cluster, "ETC", tmp_path)
    kept = tmp_path / f"slurm.conf{cluster.KEPT}"
    kept.write_text("the site's own")
    (tmp_path / "slurm.conf").write_text(f"{cluster.MARK}\nClusterName=routewise\n")
    (tmp_path / "gres.conf").write_text(f"{cluster.MARK}\nAutoDetect=off\n")
    assert str(tmp_path / "gres.conf") in what_is_left()
    for _ in range(2):  # a second time does nothing
        cluster.restore_configuration()
        assert {path.name for path in tmp_path.iterdir()} == {"slurm.conf"}
        assert (tmp_path / "slurm.conf").read_text() == "the site's own"
