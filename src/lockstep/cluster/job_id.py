"""What tells one job's processes from another's: an id, derived from the cluster where nobody gives one.

It guards against accidents (a forgotten process of an older job that finds a newer one's address), not attackers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

from lockstep.cluster.address import canonical, shown
from lockstep.errors import ClusterError

JOB_ID_VARIABLE = "LOCKSTEP_JOB_ID"
"""Names the job in every form; equal on all its workers, and another for every job."""

_LONGEST = 200


def check_job_id(job_id: object, where: str = "job_id") -> None:
    """Accepts up to 200 printable characters, and the empty text, which asks for a derived id.

    Raises:
        ClusterError: anything else.
    """
    if not isinstance(job_id, str) or not job_id.isprintable() or len(job_id) > _LONGEST:
        raise ClusterError(
            f"{where}={shown(job_id)} is no job id; give 1 to {_LONGEST} printable characters, such as 'flowers-17'"
        )


def derive_job_id(workers: Sequence[str]) -> str:
    """The same id on every worker of a cluster, and another for other addresses or another number of workers."""
    addresses = [canonical(address) if address else "" for address in workers]
    return f"cluster-{hashlib.sha256(json.dumps(addresses).encode()).hexdigest()[:16]}"


def given_job_id(environment: Mapping[str, str]) -> str:
    """The id in ``LOCKSTEP_JOB_ID``; empty where it is not set.

    Raises:
        ClusterError: it is set to something that is no id.
    """
    job_id = environment.get(JOB_ID_VARIABLE, "")
    check_job_id(job_id, JOB_ID_VARIABLE)
    return job_id
