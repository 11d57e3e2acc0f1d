"""TF_CONFIG in all its forms, and every malformed one as an error that shows the part and a right example."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lockstep.cluster.environment import EXAMPLE, parse_tf_config
from lockstep.cluster.spec import ClusterSpec
from lockstep.errors import ClusterError

# Workload B's text, as published.
PUBLISHED = '{"cluster": {"worker": ["localhost:20000", "localhost:20001"]}, "task": {"type": "worker", "index": 0}}'
PAIR = {"worker": ["hosta:20000", "hostb:20000"]}
ALL_TYPES = {"chief": ["hosta:1"], "worker": ["hostb:1", "hostc:1"], "evaluator": ["hostd:1"]}


def parse(cluster: object, task: object = None, **variables: str) -> ClusterSpec | None:
    declared = {"cluster": cluster} | ({} if task is None else {"task": task})
    return parse_tf_config({"TF_CONFIG": json.dumps(declared), **variables})


def task(kind: object, index: object) -> dict[str, object]:
    return {"type": kind, "index": index}


def test_the_published_form():
    cluster = parse_tf_config({"TF_CONFIG": PUBLISHED})

    assert cluster is not None
    assert cluster.workers == ("localhost:20000", "localhost:20001")
    assert (cluster.index, cluster.task, cluster.source, cluster.is_chief) == (0, "worker", "TF_CONFIG", True)
    assert (cluster.attempt, cluster.store_is_served) == (0, False)


def test_the_example_of_the_errors_is_right():
    assert parse_tf_config({"TF_CONFIG": EXAMPLE}) == ClusterSpec(
        workers=("hosta:20000", "hostb:20000"), index=0, source="TF_CONFIG"
    )


@pytest.mark.parametrize(
    ("cluster", "task_of_it", "workers", "place"),
    [
        (PAIR, task("worker", 1), ("hosta:20000", "hostb:20000"), ("worker", 1)),
        (ALL_TYPES, task("chief", 0), ("hosta:1", "hostb:1", "hostc:1"), ("worker", 0)),
        (ALL_TYPES, task("worker", 0), ("hosta:1", "hostb:1", "hostc:1"), ("worker", 1)),
        (ALL_TYPES, task("worker", 1), ("hosta:1", "hostb:1", "hostc:1"), ("worker", 2)),
        (ALL_TYPES, task("evaluator", 0), ("hosta:1", "hostb:1", "hostc:1"), ("evaluator", 0)),
        (PAIR, task("evaluator", 3), ("hosta:20000", "hostb:20000"), ("evaluator", 3)),  # evaluators need no listing
        ({"worker": ["b:1"], "chief": ["a:1"]}, task("worker", 0), ("a:1", "b:1"), ("worker", 1)),  # in any order
        ({"master": ["a:1"], "worker": ["b:1"]}, task("master", 0), ("a:1", "b:1"), ("worker", 0)),
        ({"master": ["a:1"], "worker": ["b:1"]}, task("worker", 0), ("a:1", "b:1"), ("worker", 1)),
        ({"chief": [], **PAIR}, task("worker", 1), ("hosta:20000", "hostb:20000"), ("worker", 1)),
        ({"worker": ["[::1]:2000", "[::2]:2000"]}, task("worker", 1), ("[::1]:2000", "[::2]:2000"), ("worker", 1)),
        # Clusters of one.
        ({"worker": ["a:1"]}, task("worker", 0), ("a:1",), ("worker", 0)),
        ({"worker": ["a:1"]}, None, ("a:1",), ("worker", 0)),
        ({"chief": ["a:1"]}, task("chief", 0), ("a:1",), ("worker", 0)),
        ({"chief": ["a:1"], "evaluator": ["b:1"]}, task("evaluator", 0), ("a:1",), ("evaluator", 0)),
        ({}, None, ("",), ("worker", 0)),
        ({}, task("worker", 0), ("",), ("worker", 0)),
        ({"worker": []}, task("worker", 0), ("",), ("worker", 0)),
        (None, None, ("",), ("worker", 0)),
    ],
)
def test_who_takes_part(cluster: object, task_of_it: object, workers: tuple[str, ...], place: tuple[str, int]):
    found = parse(cluster, task_of_it)

    assert found is not None
    assert (found.workers, (found.task, found.index)) == (workers, place)


@pytest.mark.parametrize("environment", [{}, {"TF_CONFIG": ""}, {"TF_CONFIG": " \n"}, {"OTHER": PUBLISHED}])
def test_nothing_is_declared(environment: dict[str, str]):
    assert parse_tf_config(environment) is None


def test_no_cluster_in_it_is_a_cluster_of_one():
    assert parse_tf_config({"TF_CONFIG": "{}"}) == ClusterSpec(workers=("",), index=0, source="TF_CONFIG")


def test_other_fields_are_not_read():
    text = json.dumps({**json.loads(PUBLISHED), "job": {"id": 3}, "environment": "cloud", "rpc_layer": "grpc"})

    assert parse_tf_config({"TF_CONFIG": text}) == parse_tf_config({"TF_CONFIG": PUBLISHED})


def test_the_id_is_derived_and_can_be_given():
    first, second = (parse(PAIR, task("worker", index)) for index in (0, 1))
    named = parse(PAIR, task("worker", 0), LOCKSTEP_JOB_ID="flowers-17")

    assert first is not None
    assert second is not None
    assert named is not None
    assert first.job_id == second.job_id != ""
    assert named.job_id == "flowers-17"


def test_an_id_that_is_none_is_refused():
    with pytest.raises(
        ClusterError, match=r"LOCKSTEP_JOB_ID='a\\nb' is not a job id; give 1 to 200 printable characters"
    ):
        parse(PAIR, task("worker", 0), LOCKSTEP_JOB_ID="a\nb")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "{not json",
            r"TF_CONFIG: not JSON \(Expecting property name.*\) at character 1, near '{not json'; for example",
        ),
        (
            "{'cluster': {}}",
            r"not JSON .* near .*; JSON takes double quotes, with the shell's single quotes around",
        ),
        ("x" * 5000, r"TF_CONFIG: not JSON \(Expecting value\) at character 0, near 'x{40}'; for"),
        ("[" * 100_000, r"TF_CONFIG: '\[{119}\.\.\. is nested too deep"),
        ("[1]", r"TF_CONFIG: \[1\] is not a JSON object"),
        ("7", r"TF_CONFIG: 7 is not a JSON object"),
        ("null", r"TF_CONFIG: None is not a JSON object"),
        (
            '{"cluster": {"worker": ["a:1",\n "a:1"]},\n "task": 3}',
            r"worker\[0\] and cluster.worker\[1\] are both 'a:1'",
        ),
    ],
)
def test_what_is_no_description_is_shown(text: str, message: str):
    with pytest.raises(ClusterError, match=message) as caught:
        parse_tf_config({"TF_CONFIG": text})

    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(f"for example TF_CONFIG='{EXAMPLE}'")


FIRST = task("worker", 0)
TWO_CHIEFS = {"chief": ["a:1", "b:1"], "worker": ["c:1"]}
BOTH_NAMES = {"chief": ["a:1"], "master": ["b:1"]}


@pytest.mark.parametrize(
    ("cluster", "task_of_it", "message"),
    [
        ([1], FIRST, r"cluster is \[1\]; it must map task types to lists of addresses"),
        ({"ps": ["p:1"], **PAIR}, FIRST, r"has parameter servers \(ps: \['p:1'\]\).*none are served: leave out ps and"),
        ({"wroker": ["a:1"]}, FIRST, r"cluster has the task type 'wroker'; the types are chief, worker and evaluator"),
        ({"worker": "a:1"}, FIRST, r"cluster.worker is 'a:1'; it must be a list of addresses"),
        ({"worker": {"0": "a:1"}}, FIRST, r"cluster.worker is {'0': 'a:1'}; it must be a list of addresses"),
        ({"worker": ["a:1", "b"]}, FIRST, r"cluster.worker\[1\]: 'b' lacks a port; write 'hosta:20000'"),
        ({"worker": ["a:1", 2]}, FIRST, r"cluster.worker\[1\]: 2 is not an address"),
        ({"worker": ["a:1", ""]}, FIRST, r"cluster.worker\[1\]: '' lacks a port"),
        ({"worker": ["a:1", "b:99999"]}, FIRST, r"cluster.worker\[1\]: 'b:99999' has no port from 1 to 65535"),
        ({"worker": ["::1:20", "b:1"]}, FIRST, r"cluster.worker\[0\]: '::1:20' has more than one colon"),
        ({"worker": ["a:1"], "evaluator": ["b"]}, FIRST, r"cluster.evaluator\[0\]: 'b' lacks a port"),
        ({"worker": ["a:1", "A:1"]}, FIRST, r"cluster.worker\[0\] and cluster.worker\[1\] are both 'A:1'; give each"),
        ({"chief": ["a:1"], "worker": ["a:1"]}, FIRST, r"cluster.chief\[0\] and cluster.worker\[0\] are both 'a:1'"),
        (TWO_CHIEFS, FIRST, r"cluster has 2 chiefs \(\['a:1', 'b:1'\]\); list all but one as worker"),
        (BOTH_NAMES, FIRST, r"cluster has 2 chiefs"),
        (PAIR, None, r"task is missing; it says which of the workers this process is"),
        (PAIR, "worker", r"task is 'worker'; it must be an object with type and index"),
        (PAIR, [], r"task is \[\]; it must be an object"),
        (PAIR, {}, r"task.type is None; the types are chief, worker and evaluator"),
        (PAIR, {"index": 0}, r"task.type is None"),
        (PAIR, task("ps", 0), r"task.type is 'ps', a parameter server; here every worker keeps a copy of the weights"),
        (PAIR, task("Worker", 0), r"task.type is 'Worker'; the types are"),
        (PAIR, task(["worker"], 0), r"task.type is \['worker'\]; the types are"),
        (PAIR, {"type": "worker"}, r"task.index is None; it must be a whole number without quotes"),
        (PAIR, task("worker", "0"), r"task.index is '0'; it must be a whole number without quotes"),
        (PAIR, task("worker", 1.0), r"task.index is 1.0; it must be a whole number"),
        (PAIR, task("worker", True), r"task.index is True; it must be a whole number"),
        (PAIR, task("worker", 2), r"task.index is 2, but cluster lists 2 of type worker; it must be from 0 to 1"),
        (PAIR, task("worker", -1), r"task.index is -1, but cluster lists 2 of type worker"),
        (ALL_TYPES, task("worker", 2), r"task.index is 2, but cluster lists 2 of type worker; it must be from 0 to 1"),
        (ALL_TYPES, task("chief", 1), r"task.index is 1, but cluster lists 1 of type chief; it must be 0"),
        (ALL_TYPES, task("evaluator", 1), r"task.index is 1, but cluster lists 1 of type evaluator; it must be 0"),
        (PAIR, task("evaluator", -1), r"task.index is -1, but cluster lists none of type evaluator; it must be 0"),
        (PAIR, task("chief", 0), r"task.type is 'chief', but cluster lists worker only; add its address there"),
        ({"chief": ["a:1"]}, FIRST, r"task.type is 'worker', but cluster lists chief only"),
        ({"evaluator": ["a:1"]}, FIRST, r"task.type is 'worker', but cluster lists evaluator only"),
        ({}, task("worker", 1), r"task.index is 1, but cluster lists none of type worker; it must be 0"),
    ],
)
def test_what_is_malformed_is_shown(cluster: Any, task_of_it: object, message: str):
    with pytest.raises(ClusterError, match=message) as caught:
        parse(cluster, task_of_it)

    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("TF_CONFIG: ")
    assert str(caught.value).endswith(f"for example TF_CONFIG='{EXAMPLE}'")
