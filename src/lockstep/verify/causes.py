"""Finds the causes of a difference: each hypothesis is tested by an experiment, or by the recorded numbers.

program as written -> all hypotheses' interventions at once -> each left out: is it needed?
                   -> what is still different: explained by the numbers, such as factors of the gradients
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from lockstep.verify.compare import Comparison, Difference, GradientFit, StepComparison
from lockstep.verify.config import UNCHANGED, BatchStatistics, Interventions, Randomness
from lockstep.verify.experiments import ExperimentRunner

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

IsRounding = Callable[[Sequence[Difference]], bool]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A cause that was found."""

    cause: Cause
    description: str  # what it is in this program
    tested: str  # how it was tested, with numbers
    advice: str  # what to change
    by_definition: bool = False  # nothing is wrong: replicas differ in this by definition, and nothing else differs


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """A possible cause that an intervention removes."""

    remove: Callable[[Interventions], Interventions]  # adds the intervention
    # makes the finding from the outcome of the intervention, if the difference needs this cause
    finding: Callable[[str], Finding]


def explain(runner: ExperimentRunner, first: Difference) -> list[Finding]:
    """All causes that could be found of ``first``, the first difference of the program as written."""
    if first.kind in ("initial weight", "rows"):
        return [_explain_inputs(runner, first)]
    hypotheses, cleared, interventions = _remove_all(runner)
    needed = [each for each in hypotheses if _is_needed(runner, each, hypotheses, cleared)]
    if not needed:
        cleared, interventions = runner.base, UNCHANGED
    rest = runner.first(cleared)
    found = [each.finding(_outcome(rest, len(needed))) for each in needed]
    if rest is not None:
        found = [replace(each, by_definition=False) for each in found]
        found += _explain_rest(runner, cleared, rest, interventions)
    if not found and (unsteady := runner.measure_rounding()) is not None:
        return [_not_reproducible(unsteady)]
    return found


# Differences in what a step starts from.


def _explain_inputs(runner: ExperimentRunner, first: Difference) -> Finding:
    """The rows or the initial weights differ. Do they also differ between two runs on one replica?"""
    step = runner.base.step(first.step) if first.kind == "rows" else None
    if step is None or step.batch.verdict == "different":
        unsteady = runner.measure_rounding()
        if unsteady is not None:
            return _not_reproducible(unsteady)
    if step is not None:
        return _rows_finding(runner.base, step, runner.is_rounding)
    return Finding(
        cause="initial weights",
        description=f"the runs begin with different weights: {first.name} differs before the first step",
        tested="compared the parameters at the first strategy.run; both runs had the same seeds",
        advice="make the module in the same way for any number of replicas, after torch.manual_seed",
    )


def _not_reproducible(difference: Difference) -> Finding:
    name = f"{difference.kind} {difference.name}"
    return Finding(
        cause="not reproducible",
        description=f"the program does not repeat itself: two runs on one replica differ in their {name}",
        tested="ran it twice on one replica, with the same seeds of torch, NumPy and Python",
        advice="seed what it draws from: the generator of its DataLoader, its shuffling, the order of its sets",
    )


def _rows_finding(comparison: Comparison, step: StepComparison, is_rounding: IsRounding) -> Finding:
    batch, replicas = step.batch, len(comparison.start.devices)
    ours, reference = len(batch.rows), len(batch.reference_rows)
    if batch.verdict == "undistributed":
        return _undistributed(step, replicas, is_rounding)
    if batch.verdict == "scaled":
        return Finding(
            cause="batch size",
            description=f"the global batch depends on the number of replicas: {ours} rows on {replicas} replicas, "
            f"{reference} on one (step {step.step}, {batch.name})",
            tested=f"compared the rows that were given to strategy.run: {replicas} times as many",
            advice="batch the data by the global batch size, whatever num_replicas_in_sync is; or compare at the same "
            "global batch",
        )
    if batch.verdict == "count":
        counts = f"{batch.batches[0]} batches on {replicas} replicas, {batch.batches[1]} on one"
        return Finding(
            cause="batch size",
            description=f"update {step.step} sums another number of batches: {counts}",
            tested="counted the runs between updates",
            advice="accumulate over the same number of global batches for any number of replicas",
        )
    given = Counter(row for each in comparison.steps for row in each.batch.rows)
    expected = Counter(row for each in comparison.steps for row in each.batch.reference_rows)
    order = " (over all steps they are the same rows, in another order)" if given == expected else ""
    return Finding(
        cause="different rows",
        description=f"the runs got different data: at step {step.step}, {batch.common} of {ours} rows on "
        f"{replicas} replicas are among the {reference} rows on one ({batch.name}){order}",
        tested="compared fingerprints of the rows given to strategy.run; two runs on one replica get the same rows",
        advice="let the order and the content of the data depend on a seed, and not on the number of replicas",
    )


def _undistributed(step: StepComparison, replicas: int, is_rounding: IsRounding) -> Finding:
    uniform = next((fit for fit in step.fits if fit.kind == "uniform"), None)
    tested = "compared the rows of every replica with those of one: they are the same"
    if uniform is not None and is_rounding(uniform.residuals):
        factor = f"{1 / uniform.factors[0]:.4g}" if uniform.factors[0] else "another"
        tested = f"the summed gradients are {factor} times the one replica's, and divided by that they are equal"
    return Finding(
        cause="undistributed batch",
        description=f"each of the {replicas} replicas got the whole batch of {len(step.batch.reference_rows)} rows",
        tested=tested,
        advice="divide it: for batch in strategy.distribute_dataset(batches): strategy.run(step, (batch,))",
    )


# Hypotheses that an intervention tests.


def _remove_all(runner: ExperimentRunner) -> tuple[list[Hypothesis], Comparison, Interventions]:
    """The hypotheses, and the program with all their interventions at once."""
    statistics: BatchStatistics = "synced"
    hypotheses = _hypotheses(runner.base, "no dropout", statistics)
    cleared = runner.attempt(_remove(hypotheses))
    if cleared is None:  # synchronised batch norms are collectives, which an unchanged step may not all reach
        statistics = "frozen"
        hypotheses = _hypotheses(runner.base, "no dropout", statistics)
        cleared = runner.attempt(_remove(hypotheses))
    if cleared is not None and cleared.draws and runner.first(cleared) is not None:
        more = _hypotheses(runner.base, "constant", statistics)
        further = runner.attempt(_remove(more))
        if further is not None and _is_earlier(runner, cleared, further):
            return more, further, _remove(more)
    return ([], runner.base, UNCHANGED) if cleared is None else (hypotheses, cleared, _remove(hypotheses))


def _hypotheses(base: Comparison, randomness: Randomness, statistics: BatchStatistics) -> list[Hypothesis]:
    hypotheses = []
    if base.draws or base.start.dropouts:
        hypotheses.append(
            Hypothesis(
                remove=lambda interventions: replace(interventions, randomness=randomness),
                finding=partial(_random_finding, base.start.dropouts, randomness == "no dropout"),
            )
        )
    if base.start.batch_norms:
        hypotheses.append(
            Hypothesis(
                remove=lambda interventions: replace(interventions, batch_norm=statistics),
                finding=partial(_batch_norm_finding, base.start.batch_norms, statistics == "synced"),
            )
        )
    changed = next((step.changed for step in base.steps if step.changed), None)
    if changed is not None:
        hypotheses.append(
            Hypothesis(
                remove=lambda interventions: replace(interventions, hold_weights=True),
                finding=partial(_held_finding, changed),
            )
        )
    return hypotheses


def _remove(hypotheses: Sequence[Hypothesis]) -> Interventions:
    interventions = UNCHANGED
    for hypothesis in hypotheses:
        interventions = hypothesis.remove(interventions)
    return interventions


def _is_needed(
    runner: ExperimentRunner, hypothesis: Hypothesis, hypotheses: Sequence[Hypothesis], cleared: Comparison
) -> bool:
    """Whether the runs differ, and earlier, when this one cause is left in and all others are removed."""
    alone = runner.attempt(_remove([each for each in hypotheses if each is not hypothesis]))
    return alone is not None and _is_earlier(runner, alone, cleared)


def _is_earlier(runner: ExperimentRunner, one: Comparison, other: Comparison) -> bool:
    """Whether ``one`` differs, and earlier than ``other`` does."""
    first, second = runner.first(one), runner.first(other)
    return first is not None and (second is None or first.order < second.order)


def _outcome(rest: Difference | None, needed: int) -> str:
    together = "" if needed == 1 else " with the other causes off too,"
    if rest is None:
        return f"{together} the difference vanishes"
    return f"{together} the first that differs is then the {rest.kind} {rest.name} of step {rest.step}"


def _random_finding(dropouts: Sequence[str], dropout_alone: bool, outcome: str) -> Finding:
    dropout = f"dropout ({_some(dropouts)})" if dropouts else "dropout"
    what, how = (dropout, "dropout off") if dropout_alone else ("more than dropout", "all draws replaced by constants")
    return Finding(
        cause="random numbers",
        description=f"each replica draws its own random numbers in the step: {what}",
        tested=f"ran both with {how}:{outcome}",
        advice="nothing is wrong: masks differ between replicas by definition, and every layout repeats its own"
        if dropout_alone
        else "they differ by definition; to have them equal, draw them with the data, outside strategy.run",
        by_definition=dropout_alone,
    )


def _batch_norm_finding(batch_norms: Sequence[str], synced: bool, outcome: str) -> Finding:
    how = "statistics of the whole batch (sync_batchnorm=True)" if synced else "batch norms in evaluation mode"
    return Finding(
        cause="batch statistics",
        description=f"batch norms take the statistics of each replica's shard: {_some(batch_norms)}",
        tested=f"ran both with {how}:{outcome}",
        advice="strategy.mirror(module, sync_batchnorm=True), or ls.Model(module, sync_batchnorm=True)",
    )


def _held_finding(changed: Sequence[str], outcome: str) -> Finding:
    return Finding(
        cause="changed outside the optimizer",
        description=f"parameters change outside the optimizer, after an update: {_some(changed)}",
        tested=f"put the parameters back to their values after the update, in both runs:{outcome}",
        advice=_OUTSIDE_ADVICE,
    )


# Differences that no intervention removes.


def _explain_rest(
    runner: ExperimentRunner, comparison: Comparison, rest: Difference, interventions: Interventions
) -> list[Finding]:
    step, replicas = comparison.step(rest.step), len(comparison.start.devices)
    found: Finding | None = None
    if rest.kind == "output":
        by_shard = runner.compare(interventions, replace(interventions, shards=replicas))
        found = _mixed_rows_finding(rest, replicas) if _is_earlier(runner, comparison, by_shard) else None
    elif rest.kind in ("loss", "gradient"):
        found = _fit_finding(step, runner.is_rounding) or _not_additive(runner, comparison, step, interventions)
    elif rest.kind in ("weight changed before update", "weight changed after update"):
        found = _outside_finding(rest, step)
    elif rest.kind == "weight":
        found = _learning_rate_finding(step, replicas)
    return [] if found is None else [found]


def _mixed_rows_finding(output: Difference, replicas: int) -> Finding:
    return Finding(
        cause="rows mixed in the module",
        description=f"the output of {output.name} for a row depends on the other rows of the batch",
        tested=f"called the module on one replica with the {replicas} shards one after another: then its outputs are "
        "those of the replicas",
        advice="compute such statistics over all replicas, with ls.get_replica_context().all_reduce in forward",
    )


def _fit_finding(step: StepComparison, is_rounding: IsRounding) -> Finding | None:
    """The first fit that turns the replicas' gradients into the single replica's."""
    best = next((fit for fit in step.fits if is_rounding(fit.residuals)), None)
    if best is None:
        return None
    tested = _fit_test(best, step)
    if best.kind in ("shares", "uniform") and _is_one_number(step.losses):
        return Finding(
            cause="all-reduced loss",
            description=f"each replica back-propagates the loss of all replicas: it is {step.losses[0]:.6g} on each",
            tested=tested,
            advice="back-propagate each replica's own part, ls.compute_average_loss(per_example, "
            "global_batch_size=...), and all_reduce the loss after that, for showing it",
        )
    if best.kind == "shares" or (best.kind == "uniform" and abs(best.factors[0] * len(best.factors) - 1) < 1e-4):
        even = len(set(best.factors)) == 1
        times = (
            f"{1 / best.factors[0]:.4g} times the gradient of the whole batch"
            if even
            else "each is too large by as much as its shard is short"
        )
        return Finding(
            cause="mean over a shard",
            description="each replica's loss is the mean over its own shard, and the replicas' gradients are added: "
            f"{times}",
            tested=tested,
            advice="divide by the global batch: ls.compute_average_loss(per_example, global_batch_size=...), with "
            'reduction="none" in the loss',
        )
    if best.kind == "weight penalty":
        return Finding(
            cause="weight penalty",
            description="every replica adds the whole weight penalty to its loss, so it counts once per replica",
            tested=tested,
            advice="divide it among them: loss + ls.scale_regularization_loss(penalty)",
        )
    factors = "one factor" if best.kind == "uniform" else "a factor of each replica's own"
    return Finding(
        cause="scaled loss",
        description=f"the replicas' gradients, added up, are the one replica's but for {factors}",
        tested=tested,
        advice="look for what the loss is divided by or multiplied with: a number of replicas, or the rows of a shard",
    )


def _not_additive(
    runner: ExperimentRunner, comparison: Comparison, step: StepComparison, interventions: Interventions
) -> Finding | None:
    """No factors fit. If each replica's gradient is that of one device on its rows, the losses do not add up."""
    replicas, tried = len(comparison.start.devices), []
    # After an update, one shard alone would have made other weights, so only the first step can be tested.
    for replica in sorted({0, replicas - 1}) if step.step == 1 else ():
        alone = runner.compare_shard(interventions, replica, replicas).step(1)
        if alone.batch.verdict != "same":  # the batch did not come through the arguments, so it could not be cut
            continue
        gradients = [each for each in alone.differences if each.kind == "gradient"]
        scaled = [fit.residuals for fit in alone.fits if fit.kind == "uniform"]
        if not any(runner.is_rounding(left) for left in [gradients, *scaled]):
            return None
        tried.append(f"replica {replica}")
    best = min((_left(fit.residuals) for fit in step.fits), default=1.0)
    alone_too = (
        f"; {' and '.join(tried)} alone: the gradients are those of one device on the same rows" if tried else ""
    )
    return Finding(
        cause="loss not per example",
        description="the module's outputs agree row by row, yet the losses of the shards do not add up to the batch's",
        tested=f"no factors for the {replicas} replicas' gradients give the one replica's: what is left is {best:.2g} "
        f"of the largest gradient, at best{alone_too}",
        advice="the loss compares examples with one another (contrastive, centred, ranked): gather what it needs with "
        "ls.get_replica_context().all_gather(outputs, 0), or average a loss of single examples",
    )


def _outside_finding(first: Difference, step: StepComparison) -> Finding:
    after = first.kind == "weight changed after update"
    when = "between an update and the next run" if after else "in a step before its update"
    return Finding(
        cause="changed outside the optimizer",
        description=f"parameters change outside the optimizer, {when}: {_some(step.changed)}",
        tested=f"compared the parameters after each update with those before the next: {first.name} differs by "
        f"{first.relative:.2g} of its size",
        advice=_OUTSIDE_ADVICE,
    )


def _learning_rate_finding(step: StepComparison, replicas: int) -> Finding | None:
    if step.update_scale is None or abs(step.update_scale - 1) < 1e-4:
        return None
    return Finding(
        cause="learning rate",
        description=f"the gradients agree, but the update goes {step.update_scale:.4g} times as far on {replicas} "
        "replicas",
        tested="fitted one factor to the changes of all parameters",
        advice="a learning rate that grows with num_replicas_in_sync is not needed: the global batch is the same",
    )


def _fit_test(fit: GradientFit, step: StepComparison) -> str:
    left = f"{_left(fit.residuals):.1e}"
    if fit.kind == "weight penalty":
        return f"the sum less {fit.penalty:.4g} times the weights is the one replica's gradient to {left}"
    written = [f"{factor:.4g}" for factor in fit.factors]
    factors = written[0] if len(set(written)) == 1 else ", ".join(written)
    how = {"shares": "weighted with the shards' shares", "uniform": "all multiplied by"}.get(fit.kind, "multiplied by")
    return f"step {step.step}: the replicas' gradients, {how} {factors}, give the one replica's to {left}"


def _is_one_number(losses: Sequence[float]) -> bool:
    """Whether several replicas have the same loss, which different rows do not give by chance."""
    return len(losses) > 1 and bool(losses[0]) and max(losses) - min(losses) <= _SAME_LOSS * abs(losses[0])


def _left(residuals: Sequence[Difference]) -> float:
    """The largest residual relative to the largest gradient; a gradient that is 0 but for rounding has no own size."""
    size = max((each.size for each in residuals), default=0.0)
    return max((each.amount for each in residuals), default=0.0) / size if size else 0.0


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
