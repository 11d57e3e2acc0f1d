"""Batch norm in replicas: synchronised over all of them, and safe on a shard of one row.

``convert_sync_batch_norm`` has the batch norms of a module sum their statistics over all replicas. For the others,
``normalising_single_row`` normalises a shard with one value per channel by the running statistics, without changing
them: torch refuses such a shard.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from lockstep._torch_compat import BatchNormBase, DisableTorchFunction, tree_leaves
from lockstep.errors import ConfigError
from lockstep.replicas.context import ReplicaContext, get_replica_context

_PARAMETERS = tuple(inspect.signature(F.batch_norm).parameters)


class SyncBatchNorm:
    """Mixin of a batch norm with the statistics of the global batch: in training every replica must call it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward with the statistics of all replicas."""
        module: Any = self
        context = get_replica_context()
        forward: Callable[..., Any] = _plain_forward(type(module))
        of_batch = module.training or module.running_mean is None
        if context is None or context.num_replicas_in_sync == 1 or not of_batch:
            return forward(self, *args, **kwargs)
        input = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)), None)
        empty = input is not None and not input.numel()
        batches = module.num_batches_tracked
        # torch counts a batch before it looks at its rows; without rows in any replica one device counts none.
        before = batches.clone() if empty and batches is not None else None
        statistics = _StatisticsOfAll(context, module, input)
        with statistics:
            output = forward(self, *args, **kwargs)
        if not statistics.called:
            raise ConfigError(
                f"{type(self).__name__} computes its output in training without torch.nn.functional.batch_norm; call "
                "that in its forward, put the module in eval(), or mirror without sync_batchnorm"
            )
        if before is not None and not statistics.has_rows:
            batches.copy_(before)
        return output

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle cannot find a class made at run time: it is given the class that this was made from.
        reduced: Any = super().__reduce_ex__(max(2, protocol))
        make, args, *rest = reduced
        if make is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return make, args, *rest
        return _made_again, (_plain_class(type(self)), *args[1:]), *rest


class _StatisticsOfAll(TorchFunctionMode):
    """Inside, batch norm in training takes the statistics of all replicas; ``input`` is the module's first tensor.

    Afterwards ``called`` says whether batch norm was called, and ``has_rows`` whether any replica had a row.
    """

    def __init__(self, context: ReplicaContext, module: Any, input: torch.Tensor | None) -> None:
        super().__init__()
        self._context, self._module, self._input = context, module, input
        self.called = False
        self.has_rows = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm:
            return self._batch_norm(*args, **(kwargs or {}))
        # A subclass may call torch's own function, as F.batch_norm does, with the arguments in another order.
        if func is torch.batch_norm:
            input, weight, bias, running_mean, running_var, training, momentum, eps, _ = args
            return self._batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        return func(*args, **(kwargs or {}))

    def _batch_norm(
        self,
        input: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        self.called = True
        if not training:
            return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        channels = self._module.num_features
        if self._input is not None and (input.numel() != self._input.numel() or input.shape[1] != channels):
            raise ConfigError(
                f"{type(self._module).__name__} takes batch statistics of a tensor of shape {tuple(input.shape)}, and "
                f"was given one of shape {tuple(self._input.shape)} with {channels} channels; sync_batchnorm needs "
                "the whole input; mirror without it"
            )
        dims = [0, *range(2, input.dim())]
        shape = [1, -1] + [1] * (input.dim() - 2)
        # Half precision holds neither sums nor counts; torch's own batch norm adds in float32 too
        # (test_half_precision_is_added_in_float32).
        exact = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        # One all-reduce for sums and counts, another for centred squares; both are differentiable.
        sums = exact.sum(dims)
        rows = sums.new_full((1,), input.numel() / input.shape[1])
        total = self._context.all_reduce("sum", torch.cat([sums, rows]))
        num_rows = float(total[-1].detach())
        if num_rows == 1:
            raise ValueError(
                f"{type(self._module).__name__} got one value per channel in the whole global batch, which has no "
                "variance; give more rows, or put the module in eval()"
            )
        # 1 for a batch without rows: 0 / 0 would be NaN, also in the gradients of the all-reduce.
        count = max(1.0, num_rows)
        mean = total[:-1] / count
        # Two passes: the mean of squares minus the squared mean loses the digits of a small variance.
        centred = exact - mean.view(shape)
        squares = self._context.all_reduce("sum", centred.square().sum(dims))
        if num_rows:
            self.has_rows = True
            _track(running_mean, mean, momentum)
            _track(running_var, squares / max(count - 1, 1), momentum)
        output: torch.Tensor = centred * torch.rsqrt(squares / count + eps).view(shape)
        if weight is not None:
            output = output * weight.view(shape)
        if bias is not None:
            output = output + bias.view(shape)
        return output.to(input.dtype)


class RefusingOtherBatchNorms(TorchFunctionMode):
    """Inside, raises ConfigError for batch statistics of one replica's shard, outside a synchronised batch norm."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm and (kwargs["training"] if "training" in kwargs else len(args) > 5 and args[5]):
            raise ConfigError(
                "the module calls torch.nn.functional.batch_norm in training outside a torch.nn.BatchNorm; make its "
                "class a subclass of torch.nn.BatchNorm1d, 2d or 3d, or mirror without sync_batchnorm"
            )
        return func(*args, **kwargs)


@functools.cache
def synchronised(kind: type[BatchNormBase]) -> type[BatchNormBase]:
    """The subclass of ``kind`` whose statistics are those of the global batch."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (SyncBatchNorm, kind), names)


def convert_sync_batch_norm(module: nn.Module, kind: type[BatchNormBase] = BatchNormBase) -> nn.Module:
    """Makes every batch norm of this kind inside ``module``, in place, one of the subclass for all replicas."""
    for name, part in module.named_modules():
        if isinstance(part, kind) and not isinstance(part, SyncBatchNorm):
            if "forward" in part.__dict__:
                raise ConfigError(
                    f"the {type(part).__name__} {name!r} has a forward of its own, set on the object; define it in a "
                    f"subclass of {type(part).__name__}, or mirror without sync_batchnorm"
                )
            plain_class: Any = type(part)  # mypy takes the class for no Hashable
            part.__class__ = synchronised(plain_class)
    return module


def has_sync_batch_norm(module: nn.Module) -> bool:
    """Whether ``module`` has a synchronised batch norm, so that every replica must run it in training."""
    return any(isinstance(part, SyncBatchNorm) for part in module.modules())


def _plain_class(kind: type) -> type[BatchNormBase]:
    """The class that a synchronised class was made from."""
    plain_class: type[BatchNormBase] = kind.__mro__[kind.__mro__.index(SyncBatchNorm) + 1]
    return plain_class


def _plain_forward(kind: type) -> Callable[..., Any]:
    plain_class = _plain_class(kind)
    # torch.nn.SyncBatchNorm.forward would use process groups of torch.distributed.
    return BatchNormBase.forward if plain_class is nn.SyncBatchNorm else plain_class.forward


def _made_again(kind: Any, *args: Any) -> Any:
    kind_again = synchronised(kind)
    return kind_again.__new__(kind_again, *args)


@torch.no_grad()
def _track(running: torch.Tensor | None, value: torch.Tensor, momentum: float) -> None:
    if running is not None:
        running.lerp_(value.detach().to(running.dtype), momentum)


def normalising_single_row(
    module: nn.Module, args: Iterable[Any], kwargs: dict[str, Any]
) -> AbstractContextManager[object]:
    """A block to run ``module`` in. If all inputs have one row, its batch norms use their running statistics."""
    # Told from all inputs: batch norms deep in the module see activations, whose dimension 0 need not be rows. Most
    # calls have a tensor of several rows as an argument, and end at the first of these two looks.
    single = _have_single_row(args, if_none=True)
    single = single and _have_single_row(tree_leaves((tuple(args), kwargs)), if_none=False)
    has_batch_norm = single and any(isinstance(part, BatchNormBase) for part in module.modules())
    return _NoStatisticsOfOneValue() if has_batch_norm else nullcontext()


def _have_single_row(values: Iterable[Any], *, if_none: bool) -> bool:
    """Whether all tensors among the values that have rows have one; ``if_none`` if there are none."""
    have = if_none
    with DisableTorchFunction():  # otherwise the replica's function mode is called for each size
        for value in values:
            if isinstance(value, torch.Tensor) and value.ndim > 0:
                if value.size(0) != 1:
                    return False
                have = True
    return have


class _NoStatisticsOfOneValue(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm:
            arguments = dict(zip(_PARAMETERS, args, strict=False)) | (kwargs or {})
            if arguments["running_mean"] is not None and arguments["input"].numel() <= arguments["input"].shape[1]:
                arguments["training"] = False
            return func(**arguments)
        return func(*args, **(kwargs or {}))
