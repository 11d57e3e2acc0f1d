"""The address of a worker, "host:port". Pure: no name is looked up."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping

from lockstep.errors import ClusterError

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
_NUMBERS = re.compile(r"[0-9.]+")
_SHOWN_LENGTH = 120


def shown(value: object) -> str:
    """A received value as messages show it: on one line, and cut if it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN_LENGTH else f"{text[:_SHOWN_LENGTH]}..."


def parse_address(address: object) -> tuple[str, int]:
    """Host and port of "hosta:20000" or "[fd00::1]:20000"; an IPv6 host comes without its brackets.

    Raises:
        ClusterError: not text, no port, a port out of range, or an impossible host.
    """
    if not isinstance(address, str):
        raise ClusterError(f"{shown(address)} is no address; write text such as 'hosta:20000'")
    if "://" in address or "/" in address:
        raise ClusterError(f"{shown(address)} looks like a URL; write host and port alone, such as 'hosta:20000'")
    host, colon, port = address.rpartition(":")
    if not colon or not host:
        raise ClusterError(f"{shown(address)} lacks {'a host' if colon else 'a port'}; write 'hosta:20000'")
    if not port.isascii() or not port.isdecimal() or not 1 <= int(port[:6]) <= 65535 or len(port) > 5:
        raise ClusterError(f"{shown(address)} has no port from 1 to 65535 after its last colon; write 'hosta:20000'")
    bracketed = host.startswith("[") and host.endswith("]")
    if ":" in host and not bracketed:
        raise ClusterError(
            f"{shown(address)} has more than one colon; write an IPv6 address in brackets: '[fd00::1]:20000'"
        )
    host = host[1:-1] if bracketed else host
    if bracketed or _NUMBERS.fullmatch(host):
        _check_number(host, address, ipaddress.IPv6Address if bracketed else ipaddress.IPv4Address)
    elif not _HOST.fullmatch(host):
        raise ClusterError(f"{shown(address)} has no host name before its colon; write 'hosta:20000'")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """The address of a port of a host, with brackets for an IPv6 host: "[fd00::1]:20000"."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def canonical(address: str) -> str:
    """One spelling for equal addresses: host names in lower case, IPv6 in its short form, ports without zeros."""
    host, port = parse_address(address)
    if ":" in host:
        host = str(ipaddress.IPv6Address(host))
    return join_address(host.lower().removesuffix("."), port)


def check_addresses(addresses: Mapping[str, str]) -> None:
    """Checks that all addresses are valid and no two are the same.

    Args:
        addresses: each address by how messages call its place.

    Raises:
        ClusterError: an address is malformed, or two are the same.
    """
    seen: dict[str, str] = {}
    for place, address in addresses.items():
        try:
            spelling = canonical(address)
        except ClusterError as error:
            raise ClusterError(f"{place}: {error}") from None
        if spelling in seen:
            raise ClusterError(f"{seen[spelling]} and {place} are both {shown(address)}; give each its own address")
        seen[spelling] = place


def _check_number(host: str, address: str, version: type[ipaddress.IPv4Address] | type[ipaddress.IPv6Address]) -> None:
    try:
        number = version(host)
    except ValueError as error:
        example = "[fd00::1]:20000" if version is ipaddress.IPv6Address else "10.0.0.1:20000"
        raise ClusterError(f"{shown(address)} has no IP address before its port ({error}); write '{example}'") from None
    if number.is_unspecified:
        raise ClusterError(
            f"{shown(address)} means every address of a host, which others cannot reach; write the one that they use"
        )
