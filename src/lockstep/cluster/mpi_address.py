"""Where process 0 of an MPI job is, as MPI itself tells: for jobs on several hosts, whose variables name no host.

MPI is asked through mpi4py, where that is installed. Process 0 sends its address, a free port of its own, and a name
for the job to all others, in one broadcast.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from lockstep.cluster.spec import join_address
from lockstep.errors import ClusterError

_MESSAGE_BYTES = 512
_TIMEOUT_S = 600.0
_POLL_S = 0.01
_ELSEWHERE = ("192.0.2.1", 9)  # an address of RFC 5737, which no host has; nothing is sent to it


_ADDRESS = "give MASTER_ADDR and MASTER_PORT to all processes"


@dataclass(frozen=True, kw_only=True)
class MpiJob:
    """What process 0 has told all processes.

    Args:
        chief: the address of its store.
        job: distinguishes this job from all others.
    """

    chief: str
    job: str


@cache  # a broadcast of all processes; a second strategy must not begin another
def ask_mpi(index: int, size: int) -> MpiJob | None:
    """What process 0 of MPI's job tells the others; None without mpi4py. Every process of the job must call it.

    Raises ClusterError if MPI numbers this process in another way than its launcher's variables, as where mpi4py uses
    another MPI than mpirun's, and if process 0 says nothing for ten minutes.
    """
    if find_spec("mpi4py") is None:
        return None
    try:
        mpi = import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:  # the second for a MPI4PY_LIBMPI that is none
        raise ClusterError(
            "no variable names the host of process 0, and mpi4py, which could ask MPI for it, finds no MPI library "
            f"({' '.join(str(error).split())}); set MPI4PY_LIBMPI to mpirun's or {_ADDRESS}"
        ) from error
    world = mpi.COMM_WORLD
    if (world.rank, world.size) != (index, size):
        raise ClusterError(
            f"mpirun makes this process {index} of {size}, and mpi4py {world.rank} of {world.size}, since it uses "
            f"another MPI ({_library(mpi)}); set MPI4PY_LIBMPI to mpirun's or {_ADDRESS}"
        )
    buffer = bytearray(_MESSAGE_BYTES)
    if index == 0:
        host = _own_address()
        text = json.dumps({"chief": join_address(host, _free_port(host)), "job": secrets.token_hex(8)}).encode()
        buffer[: len(text)] = text
    _wait(world.Ibcast([buffer, mpi.BYTE], root=0))
    return MpiJob(**json.loads(buffer.rstrip(b"\0")))


def _library(mpi: Any) -> str:
    return str(mpi.Get_library_version()).partition(",")[0].strip()


def _wait(request: Any) -> None:
    # Not ``Wait``, which never returns if process 0 has ended.
    until = time.monotonic() + _TIMEOUT_S
    while not request.Test():
        if time.monotonic() > until:
            raise ClusterError(
                f"process 0 of the MPI job told no address in {_TIMEOUT_S:g} s; look at its output, or {_ADDRESS}"
            )
        time.sleep(_POLL_S)


def _own_address() -> str:
    """An address of this host by which others reach it; a loopback address where there is no other."""
    addresses = [*_addresses()]
    return next((address for address in addresses if not address.startswith("127.")), addresses[-1])


def _addresses() -> Iterator[str]:
    with suppress(socket.gaierror):
        yield from (str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), 0, socket.AF_INET))
    # Many systems give the host's name a loopback address. Connecting a datagram socket sends nothing: it asks the
    # system by which of its addresses it would reach another host.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)
            yield str(probe.getsockname()[0])
        except OSError:  # no network but its own
            yield "127.0.0.1"


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as server:
        port: int = server.getsockname()[1]
        return port
