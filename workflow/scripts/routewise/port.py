"""TCP ports of this machine: a free one, who listens, and what a process has mapped and opened."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from pathlib import Path

# states in /proc/net/tcp
_LISTENING = "0A"
_FADING = "06"


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that nobody holds at this moment. Another may take it before it is used."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def is_port_free(host: str, port: int) -> bool:
    """Return whether nobody holds a port.

    Connections that fade do not count: they keep a port from being bound for a minute where the
    server was written without SO_REUSEADDR, but belong to no process any more.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            states = {state for state, _ in _sockets(port)}
            return states == {_FADING}
        return True


def listening_inodes(port: int) -> set[str]:
    """Return the inodes of all sockets that listen on a port, of whatever process."""
    return {inode for state, inode in _sockets(port) if state == _LISTENING}


def _sockets(port: int) -> list[tuple[str, str]]:
    """Return state and inode of every socket whose own end is the port."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:  # without IPv6 there is no second one
            continue
        for line in lines:
            fields = line.split()
            if int(fields[1].rpartition(":")[2], 16) == port:
                found.append((fields[3], fields[9]))
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
