"""The process that has started all processes of a job on this host, as a name that these can agree on.

Hydra, the launcher of MPICH and Intel MPI, gives its processes no id of the job. What they have in common is an
ancestor: mpirun's proxy. A shell script may stand between it and the program.
"""

from __future__ import annotations

import os
from pathlib import Path


def launcher_process(variable: str) -> str | None:
    """The nearest ancestor of this process that does not have ``variable``, which its launcher sets in each of them.

    Returns:
        Its number and when it was started, which no other process of this host has; None if it cannot be seen, as in
        a container that has only this process.
    """
    pid = os.getppid()
    while pid > 0:
        process = Path(f"/proc/{pid}")
        try:
            if not _has(process, variable):
                # The kernel gives the number of a process to a later one, so it is told apart by its start as well.
                return f"{pid}.{_status(process)[_STARTED]}"
            pid = int(_status(process)[_PARENT])
        # A parent may end between two reads; its children then belong to another process.
        except (FileNotFoundError, ProcessLookupError):
            return None
    return None


# Fields of /proc/PID/stat after the name in parentheses, which may contain spaces itself (proc(5), from field 3 on).
_PARENT, _STARTED = 4 - 3, 22 - 3


def _has(process: Path, variable: str) -> bool:
    """Whether a process was started with a variable. Another user's process cannot be asked, and is none of the job."""
    try:
        variables = (process / "environ").read_bytes().split(b"\0")
    except PermissionError:
        return False
    return any(variable_text.startswith(f"{variable}=".encode()) for variable_text in variables)


def _status(process: Path) -> list[str]:
    return (process / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
