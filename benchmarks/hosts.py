"""Two hosts on one machine: network namespaces joined by one link of a given rate, each with its part of the cores.

    host 0: cores 0 .. n/2   10.83.0.1 --- veth, tc tbf on both ends --- 10.83.0.2   host 1: cores n/2 .. n

Needs root, or CAP_NET_ADMIN and CAP_SYS_ADMIN, and iproute2. Nothing outside the namespaces is touched: what is in them
cannot reach anything but each other, and they are gone when the block ends. Those of a run that was killed are removed
by the next one.
"""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from lockstep.errors import ConfigError, ReplicaError

_NAMESPACES = Path("/run/netns")
_ADDRESSES = ("10.83.0.1", "10.83.0.2")
_PREFIX_BITS = 24
_COMMAND_LIMIT_S = 20.0
_CLONE_NEWNET = 0x40000000
_STEM = "lockstep-bench-"
_numbers = count()


@dataclass(frozen=True, kw_only=True)
class Link:
    """What joins two hosts."""

    mbit: float  # megabits (10**6 bits) a second in each direction

    def __post_init__(self) -> None:
        if not 0 < self.mbit < math.inf:
            raise ConfigError(f"link_mbit={self.mbit} was given, expected a finite number above 0")

    @property
    def text(self) -> str:
        """Such as "1000 Mbit/s"."""
        return f"{self.mbit:g} Mbit/s"


@dataclass(frozen=True, kw_only=True)
class Host:
    """One of two hosts."""

    namespace: str  # the name of its network namespace
    interface: str  # its end of the link
    address: str  # of that end
    cores: tuple[int, ...]  # the CPU cores that its processes run on

    def enter(self) -> None:
        """Moves the calling thread, and the threads that it starts from then on, to this host. There is no way back.

        torch's gloo gets the interface as its users give it: by its environment variable.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        with (_NAMESPACES / self.namespace).open("rb") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise ReplicaError(f"host {self.namespace} cannot be entered: {os.strerror(ctypes.get_errno())}")
        os.sched_setaffinity(0, self.cores)
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface


def divide_cores(cores: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The cores of each host: one half each; a single core is shared.

    Example:
        >>> divide_cores([0, 1, 2])
        ((0, 1), (2,))
    """
    half = (len(cores) + 1) // 2
    return tuple(cores[:half]), tuple(cores[half:] or cores[:half])


@contextmanager
def two_hosts(link: Link) -> Iterator[tuple[Host, Host]]:
    """Makes the hosts, and removes them at the end of the block, after errors too.

    Raises:
        ReplicaError: they cannot be made here; it says why.
    """
    if shutil.which("ip") is None or shutil.which("tc") is None:
        raise ReplicaError("hosts are made with ip and tc, which are not installed; install iproute2")
    _remove_abandoned()
    stem = f"{_STEM}{os.getpid()}x{next(_numbers)}"
    parts = divide_cores(sorted(os.sched_getaffinity(0)))
    hosts = tuple(
        Host(namespace=f"{stem}h{index}", interface=f"link{index}", address=address, cores=cores)
        for index, (address, cores) in enumerate(zip(_ADDRESSES, parts, strict=True))
    )
    with ExitStack() as made:
        for host in hosts:
            _run("ip", "netns", "add", host.namespace)
            made.callback(_run, "ip", "netns", "del", host.namespace)
        _join(hosts[0], hosts[1], link)
        yield hosts[0], hosts[1]


def why_no_hosts() -> str:
    """Why hosts cannot be made on this machine; empty where they can: two are made and removed."""
    try:
        with two_hosts(Link(mbit=1000.0)):
            return ""
    except ReplicaError as error:
        return str(error)


def _remove_abandoned() -> None:
    """Removes the hosts whose maker is no longer there: it was killed."""
    for path in sorted(_NAMESPACES.glob(f"{_STEM}*x*")):
        maker = path.name.removeprefix(_STEM).partition("x")[0]
        if not Path("/proc", maker).exists():
            _run("ip", "netns", "del", path.name)


def _join(one: Host, other: Host, link: Link) -> None:
    ends = [
        ["name", one.interface, "netns", one.namespace],
        ["peer", "name", other.interface, "netns", other.namespace],
    ]
    _run("ip", "link", "add", *ends[0], "type", "veth", *ends[1])
    for host in (one, other):
        _run("ip", "-n", host.namespace, "address", "add", f"{host.address}/{_PREFIX_BITS}", "dev", host.interface)
        for interface in ("lo", host.interface):
            _run("ip", "-n", host.namespace, "link", "set", interface, "up")
        # 1 ms of the rate may go at once; the queue holds what a network card's would.
        burst = max(64 * 1024, int(link.mbit * 1000 / 8))
        rate = ["rate", f"{link.mbit:g}mbit", "burst", str(burst), "latency", "50ms"]
        _run("tc", "-n", host.namespace, "qdisc", "add", "dev", host.interface, "root", "tbf", *rate)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_LIMIT_S, check=False)
    if done.returncode:
        output = (done.stderr or done.stdout).strip().splitlines() or ["it printed nothing"]
        raise ReplicaError(f"`{' '.join(command)}` failed: {output[-1]}; making hosts needs root")
