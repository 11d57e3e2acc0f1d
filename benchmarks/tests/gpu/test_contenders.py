"""The contenders' programs on the CPU, at tiny sizes: all do the same work, so their losses agree."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.stand_in import stand_in_gpus

import lockstep as ls
from benchmarks.gpu.contenders import entrants
from benchmarks.gpu.loops import (
    LapTimer,
    Pace,
    Setting,
    begin_process,
    on_device,
    pinned,
    share_mb,
    train_ddp,
    train_ours,
    train_plain,
)
from benchmarks.gpu.peers import PACKAGES, missing
from benchmarks.gpu.roofline import look_at_device
from benchmarks.gpu.workloads import TINY, gpu_workloads, precision_of
from benchmarks.harness import run_trial
from benchmarks.processes import ProcessInfo, SpawnedBody
from benchmarks.step_timer import StepRecord, StepTimer
from benchmarks.trial import Trial
from lockstep.errors import ConfigError, ReplicaError
from lockstep.recipes.mlm.model import BertShape

PACE = Pace(warm_up=2, lap_steps=2, laps=2)
# Without dropout every step is the same in every program.
SIZES = replace(TINY, shape=BertShape(**{**vars(TINY.shape), "dropout": 0.0}))
WORK = gpu_workloads(SIZES)
LIMIT_S = 170
ROOT = Path(__file__).parents[3]


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


def trial(name: str, workload: str = "mlm-fp32") -> Trial:
    contender = next(one.contender for one in entrants(WORK[workload], "cpu", PACE) if one.contender.name == name)
    return Trial(workload=WORK[workload], contender=contender, warm_up=1, steps=PACE.laps, cores=2)


def trained(
    trial: Trial, body: Callable[..., None], precision: str = "fp32", device: str = "cpu", **how: Any
) -> StepRecord:
    records: list[StepRecord] = []
    timer = StepTimer(warm_up=1, steps=PACE.laps, started_s=time.monotonic(), report=records.append)
    process = ProcessInfo(rank=0, started_s=0.0, store="", guard="")
    body(trial, process, timer, setting=Setting(device=device, precision=precision, pace=PACE), **how)
    (record,) = records
    assert len(record.step_s) == PACE.laps
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
    begin_process(Setting(device="cpu", precision="fp32", pace=PACE))
    workload = WORK["mlm-fp32"]
    module = workload.make_module()
    optimizer = torch.optim.Adam(module.parameters(), lr=workload.learning_rate)
    losses = []
    for x, y in workload.make_batches(PACE.steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(**x), y.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / PACE.steps


def test_the_undivided_device_trains_pictures_in_bf16(fresh_devices: object):
    record = trained(trial("lockstep-1", "mobilenetv2-bf16"), train_ours, "bf16")
    eager = trained(trial("eager channels_last", "mobilenetv2-bf16"), train_plain, "bf16", compiled=False)

    assert record.trained == eager.trained == 2_226_434
    assert record.loss == pytest.approx(eager.loss, rel=0.2)  # the classifier drops other features


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
    assert [graph.replays for graph in driver.graphs] == [PACE.steps - 3]
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

    assert (asked, len(begun)) == (["reduce-overhead"], PACE.steps)
    assert compiled.loss == pytest.approx(by_hand(), rel=1e-6)


@pytest.mark.workers
@pytest.mark.slow
def test_four_processes_do_the_same_work_within_the_trial_s_own_limit():
    sample = run_trial(trial("ddp-4"))

    assert sample.loss == pytest.approx(by_hand(), rel=1e-5)
    assert (sample.device_reserved_mb, sample.device_used_mb) == (0.0, 0.0)
    with pytest.raises(ReplicaError, match="'eager' on workload 'mlm-fp32' was not done after 0 s"):
        run_trial(replace(trial("eager"), limit_s=0.01))


PEERS = """
import json, sys, time
from benchmarks.gpu import peers
from benchmarks.step_timer import StepTimer
from benchmarks.processes import ProcessInfo
from tests_of_the_gpu_benchmark import PACE, trial
from benchmarks.gpu.loops import Setting

said = {}
for name in sys.argv[1:]:
    records = []
    timer = StepTimer(warm_up=1, steps=PACE.laps, started_s=time.monotonic(), report=records.append)
    body = getattr(peers, f"train_{name}")
    setting = Setting(device="cpu", precision="fp32", pace=PACE)
    body(trial(name), ProcessInfo(rank=0, started_s=0.0, store="", guard=""), timer, setting=setting)
    said[name] = records[0].loss, records[0].trained, len(records[0].step_s)
print("SAID", json.dumps(said))
"""


@pytest.mark.slow
def test_the_peers_that_are_here_do_the_same_work(python: Callable[..., Any], tmp_path: Path):
    here = [name for name in PACKAGES if not missing(name)]
    (tmp_path / "tests_of_the_gpu_benchmark.py").symlink_to(__file__)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    process = python("-c", PEERS, *here, TQDM_DISABLE="1")
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    said = json.loads(next(line for line in out.splitlines() if line.startswith("SAID")).removeprefix("SAID"))

    assert set(said) == set(here)
    for name, (loss, parameters, blocks) in said.items():
        assert loss == pytest.approx(by_hand(), rel=1e-5), name
        assert (parameters, blocks) == (trained(trial("eager"), train_plain, compiled=False).trained, PACE.laps)


def test_a_peer_that_is_not_installed_is_absent_with_a_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("benchmarks.gpu.peers.find_spec", lambda name: None)
    reasons = {one.contender.name: one.absent for one in entrants(WORK["mlm-bf16"], "cuda", PACE) if one.absent}

    assert reasons == {
        "accelerate": "accelerate is not installed",
        "fabric": "lightning_fabric is not installed",
        "trainer": "transformers is not installed",
    }
    monkeypatch.setattr("benchmarks.gpu.peers.find_spec", lambda name: object() if name == "transformers" else None)
    assert missing("trainer") == "accelerate, which it needs, is not installed"


def test_batches_come_in_order_and_as_they_are_on_a_cpu():
    batches = WORK["mlm-fp32"].make_batches(3)

    assert [id(batch) for batch in on_device(pinned(batches, torch.device("cpu")), torch.device("cpu"))] == [
        id(batch) for batch in batches
    ]


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
        assert 0 < record.device_reserved_mb < record.device_used_mb


@needs_gpu
def test_a_gpu_s_rates_and_costs_are_measured():
    facts = look_at_device("cuda", TINY)

    assert facts.name == torch.cuda.get_device_name(0)
    assert set(facts.costs) == set(WORK)
    assert facts.matmul_flops["bf16"] > 0 < facts.matmul_flops["fp32"]
    assert facts.copy_bytes_s > 1e9


def test_the_device_is_waited_for_between_laps_only(monkeypatch: pytest.MonkeyPatch):
    waits: list[int] = []
    read: list[int] = []
    begun: list[int] = []
    monkeypatch.setattr("benchmarks.gpu.loops.wait_for", lambda device: waits.append(begun[-1]))
    timer = StepTimer(warm_up=1, steps=PACE.laps, started_s=time.monotonic(), report=lambda record: None)
    laps = LapTimer(timer, PACE, torch.device("cpu"))
    for step in range(1, PACE.steps + 1):
        begun.append(step)
        laps.step(lambda: read.append(begun[-1]) or 0.0)

    assert (waits, read) == ([2, 4, 6], [6])


def test_a_logical_device_gets_its_part_of_four_fifths():
    assert share_mb(81920, 4) == 16384
    assert share_mb(24564, 4) == 4912


@pytest.mark.parametrize("name", ["warm_up", "lap_steps", "laps"])
def test_a_pace_of_nothing_is_refused(name: str):
    with pytest.raises(ConfigError, match=f"{name}=0 was given, expected at least 1"):
        replace(PACE, **{name: 0})


def test_the_bodies_of_the_roster_are_these():
    bodies = {one.contender.name: one.contender.launcher for one in entrants(WORK["mlm-fp32"], "cuda", PACE)}
    functions = {name: launcher.body.func for name, launcher in bodies.items() if isinstance(launcher, SpawnedBody)}

    assert functions["lockstep-1"] is functions["lockstep-4"] is functions["lockstep-1 compiled"] is train_ours
    assert [launcher.body.keywords.get("compiled") for name, launcher in bodies.items() if "compiled" in name] == [
        True
    ] * 2
    assert functions["eager"] is functions["compiled"] is train_plain
    assert functions["ddp-4"] is train_ddp
