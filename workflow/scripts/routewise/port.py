"""TCP ports of this machine: a free one, who listens, and what a process has mapped and opened."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from pathlib import Path

_LISTENING = "0A"  # the state in /proc/net/tcp


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that nobody holds at this moment. Another may take it before it is used."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def is_port_free(host: str, port: int) -> bool:
    """Return whether a server could bind the port: connections that still fade do not matter."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def listening_inodes(port: int) -> set[str]:
    """Return the inodes of all sockets that listen on a port, of whatever process."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(fields[9])
    return found


def socket_inodes(pid: int) -> set[str]:
    """Return the inodes of a process's sockets; none where it is gone."""
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{entry}"))
                if match:
                    found.add(match[1])
    return found


def mapped_files(pid: int) -> list[Path]:
    """Return the libraries that a process has mapped, sorted. Raises OSError where it is gone."""
    found = set()
    with Path(f"/proc/{pid}/maps").open() as maps:
        for line in maps:
            name = "/" + line.rstrip("\n").partition("/")[2]
            if re.search(r"/lib[^/]*\.so[^/]*$", name):
                found.add(Path(name))
    return sorted(found)
