"""What a worker tells the others when it joins a job, as text in the store; whether two of them can train together."""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version

import torch

from lockstep.cluster.spec import ClusterSpec
from lockstep.errors import ClusterError

JOB_LENGTH = 300
"""To how many characters the description of a job is cut in messages and in the store."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerInfo:
    """What a worker tells the others at the rendezvous."""

    rank: int  # its rank
    host: str  # the name of its machine
    pid: int  # its process id there
    address: str  # the IP address where it listens for the others
    token: str  # distinguishes this process from another of the same rank
    info: Mapping[str, int]  # what the caller of ``join`` has to tell the others
    terms: Mapping[str, str]  # what must be equal on all workers, by name

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> WorkerInfo:
        """Reads an info from the store. Raises ClusterError if the text is something else."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise ClusterError(
                f"the job's store has an unreadable worker info ({error}); start all workers with the same lockstep"
            ) from None

    @property
    def process(self) -> str:
        """The process as messages name it: "process 4242 on hostb"."""
        return f"process {self.pid} on {self.host}"


def job_terms(spec: ClusterSpec, lost_after_s: float) -> dict[str, str]:
    """What must be equal on all workers; the first difference is the one reported."""
    try:
        own_version = version("torch-lockstep")
    except PackageNotFoundError:  # run from its source without being installed
        own_version = "not installed"
    return {
        "lockstep": own_version,
        # Patch releases of torch may be mixed; bits and private APIs change with minor ones.
        "torch": ".".join(torch.__version__.split(".")[:2]),
        "number of workers": str(spec.num_workers),
        "workers": describe_workers(spec.workers),
        "lost_after_s": f"{lost_after_s:g}",
    }


def find_disagreement(chief: WorkerInfo, worker: WorkerInfo, names: tuple[str, str]) -> str:
    """Why the chief and a worker, which messages call ``names``, cannot train together; empty if they can."""
    for term, value in chief.terms.items():
        if (other := worker.terms.get(term, "unknown")) != value:
            return (
                f"{names[1]} and {names[0]} disagree: {term} is {other} on {names[1]} and {value} on {names[0]}; "
                "start all workers with the same cluster, settings and versions"
            )
    for info, name in ((chief, names[0]), (worker, names[1])):
        if chief.host != worker.host and ipaddress.ip_address(info.address).is_loopback:
            return (
                f"{name} listens at {info.address}, which only its own machine ({info.host}) reaches, but the workers "
                f"are on {chief.host} and {worker.host}; give its address in the network, or correct its /etc/hosts"
            )
    return ""


def infos_to_text(infos: Sequence[WorkerInfo]) -> str:
    """All infos in rank order, compressed, without what only the rendezvous itself needs."""
    # test_what_is_equal_for_all_takes_no_room: tokens are random and would not compress, and terms are equal for all.
    plain = json.dumps([asdict(replace(info, token="", terms={})) for info in infos])
    return base64.b85encode(zlib.compress(plain.encode())).decode()


def infos_from_text(text: str) -> tuple[WorkerInfo, ...]:
    """The infos that ``infos_to_text`` wrote."""
    return tuple(WorkerInfo(**info) for info in json.loads(zlib.decompress(base64.b85decode(text))))


def describe_workers(workers: Sequence[str]) -> str:
    """The addresses; of a long list the beginning, and a number that another list does not have."""
    text = ", ".join(workers)
    if len(text) <= JOB_LENGTH:
        return text
    return f"{text[:JOB_LENGTH]}... ({hashlib.sha256(text.encode()).hexdigest()[:16]})"
