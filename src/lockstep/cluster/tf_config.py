"""TF_CONFIG, and Vertex AI's CLUSTER_SPEC: one JSON text, which differs between the workers only in its task. Pure.

The task types of TF_CONFIG are chief (at most one; without one worker 0 is the chief), worker and evaluator. master is
an older name of chief that hosted services still write. With a chief, TensorFlow's worker i is worker i + 1 here. Other
fields say nothing about the workers and are not read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lockstep.checks import shown
from lockstep.cluster.spec import ClusterSpec, Task, check_addresses
from lockstep.cluster.variables import Variables
from lockstep.errors import ClusterError

EXAMPLE = '{"cluster": {"worker": ["hosta:20000", "hostb:20000"]}, "task": {"type": "worker", "index": 0}}'

_CHIEFS = ("chief", "master")
_TYPES = (*_CHIEFS, "worker", "evaluator")


def parse_tf_config(environment: Mapping[str, str]) -> ClusterSpec | None:
    """The cluster that ``TF_CONFIG`` declares; None if the variable is not set or empty.

    Without a cluster in it, or with one worker, it declares a cluster of one. Raises ClusterError for anything else.
    """
    text = environment.get("TF_CONFIG", "").strip()
    if not text:
        return None
    try:
        declared = json.loads(text)
    # A text of thousands of brackets ends the parser with RecursionError.
    except (ValueError, RecursionError) as error:
        raise _malformed(f"{shown(text)} is not JSON ({error})") from None
    if not isinstance(declared, dict):
        raise _malformed(f"{shown(declared)} is not a JSON object")
    cluster = _read_cluster(declared.get("cluster") or {})
    workers = tuple(address for name in (*_CHIEFS, "worker") for address in cluster.get(name, ()))
    task, index = _read_task(declared.get("task"), cluster, alone=len(workers) <= 1)
    job_id = Variables(environment, "TF_CONFIG").job_id()
    return ClusterSpec(workers=workers or ("",), index=index, task=task, job_id=job_id, source="TF_CONFIG")


def listed_evaluators(environment: Mapping[str, str]) -> int:
    """How many evaluators a ``TF_CONFIG`` lists that ``parse_tf_config`` has read."""
    return len((json.loads(environment["TF_CONFIG"]).get("cluster") or {}).get("evaluator", ()))


def _read_cluster(cluster: Any) -> dict[str, list[str]]:
    """The checked addresses of each task type that has some."""
    if isinstance(cluster, dict):
        cluster = {name: addresses for name, addresses in cluster.items() if addresses != []}
    if not isinstance(cluster, dict) or any(
        name not in _TYPES or not isinstance(addresses, list) for name, addresses in cluster.items()
    ):
        raise _malformed(
            f"cluster is {shown(cluster)}; it must map chief, worker and evaluator to lists of addresses (there are no "
            "parameter servers here: every worker keeps a copy of the weights)"
        )
    chiefs = [address for name in _CHIEFS for address in cluster.get(name, ())]
    if len(chiefs) > 1:
        raise _malformed(f"cluster has {len(chiefs)} chiefs ({shown(chiefs)}); list all but one as worker")
    try:
        check_addresses(
            {
                f"cluster.{name}[{i}]": address
                for name, addresses in cluster.items()
                for i, address in enumerate(addresses)
            }
        )
    except ClusterError as error:
        raise _malformed(str(error)) from None
    return cluster


def _read_task(task: object, cluster: Mapping[str, list[str]], *, alone: bool) -> tuple[Task, int]:
    """The task and its index in our counting, where the chief is worker 0."""
    if task is None and alone:
        return "worker", 0
    kind, index = (task.get("type"), task.get("index")) if isinstance(task, dict) else (None, None)
    # ``type`` and not ``isinstance``: JSON's ``true`` is a bool, which Python takes for 1.
    if kind not in _TYPES or type(index) is not int:
        raise _malformed(
            f"task is {shown(task)}; it must say which worker this process is, with a type (chief, worker or evaluator)"
            " and an index, a whole number without quotes"
        )
    places = len(cluster.get(kind, ())) if any(cluster.values()) else 1
    if kind == "evaluator" and not cluster.get(kind):  # in TensorFlow evaluators need not be listed
        places = index + 1
    if not 0 <= index < places:
        raise _malformed(f"task is {kind} {index}, but cluster lists {places or 'none'} of that type, counted from 0")
    if kind == "evaluator":
        return "evaluator", index
    chiefs = sum(len(cluster.get(name, ())) for name in _CHIEFS)
    return "worker", index + (chiefs if kind == "worker" else 0)


def _malformed(what: str) -> ClusterError:
    return ClusterError(f"TF_CONFIG: {what}; for example TF_CONFIG='{EXAMPLE}'")


# ---- CLUSTER_SPEC of Vertex AI: pools of machines in the place of task types
#
# Pool 0 is the primary replica, pool 1 the other workers, pool 2 parameter servers or reduction servers, which run
# another program, and pool 3 evaluators.

_POOLS = tuple(f"workerpool{number}" for number in range(4))
_VERTEX_EXAMPLE = (
    '{"cluster": {"workerpool0": ["hosta:2222"], "workerpool1": ["hostb:2222"]}, '
    '"task": {"type": "workerpool1", "index": 0}}'
)


def parse_cluster_spec(environment: Mapping[str, str]) -> ClusterSpec | None:
    """The cluster that Vertex AI's ``CLUSTER_SPEC`` declares; None if the variable is no JSON object.

    Other programs use the name for a word or a file. Raises ClusterError for an object that is not Vertex AI's, and in
    a process of its parameter servers.
    """
    text = environment.get("CLUSTER_SPEC", "").strip()
    if not text.startswith("{"):
        return None
    pools, kind, index = _read_pools(text)
    if kind == _POOLS[2]:
        raise ClusterError(
            f"CLUSTER_SPEC makes this process {kind} {index}, which is a parameter server, and there are none here: "
            "every worker keeps a copy of the weights; put its machines in workerpool1"
        )
    first = pools.get(_POOLS[0], [])
    workers = tuple(first + pools.get(_POOLS[1], []))
    task: Task = "evaluator" if kind == _POOLS[3] else "worker"
    job_id = Variables(environment, "CLUSTER_SPEC").job_id()
    if task == "worker" and len(workers) == 1:
        return ClusterSpec(workers=("",), index=0, job_id=job_id, source="CLUSTER_SPEC")
    worker = index + (len(first) if kind == _POOLS[1] else 0)
    return ClusterSpec(workers=workers or ("",), index=worker, task=task, job_id=job_id, source="CLUSTER_SPEC")


def _read_pools(text: str) -> tuple[dict[str, list[str]], str, int]:
    """The addresses of each pool, the pool of this process, and its index there."""
    try:
        declared = json.loads(text)
    except (ValueError, RecursionError):
        declared = None
    parts = declared if isinstance(declared, dict) else {}
    pools, task = parts.get("cluster") or {}, parts.get("task")
    kind, index = (task.get("type"), task.get("index")) if isinstance(task, dict) else (None, None)
    listed = isinstance(pools, dict) and all(isinstance(addresses, list) for addresses in pools.values())
    if not listed or kind not in _POOLS or type(index) is not int or not 0 <= index < len(pools.get(kind, ())):
        raise ClusterError(
            f"CLUSTER_SPEC={shown(text)} is not Vertex AI's, such as '{_VERTEX_EXAMPLE}'; where another service has "
            f"set it, say in TF_CONFIG who takes part, for example TF_CONFIG='{EXAMPLE}', or in RANK, WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT"
        )
    return pools, kind, index
