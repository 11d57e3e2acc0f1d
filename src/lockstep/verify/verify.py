"""The verification as a whole: compare, measure rounding if that is in question, and explain what is left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lockstep.verify.causes import Finding, unreproducible_finding
from lockstep.verify.compare import Comparison
from lockstep.verify.config import Side, Switches, VerifyConfig
from lockstep.verify.difference import KINDS, Allowance, Difference, Key
from lockstep.verify.explain import Explanation
from lockstep.verify.trial import compare_runs

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One pair of runs.

    Args:
        what: what was compared.
        outcome: the first thing that differs, or that nothing does.
    """

    what: str
    outcome: str


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What came out.

    Args:
        config: what was asked.
        comparison: of the program as written, N replicas with one.
        allowance: what counted as rounding.
        first: the first thing that differs; None where nothing does.
        findings: the causes; empty where nothing differs, or where no hypothesis explains it.
        experiments: every pair of runs, in order.
    """

    config: VerifyConfig
    comparison: Comparison
    allowance: Allowance
    first: Difference | None = None
    findings: tuple[Finding, ...] = ()
    experiments: tuple[Experiment, ...] = field(default=(), repr=False)

    @property
    def equal(self) -> bool:
        """Whether N replicas gave the numbers of one."""
        return self.first is None

    def largest(self) -> list[Difference]:
        """Of every kind the largest difference relative to its size, in the order of a step."""
        found: dict[str, Difference] = {}
        for each in self.comparison.differences:
            if each.kind not in found or each.relative > found[each.kind].relative:
                found[each.kind] = each
        return [found[kind] for kind in KINDS if kind in found]


def verify(config: VerifyConfig, *, progress: Progress | None = None) -> VerifyReport:
    """Runs the program on N replicas and on one, and says whether they agree and, if not, why.

    Args:
        config: the program, and how far it is to be run.
        progress: called with a line before each pair of runs.

    Raises:
        ConfigError: the program fails by itself, or there is nothing to compare.
        ReplicaError: a run took too long, or the program fails on one of the sides only.
    """
    laboratory = _Laboratory(config, progress or (lambda line: None))
    base = laboratory.compare(Side(all_replicas=True), Side(all_replicas=False))
    allowance = Allowance(unit=base.unit)
    if base.first(allowance) is not None:
        noise, unsteady = _measure_noise(laboratory, base)
        if unsteady is not None:
            finding = unreproducible_finding(unsteady)
            return laboratory.report(base, allowance, base.first(allowance), [finding])
        allowance = Allowance(unit=base.unit, noise=noise)
    first = base.first(allowance)
    findings = [] if first is None else Explanation(base, allowance, laboratory.compare).findings(first)
    return laboratory.report(base, allowance, first, findings)


def _measure_noise(laboratory: _Laboratory, base: Comparison) -> tuple[Mapping[Key, float], Difference | None]:
    """How far one replica is from itself where only rounding differs; and what shows that it does not repeat itself.

    Every weight is moved by one rounding error and the sums are made by one thread: what that does to each tensor, and
    how a step makes it grow, is what the order of additions may do.
    """
    nudged = Switches(nudge=base.unit, threads=1)
    twice = laboratory.compare(Side(all_replicas=False, switches=nudged), Side(all_replicas=False))
    wrong = (d for d in twice.differences if d.kind in ("initial weight", "rows") and d.amount > 0)
    return {each.key: each.amount for each in twice.differences if each.amount > 0}, next(wrong, None)


class _Laboratory:
    """Runs comparisons and keeps a list of them."""

    def __init__(self, config: VerifyConfig, progress: Progress) -> None:
        self._config = config
        self._progress = progress
        self._done: list[tuple[str, Comparison]] = []

    def compare(self, left: Side, right: Side) -> Comparison:
        """Runs both sides."""
        what = describe(left, right)
        self._progress(what)
        comparison = compare_runs(self._config, left, right)
        self._done.append((what, comparison))
        return comparison

    def report(
        self, base: Comparison, allowance: Allowance, first: Difference | None, findings: list[Finding]
    ) -> VerifyReport:
        """All that was found."""
        return VerifyReport(
            config=self._config,
            comparison=base,
            allowance=allowance,
            first=first,
            findings=tuple(findings),
            experiments=tuple(Experiment(what=what, outcome=_outcome(each, allowance)) for what, each in self._done),
        )


def describe(left: Side, right: Side) -> str:
    """A comparison in one line."""
    if left.switches.nudge:
        return "one replica with itself, weights moved by one rounding error"
    switches = left.switches
    parts = {
        "without dropout": switches.randomness == "dropout",
        "without random draws": switches.randomness == "constant",
        "batch statistics of the whole batch": switches.batch_norm == "synced",
        "batch norms in evaluation mode": switches.batch_norm == "frozen",
        "weights held between updates": switches.hold_weights,
        "the module called shard by shard on one": right.switches.shards > 1,
    }
    changed = [part for part, there in parts.items() if there]
    return "all replicas with one, " + (", ".join(changed) if changed else "as written")


def _outcome(comparison: Comparison, allowance: Allowance) -> str:
    first = comparison.first(allowance)
    if first is None:
        return "equal"
    return f"step {first.step}: {first.kind} {first.name} differs by {first.relative:.1e} of its size"
