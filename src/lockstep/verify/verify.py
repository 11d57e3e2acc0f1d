"""The verification as a whole: compare, and explain what is more than rounding."""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.verify.causes import Finding
from lockstep.verify.compare import Comparison
from lockstep.verify.config import VerifyConfig
from lockstep.verify.difference import KINDS, Allowance, Difference
from lockstep.verify.explain import explain
from lockstep.verify.laboratory import Laboratory, Progress


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

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong: the numbers are equal, or differ by dropout alone, which is a replica's own."""
        return self.equal or (bool(self.findings) and all(finding.by_definition for finding in self.findings))

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
    laboratory = Laboratory(config, progress or (lambda line: None))
    first = laboratory.first(laboratory.base)
    findings = [] if first is None else explain(laboratory, first)
    allowance = laboratory.allowance
    return VerifyReport(
        config=config,
        comparison=laboratory.base,
        allowance=allowance,
        first=first,
        findings=tuple(findings),
        experiments=tuple(
            Experiment(what=what, outcome=_outcome(comparison, allowance)) for what, comparison in laboratory.done
        ),
    )


def _outcome(comparison: Comparison, allowance: Allowance) -> str:
    first = comparison.first(allowance)
    if first is None:
        return "equal"
    return f"step {first.step}: {first.kind} {first.name} differs by {first.relative:.1e} of its size"
