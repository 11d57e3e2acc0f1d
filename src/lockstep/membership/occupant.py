"""Which process of this machine listens at a port, as far as this one may know; for messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_LISTENING = "0A"
_LONGEST_COMMAND = 80


def describe_occupant(port: int, proc: Path = Path("/proc")) -> str:
    """ "process 4242 (python train.py)", or an empty text where it is another user's, or the machine has no /proc."""
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port, proc)}
    for process in sorted(proc.glob("[0-9]*")) if sockets else ():
        if any(link in sockets for link in _open_files(process)):
            return f"process {process.name}{_command(process)}"
    return ""


def _listening_inodes(port: int, proc: Path) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]


def _open_files(process: Path) -> Iterator[str]:
    try:
        for file in (process / "fd").iterdir():
            yield str(file.readlink())
    except OSError:  # it has ended, or is another user's
        return


def _command(process: Path) -> str:
    try:
        words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
    return f" ({words[:_LONGEST_COMMAND]})" if words else ""
