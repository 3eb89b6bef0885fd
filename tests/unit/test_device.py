"""Whether a machine has a device, as far as /dev shows it."""

from __future__ import annotations

from pathlib import Path

import pytest
from routewise.device import TRUSTED, missing_devices


@pytest.fixture(autouse=True)
def nothing_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRUSTED, raising=False)


def test_a_device_without_its_node_is_missing(tmp_path: Path) -> None:
    assert missing_devices(["cuda", "npu"], tmp_path) == {
        "cuda": f"{tmp_path}/nvidiactl or {tmp_path}/nvidia[0-9]*",
        "npu": f"{tmp_path}/accel/accel*",
    }


def test_a_device_with_its_node_is_there(tmp_path: Path) -> None:
    (tmp_path / "accel").mkdir()
    (tmp_path / "accel" / "accel0").touch()
    (tmp_path / "kfd").touch()
    assert missing_devices(["npu", "hrx", "hip"], tmp_path) == {}


def test_processors_and_unknown_devices_are_taken_on_trust(tmp_path: Path) -> None:
    assert missing_devices(["cpu", "remote", "mine"], tmp_path) == {}


def test_a_trusted_device_need_not_show_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRUSTED, "npu, hrx")
    assert list(missing_devices(["npu", "hrx", "cuda"], tmp_path)) == ["cuda"]
