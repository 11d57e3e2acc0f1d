"""A cluster holds itself to its rules, whoever makes it, and is the same on all workers but for the index."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import lockstep as ls
from lockstep.cluster.spec import ClusterSpec
from lockstep.errors import ClusterError

PAIR = ("hosta:20000", "hostb:20001")


def test_the_facade_has_it():
    assert ls.ClusterSpec is ClusterSpec


def test_a_list_is_kept_as_a_tuple():
    cluster = ClusterSpec(workers=list(PAIR), index=0)  # type: ignore[arg-type]
    assert cluster.workers == PAIR
    assert hash(cluster) == hash(ClusterSpec(workers=PAIR, index=0))


def test_what_follows_from_the_fields():
    chief, other = (ClusterSpec(workers=PAIR, index=index) for index in (0, 1))
    assert (chief.num_workers, chief.is_chief, other.is_chief) == (2, True, False)
    assert other.chief_address == ("hosta", 20000)
    assert [other.name(index) for index in (0, 1)] == ["worker 0 (hosta:20000)", "worker 1 (hostb:20001)"]
    assert [other.host(index) for index in (0, 1)] == ["hosta", "hostb"]
    assert (chief.task, chief.source, chief.attempt, chief.store_is_served) == ("worker", "ClusterSpec", 0, False)


def test_workers_whose_address_a_launcher_did_not_name():
    cluster = ClusterSpec(workers=("[::1]:20000", "", ""), index=2)
    assert cluster.chief_address == ("::1", 20000)
    assert (cluster.name(0), cluster.name(2), cluster.host(2)) == ("worker 0 ([::1]:20000)", "worker 2", "")


def test_a_cluster_of_one_needs_no_address_until_somebody_asks():
    alone = ClusterSpec(workers=("",), index=0)
    assert (alone.num_workers, alone.is_chief, alone.name(0)) == (1, True, "worker 0")
    with pytest.raises(ClusterError, match=r"cluster of one worker names no address; give one, for example ClusterSp"):
        _ = alone.chief_address


def test_an_evaluator_is_no_chief_and_counts_among_its_kind():
    evaluator = ClusterSpec(workers=PAIR, index=0, task="evaluator")
    assert not evaluator.is_chief
    assert ClusterSpec(workers=PAIR, index=7, task="evaluator").num_workers == 2


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ClusterSpec(workers=PAIR, index=0).index = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": ()}, r"ClusterSpec: the cluster has no workers; name every worker's address, for example Cluster"),
        ({"workers": "hosta:20000"}, r"workers='hosta:20000' is not a list of addresses; give one per worker"),
        ({"workers": None}, r"workers=None is not a list of addresses"),
        ({"workers": ("hosta:1", "hostb")}, r"workers\[1\]: 'hostb' is not an address"),
        ({"workers": ("hosta:1", 2)}, r"workers\[1\]: 2 is not an address"),
        ({"workers": ("hosta:1", "b:1", "HOSTA:01")}, r"workers\[0\] and workers\[2\] are both 'HOSTA:01'; give each"),
        ({"workers": ("", "hostb:1")}, r"workers\[0\] is empty, but the others must find the chief; for example"),
        ({"index": 2}, r"index=2 is not a rank in the cluster; give from 0 to 1, one per worker"),
        ({"index": -1}, r"index=-1 is not a rank in the cluster"),
        ({"index": True}, r"index=True is not a rank"),
        ({"index": "1"}, r"index='1' is not a rank"),
        ({"index": -1, "task": "evaluator"}, r"index=-1 is not a rank in the cluster; give from 0, one per evaluator"),
        ({"task": "chief"}, r"task='chief' is unknown; choose 'worker' or 'evaluator'"),
        ({"attempt": -1}, r"attempt=-1 is not a number of earlier attempts; give 0, 1"),
        (
            {"job_id": "two\nwords"},
            r"job_id='two\\nwords' is not a job id; give 1 to 200 printable characters, such as",
        ),
        ({"job_id": "x" * 201}, r"is not a job id"),
        ({"job_id": 7}, r"job_id=7 is not a job id"),
    ],
)
def test_a_malformed_cluster_says_what_is_wrong_with_it(changes: dict[str, Any], message: str):
    with pytest.raises(ClusterError, match=message) as caught:
        ClusterSpec(**{"workers": PAIR, "index": 0, **changes})
    assert "\n" not in str(caught.value)


def test_the_error_names_who_said_so():
    with pytest.raises(ClusterError, match=r"^SLURM: index=5 is not a rank"):
        ClusterSpec(workers=PAIR, index=5, source="SLURM")


def test_the_derived_id_is_the_same_on_every_worker_and_another_for_other_clusters():
    ids = {
        ClusterSpec(workers=workers, index=index).job_id
        for workers, index in (
            (PAIR, 0),
            (PAIR, 1),
            (("HostA:20000", "hostb:20001"), 0),
            (PAIR[::-1], 0),
            ((*PAIR, "hostc:1"), 0),
            (("hosta:20000", ""), 0),
        )
    }

    assert len(ids) == 4
    # Written down: a worker with another version of this package must find the same.
    assert ClusterSpec(workers=PAIR, index=0).job_id == "cluster-22130995f5e163c3"


def test_a_given_id_is_kept():
    assert ClusterSpec(workers=PAIR, index=0, job_id="flowers-17").job_id == "flowers-17"
