"""Runs comparisons: the program as written, and with interventions. Measures rounding where a result depends on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from lockstep.errors import ConfigError, ReplicaError
from lockstep_tools.verify.compare import (
    Comparison,
    Difference,
    StepComparison,
    Tolerance,
    compare_starts,
    compare_updates,
)
from lockstep_tools.verify.config import Interventions, RunConfig, VerifyConfig
from lockstep_tools.verify.runner import RunPair, run_pair
from lockstep_tools.verify.trace import EndRecord, StartRecord, UpdateRecord

Progress = Callable[[str], None]
GROSS = 150
"""A difference this many times the tolerance, in a step before any update, cannot be rounding; nothing is measured."""


class ChildTracebackError(Exception):
    """Traceback and last output of the program; the cause of the error that reports its failure."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class ExperimentRunner:
    """Compares N replicas with one, as written and with interventions. Each pair of runs is made once.

    Raises:
        ConfigError: the program fails by itself, or there is nothing to compare: no strategy, one device, no update.
        ReplicaError: a run took too long, or the program fails in one of the two runs only.
    """

    def __init__(self, config: VerifyConfig, progress: Progress) -> None:
        self._config = config
        self._progress = progress
        self._comparisons: dict[tuple[RunConfig, RunConfig], Comparison | None] = {}
        self.base = self.compare(Interventions())
        self.tolerance = Tolerance(unit=self.base.unit, coarse=self.base.coarse)

    @property
    def completed(self) -> Iterator[tuple[str, Comparison]]:
        """All comparisons that succeeded, in order, each with its description."""
        for runs, comparison in self._comparisons.items():
            if comparison is not None:
                yield describe(*runs), comparison

    def compare(self, interventions: Interventions, reference: Interventions | None = None) -> Comparison:
        """Compares N replicas with one; ``reference`` holds the interventions of the run on one, where they differ."""
        other = interventions if reference is None else reference
        return self._run(
            RunConfig(all_replicas=True, interventions=interventions),
            RunConfig(all_replicas=False, interventions=other),
        )

    def attempt(self, interventions: Interventions) -> Comparison | None:
        """Like ``compare``, but None if the interventions make a run fail."""
        try:
            return self.compare(interventions)
        # A program may need what an intervention removes; that says nothing about the cause.
        except ReplicaError:
            return None

    def first(self, comparison: Comparison) -> Difference | None:
        """The first difference beyond rounding. Measures rounding if the answer depends on it."""
        first = comparison.first(self.tolerance)
        # Two more runs cost as much as the comparison itself, so rounding is measured only where the answer hangs on
        # it.
        if first is None or self._is_gross(first):
            return first
        self.measure_rounding()
        return comparison.first(self.tolerance)

    def is_rounding(self, differences: Sequence[Difference]) -> bool:
        """Whether all differences may be rounding. Measures rounding if the answer depends on it."""
        if all(self.tolerance.covers(difference) for difference in differences):
            return True
        size = max((difference.size for difference in differences), default=0.0)
        if max(difference.amount for difference in differences) > GROSS * self.tolerance.relative * size:
            return False
        self.measure_rounding()
        return all(self.tolerance.covers(difference) for difference in differences)

    def measure_rounding(self) -> Difference | None:
        """Compares one replica with itself where only rounding differs, and sets the tolerance by what that changes.

        In one of the runs every weight is moved by one rounding error, and sums are made by one thread. Returns a
        difference that shows that the program is not reproducible, if there is one.
        """
        # A nudge of an eighth of a coarse rounding error changes an eighth of the weights when they are cast.
        nudged = Interventions(nudge=max(self.base.unit, self.base.coarse / 8), threads=1)
        twice = self._run(RunConfig(all_replicas=False, interventions=nudged), RunConfig(all_replicas=False))
        noise = {difference.key: difference.amount for difference in twice.differences if difference.amount > 0}
        self.tolerance = replace(self.tolerance, noise=noise)
        inputs = (
            difference
            for difference in twice.differences
            if difference.kind in ("initial weight", "rows") and difference.amount > 0
        )
        return next(inputs, next(filter(self._is_gross, twice.differences), None))

    def _is_gross(self, difference: Difference) -> bool:
        """Whether no order of additions explains it: it is large, and no rounding has gone through an update yet."""
        if difference.kind in ("rows", "initial weight"):
            return difference.amount > 0
        before_update = ("weight changed before update", "output", "loss", "weight changed after update")
        early = difference.kind in before_update and difference.step == 1
        return early and difference.relative > GROSS * self.tolerance.relative

    def _run(self, left: RunConfig, right: RunConfig) -> Comparison:
        if (left, right) not in self._comparisons:
            self._progress(describe(left, right))
            # Set before the run: a pair that fails is not run again, and its error is told each time.
            self._comparisons[left, right] = None
            with run_pair(self._config, left, right) as pair:
                self._comparisons[left, right] = _compare(self._config, pair)
        comparison = self._comparisons[left, right]
        if comparison is None:
            raise ReplicaError(f"{describe(left, right)}: this comparison failed before")
        return comparison


def describe(left: RunConfig, right: RunConfig) -> str:
    """A comparison in one line."""
    changes = left.interventions
    if changes.nudge:
        return "one replica with itself, weights moved by one rounding error"
    parts = {
        "without dropout": changes.randomness == "no dropout",
        "without random draws": changes.randomness == "constant",
        "batch statistics of the whole batch": changes.sync_batch_norm,
        "weights held between updates": changes.hold_weights,
        "the module called shard by shard on the one": right.interventions.shards > 1,
    }
    names = [name for name, is_on in parts.items() if is_on]
    return "all replicas with one, " + (", ".join(names) if names else "as written")


def _compare(config: VerifyConfig, pair: RunPair) -> Comparison:
    starts: tuple[StartRecord, StartRecord] | None = None
    weights: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    steps: list[StepComparison] = []
    draws = False
    for candidate, reference in pair.records():
        if isinstance(candidate, StartRecord) and isinstance(reference, StartRecord):
            starts = candidate, reference
            weights = dict(candidate.parameters), dict(reference.parameters)
        elif isinstance(candidate, UpdateRecord) and isinstance(reference, UpdateRecord):
            # The dtype is known only at the end; float32's tolerance here decides only whether factors are fitted.
            steps.append(compare_updates(candidate, reference, weights, Tolerance(unit=2.0**-23)))
            for values, update in zip(weights, (candidate, reference), strict=True):
                values.update({**update.replicas[0].parameters, **update.replicas[0].changed_after})
            draws = draws or any(trace.draws for trace in (*candidate.replicas, *reference.replicas))
    ends = _ends(config, pair)
    if starts is None or not steps:
        raise ConfigError(f"{config.program.name} {_nothing_to_compare(ends[0])}")
    return Comparison(
        start=starts[0],
        reference=starts[1],
        initial=compare_starts(*starts),
        steps=tuple(steps),
        ends=ends,
        extra=pair.extra,
        draws=draws,
    )


def _ends(config: VerifyConfig, pair: RunPair) -> tuple[EndRecord, EndRecord]:
    """How both runs ended; raises if one or both failed."""
    left, right = (process.end or EndRecord() for process in (pair.left, pair.right))
    if not left.error and not right.error:
        return left, right
    process, end = (pair.right, right) if right.error else (pair.left, left)
    output = process.last_output()
    # Where there is only an exit code, the last line that the program printed tells more.
    last = f": {output.splitlines()[-1]}" if end.error.startswith("exit code") and output else ""
    failure = f"{end.error}{f' ({end.location})' if end.location else ''}{last}"
    cause = ChildTracebackError(end.traceback + (f"\nthe program's last output:\n{output}\n" if output else ""))
    if left.error and right.error:
        raise ConfigError(f"{config.program.name} fails by itself: {failure}") from cause
    which = "all replicas and not on one" if process.run.all_replicas else "one replica and not on all replicas"
    raise ReplicaError(f"{config.program.name} fails on {which}: {failure}") from cause


def _nothing_to_compare(end: EndRecord) -> str:
    if end.strategies:
        return (
            "made a MirroredStrategy, but no update through it was seen; mirror the optimizer and step it in "
            "strategy.run, or use ls.Model.fit"
        )
    if end.single:
        return (
            "uses one device only, so there is nothing to compare; divide the CPU before it starts, as in "
            "lockstep verify --devices cpu:4 SCRIPT, and let it make ls.MirroredStrategy()"
        )
    return "made no ls.MirroredStrategy, so there is nothing to compare; make one and train under it"
