"""A call of a torch function that is made again on copies of the tensors that depend on rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor

CONTAINERS = (tuple, list, dict)
COPIES = 4
_ADDITIONS = frozenset(
    [torch.add, torch.sub, Tensor.add, Tensor.sub, Tensor.__add__, Tensor.__radd__, Tensor.__sub__, Tensor.__rsub__]
)
_LINEAR = _ADDITIONS | frozenset(
    [
        *(torch.sum, torch.mean, torch.mul, torch.div, torch.true_divide, torch.neg),
        *(Tensor.sum, Tensor.mean, Tensor.mul, Tensor.div, Tensor.neg, Tensor.__mul__, Tensor.__rmul__),
        *(Tensor.__truediv__, Tensor.__neg__, Tensor.float, Tensor.double, Tensor.to, Tensor.clone, Tensor.squeeze),
    ]
)


@dataclass(slots=True)
class Followed:
    """A tensor that depends on rows: what it is for (A, B), (A', B), (A, B') and (A', B')."""

    tensor: ref[Tensor]
    copies: tuple[Tensor, ...]
    origins: tuple[str, ...] = ()  # the calls that combined rows of both groups first
    kink: str = ""  # the call that bent a number of both groups, as a clamp of their sum
    magnitude: Tensor | None = None  # of a number: the sum of its terms' absolute values, to judge roundings by


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a torch function that is made again on copies."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]  # of both
    written: list[Tensor]  # arguments that depend on no row, into which the call has written
    again: Callable[[], None]  # called before each call: random numbers begin as in the first

    def on_copies(self, get: Callable[[Any], Followed | None]) -> tuple[list[Any], list[list[Tensor]]]:
        """The results for the four copies, and for each what was written into."""
        results, written = [], []
        for number in range(COPIES):
            # Clones: a call in place must not write a second time into the step's own tensors.
            fresh = {id(target): target.detach().clone() for target in self.written}
            for leaf in self.leaves:
                if (followed := get(leaf)) is not None:
                    fresh[id(leaf)] = followed.copies[number]
            args, kwargs = _replaced((self.args, self.kwargs), partial(_exchanged, fresh))
            self.again()
            results.append(self._make(args, kwargs))
            written.append([fresh[id(target)] for target in self.written])
        return results, written

    def _make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        make = _BY_THE_SHARD.get(self.func)
        return self.func(*args, **kwargs) if make is None else make(self, args, kwargs)

    def magnitude(self, result: Tensor, get: Callable[[Any], Followed | None]) -> Tensor:
        """The sum of the absolute values of the terms of a number."""
        arguments = [followed for leaf in self.leaves if (followed := get(leaf)) is not None]
        # The result itself may be near 0 where large terms cancel, and is off by the roundings of those.
        terms = [followed.magnitude for followed in arguments if followed.magnitude is not None]
        least = [result.detach().abs().double(), *(terms if self.func in _ADDITIONS else ())]
        if self.func in _LINEAR:
            args, kwargs = _replaced((self.args, self.kwargs), lambda leaf: _absolute(leaf, get(leaf)))
            least.append(self.func(*args, **kwargs).abs().double())
        return torch.stack([number.to(result.device).reshape(()) for number in least]).max()


def _absolute(leaf: Any, followed: Followed | None) -> Any:
    if followed is not None and followed.magnitude is not None:
        return followed.magnitude
    if isinstance(leaf, Tensor):
        return leaf.detach().abs() if leaf.dtype is not torch.bool else leaf
    return abs(leaf) if type(leaf) is float else leaf


def _named(names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(names, args, strict=False)) | kwargs


def _normalised(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Batch norm of a copy, in training by the statistics of the shard itself; nothing is written."""
    arguments = _named(_OF_BATCH_NORM, args, kwargs)
    mean, variance = arguments.get("running_mean"), arguments.get("running_var")
    if arguments.get("training") or mean is None or variance is None:
        shard = _named(_OF_BATCH_NORM, call.args, call.kwargs)["input"].detach()
        over = [dim for dim in range(shard.ndim) if dim != 1]
        shard = shard if shard.dtype is torch.float64 else shard.float()
        variance, mean = torch.var_mean(shard, over, correction=0)
    return F.batch_norm(
        arguments["input"],
        mean,
        variance,
        arguments.get("weight"),
        arguments.get("bias"),
        training=False,
        eps=arguments.get("eps", 1e-5),
    )


def _over_labels(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A mean over labels of a copy, by the number of labels that count in the shard itself.

    The number that a mean is divided by is judged elsewhere: the Trainer weighs it, fit divides by that of all shards,
    and loops are warned of means over a shard. A copy has other labels, so its mean would depend on both groups.
    """
    arguments = _named(_OF_LABELS, args, kwargs)
    shard = _named(_OF_LABELS, call.args, call.kwargs)
    target, weight, ignored = shard["target"], shard.get("weight"), shard.get("ignore_index", -100)
    if arguments.get("reduction", "mean") != "mean" or target.is_floating_point():
        return call.func(*args, **kwargs)  # type: ignore[no-any-return]
    counted = target != ignored
    count = counted.sum() if weight is None else (weight[target.where(counted, 0)] * counted).sum()
    return call.func(**{**arguments, "reduction": "sum"}) / count  # type: ignore[no-any-return]


_OF_BATCH_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_OF_LABELS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
_BY_THE_SHARD: dict[Any, Callable[[Call, tuple[Any, ...], dict[str, Any]], Tensor]] = {
    F.batch_norm: _normalised,
    F.cross_entropy: _over_labels,
    F.nll_loss: _over_labels,
}
"""Functions that take something from the shard itself on copies too."""


def _exchanged(replacements: Mapping[int, Any], leaf: Any) -> Any:
    return replacements.get(id(leaf), leaf)


def leaves_of(values: Any) -> Iterator[Any]:
    """What is in tuples, lists and dicts. ``torch.utils._pytree`` took a quarter of the time of a watched call."""
    if isinstance(values, CONTAINERS) and type(values) is not torch.Size:
        for value in items_of(values):
            yield from leaves_of(value)
    else:
        yield values


def _replaced(values: Any, replacement: Callable[[Any], Any]) -> Any:
    """The same with other leaves."""
    if not isinstance(values, CONTAINERS) or type(values) is torch.Size:
        return replacement(values)
    if isinstance(values, dict):
        return {key: _replaced(value, replacement) for key, value in values.items()}
    fresh = [_replaced(value, replacement) for value in values]
    if isinstance(values, list):
        return fresh
    return type(values)(*fresh) if hasattr(values, "_fields") else tuple(fresh)


def items_of(container: Any) -> Iterable[Any]:
    """The values of a dict; the items of a tuple or list."""
    return container.values() if isinstance(container, dict) else container
