"""Addresses of this machine, and the cluster that the environment declares. Looks names up, and sends nothing."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from lockstep.cluster.environment import cluster_from_environment
from lockstep.cluster.spec import ClusterSpec
from lockstep.errors import ClusterError
from lockstep_tools.doctor.section import Fact, Section, Trouble

_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
_ELSEWHERE = "192.0.2.1"  # RFC 5737: an address of nobody; connecting a UDP socket looks up the route and sends nothing
_CLUSTER = (
    *("TF_CONFIG", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"),
    *("LOCKSTEP_JOB_ID", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
    *("PMIX_RANK", "CLUSTER_SPEC", "SM_HOSTS", "VC_TASK_INDEX"),
)
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_DEBUG")


def examine_network(environment: Mapping[str, str] = os.environ) -> Section:
    """The probe."""
    host, outward = socket.gethostname(), local_address(_ELSEWHERE)
    facts = [
        Fact("host", f"{host}, which is {', '.join(look_up(host)) or 'not known to the name service'}", private=True),
        Fact("interfaces", ", ".join(name for _, name in socket.if_nameindex())),
        *(Fact(f"  {name}", ", ".join(addresses), private=True) for name, addresses in interface_addresses().items()),
        Fact("to other hosts", f"workers use {outward}" if outward else "no route", private=True),
        Fact("on this host", "workers use 127.0.0.1"),
        Fact("cluster variables", ", ".join(name for name in _CLUSTER if environment.get(name)) or "none is set"),
        *(Fact(name, environment[name]) for name in _INTERFACES if environment.get(name)),
    ]
    try:
        cluster = cluster_from_environment(environment)
    except ClusterError as error:
        wrong = "The variables of the cluster cannot be used"
        trouble = Trouble(f"{wrong}: {error}.", public=f"{wrong}.")
        return Section(title="network", facts=[*facts, Fact("cluster", "malformed")], troubles=[trouble])
    return Section(
        title="network",
        facts=[*facts, *_cluster_facts(cluster)],
        troubles=() if cluster is None else tuple(cluster_troubles(cluster)),
    )


def _cluster_facts(cluster: ClusterSpec | None) -> Iterator[Fact]:
    if cluster is None:
        yield Fact("cluster", "none is declared; a program trains alone, or lockstep run starts its workers")
        return
    yield Fact(
        "cluster", f"{cluster.task} {cluster.index} of {cluster.num_workers} workers, declared by {cluster.source}"
    )
    yield Fact("workers", ", ".join(address or "(not named)" for address in cluster.workers), private=True)
    if any(cluster.workers):
        address = local_address(cluster.chief_address[0])
        yield Fact("to the chief", f"this worker uses {address}" if address else "no route", private=True)


def cluster_troubles(cluster: ClusterSpec) -> Iterator[Trouble]:
    """What keeps workers of several hosts apart."""
    hosts = {cluster.host(index) for index in range(cluster.num_workers)} - {""}
    for name in sorted(hosts):
        addresses = look_up(name)
        if not addresses:
            yield Trouble(
                f"The host {name!r} of the cluster cannot be looked up here. Give its address, or write it into "
                "/etc/hosts.",
                public="A host of the cluster cannot be looked up.",
            )
        elif len(hosts) > 1 and all(ipaddress.ip_address(address).is_loopback for address in addresses):
            yield Trouble(
                f"The host {name!r} of the cluster is {addresses[0]} here, an address that no other host can reach. "
                "Debian writes it into /etc/hosts; give the host's address in the network instead.",
                public="A host of the cluster is a loopback address.",
            )


def look_up(host: str) -> list[str]:
    """The addresses of a host; empty if it is not known."""
    try:
        answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        return []
    # Without the zone of a link-local address, such as "%eth0", which names an interface of this machine alone.
    return list(dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in answers))


def local_address(host: str) -> str | None:
    """The address of this machine from which packets to a host are sent; None without a route."""
    for address in look_up(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                # Port 9 (discard); a UDP socket that connects only chooses its route and address, and sends no packet.
                probe.connect((address, 9))
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return None


def interface_addresses() -> dict[str, list[str]]:
    """Name of each network interface -> its addresses."""
    addresses: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in addresses:
            try:
                # The standard library lists interfaces and not their addresses; netdevice(7): the name in, the address
                # at byte 20.
                answer = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError:  # has none
                continue
            addresses[name].append(socket.inet_ntoa(answer[20:24]))
    table = Path("/proc/net/if_inet6")
    for line in table.read_text(encoding="ascii").splitlines() if table.exists() else ():
        digits, *_, name = line.split()
        addresses.setdefault(name, []).append(str(ipaddress.IPv6Address(bytes.fromhex(digits))))
    return {name: listed or ["no address"] for name, listed in addresses.items()}
