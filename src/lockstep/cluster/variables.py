"""Whole numbers out of variables that a launcher sets, with errors that name the variable. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.cluster.address import join_address, parse_address, shown
from lockstep.errors import ClusterError

LAST_PORT = 65535


def require_variables(environment: Mapping[str, str], names: Sequence[str], source: str, remedy: str) -> None:
    """Holds an environment to a set of variables.

    Raises:
        ClusterError: some are not set or empty; it names them, and those that are set.
    """
    missing = [name for name in names if not environment.get(name)]
    if missing:
        present = " ".join(f"{name}={shown(environment[name])}" for name in names if environment.get(name))
        raise ClusterError(f"{source}: {' '.join(missing)} not set (there is {present or 'none of them'}); {remedy}")


def whole_number(environment: Mapping[str, str], name: str, source: str, *, least: int, most: int | None = None) -> int:
    """A variable's number.

    Raises:
        ClusterError: no number in decimal digits, or one out of range.
    """
    text = environment.get(name, "").strip()
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None
    if number is None or number < least or (most is not None and number > most):
        limits = f"from {least} to {most}" if most is not None else f"from {least} up"
        raise ClusterError(f"{source}: {name}={shown(environment.get(name))}; it must be a whole number {limits}")
    return number


def chief_at(host: str, port: int, name: str, source: str) -> str:
    """The address of the chief's store, from a host that the variable ``name`` gave; an IPv6 host with brackets or not.

    Raises:
        ClusterError: no host.
    """
    address = join_address(host.removeprefix("[").removesuffix("]"), port)
    try:
        parse_address(address)
    except ClusterError as error:
        raise ClusterError(f"{source}: {name}={shown(host)} is no host: {error}") from None
    return address
