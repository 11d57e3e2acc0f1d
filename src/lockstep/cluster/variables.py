"""Environment variables of one source, with errors that name the variable; and the id and the port of a job. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from lockstep.checks import shown
from lockstep.cluster.spec import check_job_id, join_address, parse_address
from lockstep.errors import ClusterError

JOB_ID_VARIABLE = "LOCKSTEP_JOB_ID"
"""Names the job in every form; equal on all its workers, and different for every job."""

# Above the ports of common services and below Linux's ephemeral ones (from 32768).
FIRST_PORT, PORTS = 15000, 15000


def job_port(job: str) -> int:
    """The port of a job's store, from 15000 to 29999, which all its processes derive without talking to each other."""
    return FIRST_PORT + int.from_bytes(hashlib.sha256(job.encode()).digest()[:6]) % PORTS


class Variables:
    """Environment variables that ``source`` sets, with a ClusterError that names the variable for each bad value.

    ``remedy`` says what to do if variables are missing.
    """

    def __init__(self, environment: Mapping[str, str], source: str, remedy: str = "") -> None:
        self._environment, self._source, self._remedy = environment, source, remedy

    def get(self, name: str) -> str:
        """The value of a variable; empty if it is not set."""
        return self._environment.get(name, "")

    def require(self, *names: str) -> None:
        """Checks that variables are set and not empty."""
        missing = [name for name in names if not self.get(name)]
        if missing:
            present = " ".join(f"{name}={shown(self.get(name))}" for name in names if self.get(name))
            raise ClusterError(
                f"{self._source}: {' '.join(missing)} not set (there is {present or 'none of them'}); {self._remedy}"
            )

    def number(self, name: str, *, least: int = 0, most: int | None = None) -> int:
        """The whole number in a variable, in decimal digits."""
        text = self.get(name).strip()
        # ``int`` also takes digits of other alphabets, "1_000", and texts of any length; a launcher writes none of
        # them.
        number = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None
        if number is None or number < least or (most is not None and number > most):
            limits = f"from {least} to {most}" if most is not None else f"from {least} up"
            received = shown(self._environment.get(name))
            raise ClusterError(f"{self._source}: {name}={received}; it must be a whole number {limits}")
        return number

    def count(self, name: str) -> int:
        """The number in a variable; 0 if the variable is not set."""
        return self.number(name) if self.get(name) else 0

    def port(self, name: str) -> int:
        """The port in a variable."""
        return self.number(name, least=1, most=65535)

    def address(self, host: str, port: int, name: str) -> str:
        """The address of the chief's store on a host that the variable ``name`` gave, IPv6 with or without brackets."""
        address = join_address(host.removeprefix("[").removesuffix("]"), port)
        try:
            parse_address(address)
        except ClusterError as error:
            raise ClusterError(f"{self._source}: {name}={shown(host)} is not a host: {error}") from None
        return address

    def job_id(self) -> str:
        """The id in ``LOCKSTEP_JOB_ID``; empty if it is not set."""
        check_job_id(self.get(JOB_ID_VARIABLE), JOB_ID_VARIABLE)
        return self.get(JOB_ID_VARIABLE)
