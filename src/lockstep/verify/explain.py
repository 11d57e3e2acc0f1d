"""From a difference to its causes: each hypothesis is tried by running the program again with something switched off.

base -> all suspects off -> the suspects back on, one at a time: is it needed? -> what is left: the gradients' weights
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lockstep.errors import ReplicaError
from lockstep.verify.causes import (
    Finding,
    additive_finding,
    initial_finding,
    outside_finding,
    rows_finding,
    stride_finding,
    weighting_finding,
)
from lockstep.verify.compare import Comparison
from lockstep.verify.config import AS_WRITTEN, Side, Switches
from lockstep.verify.difference import Allowance, Difference

Compare = Callable[[Side, Side], Comparison]


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """Something that can be switched off."""

    name: str
    off: Callable[[Switches], Switches]


class Explanation:
    """Finds the causes of a difference.

    Args:
        base: the comparison of the program as written.
        allowance: what is rounding.
        compare: runs a comparison.
    """

    def __init__(self, base: Comparison, allowance: Allowance, compare: Compare) -> None:
        self._base = base
        self._allowance = allowance
        self._compare = compare
        self._known: dict[Switches, Comparison | None] = {AS_WRITTEN: base}

    def findings(self, first: Difference) -> list[Finding]:
        """All causes that were needed for the difference, as far as they were found."""
        if first.kind == "initial weight":
            return [initial_finding(first)]
        if first.kind == "rows":
            return [rows_finding(self._base, self._base.step(first.step), self._allowance)]
        suspects, cleared = self._clear()
        needed = [suspect for suspect in suspects if self._is_needed(suspect, suspects, cleared)]
        if not needed:
            cleared = self._base
        found = [self._finding(suspect) for suspect in needed]
        rest = cleared.first(self._allowance)
        return found if rest is None else [*found, *self._explain_rest(cleared, rest, _off(suspects))]

    def _clear(self) -> tuple[list[Suspect], Comparison]:
        """The program without any suspect, and which these were."""
        suspects = _suspects(self._base)
        cleared = self._run(_off(suspects))
        if cleared is None:  # synchronised batch norms are collectives, which an unchanged step may not all reach
            suspects = [replace(s, off=_frozen) if s.name == "batch statistics" else s for s in suspects]
            cleared = self._run(_off(suspects))
        return (suspects, cleared) if cleared is not None else ([], self._base)

    def _is_needed(self, suspect: Suspect, suspects: list[Suspect], cleared: Comparison) -> bool:
        """Whether the difference comes earlier, or at all, with this one suspect as written."""
        alone = self._run(_off([each for each in suspects if each is not suspect]))
        earlier = None if alone is None else alone.first(self._allowance)
        rest = cleared.first(self._allowance)
        return earlier is not None and (rest is None or earlier.order < rest.order)

    def _run(self, switches: Switches) -> Comparison | None:
        if switches not in self._known:
            try:
                self._known[switches] = self._compare(
                    Side(all_replicas=True, switches=switches), Side(all_replicas=False, switches=switches)
                )
            except ReplicaError:
                self._known[switches] = None
        return self._known[switches]

    def _finding(self, suspect: Suspect) -> Finding:
        base = self._base
        if suspect.name == "batch statistics":
            names = _some(base.start.batch_norms)
            how = "synced" if suspect.off(AS_WRITTEN).batch_norm == "synced" else "frozen"
            return Finding(
                cause="batch statistics",
                said=f"batch norms take the statistics of each replica's shard: {names}",
                tested="ran both with statistics of the whole batch (sync_batchnorm=True): the difference vanishes"
                if how == "synced"
                else "ran both with the running statistics in place of the batch's: the difference vanishes",
                advice="strategy.mirror(module, sync_batchnorm=True), or ls.Model(module, sync_batchnorm=True)",
            )
        if suspect.name == "random numbers":
            return self._random_finding()
        step = next(each for each in base.steps if each.changed)
        at = next((d for d in step.differences if d.kind in ("settled weight", "moved weight")), step.differences[0])
        return outside_finding(at, step, held=True)

    def _random_finding(self) -> Finding:
        others = [s for s in _suspects(self._base) if s.name != "random numbers"]
        dropout = self._run(_off(others, randomness="dropout"))
        constant = self._run(_off(others, randomness="constant"))
        first = None if dropout is None else dropout.first(self._allowance)
        rest = None if constant is None else constant.first(self._allowance)
        alone = first is None or (rest is not None and first.order >= rest.order)
        names = _some(self._base.start.dropouts)
        what = f"dropout: {names}" if names else "dropout"
        return Finding(
            cause="random numbers",
            said="each replica draws its own random numbers in the step; " + (what if alone else "more than dropout"),
            tested=f"ran both {'with dropout off' if alone else 'with all draws replaced by constants'}: "
            "the difference vanishes",
            advice="nothing is wrong: the masks differ by definition, and every layout repeats its own"
            if alone
            else "the numbers differ by definition; draw them with the data, outside strategy.run, to have them equal",
        )

    def _explain_rest(self, comparison: Comparison, rest: Difference, switches: Switches) -> list[Finding]:
        step = comparison.step(rest.step)
        if rest.kind == "output":
            return self._mixed_rows(comparison, rest, switches)
        if rest.kind in ("loss", "gradient"):
            return [weighting_finding(step, self._allowance) or additive_finding(comparison, step)]
        if rest.kind in ("moved weight", "settled weight"):
            return [outside_finding(rest, step, held=False)]
        found = stride_finding(step, len(comparison.start.devices)) if rest.kind == "weight" else None
        return [] if found is None else [found]

    def _mixed_rows(self, comparison: Comparison, rest: Difference, switches: Switches) -> list[Finding]:
        replicas = len(comparison.start.devices)
        left = Side(all_replicas=True, switches=switches)
        right = Side(all_replicas=False, switches=replace(switches, shards=replicas))
        sharded = self._compare(left, right).first(self._allowance)
        if sharded is not None and sharded.order <= rest.order:
            return []
        return [
            Finding(
                cause="rows mixed in the module",
                said=f"the output of {rest.name} for a row depends on the other rows of the batch",
                tested=f"called the module on one replica with the {replicas} shards one after another: then its outputs "
                "are those of the replicas",
                advice="compute such statistics over all replicas, with ls.get_replica_context().all_reduce in forward",
            )
        ]


def _suspects(base: Comparison) -> list[Suspect]:
    suspects = []
    if base.draws or base.start.dropouts:
        suspects.append(Suspect(name="random numbers", off=lambda switches: replace(switches, randomness="constant")))
    if base.start.batch_norms:
        suspects.append(Suspect(name="batch statistics", off=lambda switches: replace(switches, batch_norm="synced")))
    if any(step.changed for step in base.steps):
        suspects.append(
            Suspect(name="changed outside the optimizer", off=lambda switches: replace(switches, hold_weights=True))
        )
    return suspects


def _off(suspects: list[Suspect], **also: str) -> Switches:
    switches = AS_WRITTEN
    for suspect in suspects:
        switches = suspect.off(switches)
    return replace(switches, **also)  # type: ignore[arg-type]


def _frozen(switches: Switches) -> Switches:
    return replace(switches, batch_norm="frozen")


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
