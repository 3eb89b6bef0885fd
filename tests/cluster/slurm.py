"""A Slurm cluster on this machine: a controller here, and two nodes in network namespaces.

Each node has a slurmd, a network and a host name of its own; the file system is shared, as on a
real cluster. Devices are character files that do nothing. slurm.conf must lie in /etc/slurm (a job
step of the executor plugin drops ``SLURM_CONF``): what lies there is kept and put back.

By hand, until Ctrl-C: ``python tests/cluster/slurm.py``. Needs root, and on Debian the packages
slurmctld, slurmd, slurm-client, munge and slurm-wlm-basic-plugins.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: Sockets, logs and device files; fixed, so that what a killed run left is found and taken down.
STATE = Path("/run/routewise-test-slurm")
LOCK = Path("/run/routewise-test-slurm.lock")
ETC = Path("/etc/slurm")
CONFIGURATION = ("slurm.conf", "gres.conf", "cgroup.conf")
KEPT = ".kept-by-routewise-tests"
MARK = "# made by the tests of Routewise, and removed by them"
BRIDGE = "rwbridge"
CONTROLLER_ADDRESS = "10.213.77.1"
PROGRAMS = (
    *("slurmctld", "slurmd", "munged"),
    *("sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo"),
    *("ip", "nsenter", "unshare"),
)
START_LIMIT_S = 60.0


@dataclass(frozen=True)
class Node:
    """A node: its host name, address, partitions, and the kind of device that it has one of."""

    name: str
    address: str
    partitions: tuple[str, ...]
    device: str

    @property
    def network(self) -> Path:
        return Path("/run/netns") / self.name

    @property
    def device_file(self) -> Path:
        return STATE / f"{self.name}-{self.device}0"


NODES = (
    Node("rwone", "10.213.77.2", ("cpus", "everything"), "npu"),
    Node("rwtwo", "10.213.77.3", ("everything",), "gpu"),
)


def what_is_missing() -> str | None:
    """Say why no cluster can be brought up on this machine; None where one can."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        return f"these programs are missing: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "it takes root"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "true"], capture_output=True, text=True, check=False
    )
    if tried.returncode != 0:
        return f"no network namespace can be made: {tried.stderr.strip()}"
    return None


def ask(*command: str) -> str:
    """Return what a command prints; AssertionError with its complaint where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}{done.stdout}"
    return done.stdout


def processes_in(network: Path) -> list[int]:
    """Return the processes that live in a network namespace."""
    try:
        wanted = network.stat().st_ino
    except FileNotFoundError:
        return []
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (entry / "ns/net").stat().st_ino == wanted and not _is_zombie(entry):
                    found.append(int(entry.name))
    return found


def _is_zombie(entry: Path) -> bool:
    return (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"


class Slurm:
    """The running cluster."""

    def __init__(self) -> None:
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *command: str) -> None:
        """Start a daemon in the foreground, in a session of its own."""
        with (STATE / f"{name}.out").open("ab") as out:
            self.daemons[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=_daemon_environment(),
                cwd="/",
            )
        with (STATE / "pids").open("a") as pids:
            pids.write(f"{self.daemons[name].pid} {name}\n")

    def start_node(self, node: Node) -> None:
        """Start a node's slurmd, with the node's own host name and network."""
        slurmd = shutil.which("slurmd", path="/usr/sbin:/sbin:/usr/bin") or "slurmd"
        # not `ip netns exec`, which hides the cgroup mount from slurmd
        self.start(
            node.name,
            *("nsenter", f"--net={node.network}", "unshare", "--uts", "sh", "-c"),
            f"hostname {node.name}; exec {slurmd} -D",
        )

    def lose_node(self, node: Node) -> None:
        """Kill all that runs on a node, and have the controller know that it is gone."""
        while alive := processes_in(node.network):
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.daemons[node.name].poll()
            time.sleep(0.05)
        self.daemons.pop(node.name).wait()
        ask("scontrol", "update", f"nodename={node.name}", "state=down", "reason=lost")

    def bring_back(self, node: Node) -> None:
        """Start a lost node again and wait until it takes jobs."""
        self.start_node(node)
        ask("scontrol", "update", f"nodename={node.name}", "state=resume")
        self.wait_until_idle()

    def states(self) -> dict[str, str]:
        """Return the state of each node, as sinfo says it (``idle``, ``mixed``, ``down``, …)."""
        lines = ask("sinfo", "-h", "-N", "-o", "%N %T").splitlines()
        return dict(line.split() for line in lines)

    def jobs(self) -> list[dict[str, str]]:
        """Return all jobs that the controller remembers, as scontrol shows them."""
        lines = ask("scontrol", "show", "job", "-o").splitlines()
        found = [
            dict(word.split("=", 1) for word in line.split() if "=" in word)
            for line in lines
            if line.startswith("JobId=")
        ]
        return found

    def cancel_all(self) -> None:
        """Cancel what is queued or runs, and wait until it has ended."""
        ask("scancel", "--user", "root")
        deadline = time.monotonic() + START_LIMIT_S
        while ask("squeue", "-h").strip():
            assert time.monotonic() < deadline, ask("squeue")
            time.sleep(0.2)

    def wait_until_idle(self) -> None:
        """Wait until every node takes jobs."""
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            with contextlib.suppress(AssertionError):
                states = self.states()
                if len(states) == len(NODES) and set(states.values()) == {"idle"}:
                    return
            assert time.monotonic() < deadline, f"Slurm did not come up\n{self.said()}"
            time.sleep(0.1)

    def said(self) -> str:
        """Return the ends of all logs."""
        logs = sorted([*STATE.glob("*.log"), *STATE.glob("*.out")])
        return "\n".join(f"== {path}\n{path.read_text(errors='replace')[-3000:]}" for path in logs)


@contextlib.contextmanager
def slurm_cluster() -> Iterator[Slurm]:
    """Bring the cluster up, and take all of it down again, whatever happens.

    AssertionError where it does not come up, or leaves something. One at a time on a machine: a
    second one waits.
    """
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        take_down()  # what a killed run left
        slurm = Slurm()
        try:
            _bring_up(slurm)
            yield slurm
        finally:
            take_down()
            for process in slurm.daemons.values():
                process.wait()
        assert what_is_left() == []


def _bring_up(slurm: Slurm) -> None:
    STATE.mkdir(mode=0o755)
    _write_configuration()
    ask("ip", "link", "add", BRIDGE, "type", "bridge")
    ask("ip", "address", "add", f"{CONTROLLER_ADDRESS}/24", "dev", BRIDGE)
    ask("ip", "link", "set", BRIDGE, "up")
    for node in NODES:
        outer, inner = f"{node.name}-o", f"{node.name}-i"
        ask("ip", "netns", "add", node.name)
        ask("ip", "link", "add", outer, "type", "veth", "peer", "name", inner)
        ask("ip", "link", "set", outer, "master", BRIDGE, "up")
        ask("ip", "link", "set", inner, "netns", node.name)
        ask("ip", "-n", node.name, "address", "add", f"{node.address}/24", "dev", inner)
        for device in ("lo", inner):
            ask("ip", "-n", node.name, "link", "set", device, "up")
        os.mknod(node.device_file, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    key = STATE / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    munge = {
        "key-file": key,
        "socket": STATE / "munge.socket",
        "pid-file": STATE / "munge.pid",
        "log-file": STATE / "munge.log",
        "seed-file": STATE / "munge.seed",
    }
    options = [f"--{name}={path}" for name, path in munge.items()]
    slurm.start("munged", "munged", "--foreground", "--force", *options)
    deadline = time.monotonic() + START_LIMIT_S
    while not munge["socket"].is_socket():
        assert time.monotonic() < deadline, slurm.said()
        time.sleep(0.05)
    slurm.start("slurmctld", "slurmctld", "-D", "-c")
    for node in NODES:
        slurm.start_node(node)
    slurm.wait_until_idle()


def _write_configuration() -> None:
    ETC.mkdir(exist_ok=True)
    (STATE / "state").mkdir()
    for name, text in configuration().items():
        if (ETC / name).exists():
            os.replace(ETC / name, ETC / f"{name}{KEPT}")
        (ETC / name).write_text(f"{MARK}\n{text}")


def restore_configuration() -> None:
    """Put back what lay in /etc/slurm; also after a kill and a reboot, for it is kept there."""
    for name in CONFIGURATION:
        ours, kept = ETC / name, ETC / f"{name}{KEPT}"
        if ours.exists() and ours.read_text().startswith(MARK):
            ours.unlink()
        if kept.exists() and not ours.exists():
            os.replace(kept, ours)


def configuration() -> dict[str, str]:
    """Return the text of each configuration file."""
    partitions = dict.fromkeys(name for node in NODES for name in node.partitions)
    slurm = [
        "ClusterName=routewise",
        f"SlurmctldHost={socket.gethostname().split('.')[0]}({CONTROLLER_ADDRESS})",
        "SlurmUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={STATE}/munge.socket",
        f"StateSaveLocation={STATE}/state",
        f"SlurmdSpoolDir={STATE}/spool-%n",
        f"SlurmctldPidFile={STATE}/slurmctld.pid",
        f"SlurmdPidFile={STATE}/slurmd-%n.pid",
        f"SlurmctldLogFile={STATE}/slurmctld.log",
        f"SlurmdLogFile={STATE}/slurmd-%n.log",
        # ports of its own, beside a cluster that this machine may belong to
        "SlurmctldPort=16817",
        "SlurmdPort=16818",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/none",
        "AccountingStorageType=accounting_storage/none",
        "SelectType=select/cons_tres",
        "SlurmdParameters=config_overrides",  # more cores than there are
        "MinJobAge=300",
        "MpiDefault=none",
        "ReturnToService=2",
        "KillWait=10",
        "SchedulerParameters=batch_sched_delay=0,sched_min_interval=0",
        "GresTypes=" + ",".join(sorted({node.device for node in NODES})),
    ]
    slurm += [
        f"NodeName={node.name} NodeAddr={node.address} CPUs=16 RealMemory=100000"
        f" Gres={node.device}:1 State=UNKNOWN"
        for node in NODES
    ]
    for name in partitions:
        members = ",".join(node.name for node in NODES if name in node.partitions)
        default = "YES" if name == "everything" else "NO"
        slurm.append(f"PartitionName={name} Nodes={members} Default={default} State=UP")
    gres = ["AutoDetect=off"]
    gres += [f"NodeName={node.name} Name={node.device} File={node.device_file}" for node in NODES]
    return {
        "slurm.conf": "\n".join(slurm) + "\n",
        "gres.conf": "\n".join(gres) + "\n",
        "cgroup.conf": "CgroupPlugin=autodetect\n",
    }


def _daemon_environment() -> dict[str, str]:
    # a daemon gives its environment to nobody, and must not be taken for a part of the test
    return {"PATH": os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])}


def take_down() -> None:
    """End every process and remove every file, namespace and link of the cluster."""
    with contextlib.suppress(FileNotFoundError):
        for line in reversed((STATE / "pids").read_text().splitlines()):
            number, name = line.split()
            _end(int(number), name)
    for node in NODES:
        deadline = time.monotonic() + START_LIMIT_S
        while alive := processes_in(node.network):
            assert time.monotonic() < deadline, f"{node.name}: {alive} cannot be killed"
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        if node.network.exists():
            ask("ip", "netns", "delete", node.name)
    links = ask("ip", "-o", "link")
    for name in (BRIDGE, *(f"{node.name}-o" for node in NODES)):
        if f" {name}:" in links or f" {name}@" in links:
            subprocess.run(["ip", "link", "delete", name], capture_output=True, check=False)
    restore_configuration()
    shutil.rmtree(STATE, ignore_errors=True)


def _end(pid: int, name: str) -> None:
    """Kill a daemon if the number is still its own."""
    program = "slurmd" if any(node.name == name for node in NODES) else name
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if program.encode() in command:
            os.kill(pid, signal.SIGKILL)


def what_is_left() -> list[str]:
    """Name what of the cluster is still there; empty after it was taken down."""
    left = [str(path) for path in (STATE, *(node.network for node in NODES)) if path.exists()]
    if BRIDGE in ask("ip", "-o", "link"):
        left.append(BRIDGE)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes().split(b"\0")
                name = Path(command[0].decode(errors="replace")).name
                if name in ("slurmctld", "slurmd", "slurmstepd:", "slurmstepd"):
                    left.append(f"{entry.name}: {name}")
    for name in CONFIGURATION:
        if (ETC / name).exists() and (ETC / name).read_text().startswith(MARK):
            left.append(str(ETC / name))
        if (ETC / f"{name}{KEPT}").exists():
            left.append(f"{ETC / name}{KEPT}")
    return left


if __name__ == "__main__":
    if reason := what_is_missing():
        sys.exit(f"no cluster here: {reason}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with slurm_cluster() as running:
        print(running.states(), flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
