"""How long the workers of a pipeline wait in a step, for each schedule. Pure.

The formulas are those of what ``torch.distributed.pipelining`` does, S workers and M microbatches; a test holds them to
its own lists of actions, played out.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.plan.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Seconds of a worker for one microbatch.

    Args:
        forward: of the forward passes of all its parts.
        inputs: of what the backward passes take for the gradients of its inputs.
        weights: of what they take for those of its weights.
    """

    forward: float
    inputs: float
    weights: float

    @property
    def all(self) -> float:
        return self.forward + self.inputs + self.weights


def waiting(layout: Layout, others: Passes) -> float:
    """Seconds that the slowest worker waits in a step.

    Args:
        layout: of more than one stage.
        others: a worker's passes, on average over all but the slowest.
    """
    far = layout.pipeline - 1
    if layout.schedule == "zero_bubble_v":
        return _waiting_in_a_v(layout.pipeline, layout.microbatches, others)
    if layout.schedule == "zero_bubble":
        # ZB-H1 (Qi et al. 2023, arXiv 2401.10241): weights' gradients, which wait for nobody, fill it.
        return far * max(0.0, others.forward + others.inputs - others.weights) / layout.chunks
    # The way of a microbatch through all other workers, shorter by the parts that each has (Narayanan et al. 2021).
    return far * others.all / layout.chunks


def _waiting_in_a_v(workers: int, microbatches: int, others: Passes) -> float:
    """ZB-V (Qi et al. 2023, section 6; Qi et al. 2024, arXiv 2405.15362) where the update waits for all workers.

    Were all passes equally long, half a forward pass would be left of each other worker: the last one begins so much
    later. The order is fixed, so backward passes that take longer than forward ones are waited for.
    """
    forward, inputs, weights = others.forward, others.inputs, others.weights
    far, missing = workers - 1, max(0, 2 * workers - 1 - microbatches)
    return max(
        # the first gradient's way back, beside what gradients of weights there are to fill it with
        far * inputs - min(microbatches - workers, far) * weights,
        # the same through one part of each
        (far * inputs + missing * (inputs - weights)) / 2,
        # the way down, where forward passes are the longer ones
        (far * forward + (workers - 2) * max(0.0, max(forward, weights) - inputs)) / 2,
    )
