"""TF_CONFIG: the cluster as one JSON text, equal on every worker but for its task. Pure.

    {"cluster": {"worker": ["hosta:20000", "hostb:20000"]}, "task": {"type": "worker", "index": 0}}

Task types: ``chief`` (at most one; without one worker 0 is it), ``worker`` and ``evaluator``. ``master`` is an older
name of chief, taken since hosted services still write it. With a chief, TensorFlow's worker i is worker i + 1 here.
Other fields of TF_CONFIG say nothing about who takes part and are not read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lockstep.cluster.address import canonical, shown
from lockstep.cluster.spec import ClusterSpec, Task, given_job_id
from lockstep.errors import ClusterError

EXAMPLE = '{"cluster": {"worker": ["hosta:20000", "hostb:20000"]}, "task": {"type": "worker", "index": 0}}'

_CHIEFS = ("chief", "master")
_TYPES = (*_CHIEFS, "worker", "evaluator")


def parse_tf_config(environment: Mapping[str, str]) -> ClusterSpec | None:
    """The cluster that ``TF_CONFIG`` declares; None where the variable is not set or empty.

    No cluster in it, or one worker, is a cluster of one.

    Raises:
        ClusterError: anything else that cannot be followed; it shows the offending part.
    """
    text = environment.get("TF_CONFIG", "").strip()
    if not text:
        return None
    declared = _load(text)
    cluster = _read_cluster(declared.get("cluster"))
    workers = _workers(cluster)
    task, index = _read_task(declared.get("task"), cluster, alone=len(workers) <= 1)
    return ClusterSpec(
        workers=workers or ("",), index=index, task=task, job_id=given_job_id(environment), source="TF_CONFIG"
    )


def _load(text: str) -> dict[str, Any]:
    try:
        declared = json.loads(text)
    except json.JSONDecodeError as error:
        near = text[max(error.pos - 20, 0) : error.pos + 40]
        raise _malformed(
            f"not JSON ({error.msg}) at character {error.pos}, near {shown(near)}{_quotes(text)}"
        ) from None
    except RecursionError:
        raise _malformed(f"{shown(text)} is nested too deep") from None
    if not isinstance(declared, dict):
        raise _malformed(f"{shown(declared)} is no JSON object")
    return declared


def _quotes(text: str) -> str:
    return "; JSON takes double quotes, and the shell's single quotes stand around them" if "'" in text else ""


def _read_cluster(cluster: object) -> dict[str, list[str]]:
    """The addresses of each task type, every one of them checked."""
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
    _check_addresses(cluster)
    return cluster


def _check_addresses(cluster: Mapping[str, list[str]]) -> None:
    chiefs = [address for name in _CHIEFS for address in cluster.get(name, ())]
    if len(chiefs) > 1:
        raise _malformed(
            f"cluster has {len(chiefs)} chiefs ({shown(chiefs)}); it has one at most, list the rest as worker"
        )
    seen: dict[str, str] = {}
    for name, addresses in cluster.items():
        for index, address in enumerate(addresses):
            place = f"cluster.{name}[{index}]"
            try:
                spelling = canonical(address)
            except ClusterError as error:
                raise _malformed(f"{place}: {error}") from None
            if spelling in seen:
                raise _malformed(f"{seen[spelling]} and {place} are both {shown(address)}; each needs its own address")
            seen[spelling] = place


def _workers(cluster: Mapping[str, list[str]]) -> tuple[str, ...]:
    """Every address that trains, the chief's first."""
    return tuple(address for name in (*_CHIEFS, "worker") for address in cluster.get(name, ()))


def _read_task(task: object, cluster: Mapping[str, list[str]], *, alone: bool) -> tuple[Task, int]:
    if task is None and alone:
        return "worker", 0
    if not isinstance(task, dict):
        raise _malformed(
            "task is missing; it says which of the workers this process is"
            if task is None
            else f"task is {shown(task)}; it must be an object with type and index"
        )
    kind, index = task.get("type"), task.get("index")
    if kind == "ps":
        raise _malformed("task.type is 'ps', a parameter server; here every worker keeps a copy of the weights")
    if kind not in _TYPES:
        raise _malformed(f"task.type is {shown(kind)}; the types are chief, worker and evaluator")
    if not isinstance(index, int) or isinstance(index, bool):
        raise _malformed(f"task.index is {shown(index)}; it must be a whole number without quotes")
    return _place(kind, index, cluster)


def _place(kind: str, index: int, cluster: Mapping[str, list[str]]) -> tuple[Task, int]:
    """The task and the index of a process among its kind, in our counting: the chief first, then the workers."""
    if kind == "evaluator":
        # TensorFlow leaves the evaluators out of the cluster, or lists them: both are in use.
        _check_index(kind, index, len(cluster.get("evaluator", ())) or None)
        return "evaluator", index
    listed = [name for name in _TYPES if cluster.get(name)]
    if kind not in listed and listed:
        raise _malformed(f"task.type is {kind!r}, but cluster lists {' and '.join(listed)} only; add its address there")
    _check_index(kind, index, len(cluster.get(kind, ())))
    chiefs = sum(len(cluster.get(name, ())) for name in _CHIEFS)
    return "worker", index + (chiefs if kind == "worker" else 0)


def _check_index(kind: str, index: int, count: int | None) -> None:
    """Holds an index to the number of addresses of its kind; a cluster that names none has one place, or any (None)."""
    places = max(count, 1) if count is not None else index + 1
    if not 0 <= index < places:
        expected = "it must be 0" if places <= 1 else f"it must be from 0 to {places - 1}"
        raise _malformed(f"task.index is {index}, but cluster lists {count or 'none'} of type {kind}; {expected}")


def _malformed(what: str) -> ClusterError:
    return ClusterError(f"TF_CONFIG: {what}; for example TF_CONFIG='{EXAMPLE}'")
