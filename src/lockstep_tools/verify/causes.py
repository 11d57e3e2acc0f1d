"""Finds the causes of a difference: each hypothesis is tested by an experiment, or by the recorded numbers.

program as written -> all hypotheses' interventions at once -> each left out: is it needed?
                   -> what is still different: explained by the numbers, such as factors of the gradients
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep_tools.verify.compare import Comparison, Difference, GradientFit, StepComparison
from lockstep_tools.verify.config import UNCHANGED, Interventions, Randomness
from lockstep_tools.verify.experiments import ExperimentRunner

# Relative; an all-reduced loss is the same on all replicas to a few rounding errors of float32 (1.2e-7).
_SAME_LOSS = 1e-6
ADVICE: Mapping[str, str] = {
    "batch statistics": "strategy.mirror(module, sync_batchnorm=True), or ls.Model(module, sync_batchnorm=True)",
    "random numbers": "dropout masks differ between replicas by definition, and every layout repeats its own; to have "
    "other random numbers equal, draw them with the data, outside strategy.run",
    "mean over a shard": "divide by the global batch: ls.compute_average_loss(per_example, global_batch_size=...), "
    'with reduction="none" in the loss',
    "all-reduced loss": "back-propagate each replica's own part, ls.compute_average_loss(per_example, "
    "global_batch_size=...), and all_reduce the loss after that, for showing it",
    "undistributed batch": "divide it: for batch in strategy.distribute_dataset(batches): strategy.run(step, (batch,))",
    "batch size": "take the same global batch and accumulate over the same number of them, whatever "
    "num_replicas_in_sync is; or compare at the same global batch",
    "different rows": "let the order and the content of the data depend on a seed, and not on the number of replicas",
    "not reproducible": "seed what it draws from: the generator of its DataLoader, its shuffling, the order of sets",
    "initial weights": "make the module in the same way for any number of replicas, after torch.manual_seed",
    "loss not per example": "the loss compares examples with one another (contrastive, centred, ranked): gather what "
    "it needs with ls.get_replica_context().all_gather(outputs, 0), or average a loss of single examples",
    "rows mixed in the module": "compute such statistics over all replicas, with "
    "ls.get_replica_context().all_reduce in forward",
    "weight penalty": "divide it among the replicas: loss + ls.scale_regularization_loss(penalty)",
    "scaled loss": "look for what the loss is divided by or multiplied with: a number of replicas, or the rows of a "
    "shard",
    "changed outside the optimizer": "replicas share one copy of the weights, so a change inside strategy.run is made "
    "once per replica: make it outside, after run, or let the optimizer do it (weight_decay)",
    "learning rate": "a learning rate that grows with num_replicas_in_sync is not needed: the global batch is the same",
}
"""The causes, and what to change."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A cause that was found."""

    cause: str  # one of ``ADVICE``
    description: str  # what it is in this program
    tested: str  # how it was tested, with numbers
    by_definition: bool = False  # nothing is wrong: replicas differ in this by definition, and nothing else differs

    @property
    def advice(self) -> str:
        return ADVICE[self.cause]


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """A possible cause that an intervention removes."""

    changes: Mapping[str, Any]  # the intervention: fields of ``Interventions``
    finding: Finding  # if the difference needs this cause; what came of the intervention is to be added


def explain(runner: ExperimentRunner, first: Difference) -> list[Finding]:
    """All causes that could be found of ``first``, the first difference of the program as written."""
    if first.kind in ("initial weight", "rows"):
        return [_explain_inputs(runner, first)]
    hypotheses, cleared = _remove_all(runner)
    # Leaving out one at a time: with two causes, removing one of them alone would still leave a difference
    # (test_two_causes_are_both_found).
    needed = [hypothesis for hypothesis in hypotheses if _is_needed(runner, hypothesis, hypotheses, cleared)]
    if not needed:
        hypotheses, cleared = [], runner.base
    rest = runner.first(cleared)
    outcome = "the difference vanishes"
    if rest is not None:
        outcome = f"the first that differs is then the {rest.kind} {rest.name} of step {rest.step}"
    together = "" if len(needed) == 1 else " with the other causes off too,"
    findings = [
        replace(hypothesis.finding, tested=f"{hypothesis.finding.tested}:{together} {outcome}") for hypothesis in needed
    ]
    if rest is not None:
        findings = [replace(finding, by_definition=False) for finding in findings]
        findings += _explain_rest(runner, cleared, rest, _remove(hypotheses))
    if not findings and (unsteady := runner.measure_rounding()) is not None:
        return [_not_reproducible(unsteady)]
    return findings


# Differences in what a step starts from.


def _explain_inputs(runner: ExperimentRunner, first: Difference) -> Finding:
    """The rows or the initial weights differ. Do they also differ between two runs on one replica?"""
    step = runner.base.step(first.step) if first.kind == "rows" else None
    if step is None or step.batch.verdict == "different":
        unsteady = runner.measure_rounding()
        if unsteady is not None:
            return _not_reproducible(unsteady)
    if step is not None:
        return _rows_finding(runner, step)
    return Finding(
        cause="initial weights",
        description=f"the runs begin with different weights: {first.name} differs before the first step",
        tested="compared the parameters at the first strategy.run; both runs had the same seeds",
    )


def _not_reproducible(difference: Difference) -> Finding:
    name = f"{difference.kind} {difference.name}"
    return Finding(
        cause="not reproducible",
        description=f"the program does not repeat itself: two runs on one replica differ in their {name}",
        tested="ran it twice on one replica, with the same seeds of torch, NumPy and Python",
    )


def _rows_finding(runner: ExperimentRunner, step: StepComparison) -> Finding:
    batch, replicas = step.batch, len(runner.base.start.devices)
    rows, reference_rows = len(batch.rows), len(batch.reference_rows)
    if batch.verdict == "undistributed":
        uniform = next((fit for fit in step.fits if fit.kind == "uniform" and runner.is_rounding(fit.residuals)), None)
        gradients = ""
        if uniform is not None and uniform.factors[0]:
            gradients = f"; the summed gradients are {1 / uniform.factors[0]:.4g} times the one replica's"
        return Finding(
            cause="undistributed batch",
            description=f"each of the {replicas} replicas got the whole batch of {reference_rows} rows",
            tested=f"compared the rows of every replica with those of one: they are the same{gradients}",
        )
    if batch.verdict == "scaled":
        return Finding(
            cause="batch size",
            description=f"the global batch depends on the number of replicas: {rows} rows on {replicas} replicas, "
            f"{reference_rows} on one (step {step.step}, {batch.name})",
            tested=f"compared the rows that were given to strategy.run: {replicas} times as many",
        )
    if batch.verdict == "count":
        counts = f"{batch.batches[0]} batches on {replicas} replicas, {batch.batches[1]} on one"
        return Finding(
            cause="batch size",
            description=f"update {step.step} sums another number of batches: {counts}",
            tested="counted the runs between updates",
        )
    candidate_rows = Counter(row for update in runner.base.steps for row in update.batch.rows)
    expected_rows = Counter(row for update in runner.base.steps for row in update.batch.reference_rows)
    order = " (over all steps they are the same rows, in another order)" if candidate_rows == expected_rows else ""
    return Finding(
        cause="different rows",
        description=f"the runs got different data: at step {step.step}, {batch.common} of {rows} rows on "
        f"{replicas} replicas are among the {reference_rows} rows on one ({batch.name}){order}",
        tested="compared fingerprints of the rows given to strategy.run; two runs on one replica get the same rows",
    )


# Hypotheses that an intervention tests.


def _remove_all(runner: ExperimentRunner) -> tuple[list[Hypothesis], Comparison]:
    """The hypotheses, and the program with all their interventions at once; none if they make a run fail."""
    hypotheses = _hypotheses(runner.base, "no dropout")
    cleared = runner.attempt(_remove(hypotheses))
    if cleared is None:
        return [], runner.base
    # Dropout off is tried first: it changes no other number. Constants in place of all draws also change what a program
    # draws on purpose.
    if cleared.draws and runner.first(cleared) is not None:
        more = _hypotheses(runner.base, "constant")
        further = runner.attempt(_remove(more))
        if further is not None and _is_earlier(runner, cleared, further):
            return more, further
    return hypotheses, cleared


def _hypotheses(base: Comparison, randomness: Randomness) -> list[Hypothesis]:
    hypotheses = []
    if base.draws or base.start.dropouts:
        dropout = f"dropout ({_some(base.start.dropouts)})" if base.start.dropouts else "dropout"
        alone = randomness == "no dropout"
        what, how = (dropout, "dropout off") if alone else ("more than dropout", "all draws replaced by constants")
        finding = Finding(
            cause="random numbers",
            description=f"each replica draws its own random numbers in the step: {what}",
            tested=f"ran both with {how}",
            by_definition=alone,
        )
        hypotheses.append(Hypothesis(changes={"randomness": randomness}, finding=finding))
    if base.start.batch_norms:
        finding = Finding(
            cause="batch statistics",
            description=f"batch norms take the statistics of each replica's shard: {_some(base.start.batch_norms)}",
            tested="ran both with statistics of the whole batch (sync_batchnorm=True)",
        )
        hypotheses.append(Hypothesis(changes={"sync_batch_norm": True}, finding=finding))
    changed = next((step.changed for step in base.steps if step.changed), None)
    if changed is not None:
        finding = Finding(
            cause="changed outside the optimizer",
            description=f"parameters change outside the optimizer, after an update: {_some(changed)}",
            tested="put the parameters back to their values after the update, in both runs",
        )
        hypotheses.append(Hypothesis(changes={"hold_weights": True}, finding=finding))
    return hypotheses


def _remove(hypotheses: Sequence[Hypothesis]) -> Interventions:
    return replace(
        UNCHANGED, **{name: value for hypothesis in hypotheses for name, value in hypothesis.changes.items()}
    )


def _is_needed(
    runner: ExperimentRunner, hypothesis: Hypothesis, hypotheses: Sequence[Hypothesis], cleared: Comparison
) -> bool:
    """Whether the runs differ, and earlier, when this one cause is left in and all others are removed."""
    alone = runner.attempt(_remove([candidate for candidate in hypotheses if candidate is not hypothesis]))
    return alone is not None and _is_earlier(runner, alone, cleared)


def _is_earlier(runner: ExperimentRunner, one: Comparison, other: Comparison) -> bool:
    """Whether ``one`` differs, and earlier than ``other`` does."""
    first, second = runner.first(one), runner.first(other)
    return first is not None and (second is None or first.order < second.order)


# Differences that no intervention removes.


def _explain_rest(
    runner: ExperimentRunner, comparison: Comparison, rest: Difference, interventions: Interventions
) -> list[Finding]:
    step, replicas = comparison.step(rest.step), len(comparison.start.devices)
    finding: Finding | None = None
    if rest.kind == "output":
        by_shard = runner.compare(interventions, replace(interventions, shards=replicas))
        if _is_earlier(runner, comparison, by_shard):
            finding = Finding(
                cause="rows mixed in the module",
                description=f"the output of {rest.name} for a row depends on the other rows of the batch",
                tested=f"called the module on one replica with the {replicas} shards one after another: then its "
                "outputs are those of the replicas",
            )
    elif rest.kind in ("loss", "gradient"):
        best = next((fit for fit in step.fits if runner.is_rounding(fit.residuals)), None)
        if best is not None:
            finding = _fit_finding(best, step)
        elif rest.kind == "loss":  # the outputs are equal, the losses are not
            residual = min((_relative_residual(fit.residuals) for fit in step.fits), default=1.0)
            finding = Finding(
                cause="loss not per example",
                description="the outputs agree row by row, yet the shards' losses do not add up to the batch's",
                tested=f"no factors for the {replicas} replicas' gradients give the one replica's: what is left is "
                f"{residual:.2g} of the largest gradient, at best",
            )
    elif rest.kind in ("weight changed before update", "weight changed after update"):
        when = "between an update and the next run" if "after" in rest.kind else "in a step before its update"
        finding = Finding(
            cause="changed outside the optimizer",
            description=f"parameters change outside the optimizer, {when}: {_some(step.changed)}",
            tested=f"compared the parameters after each update with those before the next: {rest.name} differs by "
            f"{rest.relative:.2g} of its size",
        )
    elif rest.kind == "weight" and step.update_scale is not None and abs(step.update_scale - 1) >= 1e-4:
        finding = Finding(
            cause="learning rate",
            description=f"the gradients agree, but the update goes {step.update_scale:.4g} times as far on {replicas} "
            "replicas",
            tested="fitted one factor to the changes of all parameters",
        )
    return [] if finding is None else [finding]


def _fit_finding(fit: GradientFit, step: StepComparison) -> Finding:
    """What a fit says that turns the replicas' gradients into the single replica's."""
    written = list(dict.fromkeys(f"{factor:.4g}" for factor in fit.factors))
    factors = written[0] if len(written) == 1 else ", ".join(f"{factor:.4g}" for factor in fit.factors)
    how = {"shares": "weighted with the shards' shares", "uniform": "all multiplied by"}.get(fit.kind, "multiplied by")
    residual = f"{_relative_residual(fit.residuals):.1e}"
    tested = f"step {step.step}: the replicas' gradients, {how} {factors}, give the one replica's to {residual}"
    # With shards of equal size the mean over each is the sum divided by N: a uniform factor.
    mean = fit.kind == "shares" or (fit.kind == "uniform" and abs(fit.factors[0] * len(fit.factors) - 1) < 1e-4)
    cause = "scaled loss"
    if fit.kind == "weight penalty":
        cause, description = "weight penalty", "every replica adds the whole weight penalty to its loss"
        tested = f"the sum less {fit.penalty:.4g} times the weights is the one replica's gradient to {residual}"
    elif fit.kind in ("shares", "uniform") and _is_one_number(step.losses):
        cause = "all-reduced loss"
        description = f"each replica back-propagates the loss of all replicas: it is {step.losses[0]:.6g} on each"
    elif mean:
        times = "each is too large by as much as its shard is short"
        if len(set(fit.factors)) == 1:
            times = f"{1 / fit.factors[0]:.4g} times the gradient of the whole batch"
        cause, description = "mean over a shard", f"each replica's loss is the mean over its own shard: {times}"
    else:
        which = "one factor" if fit.kind == "uniform" else "a factor of each replica's own"
        description = f"the replicas' gradients, added up, are the one replica's but for {which}"
    return Finding(cause=cause, description=description, tested=tested)


def _is_one_number(losses: Sequence[float]) -> bool:
    """Whether several replicas have the same loss, which different rows do not give by chance."""
    return len(losses) > 1 and bool(losses[0]) and max(losses) - min(losses) <= _SAME_LOSS * abs(losses[0])


def _relative_residual(residuals: Sequence[Difference]) -> float:
    """The largest residual relative to the largest gradient; a gradient that is 0 but for rounding has no own size."""
    size = max((residual.size for residual in residuals), default=0.0)
    return max((residual.amount for residual in residuals), default=0.0) / size if size else 0.0


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
