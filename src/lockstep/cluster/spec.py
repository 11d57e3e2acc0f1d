"""``ClusterSpec``: the workers of a job and their addresses, whichever variables or arguments declare them. Pure."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from lockstep.checks import shown
from lockstep.errors import ClusterError

Task = Literal["worker", "evaluator"]

_EXAMPLE = "for example ClusterSpec(workers=['hosta:20000', 'hostb:20000'], index=0)"
_JOB_ID_LENGTH = 200
_HOST = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_.])?"
_ADDRESS = re.compile(rf"(?:\[(?P<ipv6>[^\]]*:[^\]]*)\]|(?P<host>{_HOST})):(?P<port>[0-9]{{1,5}})")
_NUMBER = "(?:0[xX][0-9A-Fa-f]*|[0-9]+)"
_NUMBERS = re.compile(rf"\.*{_NUMBER}(?:\.+{_NUMBER})*\.*")  # the system takes "0x7f.1" and "127.1" for 127.0.0.1
_BROADCAST = ipaddress.IPv4Address("255.255.255.255")


def parse_address(address: object) -> tuple[str, int]:
    """Host and port of "hosta:20000" or "[fd00::1]:20000", an IPv6 host without its brackets. Looks nothing up.

    Raises ClusterError for what is no text, has no port or one out of range, or an impossible host.
    """
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if match is None or not 1 <= int(match["port"]) <= 65535:
        raise ClusterError(
            f"{shown(address)} is not an address; write a host and a port from 1 to 65535, such as 'hosta:20000' or "
            "'[fd00::1]:20000'"
        )
    host = match["ipv6"] or match["host"]
    if match["ipv6"] or _NUMBERS.fullmatch(host):
        try:
            ip = _ip(host)
        except ValueError as error:
            raise ClusterError(f"{shown(address)} has no IP address before its port ({error}); correct it") from None
        if ip.is_unspecified or ip.is_multicast or ip == _BROADCAST:
            many = "every address of a host, which others cannot reach" if ip.is_unspecified else "many hosts at once"
            raise ClusterError(f"{shown(address)} means {many}; write the address that the others reach it by")
    return host, int(match["port"])


def join_address(host: str, port: int) -> str:
    """The address of a port of a host, with brackets for an IPv6 host: "[fd00::1]:20000"."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def canonical(address: str) -> str:
    """One spelling for equal addresses: host names in lower case, IPv6 in its short form, ports without zeros."""
    host, port = parse_address(address)
    if ":" in host:
        host = str(_ip(host))
    return join_address(host.lower().removesuffix("."), port)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The IP address. IPv4 that is written as IPv6, such as ::ffff:10.0.0.1, is IPv4. Raises ValueError."""
    ip = ipaddress.ip_address(host)
    return (ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None) or ip


def check_addresses(addresses: Mapping[str, str]) -> None:
    """Raises a ClusterError if an address is malformed or two are the same. The keys say where each was declared."""
    places: dict[str, str] = {}
    for place, address in addresses.items():
        try:
            spelling = canonical(address)
        except ClusterError as error:
            raise ClusterError(f"{place}: {error}") from None
        if spelling in places:
            raise ClusterError(f"{places[spelling]} and {place} are both {shown(address)}; give each its own address")
        places[spelling] = place


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """The workers of a job, and which of them this process is.

    Worker 0 is the chief. A cluster is equal on all its workers except for ``index``. So is ``job_id``, which is
    derived from the addresses if none is given.

    Args:
        workers: one address "host:port" per worker, the chief's first; its store listens there. A list is converted to
            a tuple. Launchers that only name the chief leave the others' empty, and a cluster of one needs none.
        index: this process's rank among the workers, from 0; for an evaluator, its rank among the evaluators.
        task: "worker", or "evaluator" for a process beside the training.
        job_id: distinguishes this job's processes from others that find the same address.
        source: where the cluster was declared, for messages: "TF_CONFIG", "torchrun", "SLURM", "Open MPI" and others.
        attempt: how often the job was restarted after a failure.
        store_is_served: whether a launcher serves the store at the chief's address; otherwise worker 0 does.
        noun: what messages call the workers.

    Raises:
        ClusterError: no workers, a malformed or repeated address, an index out of range, or an unknown task.

    Example:
        >>> import lockstep as ls
        >>> cluster = ls.ClusterSpec(workers=["hosta:20000", "hostb:20000"], index=1)
        >>> cluster.name(0), cluster.is_chief
        ('worker 0 (hosta:20000)', False)
    """

    workers: tuple[str, ...]
    index: int
    task: Task = "worker"
    job_id: str = ""
    source: str = "ClusterSpec"
    attempt: int = 0
    store_is_served: bool = False
    noun: str = "worker"

    def __post_init__(self) -> None:
        workers: object = self.workers
        if isinstance(workers, str | bytes) or not isinstance(workers, Iterable):
            raise ClusterError(f"workers={shown(workers)} is not a list of addresses; give one per worker, {_EXAMPLE}")
        object.__setattr__(self, "workers", tuple(workers))
        self._check()
        if not _is_count(self.attempt):
            raise ClusterError(f"attempt={shown(self.attempt)} is not a number of earlier attempts; give 0, 1, ...")
        check_job_id(self.job_id)
        if not self.job_id:
            object.__setattr__(self, "job_id", _derived_job_id(self.workers))

    @property
    def num_workers(self) -> int:
        """The number of processes that train."""
        return len(self.workers)

    @property
    def is_chief(self) -> bool:
        """Whether this process is worker 0, the one that prints, logs and publishes checkpoints."""
        return self.task == "worker" and self.index == 0

    @property
    def chief_address(self) -> tuple[str, int]:
        """The host and the port where the job's store listens.

        Raises:
            ClusterError: a cluster of one without an address.
        """
        if not self.workers[0]:
            raise ClusterError(f"this cluster of one worker names no address; give one, {_EXAMPLE}")
        return parse_address(self.workers[0])

    def host(self, index: int) -> str:
        """The host in a worker's address; empty if a launcher named none."""
        return parse_address(self.workers[index])[0] if self.workers[index] else ""

    def name(self, index: int) -> str:
        """A worker's name in messages: "worker 1 (hostb:20001)", or "worker 1" if its address is not known."""
        return f"{self.noun} {index} ({self.workers[index]})" if self.workers[index] else f"{self.noun} {index}"

    def _check(self) -> None:
        if not self.workers:
            raise ClusterError(f"{self.source}: the cluster has no workers; name every worker's address, {_EXAMPLE}")
        if not self.workers[0] and len(self.workers) > 1:
            raise ClusterError(f"{self.source}: workers[0] is empty, but the others must find the chief; {_EXAMPLE}")
        try:
            check_addresses({f"workers[{i}]": address for i, address in enumerate(self.workers) if address != ""})
        except ClusterError as error:
            raise ClusterError(f"{self.source}: {error}, {_EXAMPLE}") from None
        if self.task not in get_args(Task):
            raise ClusterError(f"{self.source}: task={shown(self.task)} is unknown; choose 'worker' or 'evaluator'")
        last = len(self.workers) - 1
        if not _is_count(self.index) or (self.task == "worker" and self.index > last):
            expected = f"from 0 to {last}, one per worker" if self.task == "worker" else "from 0, one per evaluator"
            raise ClusterError(
                f"{self.source}: index={shown(self.index)} is not a rank in the cluster; give {expected}"
            )


def check_job_id(job_id: object, name: str = "job_id") -> None:
    """Raises a ClusterError unless a job id is at most 200 printable characters. Empty asks for a derived id.

    The id guards against accidents, such as a forgotten process of an older job that finds a newer one's address. It
    does not guard against attackers.
    """
    if not isinstance(job_id, str) or not job_id.isprintable() or len(job_id) > _JOB_ID_LENGTH:
        raise ClusterError(
            f"{name}={shown(job_id)} is not a job id; give 1 to {_JOB_ID_LENGTH} printable characters, such as"
            " 'flowers-17'"
        )


def _derived_job_id(workers: Sequence[str]) -> str:
    """The same id on every worker of a cluster, and another for other addresses or another number of workers."""
    # Workers may have been told one address in two spellings, such as HostA and hosta; the id must be the same.
    addresses = [canonical(address) if address else "" for address in workers]
    return f"cluster-{hashlib.sha256(json.dumps(addresses).encode()).hexdigest()[:16]}"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
