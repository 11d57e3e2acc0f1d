"""One comparison from start to end: two runs, their records compared as they come, and what can stop it."""

from __future__ import annotations

from lockstep.errors import ConfigError, ReplicaError
from lockstep.verify.compare import Before, Comparison, StepComparison, compare_starts, compare_updates
from lockstep.verify.config import Side, VerifyConfig
from lockstep.verify.difference import Difference
from lockstep.verify.record import EndRecord, StartRecord, UpdateRecord
from lockstep.verify.runner import Child, Pair, running


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
