"""Workers that are killed, stopped, interrupted, or that fail: all others end soon, with one error that names them.

Every worker is a plain process that finds its job in TF_CONFIG, and nobody looks after it.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep as ls
from lockstep.membership.failure_report import EXIT_OF_SURVIVOR

pytestmark = pytest.mark.workers

LOST_AFTER_S = 2.0
# Room for a machine that has other things to do.
FOUND_AFTER_S = LOST_AFTER_S + 3.0
HANGS_S = 2 * FOUND_AFTER_S
STEPS = 6
ROWS = 12  # so that every replica has some
TROUBLE_AT = 3
IN_STEP = r"a run of own_loop.<locals>.step \(test_multi_worker_faults\.py:\d+ in own_loop\)"
IN_FIT = r"a run of train_step \(test_multi_worker_faults\.py:\d+ in fit\)"

Batch = tuple[Tensor, Tensor]
Loop = Callable[[int, str, str], None]


# What the workers run.


def own_loop(worker: int, place: str, kind: str) -> None:
    strategy = joined()
    trouble = Trouble(strategy, worker, place, kind)
    module = net()
    replicated = strategy.mirror(module)
    optimizer = strategy.mirror(torch.optim.SGD(module.parameters(), 0.1))

    def step(batch: Batch, number: int) -> None:
        x, y = batch
        ls.compute_average_loss(per_example(replicated(x), y), global_batch_size=ROWS).backward()
        trouble.in_last_replica(number)
        optimizer.step()
        optimizer.zero_grad()

    for number, batch in enumerate(strategy.distribute_dataset(batches())):
        strategy.run(step, (batch, number))
        trouble.at("loop", number)
    strategy.close()


def fit(worker: int, place: str, kind: str) -> None:
    strategy = joined()
    trouble = Trouble(strategy, worker, place, kind)
    ended = 0

    def data() -> Iterator[Batch]:
        for number, batch in enumerate(batches()):
            trouble.at("data", number)
            yield batch

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        trouble.in_last_replica(ended)
        return per_example(outputs, targets)

    def batch_ended(number: int, logs: dict[str, float]) -> None:
        nonlocal ended
        ended = number + 1
        trouble.at("callback", number)

    with strategy.scope():
        module = net()
        model = ls.Model(module)
        model.compile(torch.optim.SGD(module.parameters(), 0.1), loss)
        model.fit(data(), epochs=1, verbose=0, callbacks=[ls.LambdaCallback(on_train_batch_end=batch_ended)])
    strategy.close()


class Trouble:
    """What happens to one worker at one place."""

    def __init__(self, strategy: ls.Strategy, worker: int, place: str, kind: str) -> None:
        self._here = strategy.workers.index == worker
        self._place = place
        self._kind = kind

    def at(self, place: str, step: int) -> None:
        if self._here and (place, step) == (self._place, TROUBLE_AT):
            say("in trouble")
            KINDS[self._kind]()

    def in_last_replica(self, step: int) -> None:
        context = ls.get_replica_context()
        if context.local_replica == 1:
            self.at("step", step)
        elif self._here and self._kind == "raises beside" and step == TROUBLE_AT:
            threading.Event().wait(HANGS_S)  # nothing interrupts this


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def wait_for_ever() -> None:
    """Until the process is killed, or the replica is interrupted, which Python does between two waits."""
    for waits in count():
        threading.Event().wait(0.1)
        if waits == 4:  # now some beats have told what this worker does
            say("waits")


def wait_for_a_line() -> None:
    say("waits")
    sys.stdin.readline()


def raise_error() -> None:
    raise ValueError("no such picture")


KINDS: dict[str, Callable[[], Any]] = {
    "waits": wait_for_ever,
    "waits for a line": wait_for_a_line,
    "raises": raise_error,
    "raises beside": raise_error,
    "exits": sys.exit,
}


def joined() -> ls.MultiWorkerMirroredStrategy:
    torch.set_num_threads(2)  # so that both replicas run at a time
    (cpu,) = ls.config.list_physical_devices("CPU")
    ls.config.set_logical_device_configuration(cpu, [ls.config.LogicalDeviceConfiguration()] * 2)
    options = ls.CommunicationOptions(lost_after_s=LOST_AFTER_S)
    return ls.MultiWorkerMirroredStrategy(seed=7, communication=options, timeout_s=60)


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def batches() -> list[Batch]:
    random = torch.Generator().manual_seed(0)
    return [(torch.randn(ROWS, 4, generator=random), torch.randint(3, (ROWS,), generator=random)) for _ in range(STEPS)]


def per_example(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


# What the tests see of them.


def assert_ends(worker: Any, error: str, *, since: float | None = None, exit_code: int = EXIT_OF_SURVIVOR) -> None:
    """It raises this error, in time, and then really ends."""
    assert worker.end() == exit_code
    assert re.search(error, worker.error), worker.errors
    if since is not None:
        assert worker.raised_at - since < FOUND_AFTER_S


def name(worker: int) -> str:
    return rf"worker {worker} \(127\.0\.0\.1:\d+\)"


def lost(worker: int, doing: str) -> str:
    return rf"^lockstep\.errors\.ClusterError: {name(worker)}.* is lost: .*last status: {doing}"


@pytest.mark.parametrize(("loop", "doing"), [(own_loop, IN_STEP), (fit, IN_FIT)])
@pytest.mark.parametrize("worker", [0, 1])
def test_a_worker_that_is_killed_in_mid_step_is_named(start_job: Any, worker: int, loop: Loop, doing: str):
    job = start_job(loop, worker, "step", "waits")
    job[worker].wait_for("waits")
    since = time.monotonic()
    job[worker].send(signal.SIGKILL)
    assert_ends(job[1 - worker], lost(worker, doing), since=since)


@pytest.mark.slow
@pytest.mark.parametrize(("worker", "loop"), [(0, own_loop), (1, fit)])
def test_a_worker_that_is_stopped_is_named_and_ends_itself_when_it_goes_on(start_job: Any, worker: int, loop: Loop):
    job = start_job(loop, worker, "step", "waits")
    job[worker].wait_for("waits")
    since = time.monotonic()
    job[worker].send(signal.SIGSTOP)
    assert_ends(job[1 - worker], lost(worker, ""), since=since)
    job[worker].send(signal.SIGCONT)
    assert job[worker].end() == EXIT_OF_SURVIVOR
    assert "ClusterError: worker" in job[worker].error


@pytest.mark.parametrize(("worker", "loop", "doing"), [(0, fit, IN_FIT), (1, own_loop, IN_STEP)])
def test_ctrl_c_in_one_worker_ends_the_other(start_job: Any, worker: int, loop: Loop, doing: str):
    job = start_job(loop, worker, "step", "waits")
    job[worker].wait_for("waits")
    since = time.monotonic()
    job[worker].send(signal.SIGINT)
    error = rf"ClusterError: {name(worker)} was interrupted \(Ctrl-C\); it was in {doing}"
    assert_ends(job[1 - worker], error, since=since)
    assert job[worker].end() == -signal.SIGINT
    assert job[worker].errors.endswith("KeyboardInterrupt\n")


@pytest.mark.parametrize(
    ("loop", "place", "worker", "kind"),
    [
        (own_loop, "step", 1, "ValueError: no such picture"),
        (own_loop, "loop", 0, "ValueError: no such picture"),
        (fit, "step", 0, r"ValueError: no such picture \[raised in replica 1 \(cpu:1\) of worker 0\]"),
        (fit, "data", 1, "ValueError: no such picture"),
        (
            fit,
            "callback",
            0,
            "CallbackError: callback LambdaCallback.on_train_batch_end raised ValueError: no such pic",
        ),
    ],
)
def test_an_exception_in_one_worker_is_the_other_s_error(
    start_job: Any, loop: Loop, place: str, worker: int, kind: str
):
    job = start_job(loop, worker, place, "raises")
    assert job[worker].end() == 1
    assert re.search("(ValueError|CallbackError): ", job[worker].error)
    assert_ends(job[1 - worker], f"ClusterError: {name(worker)} failed with {kind}.*; it was in ")
    assert 'raise ValueError("no such picture")' in job[1 - worker].errors  # where it was raised


@pytest.mark.slow
def test_the_others_hear_of_an_exception_before_all_replicas_have_stopped(start_job: Any):
    job = start_job(own_loop, 1, "step", "raises beside")
    job[1].wait_for("in trouble")
    since = time.monotonic()
    assert_ends(job[0], f"ClusterError: {name(1)} failed with ValueError: no such picture", since=since)


@pytest.mark.parametrize(("loop", "place", "worker"), [(own_loop, "loop", 0), (fit, "callback", 1)])
def test_a_worker_that_exits_in_mid_training_is_named(start_job: Any, loop: Loop, place: str, worker: int):
    job = start_job(loop, worker, place, "exits")
    assert job[worker].end() == 0
    early = rf"{name(worker)} has ended while {name(1 - worker)} still waits for it .*last status: .*; every"
    assert_ends(job[1 - worker], early, exit_code=1)


@pytest.mark.slow
def test_the_exit_of_a_replica_is_the_exit_of_its_worker(start_job: Any):
    job = start_job(own_loop, 1, "step", "exits")
    assert job[1].end() == 0
    assert_ends(job[0], rf"ClusterError: {name(1)} ended itself with exit code 0; it was in {IN_STEP}")


@pytest.mark.slow
@pytest.mark.parametrize(("worker", "number"), [(0, signal.SIGKILL), (2, signal.SIGSTOP)])
def test_every_other_worker_of_three_names_the_same_one(start_job: Any, worker: int, number: signal.Signals):
    job = start_job(fit, worker, "step", "waits", workers=3)
    job[worker].wait_for("waits")
    since = time.monotonic()
    job[worker].send(number)
    for other in {0, 1, 2} - {worker}:
        assert_ends(job[other], lost(worker, ""), since=since)


StartByHand = Callable[[str], list[subprocess.Popen[str]]]


@pytest.fixture
def start_by_hand(tmp_path: Path, free_ports: Callable[[int], list[int]]) -> Iterator[StartByHand]:
    """``start_by_hand(program)``: two processes that find their job in TF_CONFIG; killed at the end of the test."""
    started: list[subprocess.Popen[str]] = []

    def start(program: str) -> list[subprocess.Popen[str]]:
        (tmp_path / "train.py").write_text(
            f"import runpy\nown_loop = runpy.run_path({__file__!r})['own_loop']\n{program}"
        )
        addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
        for index in range(2):
            task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            command = ["env", f"TF_CONFIG={json.dumps(task)}", sys.executable, str(tmp_path / "train.py")]
            pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
            started.append(subprocess.Popen(command, text=True, **pipes))
        return started

    yield start
    for each in started:
        each.kill()
        each.communicate()


def wait_for(process: subprocess.Popen[str], line: str) -> None:
    assert f"{line}\n" in iter(process.stdout.readline, "")


@pytest.mark.slow
def test_a_program_that_was_started_by_hand_ends_like_this_too(start_by_hand: StartByHand):
    chief, other = start_by_hand("own_loop(0, 'step', 'waits')")
    wait_for(chief, "waits")
    chief.kill()
    _, errors = other.communicate(timeout=60)
    assert other.returncode == EXIT_OF_SURVIVOR
    assert re.search(lost(0, IN_STEP), errors.splitlines()[-1]), errors


@pytest.mark.slow
def test_a_worker_that_was_killed_before_the_other_began_a_step_is_named(start_by_hand: StartByHand):
    chief, other = start_by_hand("own_loop(0, 'loop', 'waits for a line')")
    wait_for(chief, "waits")
    other.kill()
    other.communicate()
    _, errors = chief.communicate("\n", timeout=60)
    assert chief.returncode == EXIT_OF_SURVIVOR
    assert re.search(rf"^lockstep\.errors\.ClusterError: {name(1)}", errors, re.MULTILINE), errors


@pytest.mark.slow
def test_an_exception_is_told_though_a_thread_of_the_program_lives_on(start_by_hand: StartByHand):
    chief, other = start_by_hand(
        "import os, sys, threading\n"
        "if '\"index\": 1' in os.environ['TF_CONFIG']:\n"
        "    threading.Thread(target=sys.stdin.read).start()\n"
        "own_loop(1, 'loop', 'raises')"
    )

    _, errors = chief.communicate(timeout=60)

    assert chief.returncode == EXIT_OF_SURVIVOR
    assert re.search(rf"^lockstep\.errors\.ClusterError: {name(1)} failed with ", errors, re.MULTILINE), errors
    assert other.poll() is None  # it still waits for its thread


SAYS_THAT_THE_INTERPRETER_ENDS = """
import os

class Last:
    def __del__(self, write=os.write, read=os.read):
        write(1, b"the interpreter ends\\n")
        read(0, 1)

last = Last()
"""


@pytest.mark.slow
def test_an_interpreter_that_ends_while_a_connection_breaks_is_not_aborted(start_by_hand: StartByHand):
    job = start_by_hand(f"{SAYS_THAT_THE_INTERPRETER_ENDS}own_loop(1, 'loop', 'exits')")
    for each in job:
        wait_for(each, "the interpreter ends")
    job[1].communicate(timeout=60)  # which ends it
    _, errors = job[0].communicate(timeout=60)
    assert job[0].returncode == 1, errors
