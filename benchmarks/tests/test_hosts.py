"""Two hosts in network namespaces: made and removed by the benchmark. Skipped, with the reason, where not permitted."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import hosts
from benchmarks.harness import run_trial
from benchmarks.hosts import Host, Link, divide_cores, two_hosts, why_no_hosts
from benchmarks.suites.workers import on_two_hosts
from benchmarks.trial import Trial
from benchmarks.workloads import WORKLOADS
from lockstep.errors import ConfigError, ReplicaError

NAMESPACES = Path("/run/netns")
FAST = Link(mbit=1000.0)


def made() -> list[str]:
    """The namespaces of this process's hosts."""
    return sorted(path.name for path in NAMESPACES.glob(f"lockstep-bench-{os.getpid()}x*"))


def queues(host: Host) -> str:
    """How a host's end of the link is slowed."""
    words = ["tc", "-n", host.namespace, "qdisc", "show", "dev", host.interface]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def permitted() -> None:
    reason = why_no_hosts()
    if reason:
        pytest.skip(reason)


@pytest.mark.usefixtures("permitted")
def test_hosts_are_joined_by_a_link_of_the_rate_and_are_gone_after_an_error():
    seen: list[list[str]] = []

    def look_and_fail() -> None:
        with two_hosts(FAST) as pair:
            seen.append([host.namespace for host in pair])
            seen.append(made())
            assert all("tbf" in queues(host) and "rate 1Gbit" in queues(host) for host in pair)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        look_and_fail()
    assert seen[0] == seen[1]
    assert made() == []


@pytest.mark.usefixtures("permitted")
def test_hosts_of_a_run_that_was_killed_are_removed_by_the_next():
    ended = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True).stdout.strip()
    left = f"lockstep-bench-{ended}x0h0"
    subprocess.run(["ip", "netns", "add", left], check=True)

    with two_hosts(FAST):
        assert not (NAMESPACES / left).exists()
        assert len(made()) == 2


@pytest.mark.usefixtures("permitted")
def test_a_pair_that_cannot_be_joined_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hosts, "_ADDRESSES", ("10.83.0.1", "no address"))

    message = r"`ip -n lockstep.* address add no address/24 .*failed: .*; making hosts needs root"
    with pytest.raises(ReplicaError, match=message), two_hosts(FAST):
        pass
    assert made() == []


@pytest.mark.slow
@pytest.mark.workers
@pytest.mark.usefixtures("permitted")
def test_workers_on_two_hosts_send_over_the_link_and_do_the_same_work():
    ours, _, ddp, *_ = on_two_hosts("linear", FAST)
    samples = [
        run_trial(Trial(workload=WORKLOADS["linear"], contender=contender, warm_up=1, steps=2, cores=2))
        for contender in (ours, ddp)
    ]

    assert samples[0].loss == pytest.approx(samples[1].loss, rel=1e-4)
    megabytes = samples[0].trained * 4 / 1e6
    # Two workers send each number once; four processes in a ring one and a half times.
    assert megabytes < samples[0].sent_mb < 1.2 * megabytes
    assert 1.4 * megabytes < samples[1].sent_mb < 1.8 * megabytes
    assert made() == []


@pytest.mark.workers
@pytest.mark.usefixtures("permitted")
def test_a_contender_that_fails_leaves_no_hosts(capfd: pytest.CaptureFixture[str]):
    broken = replace(on_two_hosts("linear", FAST)[2], layout="auto", processes=2)

    with pytest.raises(ReplicaError, match="contender 'ddp-2x2' on workload 'linear' ended before its last step"):
        run_trial(Trial(workload=WORKLOADS["linear"], contender=broken, warm_up=1, steps=1, cores=2))
    assert "layout='auto' is for our strategies" in capfd.readouterr().err
    assert made() == []


def test_without_iproute2_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))

    assert why_no_hosts() == "hosts are made with ip and tc, which are not installed; install iproute2"


@pytest.mark.parametrize(
    ("cores", "parts"),
    [([0, 1], ((0,), (1,))), ([2, 5, 7], ((2, 5), (7,))), ([3], ((3,), (3,))), ([0, 1, 2, 3], ((0, 1), (2, 3)))],
)
def test_each_host_has_half_of_the_cores(cores: list[int], parts: tuple[tuple[int, ...], tuple[int, ...]]):
    assert divide_cores(cores) == parts


@pytest.mark.parametrize("mbit", [0.0, -1.0, float("nan")])
def test_a_link_carries_something(mbit: float):
    with pytest.raises(ConfigError, match=r"link_mbit="):
        Link(mbit=mbit)
