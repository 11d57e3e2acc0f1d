"""The suite ``steps``: what is compared, its table, and its programs and loops, each in processes of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from benchmarks.harness import Memory, run_trial
from benchmarks.report import report_of
from benchmarks.results import Figures
from benchmarks.small_steps import MODULES, ROWS, WIDTHS, fused_adam, small_batches
from benchmarks.suites.steps import (
    BURST,
    MAX_IMPORT_S,
    MAX_MEMORY_RATIO,
    PACE,
    TARGETS,
    comparisons_of,
    contenders,
    section_of,
    trial_of,
)

PEERS = ("fabric", "lightning", "accelerate")


def row(make, name: str, *rounds: tuple[float, ...], peak_mb: float = 100.0) -> Figures:
    """The milliseconds of the bursts of each round."""
    memory = Memory(peak_mb=peak_mb, pss_mb=peak_mb)
    samples = [replace(make.sample(name, *steps, round_=index), memory=memory) for index, steps in enumerate(rounds)]
    return Figures(contender=make.contender(name), samples=tuple(samples))


def test_the_fastest_bursts_of_a_round_are_compared_and_the_peak_memory(make):
    figures = [
        row(make, "plain", (2.0, 1.0, 9.0), (2.0, 2.0, 2.0)),
        row(make, "lockstep-1", (1.5, 1.25, 30.0), (3.0, 2.5, 4.0), peak_mb=103.0),
        row(make, "fabric", (1.25, 2.0, 2.0), (2.5, 2.5, 2.5)),
    ]

    found = {each.text: (each.values, each.limit, each.verdict) for each in comparisons_of("width-64", figures)}

    assert found == {
        "fastest burst, lockstep-1 / plain": ((1.25, 1.25), 1.3, "yes"),
        "fastest burst, lockstep-1 / fabric": ((1.0, 1.0), 1.05, "yes"),
        "peak resident memory, lockstep-1 / plain": ((1.03, 1.03), MAX_MEMORY_RATIO, "NO"),
    }
    assert comparisons_of("width-64", figures[2:]) == comparisons_of("blocks", figures[:1]) == []


def test_imports_are_compared_in_seconds(make):
    figures = [
        row(make, "import torch", (1000.0, 1200.0, 1100.0), (900.0,)),
        row(make, "import lockstep", (1200.0,), (1000.0,)),
        row(make, "import and use", (1600.0,), (1400.0,)),
    ]

    ours, used = comparisons_of("import", figures)

    assert ours.values == pytest.approx((0.1, 0.1))
    assert (ours.text, ours.limit, ours.unit) == ("import lockstep - import torch", MAX_IMPORT_S, " s")
    assert (used.values, used.limit) == (pytest.approx((0.5, 0.5)), None)
    assert comparisons_of("import", figures[1:]) == []


def test_the_table_has_microseconds_and_ratios_to_the_plain_loop(make):
    figures = [row(make, "plain", (0.5, 0.25, 1.0)), row(make, "fit-1", (1.5, 0.75, 1.0))]
    sections = [section_of("width-64", figures), section_of("import", [row(make, "import torch", (1234.0,))])]

    text = report_of("steps", make.conditions(), "Steps", sections, []).text

    assert "| fit-1 | 750 | 3.00 | 1000 | 2.00 | 3000 | 100 | 1.5000 | 1,000 |" in text
    assert "| import torch | 1.23 |" in text
    alone = report_of("steps", make.conditions(), "Steps", [section_of("width-64", figures[1:])], []).text
    assert "| fit-1 | 750 |  | 1000 |  |" in alone


def test_a_part_adds_what_it_takes_more_than_the_part_before(make):
    figures = [
        row(make, "plain forward", (0.5,)),
        row(make, "lockstep-2 run", (0.25, 0.125)),
        row(make, "lockstep-2 forward", (0.75,)),
        row(make, "lockstep-2 update", (1.75,)),
    ]

    text = report_of("steps", make.conditions(), "Steps", [section_of("parts", figures)], []).text

    assert "| plain forward | 500 | 500 |" in text
    assert "| lockstep-2 run | 125 | 125 |" in text
    assert "| lockstep-2 forward | 750 | 625 |" in text
    assert "| lockstep-2 update | 1750 | 1000 |" in text


def test_every_target_names_contenders_that_there_are():
    for workload, targets in TARGETS.items():
        names = {each.name for each in contenders(workload)}
        assert {name for ours, other, _ in targets for name in (ours, other)} <= names


def test_every_replica_and_process_has_one_thread(make):
    conditions = replace(make.conditions(), warm_up=PACE.warm_up, steps=PACE.steps)
    for workload in WIDTHS:
        for contender in contenders(workload):
            trial = trial_of(workload, contender, conditions)
            assert trial.threads_per_process * contender.processes == contender.replicas
            assert trial.steps // trial.lap == PACE.steps // BURST


def test_the_programs_of_other_environments_need_nothing_of_ours():
    """They import ``benchmarks.small_steps``, and from the folder of the programs."""
    folder = Path(__file__).parents[1]
    for path in (folder / "small_steps.py", folder / "peers" / "steps_work.py"):
        assert "lockstep" not in path.read_text()


@pytest.mark.parametrize("name", WIDTHS)
def test_batches_come_again_and_fit_the_model(name: str):
    batches = small_batches(name, 6)

    assert len(batches) == 6
    assert batches[5][0] is batches[1][0]
    assert MODULES[name]()(batches[0][0]).shape == batches[0][1].shape == (ROWS, WIDTHS[name])


@pytest.mark.workers
@pytest.mark.parametrize("name", ["plain", "lockstep-1", "lockstep-2"])
def test_the_programs_train_the_same_steps(name: str, make):
    assert loss_of("width-64", name, make) == pytest.approx(last_loss("width-64"), rel=1e-3)


@pytest.mark.slow
@pytest.mark.workers
@pytest.mark.parametrize("name", [contender.name for contender in contenders("parts")])
def test_the_parts_of_a_step_run(name: str, make):
    assert loss_of("parts", name, make) == 0


@pytest.mark.slow
@pytest.mark.workers
@pytest.mark.parametrize("name", ["lockstep-4", "ddp-2", "ddp-4", *PEERS])
def test_the_others_train_the_same_steps(name: str, make):
    (contender,) = (each for each in contenders("width-64") if each.name == name)
    if contender.peer and not contender.launcher.python.exists():
        pytest.skip(f"{contender.launcher.python} is not there; make bench SUITE=steps makes it")

    assert loss_of("width-64", name, make) == pytest.approx(last_loss("width-64"), rel=1e-3)


@pytest.mark.slow
@pytest.mark.workers
@pytest.mark.parametrize("name", ["fit-1", "fit-2"])
def test_fit_knows_the_mean_of_all_steps(name: str, make):
    losses = losses_of("width-64")

    assert loss_of("width-64", name, make) == pytest.approx(sum(losses) / len(losses), rel=1e-3)


@pytest.mark.slow
@pytest.mark.workers
@pytest.mark.parametrize("name", ["lockstep tensor", "torch tensor", "lockstep pipeline", "torch pipeline"])
def test_a_divided_model_trains_the_same_steps(name: str, make):
    losses = losses_of("blocks")
    expected = sum(losses) / len(losses) if name == "lockstep pipeline" else losses[-1]

    assert loss_of("blocks", name, make) == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
@pytest.mark.workers
@pytest.mark.parametrize("name", ["keras", "import and use"])
def test_the_rest_runs(name: str, make):
    workload = "width-64" if name == "keras" else "import"

    assert loss_of(workload, name, make) >= 0


def short(workload: str, name: str, make):
    """A trial of a few steps."""
    (contender,) = (each for each in contenders(workload) if each.name == name)
    trial = trial_of(workload, contender, replace(make.conditions(), warm_up=1, steps=BURST))
    return trial if workload == "import" else replace(trial, steps=4, lap=2)


def loss_of(workload: str, name: str, make) -> float:
    return run_trial(short(workload, name, make)).loss


def losses_of(workload: str) -> list[float]:
    """The same steps by hand."""
    torch.manual_seed(0)
    module, losses = MODULES[workload](), []
    optimizer = fused_adam(module)
    for x, y in small_batches(workload, 5):
        loss = F.mse_loss(module(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def last_loss(workload: str) -> float:
    return losses_of(workload)[-1]
