"""The contenders' programs on the CPU, at tiny sizes: all do the same work, so their losses agree."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.stand_in import stand_in_gpus

import lockstep as ls
from benchmarks.gpu.device import look_at_device
from benchmarks.gpu.loops import (
    Setting,
    begin_process,
    on_device,
    pinned,
    train_ddp,
    train_ours,
    train_plain,
)
from benchmarks.gpu.suite import contenders_for, trials_in_turn, wanted_contenders
from benchmarks.gpu.workloads import TINY, gpu_workloads, precision_of
from benchmarks.harness import run_trial
from benchmarks.processes import ProcessInfo
from benchmarks.step_timer import StepRecord, StepTimer
from benchmarks.trial import Trial
from lockstep.errors import ReplicaError

WARM_UP, LAP, STEPS = 2, 2, 4
# Without dropout every step is the same in every program.
SIZES = replace(TINY, shape=replace(TINY.shape, dropout=0.0))
WORK = gpu_workloads(SIZES)


def needs_gpu(test: Any) -> Any:
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")(test))


@pytest.fixture(autouse=True)
def _switches_as_before() -> Iterator[None]:
    """The programs have processes of their own, where they set what is torch's own for the whole process."""
    precision, backends = torch.get_float32_matmul_precision(), torch.backends.cudnn
    before = backends.benchmark, backends.allow_tf32
    log = logging.getLogger("lockstep")
    level, handlers = log.level, list(log.handlers)
    yield
    torch.set_float32_matmul_precision(precision)
    backends.benchmark, backends.allow_tf32 = before
    log.setLevel(level)
    log.handlers = handlers


def trial(name: str, workload: str = "mlm-fp32", **fields: Any) -> Trial:
    (contender,) = (one for one in contenders_for(WORK[workload], "cpu") if one.name == name)
    contender = replace(contender, **fields)
    return Trial(workload=WORK[workload], contender=contender, warm_up=WARM_UP, steps=STEPS, cores=2, lap=LAP)


def trained(
    trial: Trial, body: Callable[..., None], precision: str = "fp32", device: str = "cpu", **how: Any
) -> StepRecord:
    records: list[StepRecord] = []
    timer = StepTimer(warm_up=WARM_UP, steps=STEPS, started_s=time.monotonic(), report=records.append, lap=LAP)
    process = ProcessInfo(rank=0, started_s=0.0, store="", guard="")
    body(trial, process, timer, setting=Setting(device=device, precision=precision), **how)
    (record,) = records
    assert len(record.step_s) == STEPS // LAP
    assert record.trained > 0
    return record


def test_ours_and_the_hand_written_loop_do_the_same_work(fresh_devices: object, monkeypatch: pytest.MonkeyPatch):
    eager = trained(trial("eager"), train_plain, compiled=False)
    four = trained(trial("lockstep-4"), train_ours)

    assert four.loss == pytest.approx(eager.loss, rel=1e-5)
    assert four.trained == eager.trained
    assert eager.loss == pytest.approx(by_hand(), rel=1e-6)


def by_hand() -> float:
    """The mean loss of a loop over the same batches."""
    begin_process(Setting(device="cpu", precision="fp32"))
    workload = WORK["mlm-fp32"]
    module = workload.make_module()
    optimizer = torch.optim.Adam(module.parameters(), lr=workload.learning_rate)
    losses = []
    for x, y in workload.make_batches(WARM_UP + STEPS):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(**x), y.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / (WARM_UP + STEPS)


@pytest.mark.parametrize(("name", "shares"), [("lockstep-1", None), ("lockstep-4", (2048,) * 4)])
@pytest.mark.parametrize("workload", ["mlm-fp32", "mobilenetv2-bf16"])
def test_on_a_gpu_s_stand_in_the_steps_are_recorded_whole_and_nothing_waits(
    workload: str, name: str, shares: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
):
    """So a wait, or a step that cannot be recorded, would be the engine's on a real GPU, and not this program's."""
    with stand_in_gpus(shares) as (devices, driver):
        monkeypatch.setattr("benchmarks.gpu.loops.logical_devices", lambda *_: devices)
        record = trained(trial(name, workload), train_ours, precision_of(workload))

    assert driver.waits == 0
    assert [graph.replays for graph in driver.graphs] == [(WARM_UP + STEPS) - 3]
    assert record.notes == ()
    if workload == "mlm-fp32":
        assert record.loss == pytest.approx(by_hand(), rel=1e-5)


def test_what_the_package_logs_is_a_note(fresh_devices: object, monkeypatch: pytest.MonkeyPatch):
    usual = ls.Model.fit

    def logging_fit(*args: Any, **kwargs: Any) -> Any:
        for _ in range(2):
            logging.getLogger("lockstep.train").info("the step is a graph,\n  captured")
        return usual(*args, **kwargs)

    monkeypatch.setattr(ls.Model, "fit", logging_fit)

    assert trained(trial("lockstep-1"), train_ours).notes == ("the step is a graph, captured",)


def test_ours_is_compiled_by_its_own_option(fresh_devices: object, monkeypatch: pytest.MonkeyPatch):
    """Through a backend that writes no code: how fast the real one's is, is for the benchmark to say."""
    asked: list[object] = []
    usual = ls.Model.compile

    def compile_(self: ls.Model, *, compile_module: object, **settings: Any) -> None:
        asked.append(compile_module)
        usual(self, compile_module={"backend": "eager"}, **settings)

    monkeypatch.setattr(ls.Model, "compile", compile_)
    record = trained(trial("lockstep-1 compiled"), train_ours, compiled=True)

    assert asked == [True]
    assert record.loss == pytest.approx(by_hand(), rel=1e-5)


def test_the_compiled_loop_marks_its_steps(monkeypatch: pytest.MonkeyPatch):
    """What torch.compile makes of it is torch's own; here it is asked, in the mode that captures graphs."""
    asked: list[str] = []
    begun: list[None] = []

    def compile_(function: Any, *, mode: str) -> Any:
        asked.append(mode)
        return function

    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(None))
    compiled = trained(trial("compiled"), train_plain, compiled=True)

    assert (asked, len(begun)) == (["reduce-overhead"], (WARM_UP + STEPS))
    assert compiled.loss == pytest.approx(by_hand(), rel=1e-6)


@pytest.mark.workers
@pytest.mark.slow
def test_four_processes_do_the_same_work_within_the_trial_s_own_limit():
    sample = run_trial(trial("ddp-4"))

    assert sample.loss == pytest.approx(by_hand(), rel=1e-5)
    assert sample.extra == ({"reserved_mb": 0.0, "used_mb": 0.0},) * 4
    with pytest.raises(ReplicaError, match="'eager' on workload 'mlm-fp32' was not done after 0 s"):
        run_trial(trial("eager", limit_s=0.01))


@needs_gpu
def test_batches_come_to_a_gpu_in_order_while_the_step_before_runs():
    device = torch.device("cuda", 0)
    batches = [(torch.full((1 << 20,), float(number)), torch.tensor(number)) for number in range(20)]
    sums = []
    for x, y in on_device(pinned(batches, device), device):
        torch.cuda._sleep(1_000_000)
        sums.append(x.sum() + y)
        del x, y
    assert [total.item() for total in sums] == [(number << 20) + number for number in range(20)]


@needs_gpu
@pytest.mark.parametrize("name", ["lockstep-1", "lockstep-4"])
def test_on_a_gpu_ours_and_the_hand_written_loop_do_the_same_work(name: str, fresh_devices: object):
    eager = trained(trial("eager"), train_plain, device="cuda", compiled=False)
    ours = trained(trial(name), train_ours, device="cuda")

    assert ours.loss == pytest.approx(eager.loss, rel=1e-3)  # TF32
    assert ours.notes == ()
    for record in (eager, ours):
        assert 0 < record.extra["reserved_mb"] < record.extra["used_mb"]


@needs_gpu
def test_a_gpu_s_rates_are_measured():
    facts = look_at_device("cuda")

    assert facts.name == torch.cuda.get_device_name(0)
    assert facts.matmul_flops["bf16"] > 0 < facts.matmul_flops["fp32"]


def test_the_programs_of_the_contenders_are_these_and_travel_to_their_processes():
    bodies = {
        one.name: pickle.loads(pickle.dumps(one)).launcher.body for one in contenders_for(WORK["mlm-fp32"], "cuda")
    }
    functions = {name: body.func for name, body in bodies.items()}

    assert functions["lockstep-1"] is functions["lockstep-4"] is functions["lockstep-1 compiled"] is train_ours
    assert functions["eager"] is functions["compiled"] is train_plain
    assert functions["ddp-4"] is train_ddp
    compiled = {name for name, body in bodies.items() if body.keywords.get("compiled")}
    assert compiled == {"compiled", "lockstep-1 compiled"}


def test_a_round_goes_workload_by_workload_and_reads_the_clock_after_laps(make: Any):
    wanted = wanted_contenders("cpu", ["mobilenetv2"], ["eager", "lockstep-1"])
    trials = trials_in_turn(wanted, replace(make.conditions(), warm_up=3, steps=5))

    assert [(each.workload.name, each.contender.name) for each in trials] == [
        *(("mobilenetv2-bf16", "lockstep-1"), ("mobilenetv2-bf16", "eager")),
        *(("mobilenetv2-fp32", "lockstep-1"), ("mobilenetv2-fp32", "eager")),
    ]
    assert {(each.warm_up, each.steps, each.lap) for each in trials} == {(3, 15, 5)}
