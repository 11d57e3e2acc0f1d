from __future__ import annotations

import pickle

from benchmarks.hosts import Link
from benchmarks.processes import SpawnedBody
from benchmarks.suites.workers import free_name, is_halved, on_free_hosts, on_one_host, on_two_hosts

SLOW = Link(mbit=1000.0)


def test_ddp_runs_as_written_and_told_what_our_strategies_choose():
    assert [one.name for one in on_one_host("mobilenetv2")] == [
        "workers-2",
        "ddp-2",
        "ddp-2 channels_last",
        "ddp-2 channels_last keeping",
    ]
    assert [one.name for one in on_one_host("mlm")] == ["workers-2", "ddp-2", "ddp-2 keeping"]
    assert [one.name for one in on_two_hosts("mobilenetv2", SLOW)] == [
        "hosts-2x2",
        "hosts-2x2 bf16",
        "ddp-2x2",
        "ddp-2x2 channels_last keeping",
        "ddp-2x2 channels_last keeping fp16",
    ]


def test_everyone_on_two_hosts_has_as_many_replicas_on_each():
    for contender in on_two_hosts("mlm", SLOW):
        assert contender.shares == 4
        assert contender.processes == (2 if contender.role == "ours" else 4)
        assert isinstance(contender.launcher, SpawnedBody)
        assert contender.launcher.link == SLOW


def test_the_free_ones_differ_by_the_link_alone():
    slowed = [one for one in on_two_hosts("mlm", SLOW) if not is_halved(one)]
    free = on_free_hosts("mlm")

    assert [one.name for one in free] == [free_name(one.name) for one in slowed]
    for own, unslowed in zip(slowed, free, strict=True):
        assert isinstance(unslowed.launcher, SpawnedBody)
        assert unslowed.launcher.link == Link(mbit=None)
        assert unslowed.role == "yardstick"
        assert unslowed.settings == own.settings


def test_half_precision_is_known_by_its_name():
    assert [one.name for one in on_two_hosts("mlm", SLOW) if is_halved(one)] == [
        "hosts-2x2 bf16",
        "ddp-2x2 keeping fp16",
    ]


def test_contenders_can_travel_to_a_process():
    for contender in (*on_one_host("mlm"), *on_two_hosts("mobilenetv2", SLOW)):
        assert pickle.loads(pickle.dumps(contender)).name == contender.name
