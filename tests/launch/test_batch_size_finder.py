"""``ls.find_batch_size``: what it tries and chooses, that trials change nothing, and that workers agree."""

from __future__ import annotations

import math
import os
import signal
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.errors import ConfigError, DeviceMemoryError, ReplicaError
from lockstep.launch.batch_size_finder import Bounds, Step, Trial, best_trial, next_size
from lockstep.replicas.device.memory import is_out_of_memory
from lockstep.train.model import Model


def searched(bounds: Bounds, *, most: int, best: int = 10**9) -> list[Trial]:
    """The trials of a search where sizes up to ``most`` fit, and the rate grows up to ``best`` rows."""
    trials: list[Trial] = []
    while (size := next_size(trials, bounds)) is not None:
        assert [trial.rows for trial in trials].count(size) <= (bounds.aim == "speed")
        trials.append(Trial(rows=size, fits=size <= most, seconds=size / min(size, best)))
    return trials


@pytest.mark.parametrize("most", [1, 3, 8, 31, 64, 1000, 4095])
@pytest.mark.parametrize("multiple", [1, 3])
def test_the_largest_that_fits_is_found_to_a_sixteenth_and_below_the_bound(most: int, multiple: int):
    bounds = Bounds(start=8 * multiple, largest=1024, multiple_of=multiple)
    trials = searched(bounds, most=most)
    best = best_trial(trials, bounds)

    reachable = min(most, 1024)
    assert all(trial.rows <= 1024 for trial in trials)
    if reachable < multiple:
        assert best is None or best.rows <= most
    else:
        assert best.rows <= reachable
        assert best.rows + max(multiple, best.rows / 16) >= reachable - multiple
        assert best.rows % multiple == 0


def test_for_speed_the_search_ends_where_larger_batches_bring_nothing():
    bounds = Bounds(start=8, aim="speed")
    trials = searched(bounds, most=10**6, best=100)
    # The rates are 8, 16, 32, 64 and three times 100: those near the best are tried twice.
    assert [trial.rows for trial in trials] == [8, 16, 32, 64, 128, 256, 512, 128, 256, 512]
    assert best_trial(trials, bounds).rows == 128  # the smallest within 2% of the best
    assert best_trial(searched(bounds, most=50, best=100), bounds).rows == 50  # 48 are 4% slower


def test_for_speed_nothing_is_tried_between_sizes_that_are_slower():
    rates, bounds = {32: 23, 64: 28, 128: 27, 256: None, 192: 25}, Bounds(start=32, aim="speed")
    trials = [Trial(rows=rows, fits=rate is not None, seconds=rows / (rate or 1)) for rows, rate in rates.items()]
    assert next_size(trials[:-1], bounds) == 192
    assert next_size(trials, bounds) == 64  # once more


def test_for_speed_a_size_that_was_slow_once_is_tried_again():
    bounds, rates = Bounds(start=8, aim="speed"), {8: 50, 16: 100, 32: 97, 64: 60, 128: 60}
    trials: list[Trial] = []
    while (size := next_size(trials, bounds)) is not None:
        rate = rates[size] if size not in [trial.rows for trial in trials] or size != 32 else 110
        trials.append(Trial(rows=size, fits=True, seconds=size / rate))
    assert [trial.rows for trial in trials] == [8, 16, 32, 64, 16, 32, 128]
    assert best_trial(trials, bounds).rows == 32


def test_a_bound_below_the_number_of_replicas_is_tried_as_it_is():
    assert [trial.rows for trial in searched(Bounds(start=32, largest=3, multiple_of=4), most=100)] == [3]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (DeviceMemoryError("gpu:0 has a memory_limit"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_what_counts_as_no_more_memory(error: BaseException, expected: bool):
    assert is_out_of_memory(error) == expected


def holding(mb_per_row: int) -> Any:
    """What makes a step whose tensor takes so many MB a row."""

    def build() -> Step:
        def step(rows: int) -> None:
            torch.ones(rows, mb_per_row * 2**18).sum()

        return step

    return build


@pytest.mark.slow
@pytest.mark.workers
def test_real_allocations_are_measured_and_kept_below_the_limit():
    # A trial begins with the packages that this process has imported: over 400 MB where transformers is one of them.
    found = ls.find_batch_size(holding(8), aim="memory", start=4, memory_limit_mb=1000, margin=0.2)
    resting_mb = found.trials[0].memory["cpu"][0] - 8 * 4
    fitting = (0.8 * 1000 - resting_mb) / 8
    assert fitting * 15 / 16 - 2 <= found.batch_size <= fitting + 1
    assert f"batch size {found.batch_size}" in str(found)
    refused = [trial for trial in found.trials if not trial.fits]
    assert refused
    assert all(trial.reason for trial in refused)
    assert found.trials[0].rows == 4


@pytest.mark.workers
def test_where_nothing_fits_the_error_is_one_of_memory():
    with pytest.raises(DeviceMemoryError, match="not even a global batch of 1 fits"):
        ls.find_batch_size(holding(2000), memory_limit_mb=1000)


@pytest.mark.workers
def test_a_killed_trial_does_not_fit_and_other_failures_are_raised_as_they_are():
    def killed() -> Step:
        return lambda rows: os.kill(os.getpid(), signal.SIGKILL) if rows > 20 else None

    def wrong() -> Step:
        def step(rows: int) -> None:
            raise LookupError(f"no row {rows}")

        return step

    def gone() -> Step:
        return lambda rows: os._exit(3)

    assert ls.find_batch_size(killed, aim="memory").batch_size == 20
    with pytest.raises(LookupError, match="no row 8") as raised:
        ls.find_batch_size(wrong)
    assert "in step" in str(raised.value.__cause__)  # the traceback in the fresh process
    with pytest.raises(ReplicaError, match=r"the trial of 8 rows .* ended with exit code 3"):
        ls.find_batch_size(gone)
    with pytest.raises(ReplicaError, match=r"the trial of 1 rows ended without a result: .* timeout_s"):
        ls.find_batch_size(lambda: lambda rows: signal.pause(), start=1, timeout_s=1.0)


class Doubling(Model):
    """A Model with a step and an attribute of its own."""

    factor = 1.0

    def train_step(self, step: ls.TrainStep) -> Any:
        return step.loss(step.forward(step.x) * self.factor, step.y)


@pytest.mark.workers
def test_a_model_is_as_before_and_the_trials_are_used_again(split_cpu, tmp_path):
    devices = split_cpu(2)
    strategy = ls.MirroredStrategy([device.name for device in devices], seed=0)
    with strategy.scope():
        model = Doubling(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)))
    model.factor = 2.0
    model.compile(lambda parameters: torch.optim.Adam(parameters, 0.01), "mse")
    x, y = torch.randn(50, 4), torch.randn(50, 1)
    model.fit(x, y, verbose=0)
    before, drawn = ls.fingerprint(model), torch.get_rng_state()

    found = ls.find_batch_size(model, x, y, aim="memory", cache=tmp_path)
    again = ls.find_batch_size(model, x, y, aim="memory", cache=tmp_path)

    assert (found.batch_size, found.per_replica) == (50, 25)  # all rows there are
    assert (again.batch_size, again.cached, found.cached) == (50, True, False)
    assert again.trials == found.trials
    assert ls.fingerprint(model) == before
    assert torch.equal(torch.get_rng_state(), drawn)
    assert model.learning_rate == 0.01
    with strategy.scope():
        wider = Model(nn.Linear(5, 1))
    wider.compile(lambda parameters: torch.optim.Adam(parameters, 0.01), "mse")
    assert not ls.find_batch_size(wider, torch.randn(50, 5), y, aim="memory", cache=tmp_path).cached
    strategy.close()


def test_what_cannot_be_tried_is_refused():
    model = Model(nn.Linear(2, 1))
    model.compile(lambda parameters: torch.optim.SGD(parameters, 0.1), "mse")
    with pytest.raises(ConfigError, match="without x and y"):
        ls.find_batch_size(model)
    with pytest.raises(ConfigError, match="cannot be pickled"):
        ls.find_batch_size(lambda generator=(each for each in ()): generator)
    with pytest.raises(ConfigError, match="aim"):
        ls.find_batch_size(holding(1), aim="size")


def job() -> tuple[int, int, list[str]]:
    strategy = ls.MultiWorkerMirroredStrategy()

    def build() -> Step:
        rank = os.environ["RANK"]
        ls.MirroredStrategy(["cpu:0"]).close()  # of this process alone

        def step(rows: int) -> None:
            torch.ones(rows, (16 if other else 8) * 2**18).sum()
            assert rank == "0"

        return step

    other = strategy.workers.index == 1  # needs twice as much
    found = ls.find_batch_size(build, strategy=strategy, aim="memory", memory_limit_mb=500)
    sizes = [trial.rows for trial in found.trials]
    numbers = strategy.workers.all_gather_numbers("sizes", [found.batch_size, math.fsum(sizes)])
    assert numbers[0] == numbers[1]
    return found.batch_size, found.per_replica, list(next(trial for trial in found.trials if trial.fits).memory)


@pytest.mark.slow
@pytest.mark.workers
def test_workers_agree_on_what_fits_all_of_them():
    batch_size, per_replica, devices = ls.launch(job, workers=2)
    assert per_replica == batch_size // 2
    assert per_replica <= (450 - 150) / 16  # what the second one has room for; the first could take twice as many
    assert devices == ["0/cpu", "1/cpu"]
