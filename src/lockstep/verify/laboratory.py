"""Where comparisons are run, kept, and judged: what is rounding is measured when a judgement depends on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from lockstep.errors import ReplicaError
from lockstep.verify.compare import Comparison
from lockstep.verify.config import Side, Switches, VerifyConfig
from lockstep.verify.difference import Allowance, Difference
from lockstep.verify.trial import compare_runs

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
