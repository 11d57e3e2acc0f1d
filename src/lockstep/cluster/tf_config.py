"""TF_CONFIG: the cluster as one JSON text, which differs between the workers only in its task. Pure.

    {"cluster": {"worker": ["hosta:20000", "hostb:20000"]}, "task": {"type": "worker", "index": 0}}

The task types are ``chief`` (at most one; without one worker 0 is the chief), ``worker`` and ``evaluator``. ``master``
is an older name of chief that hosted services still write. With a chief, TensorFlow's worker i is worker i + 1 here.
Other fields of TF_CONFIG say nothing about the workers and are not read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lockstep.cluster.address import check_addresses, shown
from lockstep.cluster.spec import ClusterSpec, Task
from lockstep.cluster.variables import given_job_id
from lockstep.errors import ClusterError

EXAMPLE = '{"cluster": {"worker": ["hosta:20000", "hostb:20000"]}, "task": {"type": "worker", "index": 0}}'

_CHIEFS = ("chief", "master")
_TYPES = (*_CHIEFS, "worker", "evaluator")


def parse_tf_config(environment: Mapping[str, str]) -> ClusterSpec | None:
    """The cluster that ``TF_CONFIG`` declares; None if the variable is not set or empty.

    Without a cluster in it, or with one worker, it declares a cluster of one.

    Raises:
        ClusterError: anything else; it shows the malformed part.
    """
    text = environment.get("TF_CONFIG", "").strip()
    if not text:
        return None
    declared = _load(text)
    cluster = _read_cluster(declared.get("cluster"))
    workers = tuple(address for name in (*_CHIEFS, "worker") for address in cluster.get(name, ()))
    task, index = _read_task(declared.get("task"), cluster, alone=len(workers) <= 1)
    return ClusterSpec(
        workers=workers or ("",), index=index, task=task, job_id=given_job_id(environment), source="TF_CONFIG"
    )


def _load(text: str) -> dict[str, Any]:
    try:
        declared = json.loads(text)
    except json.JSONDecodeError as error:
        near = text[max(error.pos - 20, 0) : error.pos + 40]
        quotes = "; JSON takes double quotes, with the shell's single quotes around them" if "'" in text else ""
        raise _malformed(f"not JSON ({error.msg}) at character {error.pos}, near {shown(near)}{quotes}") from None
    except RecursionError:
        raise _malformed(f"{shown(text)} is nested too deep") from None
    if not isinstance(declared, dict):
        raise _malformed(f"{shown(declared)} is no JSON object")
    return declared


def _read_cluster(cluster: object) -> dict[str, list[str]]:
    """The checked addresses of each task type."""
    if cluster is None:
        return {}
    if not isinstance(cluster, dict):
        raise _malformed(f"cluster is {shown(cluster)}; it must map task types to lists of addresses")
    if "ps" in cluster:
        raise _malformed(
            f"cluster has parameter servers (ps: {shown(cluster['ps'])}); here every worker keeps a copy of the "
            "weights and none are served: leave out ps and list those hosts as workers"
        )
    unknown = [name for name in cluster if name not in _TYPES]
    if unknown:
        raise _malformed(f"cluster has the task type {shown(unknown[0])}; the types are chief, worker and evaluator")
    for name, addresses in cluster.items():
        if not isinstance(addresses, list):
            raise _malformed(f"cluster.{name} is {shown(addresses)}; it must be a list of addresses")
    chiefs = [address for name in _CHIEFS for address in cluster.get(name, ())]
    if len(chiefs) > 1:
        raise _malformed(f"cluster has {len(chiefs)} chiefs ({shown(chiefs)}); list all but one as worker")
    try:
        check_addresses(
            {f"cluster.{name}[{i}]": each for name, listed in cluster.items() for i, each in enumerate(listed)}
        )
    except ClusterError as error:
        raise _malformed(str(error)) from None
    return cluster


def _read_task(task: object, cluster: Mapping[str, list[str]], *, alone: bool) -> tuple[Task, int]:
    """The task and its index in our counting, where the chief is worker 0."""
    if task is None and alone:
        return "worker", 0
    if task is None:
        raise _malformed("task is missing; it says which of the workers this process is")
    if not isinstance(task, dict):
        raise _malformed(f"task is {shown(task)}; it must be an object with type and index")
    kind, index = task.get("type"), task.get("index")
    if kind == "ps":
        raise _malformed("task.type is 'ps', a parameter server; here every worker keeps a copy of the weights")
    if kind not in _TYPES:
        raise _malformed(f"task.type is {shown(kind)}; the types are chief, worker and evaluator")
    if not isinstance(index, int) or isinstance(index, bool):
        raise _malformed(f"task.index is {shown(index)}; it must be a whole number without quotes")
    if kind == "evaluator":
        # In TensorFlow the cluster may list the evaluators or leave them out.
        _check_index(kind, index, len(cluster.get("evaluator", ())) or None)
        return "evaluator", index
    listed = [name for name in _TYPES if cluster.get(name)]
    if kind not in listed and listed:
        raise _malformed(f"task.type is {kind!r}, but cluster lists {' and '.join(listed)} only; add its address there")
    _check_index(kind, index, len(cluster.get(kind, ())))
    chiefs = sum(len(cluster.get(name, ())) for name in _CHIEFS)
    return "worker", index + (chiefs if kind == "worker" else 0)


def _check_index(kind: str, index: int, count: int | None) -> None:
    """Checks an index against the number of addresses of its type: one may be left out, and None allows any index."""
    places = max(count, 1) if count is not None else index + 1
    if not 0 <= index < places:
        expected = "it must be 0" if places <= 1 else f"it must be from 0 to {places - 1}"
        raise _malformed(f"task.index is {index}, but cluster lists {count or 'none'} of type {kind}; {expected}")


def _malformed(what: str) -> ClusterError:
    return ClusterError(f"TF_CONFIG: {what}; for example TF_CONFIG='{EXAMPLE}'")
