"""Workers on hosts of their own: network namespaces that a switch joins, whose links are cut, dropped and slowed down.

    host 0: 10.83.0.1 ---.
    host 1: 10.83.0.2 ---+--- switch, a bridge in a namespace of its own
    host 2: 10.83.0.3 ---'

Nothing in them reaches anything but each other. They are removed when the last test has ended, however it ends; those
of a run that was killed are removed by the next.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.membership.failure_report import EXIT_OF_SURVIVOR

pytestmark = [pytest.mark.workers, pytest.mark.slow]

HOSTS = ["10.83.0.1", "10.83.0.2", "10.83.0.3"]
NAMESPACES = Path("/run/netns")
PREFIX = "lockstep-test"
LOST_AFTER_S = 3.0
# Room for a machine that has other things to do.
FOUND_AFTER_S = LOST_AFTER_S + 3.0
COMMAND_LIMIT_S = 20.0
TRAINING = Path(__file__).parents[1] / "programs" / "elastic_training.py"


class Network:
    """Three hosts and the switch between them."""

    def __init__(self) -> None:
        self.names = [f"{PREFIX}-{os.getpid()}-{host}" for host in range(len(HOSTS))]
        self._switch = f"{PREFIX}-{os.getpid()}-switch"
        self._repairs: list[tuple[str, ...]] = []

    def make(self) -> None:
        lines = [f"netns add {name}" for name in (self._switch, *self.names)]
        ip("-batch", "-", lines=lines)
        ip("-n", self._switch, "-batch", "-", lines=["link add name bridge type bridge", "link set bridge up"])
        for number, (name, address) in enumerate(zip(self.names, HOSTS, strict=True)):
            wire = f"link add port{number} type veth peer name eth0 netns {name}"
            lines = [wire, f"link set port{number} master bridge up"]
            ip("-n", self._switch, "-batch", "-", lines=lines)
            lines = ["link set lo up", f"address add {address}/24 dev eth0", "link set eth0 up"]
            ip("-n", name, "-batch", "-", lines=lines)

    def remove(self) -> None:
        for name in (*self.names, self._switch):
            if (NAMESPACES / name).exists():
                ip("netns", "delete", name)

    def unplug(self, host: int) -> None:
        """The host's own link goes down."""
        self._change(self.names[host], "link set eth0 down", "link set eth0 up")

    def drop(self, host: int) -> None:
        """Everything from and to the host is lost in the switch, and nobody is told."""
        port = f"link set port{host}"
        self._change(self._switch, f"{port} nomaster", f"{port} master bridge")

    def separate(self, one: int, other: int) -> None:
        """Two hosts no longer reach each other, but both still reach the third."""
        for host in (one, other):
            port = f"link set port{host} type bridge_slave isolated"
            self._change(self._switch, f"{port} on", f"{port} off")

    def slow_down(self, host: int, mbit: int) -> None:
        """The host's link carries so many megabits a second in each direction."""
        for name, device in ((self.names[host], "eth0"), (self._switch, f"port{host}")):
            queue = ("tc", "-n", name, "qdisc")
            call(*queue, "add", "dev", device, "root", "tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "50ms")
            self._repairs.append((*queue, "delete", "dev", device, "root"))

    def repair(self) -> None:
        """Everything is as it was made."""
        while self._repairs:
            call(*self._repairs.pop())

    def _change(self, name: str, change: str, repair: str) -> None:
        call("ip", "-n", name, *change.split())
        self._repairs.append(("ip", "-n", name, *repair.split()))


def ip(*arguments: str, lines: list[str] | None = None) -> None:
    call("ip", *arguments, lines=lines)


def call(*command: str, lines: list[str] | None = None) -> None:
    text = None if lines is None else "\n".join(lines) + "\n"
    subprocess.run(command, input=text, text=True, check=True, capture_output=True, timeout=COMMAND_LIMIT_S)


def remove_those_of_the_dead() -> None:
    for namespace in NAMESPACES.glob(f"{PREFIX}-*"):
        if not Path("/proc", namespace.name.split("-")[2]).exists():
            ip("netns", "delete", namespace.name)


@pytest.fixture(scope="module")
def made_network() -> Iterator[Network]:
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("needs iproute2 (ip and tc) to make network namespaces")
    network = Network()
    try:
        try:
            remove_those_of_the_dead()
            network.make()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"may not make network namespaces here: {error.stderr.strip()}")
        yield network
    finally:
        network.remove()


@pytest.fixture
def network(made_network: Network) -> Iterator[Network]:
    """The network, whole at the beginning of each test: a new one takes seconds until it carries anything."""
    yield made_network
    made_network.repair()


# What the workers run.


def train(steps: int, width: int, timeout_s: float, communication: dict[str, float]) -> None:
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    torch.set_num_threads(1)
    options = ls.CommunicationOptions(**{"lost_after_s": LOST_AFTER_S, "bucket_mb": 1} | communication)
    strategy = ls.MultiWorkerMirroredStrategy(["cpu:0"], seed=7, timeout_s=timeout_s, communication=options)
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
    replicated = strategy.mirror(module)
    optimizer = strategy.mirror(torch.optim.SGD(module.parameters(), 0.01))
    random = torch.Generator().manual_seed(0)
    data = ([torch.randn(6, 8, generator=random) for _ in range(4)] * steps)[:steps]

    def step(x: Tensor) -> None:
        ls.compute_average_loss(replicated(x).square().flatten(), global_batch_size=6).backward()
        optimizer.step()
        optimizer.zero_grad()

    began = time.monotonic()
    for number, batch in enumerate(strategy.distribute_dataset(data)):
        strategy.run(step, (batch,))
        say(f"step {number}")
    say(f"took {time.monotonic() - began}")
    flat = torch.cat([value.flatten() for value in replicated.state_dict().values()])
    say(f"weights {hashlib.sha256(flat.numpy().tobytes()).hexdigest()}")
    strategy.close()


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


# What the tests see of them.


FOR_EVER = 10**5
SMALL, LARGE = 16, 1024


@pytest.fixture
def start(start_job: Any, network: Network) -> Any:
    """``start(steps, width, hosts=2)`` starts a worker on each of the first hosts."""

    def begin(
        steps: int,
        width: int,
        *,
        hosts: int = 2,
        order: tuple[int, ...] = (),
        timeout_s: float = 60.0,
        **communication: float,
    ) -> Any:
        given = (steps, width, timeout_s, communication)
        return start_job(train, *given, hosts=HOSTS[:hosts], networks=network.names, order=order)

    return begin


def name(worker: int) -> str:
    return rf"worker {worker} \({re.escape(HOSTS[worker])}:\d+\)"


def assert_ends(worker: Any, *errors: str, since: float, found_after_s: float = FOUND_AFTER_S) -> None:
    """It raises one of these errors in time, and then really ends."""
    assert worker.end() == EXIT_OF_SURVIVOR
    assert any(re.search(error, worker.error) for error in errors), worker.errors
    assert worker.raised_at - since < found_after_s


def test_hosts_may_start_in_any_order(start: Any):
    job = start(4, SMALL, hosts=3, order=(2, 0, 1))
    assert [worker.end() for worker in job] == [0, 0, 0], [worker.errors for worker in job]
    assert len({worker.output.partition("weights ")[2] for worker in job}) == 1


@pytest.mark.parametrize(("missing", "there"), [(0, (1, 2)), (1, (0, 2))])
def test_a_host_that_does_not_come_is_named(start: Any, missing: int, there: tuple[int, ...]):
    job = start(4, SMALL, hosts=3, order=there, timeout_s=4)
    for worker in job:
        worker.wait_for(f"waits for worker {missing} ({HOSTS[missing]}:")
        assert worker.end() == 1
        assert re.search(rf"worker \d .* waited 4 s for {name(missing)}", worker.error), worker.errors


@pytest.mark.parametrize("cut", ["unplug", "drop"])
@pytest.mark.parametrize(("hosts", "far"), [(2, 1), (3, 0)])
def test_a_host_whose_link_is_cut_is_named_and_names_the_others(
    start: Any, network: Network, cut: str, hosts: int, far: int
):
    job = start(FOR_EVER, SMALL, hosts=hosts)
    job[far].wait_for("step 5\n")
    since = time.monotonic()
    getattr(network, cut)(far)
    others = set(range(hosts)) - {far}
    for other in others:
        assert_ends(job[other], f"{name(far)}.* is lost: .*last status: ", since=since)
    assert_ends(job[far], *(f"{name(other)}.* is lost: " for other in others), since=since)


@pytest.mark.parametrize("width", [SMALL, LARGE])
def test_two_hosts_that_reach_the_chief_but_not_each_other_are_named(start: Any, network: Network, width: int):
    job = start(FOR_EVER, width, hosts=3)
    job[0].wait_for("step 5\n")
    since = time.monotonic()
    network.separate(1, 2)
    pairs = [f"{name(one)} and {name(other)} can no longer reach each other" for one, other in ((1, 2), (2, 1))]
    for worker in job:
        assert_ends(worker, *pairs, since=since)
    assert len({worker.error for worker in job}) == 1


def test_a_slow_link_makes_the_run_slower_and_nothing_else(start: Any, network: Network):
    took, weights = {}, {}
    for mbit in (None, 100):
        if mbit is not None:
            network.slow_down(1, mbit)
        job = start(4, LARGE)
        assert [worker.end() for worker in job] == [0, 0], [worker.errors for worker in job]
        job[0].wait_for("took ")
        took[mbit] = float(job[0].wait_for("\n"))
        weights[mbit] = {worker.output.partition("weights ")[2] for worker in job}

    assert weights[None] == weights[100]
    assert len(weights[None]) == 1
    assert took[100] > 2 * took[None]


def test_a_transfer_that_takes_longer_than_silence_may_is_no_loss(start: Any, network: Network):
    network.slow_down(1, 20)
    job = start(1, LARGE, lost_after_s=1.0, bucket_mb=64)
    assert [worker.end() for worker in job] == [0, 0], [worker.errors for worker in job]
    job[0].wait_for("took ")
    assert float(job[0].wait_for("\n")) > 1.0


def test_nobody_listens_on_all_addresses(start: Any):
    job = start(FOR_EVER, SMALL)
    job[0].wait_for("step 5\n")
    for worker, host in zip(job, HOSTS, strict=False):
        assert listening(worker.pid) == {host}


def listening(pid: int) -> set[str]:
    """The addresses at which something listens in a process's network namespace."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            words = bytes.fromhex(local.partition(":")[0])
            packed = b"".join(words[start : start + 4][::-1] for start in range(0, len(words), 4))
            if state == "0A":
                found.add(str(ipaddress.ip_address(packed)))
    return found


def read_until(stream: TextIO, sought: str) -> None:
    """Waits for a line that has this text."""
    heard = []
    for line in stream:
        heard.append(line)
        if sought in line:
            return
    pytest.fail("".join(heard[-20:]))


IN_ONE_STREAM = "import os, sys, lockstep_tools.cli as cli; os.dup2(1, 2); sys.exit(cli.main())"


def test_an_elastic_job_goes_on_without_a_host_that_is_cut_off_and_takes_it_in_again(network: Network, python: Any):
    hosts = f"{HOSTS[0]}:29500,{HOSTS[1]}:29500"
    words = ["-c", IN_ONE_STREAM, "run", "--workers", "1:1", "--rejoin-s", "1", "--hosts", hosts, "--index"]
    program = [str(TRAINING), "100000", "backup"]
    launchers = [
        python(*words, str(index), *program, network=network.names[index], forks_workers=True) for index in range(2)
    ]
    first = launchers[0].stdout

    read_until(first, "step 11 ")
    network.drop(1)
    read_until(first, f"host 1 ({HOSTS[1]}:29500) is gone; 1 worker goes on")
    read_until(first, "step ")
    network.repair()
    read_until(first, f"host 1 ({HOSTS[1]}:29500) has joined; 2 workers go on")
    read_until(first, "step ")
    launchers[0].terminate()

    codes = [launcher.wait(COMMAND_LIMIT_S * 3) for launcher in launchers]
    assert codes == [75, 75], launchers[1].stdout.read()
