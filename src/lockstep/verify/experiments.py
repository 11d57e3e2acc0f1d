"""Where comparisons are run, kept, and judged: what is rounding is measured when a judgement depends on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from lockstep.errors import ConfigError, ReplicaError
from lockstep.verify.compare import (
    Allowance,
    Before,
    Comparison,
    Difference,
    StepComparison,
    compare_starts,
    compare_updates,
)
from lockstep.verify.config import Side, Switches, VerifyConfig
from lockstep.verify.runner import Child, Pair, running
from lockstep.verify.trace import EndRecord, StartRecord, UpdateRecord


class ChildTracebackError(Exception):
    """The traceback and the last output of a program in another process, as the cause of the error that names it."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def compare_runs(config: VerifyConfig, left: Side, right: Side) -> Comparison:
    """Runs the program on both sides at once and compares.

    Args:
        config: the program.
        left: the run that may be wrong.
        right: the run that is taken to be right.

    Raises:
        ConfigError: the program fails by itself, or there is nothing to compare: no strategy, one device, no update.
        ReplicaError: a run took too long, or fails on one side only.
    """
    with running(config, left, right) as pair:
        return _compare(config, pair)


def _compare(config: VerifyConfig, pair: Pair) -> Comparison:
    starts: list[tuple[StartRecord, StartRecord]] = []
    initial: tuple[Difference, ...] = ()
    before: Before | None = None
    steps: list[StepComparison] = []
    draws = False
    unit = 2.0**-23
    for ours, reference in pair.records():
        if isinstance(ours, StartRecord) and isinstance(reference, StartRecord):
            starts.append((ours, reference))
            initial = compare_starts(ours, reference)
            before = Before(ours=ours.parameters, reference=reference.parameters)
        elif isinstance(ours, UpdateRecord) and isinstance(reference, UpdateRecord) and before is not None:
            steps.append(compare_updates(ours, reference, before, unit))
            before = before.then(ours, reference)
            draws = draws or ours.draws or reference.draws
    ends = _ends(config, pair)
    if not steps:
        raise ConfigError(f"{config.program.name} {_nothing(ends[0])}")
    return Comparison(
        start=starts[0][0],
        reference=starts[0][1],
        initial=initial,
        steps=tuple(steps),
        ends=ends,
        extra=len(pair.left.waiting) - len(pair.right.waiting),
        draws=draws,
    )


def _ends(config: VerifyConfig, pair: Pair) -> tuple[EndRecord, EndRecord]:
    failed = [child for child in (pair.left, pair.right) if child.end is not None and child.end.error]
    if len(failed) == 2:
        raise ConfigError(f"{config.program.name} fails by itself: {_failure(failed[1])}") from _cause(failed[1])
    if failed:
        (child,) = failed
        which, other = ("all replicas", "one") if child.side.all_replicas else ("one replica", "all replicas")
        raise ReplicaError(f"{config.program.name} fails on {which} and not on {other}: {_failure(child)}") from _cause(
            child
        )
    return pair.left.end or EndRecord(), pair.right.end or EndRecord()


def _failure(child: Child) -> str:
    end = child.end or EndRecord()
    said = child.said().splitlines()
    # A program of ours says in its last line what an exit code only counts.
    why = f": {said[-1]}" if end.error.startswith("exit code") and said else ""
    return f"{end.error}{f' ({end.place})' if end.place else ''}{why}"


def _cause(child: Child) -> ChildTracebackError:
    end, said = child.end or EndRecord(), child.said()
    return ChildTracebackError(f"{end.traceback}" + (f"\nthe program's last output:\n{said}\n" if said else ""))


def _nothing(end: EndRecord) -> str:
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


Progress = Callable[[str], None]
GROSS = 150
"""Times what is granted, that no order of additions makes in one pass, before any update: nothing is measured then."""


class Laboratory:
    """Compares N replicas with one, as written and with things switched off.

    Args:
        config: the program.
        progress: called with a line before each pair of runs.
    """

    def __init__(self, config: VerifyConfig, progress: Progress) -> None:
        self._config = config
        self._progress = progress
        self._known: dict[tuple[Side, Side], Comparison | None] = {}
        self.allowance = Allowance(unit=0.0)
        self.base = self.compare(Switches())
        self.allowance = Allowance(unit=self.base.unit, coarse=self.base.coarse)

    @property
    def done(self) -> Iterator[tuple[str, Comparison]]:
        """All comparisons that could be made, in order, with what each was."""
        for sides, comparison in self._known.items():
            if comparison is not None:
                yield describe(*sides), comparison

    def compare(self, switches: Switches, reference: Switches | None = None) -> Comparison:
        """N replicas with one; each pair of runs is made once.

        Args:
            switches: of both sides.
            reference: of the one replica, where it differs.

        Raises:
            ConfigError: the program fails by itself, or there is nothing to compare.
            ReplicaError: a run took too long, or fails on one side only.
        """
        right = switches if reference is None else reference
        return self._run(Side(all_replicas=True, switches=switches), Side(all_replicas=False, switches=right))

    def attempt(self, switches: Switches) -> Comparison | None:
        """Like ``compare``; None where what is switched makes a run fail."""
        try:
            return self.compare(switches)
        except ReplicaError:
            return None

    def compare_shard(self, switches: Switches, shard: int, shards: int) -> Comparison:
        """One replica of several with one replica that gets that one's shard alone, for one update."""
        left = Side(all_replicas=True, switches=switches, only=shard)
        right = Side(all_replicas=False, switches=replace(switches, shards=shards, shard=shard))
        return self._run(left, right, steps=1)

    def first(self, comparison: Comparison) -> Difference | None:
        """The first difference that is more than rounding, which is measured if that is in question."""
        first = comparison.first(self.allowance)
        if first is None or self._is_gross(first):
            return first
        self.repeat()
        return comparison.first(self.allowance)

    def is_rounding(self, residuals: Sequence[Difference]) -> bool:
        """Whether all of them are no more than rounding, which is measured if that is in question."""
        if all(self.allowance.explains(each) for each in residuals):
            return True
        size = max((each.size for each in residuals), default=0.0)
        if max(each.amount for each in residuals) > GROSS * self.allowance.granted * size:
            return False
        self.repeat()
        return all(self.allowance.explains(each) for each in residuals)

    def repeat(self) -> Difference | None:
        """Compares one replica with itself, where only rounding differs, and takes that as the measure of rounding.

        Every weight is moved by one rounding error and the sums are made by one thread: what that does to each tensor,
        and how a step makes it grow, is what the order of additions may do.

        Returns:
            What shows that the program does not repeat itself, if anything does.
        """
        # A nudge of an eighth of a coarse rounding error turns an eighth of the weights over, when they are cast.
        nudged = Switches(nudge=max(self.base.unit, self.base.coarse / 8), threads=1)
        twice = self._run(Side(all_replicas=False, switches=nudged), Side(all_replicas=False))
        noise = {each.key: each.amount for each in twice.differences if each.amount > 0}
        self.allowance = replace(self.allowance, noise=noise)
        fixed = (each for each in twice.differences if each.kind in ("initial weight", "rows") and each.amount > 0)
        return next(fixed, next((each for each in twice.differences if self._is_gross(each)), None))

    def _is_gross(self, difference: Difference) -> bool:
        """Whether it is beyond what any order of additions does: no rounding has been through an update yet."""
        if difference.kind in ("rows", "initial weight"):
            return difference.amount > 0
        early = difference.kind in ("moved weight", "output", "loss", "settled weight") and difference.step == 1
        return early and difference.relative > GROSS * self.allowance.granted

    def _run(self, left: Side, right: Side, *, steps: int | None = None) -> Comparison:
        if (left, right) not in self._known:
            self._progress(describe(left, right))
            self._known[left, right] = None
            self._known[left, right] = compare_runs(
                self._config if steps is None else replace(self._config, steps=steps), left, right
            )
        comparison = self._known[left, right]
        if comparison is None:
            raise ReplicaError(f"{describe(left, right)}: this comparison failed before")
        return comparison


def describe(left: Side, right: Side) -> str:
    """A comparison in one line."""
    if left.switches.nudge:
        return "one replica with itself, weights moved by one rounding error"
    if left.only is not None:
        return f"replica {left.only} with one on the rows of that replica alone"
    switches = left.switches
    parts = {
        "without dropout": switches.randomness == "dropout",
        "without random draws": switches.randomness == "constant",
        "batch statistics of the whole batch": switches.batch_norm == "synced",
        "batch norms in evaluation mode": switches.batch_norm == "frozen",
        "weights held between updates": switches.hold_weights,
        "the module called shard by shard on the one": right.switches.shards > 1,
    }
    changed = [part for part, there in parts.items() if there]
    return "all replicas with one, " + (", ".join(changed) if changed else "as written")
