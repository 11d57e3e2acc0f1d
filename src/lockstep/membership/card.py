"""What a worker says of itself at the roll call, and whether two workers mean the same job. Pure."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from lockstep.cluster.spec import ClusterSpec
from lockstep.errors import ClusterError

PROTOCOL = 1
"""Of what the workers exchange; raised when workers of two versions of lockstep could not understand each other."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """A worker at the roll call.

    Args:
        index: its number.
        host: the name of its machine.
        pid: its process, there.
        address: the IP address that it listens at for the others.
        token: tells this process from any other that claims the same number.
        info: what it has to tell the others at the start.
        terms: what must be equal on all workers, by name.
    """

    index: int
    host: str
    pid: int
    address: str
    token: str
    info: Mapping[str, int]
    terms: Mapping[str, str]

    def to_text(self) -> str:
        """As it is kept in the store."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def process(self) -> str:
        """Which process this is: "process 4242 on hostb"."""
        return f"process {self.pid} on {self.host}"


def this_process() -> str:
    """How messages call the process that runs this: "process 4242 on hostb"."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def read_card(text: str) -> Card:
    """A card as it was kept in the store.

    Raises:
        ClusterError: it is none.
    """
    try:
        return Card(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise ClusterError(
            f"what lies in the job's store is no worker's entry ({error}); start all workers with the same lockstep"
        ) from None


def terms_of(spec: ClusterSpec, lost_after_s: float) -> dict[str, str]:
    """What this worker expects to find equal on the others, the most telling first."""
    return {
        "protocol": str(PROTOCOL),
        "lockstep": _own_version(),
        "torch": ".".join(torch.__version__.split(".")[:2]),
        "number of workers": str(spec.num_workers),
        "workers": ", ".join(spec.workers),
        "lost_after_s": f"{lost_after_s:g}",
    }


def find_disagreement(mine: Card, theirs: Card, names: tuple[str, str]) -> str:
    """What two workers disagree about, in one line; empty if nothing. ``names`` are how messages call them."""
    for term in [*mine.terms, *(term for term in theirs.terms if term not in mine.terms)]:
        here, there = mine.terms.get(term, "unknown"), theirs.terms.get(term, "unknown")
        if here != there:
            return (
                f"{names[1]} and {names[0]} disagree: {term} is {there} on {names[1]} and {here} on {names[0]}; "
                "start all workers with the same cluster, settings and versions"
            )
    return ""


def _own_version() -> str:
    try:
        return version("torch-lockstep")
    except PackageNotFoundError:  # run from its source, without being installed
        return "not installed"
