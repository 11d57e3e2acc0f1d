"""From a difference to its causes: each hypothesis is tried by running the program again with something switched off.

as written -> all suspects off -> each back on by itself: is it needed? -> what is left: the gradients' weights
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from lockstep.verify.causes import (
    Finding,
    additive_finding,
    batch_norm_finding,
    held_finding,
    initial_finding,
    mixed_rows_finding,
    outside_finding,
    random_finding,
    rows_finding,
    stride_finding,
    unreproducible_finding,
    weighting_finding,
)
from lockstep.verify.compare import Comparison, StepComparison
from lockstep.verify.config import AS_WRITTEN, Randomness, Statistics, Switches
from lockstep.verify.difference import Difference
from lockstep.verify.laboratory import Laboratory


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """Something that can be switched off.

    Args:
        off: switches it off.
        finding: what is found if the difference needs it; gets what came of switching it off.
    """

    off: Callable[[Switches], Switches]
    finding: Callable[[str], Finding]


def explain(laboratory: Laboratory, first: Difference) -> list[Finding]:
    """All causes that the difference needed, as far as they were found.

    Args:
        laboratory: runs the experiments; its ``base`` is the program as written.
        first: the first difference of that.
    """
    base = laboratory.base
    if first.kind in ("initial weight", "rows"):
        return [_of_what_is_given(laboratory, first)]
    suspects, cleared, switches = _clear(laboratory)
    needed = [suspect for suspect in suspects if _is_needed(laboratory, suspect, suspects, cleared)]
    if not needed:
        cleared, switches = base, AS_WRITTEN
    rest = laboratory.first(cleared)
    found = [suspect.finding(_outcome(rest, len(needed))) for suspect in needed]
    if rest is not None:
        found = [replace(each, by_definition=False) for each in found]
        found += _explain_rest(laboratory, cleared, rest, switches)
    if not found and (unsteady := laboratory.repeat()) is not None:
        return [unreproducible_finding(unsteady)]
    return found


def _of_what_is_given(laboratory: Laboratory, first: Difference) -> Finding:
    """The rows, or the weights before the first step, are not the same: is that so for one replica too?"""
    base = laboratory.base
    step = base.step(first.step) if first.kind == "rows" else None
    if step is None or step.batch.verdict == "different":
        unsteady = laboratory.repeat()
        if unsteady is not None:
            return unreproducible_finding(unsteady)
    return initial_finding(first) if step is None else rows_finding(base, step, laboratory.is_rounding)


def _clear(laboratory: Laboratory) -> tuple[list[Suspect], Comparison, Switches]:
    """The suspects, and the program with all of them off."""
    suspects = _suspects(laboratory.base, drawing="dropout", statistics="synced")
    cleared = laboratory.attempt(_off(suspects))
    statistics: Statistics = "synced"
    if cleared is None:  # synchronised batch norms are collectives, which an unchanged step may not all reach
        statistics = "frozen"
        suspects = _suspects(laboratory.base, drawing="dropout", statistics=statistics)
        cleared = laboratory.attempt(_off(suspects))
    if cleared is not None and cleared.draws and laboratory.first(cleared) is not None:
        more = _suspects(laboratory.base, drawing="constant", statistics=statistics)
        further = laboratory.attempt(_off(more))
        if further is not None and _is_earlier(laboratory, cleared, further):
            return more, further, _off(more)
    return ([], laboratory.base, AS_WRITTEN) if cleared is None else (suspects, cleared, _off(suspects))


def _suspects(base: Comparison, *, drawing: Randomness, statistics: Statistics) -> list[Suspect]:
    suspects = []
    if base.draws or base.start.dropouts:
        suspects.append(
            Suspect(
                off=lambda switches: replace(switches, randomness=drawing),
                finding=partial(random_finding, base, drawing == "dropout"),
            )
        )
    if base.start.batch_norms:
        suspects.append(
            Suspect(
                off=lambda switches: replace(switches, batch_norm=statistics),
                finding=partial(batch_norm_finding, base, statistics == "synced"),
            )
        )
    changing = next((step for step in base.steps if step.changed), None)
    if changing is not None:
        suspects.append(
            Suspect(
                off=lambda switches: replace(switches, hold_weights=True),
                finding=partial(held_finding, changing),
            )
        )
    return suspects


def _off(suspects: list[Suspect]) -> Switches:
    switches = AS_WRITTEN
    for suspect in suspects:
        switches = suspect.off(switches)
    return switches


def _outcome(rest: Difference | None, needed: int) -> str:
    """What came of switching off all that was needed."""
    together = "" if needed == 1 else " with the other causes off too,"
    if rest is None:
        return f"{together} the difference vanishes"
    return f"{together} the first that differs is then the {rest.kind} {rest.name} of step {rest.step}"


def _is_needed(laboratory: Laboratory, suspect: Suspect, suspects: list[Suspect], cleared: Comparison) -> bool:
    """Whether the difference comes earlier, or at all, with this one suspect as written."""
    alone = laboratory.attempt(_off([each for each in suspects if each is not suspect]))
    return alone is not None and _is_earlier(laboratory, alone, cleared)


def _is_earlier(laboratory: Laboratory, one: Comparison, other: Comparison) -> bool:
    """Whether ``one`` differs, and earlier than ``other`` does."""
    first, second = laboratory.first(one), laboratory.first(other)
    return first is not None and (second is None or first.order < second.order)


def _explain_rest(
    laboratory: Laboratory, comparison: Comparison, rest: Difference, switches: Switches
) -> list[Finding]:
    """What no switch takes away: the numbers themselves have to say it."""
    step = comparison.step(rest.step)
    if rest.kind == "output":
        return _mixed_rows(laboratory, comparison, rest, switches)
    if rest.kind in ("loss", "gradient"):
        found = weighting_finding(step, laboratory.is_rounding)
        return [found] if found is not None else _not_additive(laboratory, comparison, step, switches)
    if rest.kind in ("moved weight", "settled weight"):
        return [outside_finding(rest, step)]
    stride = stride_finding(step, len(comparison.start.devices)) if rest.kind == "weight" else None
    return [] if stride is None else [stride]


def _not_additive(
    laboratory: Laboratory, comparison: Comparison, step: StepComparison, switches: Switches
) -> list[Finding]:
    """No factors help. Is each replica's gradient that of one device on its rows? Then the loss does not add up."""
    if step.step > 1:  # an update lies before it, and one shard alone would have made another
        return [additive_finding(comparison, step, tried=())]
    replicas, tried = len(comparison.start.devices), []
    for replica in sorted({0, replicas - 1}):
        alone = laboratory.compare_shard(switches, replica, replicas).step(1)
        if alone.batch.verdict != "same":  # the shard did not come through the arguments, so it could not be cut
            continue
        residuals = [each for each in alone.differences if each.kind == "gradient"]
        factor = [each.residuals for each in alone.weightings if each.kind == "uniform"]
        if not any(laboratory.is_rounding(left) for left in [residuals, *factor]):
            return []
        tried.append(replica)
    return [additive_finding(comparison, step, tried=tried)]


def _mixed_rows(laboratory: Laboratory, comparison: Comparison, rest: Difference, switches: Switches) -> list[Finding]:
    replicas = len(comparison.start.devices)
    sharded = laboratory.compare(switches, replace(switches, shards=replicas))
    return [mixed_rows_finding(rest, replicas)] if _is_earlier(laboratory, comparison, sharded) else []
