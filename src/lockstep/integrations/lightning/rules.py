"""Which rule each number of a step follows (``values``), found out in some steps by comparing rows and their halves."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.errors import ConfigError
from lockstep.integrations.lightning.values import SAME, Part, candidates, combined, fits

LOSS = "the loss"


@dataclass(frozen=True)
class Comparison:
    """What one replica sees of a number.

    Attributes:
        fitting: the rules that fit, of those that were tried.
        whole: the number for all rows of the replica.
        halves: what the halves of the rows give, as a mean over rows.
    """

    fitting: tuple[str, ...]
    whole: float
    halves: float


@dataclass(frozen=True)
class Comparisons:
    """What one replica sees in one comparison; nothing if it could not be made.

    Attributes:
        numbers: by their names.
        containers: the dicts and lists of lists of the module that the step changes.
    """

    numbers: Mapping[str, Comparison] = field(default_factory=dict)
    containers: tuple[str, ...] = ()


def plain(comparisons: Comparisons) -> tuple[dict[str, tuple[tuple[str, ...], float, float]], tuple[str, ...]]:
    """The same for other workers, to which only plain values are sent."""
    numbers = {name: (number.fitting, number.whole, number.halves) for name, number in comparisons.numbers.items()}
    return numbers, comparisons.containers


def of_plain(values: tuple[Mapping[str, tuple[Sequence[str], float, float]], Sequence[str]]) -> Comparisons:
    """What another worker has made plain."""
    numbers, containers = values
    return Comparisons(
        {name: Comparison(tuple(fitting), whole, halves) for name, (fitting, whole, halves) in numbers.items()},
        tuple(containers),
    )


def compared(
    whole: Mapping[str, Part],
    halves: Sequence[tuple[int, Mapping[str, Part]]],
    assumed: Mapping[str, str],
    *,
    tolerance: float,
) -> dict[str, Comparison]:
    """Tries the rules on the numbers of some rows. Pure.

    Args:
        whole: the numbers of all rows by name; those of attributes are their changes, and begin with "self.".
        halves: the number of rows and the numbers of each half.
        assumed: the rule of a logged value as long as no other is known.
        tolerance: the relative difference that may be rounding.
    """
    result: dict[str, Comparison] = {}
    for name, part in whole.items():
        if not name.startswith("self.") and not all(name in half for _, half in halves):
            continue
        # What a step has left as it was, it has changed by 0: a count of what some rows have.
        parts = [half.get(name, Part(value=0, rows=rows)) for rows, half in halves]
        numbers = [number.number for number in (part, *parts)]
        if not all(map(math.isfinite, numbers)) and (name == LOSS or not all(map(math.isnan, numbers))):
            continue  # such as a mean over labels that are all ignored, which shows nothing
        rules = candidates(parts, assumed.get(name, "rows"), adds_up=name == LOSS)
        fitting = [rule for rule in rules if fits(rule, part, parts, tolerance=tolerance)]
        result[name] = Comparison(tuple(fitting), part.number, float(combined("rows", parts)))
    return result


def rule_of_loss(parts: Sequence[Part], rules: Mapping[str, str]) -> str:
    """The rule of the loss; as long as none is known, the likeliest."""
    return rules.get(LOSS) or candidates(parts, "rows")[0]


class Rules:
    """The rules of the numbers of one step, such as "training_step".

    Args:
        replicas: their number, for messages.

    Attributes:
        by_name: the rule of each number for which one has been found.
    """

    def __init__(self, replicas: int) -> None:
        self.by_name: dict[str, str] = {}
        self._replicas = replicas
        self._runs = 0
        self._warned: set[str] = set()

    def is_due(self) -> bool:
        """Whether this run is one of the 1st, 2nd, 4th, 8th, ..."""
        self._runs += 1
        return self._runs.bit_count() == 1

    def decide(self, replicas: Sequence[Comparisons], step: str) -> None:
        """Takes the first rule that fits in all replicas; refuses a loss that follows none, and warns of others."""
        for name in dict.fromkeys(name for replica in replicas for name in replica.containers):
            self._warn_of_container(name, step)
        for name in dict.fromkeys(name for replica in replicas for name in replica.numbers):
            self._decide(name, [replica.numbers[name] for replica in replicas if name in replica.numbers], step)

    def _decide(self, name: str, replicas: Sequence[Comparison], step: str) -> None:
        comparisons = [replica for replica in replicas if replica.fitting != (SAME,)] or replicas
        fitting = [rule for rule in comparisons[0].fitting if all(rule in other.fitting for other in comparisons)]
        former = self.by_name.get(name)
        if not fitting:
            misfit = next((comparison for comparison in comparisons if not comparison.fitting), comparisons[-1])
            self._refuse(name, misfit, step)
        # [SAME] beside a rule: not a number in this batch, which shows nothing.
        elif former not in fitting and (fitting != [SAME] or former is None):
            if former not in (None, SAME) and name not in self._warned:
                self._warn_of_late_rule(name, fitting[0], step)
            self.by_name[name] = fitting[0]

    def _refuse(self, name: str, misfit: Comparison, step: str) -> None:
        text = (
            f"{name} of {step} is {misfit.whole:.6g} for the rows of a replica, and its halves give "
            f"{misfit.halves:.6g}: it is neither a mean nor a sum over rows"
        )
        if name == LOSS:
            raise ConfigError(
                f"{text}, so {self._replicas} replicas would train with other numbers than one device; gather what is "
                "compared with self.all_gather(value, sync_grads=True), make terms that are means over different "
                "counts (class weights, ignored labels) means over rows, or train with replicas=1"
            )
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(
                f"{text}, so it is not what one device has; log a torchmetrics metric instead, whose states are merged",
                stacklevel=5,
            )

    def _warn_of_late_rule(self, name: str, rule: str, step: str) -> None:
        self._warned.add(name)
        warnings.warn(
            f"run {self._runs} of {step} shows that {name} is combined by {rule}, and until now it was combined by "
            f"{self.by_name[name]}; earlier steps may have other numbers than one device",
            stacklevel=5,
        )

    def _warn_of_container(self, name: str, step: str) -> None:
        if name in self._warned:
            return
        self._warned.add(name)
        warnings.warn(
            f"{step} changes self.{name}, a dict or a list of lists, in each replica for its own rows, and the module "
            "keeps that of replica 0; numbers, tensors and lists of one item a step are joined: collect in these, in a "
            "torchmetrics metric, or in a hook such as on_validation_batch_end",
            stacklevel=4,
        )
