"""Whether a machine has a device, as far as /dev shows it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from routewise.device import TRUSTED, missing_devices, read_state


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


SMI = """#!/bin/sh
echo "$*" > {folder}/asked
printf '1980, 3201, 412.50, 700.00, P0, 41\\n345, [N/A], 70.1, [Not Supported], P8, 30\\n'
"""


def test_clocks_and_power_of_each_gpu_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(SMI.format(folder=tmp_path))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    states = read_state("cuda", ("0", "1"))
    assert states is not None
    first, second = states
    assert first == {
        "sm_clock_mhz": 1980.0,
        "memory_clock_mhz": 3201.0,
        "power_w": 412.5,
        "power_limit_w": 700.0,
        "performance_state": "P0",
        "temperature_c": 41.0,
    }
    assert second["memory_clock_mhz"] is None
    assert second["power_limit_w"] is None
    assert (tmp_path / "asked").read_text().split()[-2:] == ["--id", "0,1"]
    assert read_state("cpu") is None


def test_without_the_tool_or_with_a_failing_one_there_is_no_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_state("cuda") is None
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexit 9\n")
    tool.chmod(0o755)
    assert read_state("cuda") is None
