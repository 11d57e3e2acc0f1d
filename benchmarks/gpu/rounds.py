"""Runs the trials in turn while the budget lasts: a round of all contenders, and more rounds where a whole one fits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.gpu.budget import Budget
from benchmarks.gpu.roster import Entrant
from benchmarks.gpu.setting import Pace
from benchmarks.harness import Absence, Progress, Rounds, Sample, run_trial
from benchmarks.trial import Trial, Workload
from lockstep.errors import LockstepError


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A trial to come.

    Args:
        workload: the work.
        entrant: who does it.
    """

    workload: Workload
    entrant: Entrant

    @property
    def key(self) -> tuple[str, str]:
        """By which its outcome is found."""
        return self.workload.name, self.entrant.contender.name

    def absence(self, reason: str) -> Absence:
        """That it did not run."""
        return Absence(workload=self.workload.name, contender=self.entrant.contender.name, reason=reason)


def in_turn(entered: Sequence[tuple[Workload, Sequence[Entrant]]]) -> list[Planned]:
    """The order of a round: workload by workload those who are no peers, then likewise the peers. Pure."""
    planned = [Planned(workload=workload, entrant=each) for workload, all_of_it in entered for each in all_of_it]
    return sorted(planned, key=lambda one: one.entrant.contender.role == "peer")


def run_budgeted(
    planned: Sequence[Planned],
    *,
    pace: Pace,
    cores: int,
    rounds: int,
    budget: Budget,
    started_s: float,
    progress: Progress,
    run: Callable[[Trial, int], Sample] = run_trial,
) -> Rounds:
    """Runs the trials of a round in turn, and further rounds while there is time.

    Who fails, or finds no time in the first round, is absent, and takes no further part; the others' numbers stand.

    Args:
        planned: the trials of a round, in order.
        pace: of every trial.
        cores: of the machine.
        rounds: at most.
        budget: of the whole run.
        started_s: ``time.monotonic()`` at its beginning.
        progress: told of each outcome.
        run: runs one trial.
    """
    absences = {one.key: one.absence(one.entrant.absent) for one in planned if one.entrant.absent}
    samples: list[Sample] = []
    taken: list[float] = []
    for index in range(rounds):
        present = [one for one in planned if one.key not in absences]
        if index and not (present and budget.admits_round(taken, time.monotonic() - started_s)):
            break
        taken = []
        for done, one in enumerate(present, start=1):
            began_s = time.monotonic()
            outcome = _outcome(one, index, _trial(one, pace, cores), budget, began_s - started_s, run)
            taken.append(time.monotonic() - began_s)
            if isinstance(outcome, Absence):
                absences[one.key] = outcome
            else:
                samples.append(outcome)
            progress(outcome, done, len(present))
    complete = tuple(sample for sample in samples if (sample.workload, sample.contender) not in absences)
    return Rounds(samples=complete, absences=tuple(absences.values()))


def _trial(one: Planned, pace: Pace, cores: int) -> Trial:
    """For the stopwatch the warm-up is one lap, and so is each timed row of steps."""
    return Trial(workload=one.workload, contender=one.entrant.contender, warm_up=1, steps=pace.laps, cores=cores)


def _outcome(
    one: Planned, index: int, trial: Trial, budget: Budget, spent_s: float, run: Callable[[Trial, int], Sample]
) -> Sample | Absence:
    expected_s = one.entrant.expected_s
    if index == 0 and not budget.admits(expected_s, spent_s):
        return one.absence(budget.refusal(expected_s, spent_s))
    try:
        return run(replace(trial, limit_s=budget.trial_limit_s(spent_s)), index)
    except LockstepError as error:
        return one.absence(str(error))


def per_step(sample: Sample, pace: Pace) -> Sample:
    """A sample whose times are of a step instead of a lap; CPU time too. Pure."""
    return replace(
        sample,
        step_ms=tuple(lap_ms / pace.lap_steps for lap_ms in sample.step_ms),
        cpu_ms=sample.cpu_ms / pace.lap_steps,
    )
