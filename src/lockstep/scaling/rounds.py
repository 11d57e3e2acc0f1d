"""Measures all configurations of a scaling run in turn, several rounds, so that a machine that drifts is fair to all.

round 1: A B C    round 2: A B C    ...    each in a fresh process, compared with the others of its round
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep.errors import DataError
from lockstep.scaling.plan import Configuration, largest_batch
from lockstep.scaling.training import Record
from lockstep.scaling.trial import Trial, run_trial


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One configuration, measured once.

    Args:
        configuration: what was measured.
        round: 0 for the first.
        record: what it gave.
    """

    configuration: Configuration
    round: int
    record: Record


def run_rounds(trials: Sequence[Trial], *, rounds: int, progress: Callable[[Sample, int, int], None]) -> list[Sample]:
    """Measures every trial once a round.

    Args:
        trials: one a configuration, in the order of the table.
        rounds: how often.
        progress: called with each sample as it comes, how many there are by then, and how many there will be.

    Raises:
        DataError: the data is less than the largest global batch; found after the first sample.
    """
    samples: list[Sample] = []
    said: set[str] = set()
    for index in range(rounds):
        for trial in trials:
            answer = run_trial(trial)
            for message in answer.warnings:
                if message not in said:
                    said.add(message)
                    warnings.warn(message, stacklevel=2)
            samples.append(Sample(configuration=trial.configuration, round=index, record=answer.record))
            progress(samples[-1], len(samples), rounds * len(trials))
            if len(samples) == 1:
                check_data([trial.configuration for trial in trials], samples[0])
    return samples


def check_data(configurations: Sequence[Configuration], first: Sample) -> None:
    """Refuses global batches that are surely larger than the data, rather than after all that comes before them.

    Raises:
        DataError: they are.
    """
    record, largest = first.record, largest_batch(configurations)
    epochs = len(record.step_ms) // record.steps_an_epoch
    # Exactly, where whole epochs were timed; else the last global batch counts as full.
    most = record.examples // epochs if epochs else record.steps_an_epoch * first.configuration.batch_size
    if largest > most:
        raise DataError(
            f"an epoch has {most} examples{'' if epochs else ' or fewer'}, less than the largest global batch of "
            f"{largest}; lower --batch-size or --replicas, or give more data"
        )
