"""Values from environment variables that a launcher sets, with errors that name the variable. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.cluster.address import join_address, parse_address, shown
from lockstep.cluster.spec import check_job_id
from lockstep.errors import ClusterError

JOB_ID_VARIABLE = "LOCKSTEP_JOB_ID"
"""Names the job in every form; equal on all its workers, and different for every job."""
_LAST_PORT = 65535


def given_job_id(environment: Mapping[str, str]) -> str:
    """The id in ``LOCKSTEP_JOB_ID``; empty if it is not set.

    Raises:
        ClusterError: it cannot be an id.
    """
    job_id = environment.get(JOB_ID_VARIABLE, "")
    check_job_id(job_id, JOB_ID_VARIABLE)
    return job_id


def require_variables(environment: Mapping[str, str], names: Sequence[str], source: str, remedy: str) -> None:
    """Checks that variables are set and not empty.

    Raises:
        ClusterError: some are not; it names them, and those that are set.
    """
    missing = [name for name in names if not environment.get(name)]
    if missing:
        present = " ".join(f"{name}={shown(environment[name])}" for name in names if environment.get(name))
        raise ClusterError(f"{source}: {' '.join(missing)} not set (there is {present or 'none of them'}); {remedy}")


def whole_number(environment: Mapping[str, str], name: str, source: str, *, least: int, most: int | None = None) -> int:
    """The number in a variable.

    Raises:
        ClusterError: it is not a number in decimal digits, or out of range.
    """
    text = environment.get(name, "").strip()
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None
    if number is None or number < least or (most is not None and number > most):
        limits = f"from {least} to {most}" if most is not None else f"from {least} up"
        raise ClusterError(f"{source}: {name}={shown(environment.get(name))}; it must be a whole number {limits}")
    return number


def count(environment: Mapping[str, str], name: str, source: str) -> int:
    """The number in a variable, from 0 up; 0 if the variable is not set.

    Raises:
        ClusterError: as ``whole_number``.
    """
    return whole_number(environment, name, source, least=0) if environment.get(name) else 0


def port_number(environment: Mapping[str, str], name: str, source: str) -> int:
    """The port in a variable.

    Raises:
        ClusterError: as ``whole_number``.
    """
    return whole_number(environment, name, source, least=1, most=_LAST_PORT)


def chief_address(host: str, port: int, name: str, source: str) -> str:
    """The address of the chief's store, from a host that the variable ``name`` gave; IPv6 with brackets or without.

    Raises:
        ClusterError: it is not a host.
    """
    address = join_address(host.removeprefix("[").removesuffix("]"), port)
    try:
        parse_address(address)
    except ClusterError as error:
        raise ClusterError(f"{source}: {name}={shown(host)} is no host: {error}") from None
    return address
