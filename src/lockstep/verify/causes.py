"""What the numbers of a comparison say about a cause, in words. Pure: experiments are run elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from lockstep.verify.compare import Comparison, Difference, StepComparison, Weighting
from lockstep.verify.config import AS_WRITTEN, Randomness, Statistics, Switches
from lockstep.verify.experiments import Laboratory

Cause = Literal[
    "batch statistics",
    "random numbers",
    "mean over a shard",
    "all-reduced loss",
    "undistributed batch",
    "batch size",
    "different rows",
    "not reproducible",
    "initial weights",
    "loss not per example",
    "rows mixed in the module",
    "weight penalty",
    "scaled loss",
    "changed outside the optimizer",
    "learning rate",
]


_SAME_LOSS = 1e-6
_OUTSIDE_ADVICE = (
    "replicas share one copy of the weights, so a change inside strategy.run is made once per replica: make it "
    "outside, after run, or let the optimizer do it (weight_decay)"
)

Judge = Callable[[Sequence[Difference]], bool]
"""Says whether differences are no more than rounding."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A cause that was found.

    Args:
        cause: its name.
        said: what it is, in this program.
        tested: how it was tested, with numbers.
        advice: what to change.
        by_definition: nothing is wrong, and nothing else differs.
    """

    cause: Cause
    said: str
    tested: str
    advice: str
    by_definition: bool = False


def initial_finding(first: Difference) -> Finding:
    """The weights differ before anything was trained."""
    return Finding(
        cause="initial weights",
        said=f"the runs begin with different weights: {first.name} differs before the first step",
        tested="compared the parameters at the first strategy.run; both runs had the same seeds",
        advice="make the module in the same way for any number of replicas, after torch.manual_seed",
    )


def unreproducible_finding(first: Difference) -> Finding:
    """Two runs on one replica differ."""
    return Finding(
        cause="not reproducible",
        said=f"the program does not repeat itself: two runs on one replica differ in their {first.kind} {first.name}",
        tested="ran it twice on one replica, with the same seeds of torch, NumPy and Python",
        advice="seed what it draws from: the generator of its DataLoader, its shuffling, the order of its sets",
    )


def rows_finding(comparison: Comparison, step: StepComparison, is_rounding: Judge) -> Finding:
    """The runs were fed different rows."""
    batch, replicas = step.batch, len(comparison.start.devices)
    ours, reference = len(batch.rows), len(batch.reference_rows)
    if batch.verdict == "undistributed":
        return _undistributed(step, replicas, reference, is_rounding)
    if batch.verdict == "scaled":
        return Finding(
            cause="batch size",
            said=f"the global batch depends on the number of replicas: {ours} rows on {replicas} replicas, {reference} "
            f"on one (step {step.step}, {batch.name})",
            tested=f"compared the rows that were given to strategy.run: {replicas} times as many",
            advice="batch the data by the global batch size, whatever num_replicas_in_sync is; or compare at the same "
            "global batch",
        )
    if batch.verdict == "count":
        counts = f"{batch.batches[0]} batches on {replicas} replicas, {batch.batches[1]} on one"
        return Finding(
            cause="batch size",
            said=f"update {step.step} sums another number of batches: {counts}",
            tested="counted the runs between updates",
            advice="accumulate over the same number of global batches for any number of replicas",
        )
    return _other_rows(comparison, step)


def weighting_finding(step: StepComparison, is_rounding: Judge) -> Finding | None:
    """The first of the candidate weights that turns the replicas' gradients into the one replica's."""
    fitting = (each for each in step.weightings if is_rounding(each.residuals))
    best = next(fitting, None)
    if best is None:
        return None
    tested = _weighting_test(best, step)
    if best.kind in ("shares", "uniform") and _is_one_number(step.losses):
        return Finding(
            cause="all-reduced loss",
            said=f"each replica back-propagates the loss of all replicas: it is {step.losses[0]:.6g} on every one",
            tested=tested,
            advice="back-propagate each replica's own part, ls.compute_average_loss(per_example, "
            "global_batch_size=...), and all_reduce the loss after that, for showing it",
        )
    if best.kind == "shares" or (best.kind == "uniform" and abs(best.factors[0] * len(best.factors) - 1) < 1e-4):
        even = len(set(best.factors)) == 1
        times = f"{1 / best.factors[0]:.4g} times" if even else "each is too large by as much as its shard is short"
        return Finding(
            cause="mean over a shard",
            said=f"each replica's loss is the mean over its own shard, and the replicas' gradients are added: {times}"
            f"{' the gradient of the whole batch' if times.endswith('times') else ''}",
            tested=tested,
            advice="divide by the global batch: ls.compute_average_loss(per_example, global_batch_size=...), with "
            'reduction="none" in the loss',
        )
    if best.kind == "weight penalty":
        return Finding(
            cause="weight penalty",
            said="every replica adds the whole weight penalty to its loss, so it counts once per replica",
            tested=tested,
            advice="divide it among them: loss + ls.scale_regularization_loss(penalty)",
        )
    return Finding(
        cause="scaled loss",
        said="the replicas' gradients, added up, are the one replica's but for "
        + ("one factor" if best.kind == "uniform" else "a factor of each replica's own"),
        tested=tested,
        advice="look for what the loss is divided by or multiplied with: a number of replicas, or the rows of a shard",
    )


def additive_finding(comparison: Comparison, step: StepComparison, *, tried: Sequence[int]) -> Finding:
    """Outputs agree, and no weights make the gradients agree.

    Args:
        comparison: of N replicas with one.
        step: where the gradients differ.
        tried: the replicas whose gradient is that of one device on their rows alone.
    """
    alone = " and ".join(f"replica {replica}" for replica in tried)
    best = min((_left(each.residuals) for each in step.weightings), default=1.0)
    return Finding(
        cause="loss not per example",
        said="the module's outputs agree row by row, yet the losses of the shards do not add up to that of the batch",
        tested=f"no factors for the {len(comparison.start.devices)} replicas' gradients give the one replica's: what "
        f"is left is {best:.2g} of the largest gradient, at best"
        + (f"; {alone} alone: the gradients are those of one device on the same rows" if tried else ""),
        advice="the loss compares examples with one another (contrastive, centred, ranked): gather what it needs with "
        "ls.get_replica_context().all_gather(outputs, 0), or average a loss of single examples",
    )


def outside_finding(first: Difference, step: StepComparison) -> Finding:
    """A parameter changed without an update, and differs."""
    when = "between an update and the next run" if first.kind == "settled weight" else "in a step before its update"
    return Finding(
        cause="changed outside the optimizer",
        said=f"parameters change outside the optimizer, {when}: {_some(step.changed)}",
        tested=f"compared the parameters after each update with those before the next: {first.name} differs by "
        f"{first.relative:.2g} of its size",
        advice=_OUTSIDE_ADVICE,
    )


def held_finding(step: StepComparison, outcome: str) -> Finding:
    """The difference needs the changes outside the optimizer."""
    return Finding(
        cause="changed outside the optimizer",
        said=f"parameters change outside the optimizer, after an update: {_some(step.changed)}",
        tested=f"put the parameters back to their values after the update, in both runs:{outcome}",
        advice=_OUTSIDE_ADVICE,
    )


def batch_norm_finding(comparison: Comparison, synced: bool, outcome: str) -> Finding:
    """The difference needs statistics of a shard."""
    how = "statistics of the whole batch (sync_batchnorm=True)" if synced else "batch norms in evaluation mode"
    return Finding(
        cause="batch statistics",
        said=f"batch norms take the statistics of each replica's shard: {_some(comparison.start.batch_norms)}",
        tested=f"ran both with {how}:{outcome}",
        advice="strategy.mirror(module, sync_batchnorm=True), or ls.Model(module, sync_batchnorm=True)",
    )


def random_finding(comparison: Comparison, dropout_alone: bool, outcome: str) -> Finding:
    """The difference needs random draws."""
    names = comparison.start.dropouts
    dropout = f"dropout ({_some(names)})" if names else "dropout"
    what, how = (dropout, "dropout off") if dropout_alone else ("more than dropout", "all draws replaced by constants")
    return Finding(
        cause="random numbers",
        said=f"each replica draws its own random numbers in the step: {what}",
        tested=f"ran both with {how}:{outcome}",
        advice="nothing is wrong: masks differ between replicas by definition, and every layout repeats its own"
        if dropout_alone
        else "they differ by definition; to have them equal, draw them with the data, outside strategy.run",
        by_definition=dropout_alone,
    )


def mixed_rows_finding(output: Difference, replicas: int) -> Finding:
    """Shard by shard, one replica gives what the replicas give."""
    return Finding(
        cause="rows mixed in the module",
        said=f"the output of {output.name} for a row depends on the other rows of the batch",
        tested=f"called the module on one replica with the {replicas} shards one after another: then its outputs are "
        "those of the replicas",
        advice="compute such statistics over all replicas, with ls.get_replica_context().all_reduce in forward",
    )


def stride_finding(step: StepComparison, replicas: int) -> Finding | None:
    """The gradients agree and the weights went further by one factor."""
    if step.stride is None or abs(step.stride - 1) < 1e-4:
        return None
    return Finding(
        cause="learning rate",
        said=f"the gradients agree, but the update goes {step.stride:.4g} times as far on {replicas} replicas",
        tested="fitted one factor to the changes of all parameters",
        advice="a learning rate that grows with num_replicas_in_sync is not needed: the global batch is the same",
    )


def _undistributed(step: StepComparison, replicas: int, rows: int, is_rounding: Judge) -> Finding:
    uniform = next((each for each in step.weightings if each.kind == "uniform"), None)
    alone = uniform is not None and is_rounding(uniform.residuals)
    factor = f"{1 / uniform.factors[0]:.4g}" if uniform is not None and uniform.factors[0] else "another"
    tested = (
        f"the gradients added up are {factor} times the one replica's, and divided by that they are equal"
        if alone
        else "compared the rows of every replica with those of one: they are the same"
    )
    return Finding(
        cause="undistributed batch",
        said=f"each of the {replicas} replicas was given the whole batch of {rows} rows",
        tested=tested,
        advice="divide it: for batch in strategy.distribute_dataset(batches): strategy.run(step, (batch,))",
    )


def _other_rows(comparison: Comparison, step: StepComparison) -> Finding:
    batch, replicas = step.batch, len(comparison.start.devices)
    fed = Counter(row for each in comparison.steps for row in each.batch.rows)
    expected = Counter(row for each in comparison.steps for row in each.batch.reference_rows)
    order = " (over all steps they are the same rows, in another order)" if fed == expected else ""
    return Finding(
        cause="different rows",
        said=f"the runs were fed different data: at step {step.step}, {batch.common} of {len(batch.rows)} rows on "
        f"{replicas} replicas are among the {len(batch.reference_rows)} rows on one ({batch.name}){order}",
        tested="compared fingerprints of the rows given to strategy.run; two runs on one replica get the same rows",
        advice="let the order and the content of the data depend on a seed, and not on the number of replicas",
    )


def _weighting_test(weighting: Weighting, step: StepComparison) -> str:
    largest = _left(weighting.residuals)
    if weighting.kind == "weight penalty":
        return f"the sum less {weighting.penalty:.4g} times the weights is the one replica's gradient to {largest:.1e}"
    factors = _listed(weighting.factors)
    what = {"shares": "weighted with the shards' shares", "uniform": "all multiplied by"}.get(
        weighting.kind, "multiplied by"
    )
    return f"step {step.step}: the replicas' gradients, {what} {factors}, give the one replica's to {largest:.1e}"


def _is_one_number(losses: Sequence[float]) -> bool:
    """Whether several replicas have one loss, which different rows never give by themselves."""
    return len(losses) > 1 and bool(losses[0]) and max(losses) - min(losses) <= _SAME_LOSS * abs(losses[0])


def _left(residuals: Sequence[Difference]) -> float:
    """What is left, relative to the largest gradient: a gradient that is 0 but for rounding has no size of its own."""
    size = max((each.size for each in residuals), default=0.0)
    return max((each.amount for each in residuals), default=0.0) / size if size else 0.0


def _listed(factors: Sequence[float]) -> str:
    written = [f"{factor:.4g}" for factor in factors]
    return written[0] if len(set(written)) == 1 else ", ".join(written)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


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
