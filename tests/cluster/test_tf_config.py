"""TF_CONFIG in all its forms, and every malformed one as an error that shows the part and a right example."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lockstep.cluster.spec import ClusterSpec
from lockstep.cluster.tf_config import EXAMPLE, parse_tf_config
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
        ({"ps": [], **PAIR}, task("worker", 1), ("hosta:20000", "hostb:20000"), ("worker", 1)),
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
        ("{not json", r"TF_CONFIG: '{not json' is not JSON \(Expecting property name"),
        ("{'cluster': {}}", r"is not JSON \(Expecting property name enclosed in double quotes"),
        ("x" * 5000, r"TF_CONFIG: 'x{119}\.\.\. is not JSON \(Expecting value"),
        ("[" * 100_000, r"TF_CONFIG: '\[{119}\.\.\. is not JSON"),
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
        ([1], FIRST, r"cluster is \[1\]; it must map chief, worker and evaluator to lists of addresses"),
        ({"ps": ["p:1"], **PAIR}, FIRST, r"cluster is {'ps': \['p:1'\].*no parameter servers here"),
        ({"wroker": ["a:1"]}, FIRST, r"cluster is {'wroker'.*; it must map chief, worker and evaluator"),
        ({"worker": "a:1"}, FIRST, r"cluster is {'worker': 'a:1'}; it must map .* to lists of addresses"),
        ({"worker": ["a:1", "b"]}, FIRST, r"cluster.worker\[1\]: 'b' is not an address"),
        ({"worker": ["a:1", 2]}, FIRST, r"cluster.worker\[1\]: 2 is not an address"),
        ({"worker": ["a:1", ""]}, FIRST, r"cluster.worker\[1\]: '' is not an address"),
        ({"worker": ["a:1"], "evaluator": ["b"]}, FIRST, r"cluster.evaluator\[0\]: 'b' is not an address"),
        ({"worker": ["a:1", "A:1"]}, FIRST, r"cluster.worker\[0\] and cluster.worker\[1\] are both 'A:1'; give each"),
        ({"chief": ["a:1"], "worker": ["a:1"]}, FIRST, r"cluster.chief\[0\] and cluster.worker\[0\] are both 'a:1'"),
        (TWO_CHIEFS, FIRST, r"cluster has 2 chiefs \(\['a:1', 'b:1'\]\); list all but one as worker"),
        (BOTH_NAMES, FIRST, r"cluster has 2 chiefs"),
        *(
            (PAIR, wrong, r"task is .*; it must say which worker this process is, with a type .* and an index, a whole")
            for wrong in (
                *(None, "worker", [], {}, {"index": 0}, {"type": "worker"}, task("ps", 0), task("Worker", 0)),
                *(task(["worker"], 0), task("worker", "0"), task("worker", 1.0), task("worker", True)),
            )
        ),
        (PAIR, task("worker", 2), r"task is worker 2, but cluster lists 2 of that type, counted from 0"),
        (PAIR, task("worker", -1), r"task is worker -1, but cluster lists 2 of that type"),
        (ALL_TYPES, task("worker", 2), r"task is worker 2, but cluster lists 2 of that type"),
        (ALL_TYPES, task("chief", 1), r"task is chief 1, but cluster lists 1 of that type"),
        (ALL_TYPES, task("evaluator", 1), r"task is evaluator 1, but cluster lists 1 of that type"),
        (PAIR, task("evaluator", -1), r"task is evaluator -1, but cluster lists none of that type"),
        (PAIR, task("chief", 0), r"task is chief 0, but cluster lists none of that type"),
        ({"chief": ["a:1"]}, FIRST, r"task is worker 0, but cluster lists none of that type"),
        ({"evaluator": ["a:1"]}, FIRST, r"task is worker 0, but cluster lists none of that type"),
        ({}, task("worker", 1), r"task is worker 1, but cluster lists 1 of that type"),
    ],
)
def test_what_is_malformed_is_shown(cluster: Any, task_of_it: object, message: str):
    with pytest.raises(ClusterError, match=message) as caught:
        parse(cluster, task_of_it)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("TF_CONFIG: ")
    assert str(caught.value).endswith(f"for example TF_CONFIG='{EXAMPLE}'")
