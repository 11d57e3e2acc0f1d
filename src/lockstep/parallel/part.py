"""The part of a model that one worker holds, seen as a module whose parameters are plain tensors.

    inside    the user's model, some of whose parameters are DTensors: what torch divides and computes with
    outside   one plain parameter for each, over the same memory: what an optimizer steps, what travels between replicas

A backward pass leaves the gradients with the plain parameters. ``state_dict`` is the whole model's: plain tensors under
the plain names, gathered from all workers that hold a copy together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lockstep.collectives.values import exchange_values
from lockstep.collectives.workers import Workers
from lockstep.errors import CheckpointError, UsageError
from lockstep.parallel.pipeline import Pipeline
from lockstep.parallel.tensor_plan import WHOLE, Division


class PartModule(nn.Module):
    """A worker's part of a model. Made by ``strategy.parallelize(module)``.

    Args:
        inside: the model, divided in place.
        division: how its layers were.
        names: those of the whole model's state, in its order; None where all of it is here.
        line: the workers that hold the other stages of the same part; None likewise.
        tied: the names of weights that another stage holds too, in an order that is the same there.
        pipeline: how a step passes through the stages; None where there is one.
    """

    def __init__(
        self,
        inside: nn.Module,
        division: Division = WHOLE,
        *,
        names: Sequence[str] | None = None,
        line: Workers | None = None,
        tied: Sequence[str] = (),
        pipeline: Pipeline | None = None,
    ) -> None:
        super().__init__()
        self._names = tuple(inside.state_dict() if names is None else names)
        self._line = line
        self._tied = tuple(tied)
        self.pipeline = pipeline
        self._inside = (inside,)  # a tuple, so that nn.Module does not register it: no prefix in any name
        self._orders = division.orders
        self._plain = {id(parameter): _plain(parameter) for parameter in inside.parameters()}
        self.training = inside.training

    @property
    def inside(self) -> nn.Module:
        """The model as torch divided it."""
        return self._inside[0]

    @property
    def divided(self) -> frozenset[int]:
        """The ids of the plain parameters that are this worker's share; the others are whole, and alike on all."""
        named = self.inside.parameters()
        return frozenset(id(self._plain[id(each)]) for each in named if _is_divided(each))

    @property
    def tied(self) -> list[nn.Parameter]:
        """The plain parameters that another stage holds too, in an order that is the same there."""
        return [self._plain[id(self.inside.get_parameter(name))] for name in self._tied]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs, whole, on all workers that hold a copy together; all must call it.

        Raises:
            UsageError: this is one stage of several.
        """
        if self._line is not None:
            raise UsageError(
                "a pipeline cannot be called like a module, since this worker has one of its stages; train and run it "
                "with ls.Model's fit, evaluate and predict"
            )
        return self.inside(*args, **kwargs)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The plain parameters by the model's names."""
        for name, parameter in self.inside.named_parameters(prefix, recurse, remove_duplicate):
            yield name, self._plain[id(parameter)]

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The model's buffers by name."""
        return self.inside.named_buffers(prefix, recurse, remove_duplicate)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The model's modules by name; this one stands for the model itself."""
        yield prefix, self
        for name, part in self.inside.named_modules(memo, prefix, remove_duplicate):
            if part is not self.inside:
                yield name, part

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The model's children by name."""
        return self.inside.named_children()

    def train(self, mode: bool = True) -> PartModule:
        """Sets the training mode of the whole part."""
        self.training = mode
        self.inside.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The whole model's, same keys, plain tensors. All workers that hold a copy together must call it."""
        with torch.no_grad():
            state = {name: value.detach() for name, value in self.inside.state_dict(*args, **kwargs).items()}
            whole = {key: value.full_tensor() if _is_divided(value) else _local(value) for key, value in state.items()}
        own = {name: self._in_plain_order(name, value) for name, value in whole.items()}
        if self._line is None:
            return own
        every = {
            name: value for each in exchange_values(self._line, "the weights", own) for name, value in each.items()
        }
        return {name: every[name] for name in self._names}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Takes this worker's part of a whole model's state_dict.

        Raises:
            CheckpointError: names or shapes that are not the model's.
        """
        own = self.inside.state_dict()
        names = set(self._names)
        missing, unknown = names - state_dict.keys(), state_dict.keys() - names
        if strict and (missing or unknown):
            raise CheckpointError(
                f"the weights lack {sorted(missing)[:3]} and have {sorted(unknown)[:3]} beside the model's; "
                "load those of the same model"
            )
        with torch.no_grad():
            for name in own.keys() & state_dict.keys():
                self._take(name, own[name], state_dict[name])
        return nn.modules.module._IncompatibleKeys(sorted(missing), sorted(unknown))

    def _apply(self, fn: Any, recurse: bool = True) -> PartModule:
        """What ``.to(device)`` calls; the parts are where they belong."""
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError("a part of a model belongs to its workers; save its state_dict() instead")

    def _take(self, name: str, own: Tensor, whole: Tensor) -> None:
        if own.shape != whole.shape:
            raise CheckpointError(
                f"{name} has shape {tuple(whole.shape)} in the weights and {tuple(own.shape)} in the model"
            )
        if name in self._orders:
            whole = whole[..., self._orders[name]]
        if isinstance(own, DTensor):
            whole = distribute_tensor(
                whole.to(own.device, own.dtype), own.device_mesh, own.placements, src_data_rank=None
            ).to_local()
        _local(own).copy_(whole)

    def _in_plain_order(self, name: str, value: Tensor) -> Tensor:
        if name not in self._orders:
            return value
        return value[..., torch.argsort(self._orders[name])]


def _plain(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter over this worker's share of another one's memory, which gets its gradients."""
    plain = nn.Parameter(_local(parameter.detach()), requires_grad=parameter.requires_grad)
    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(partial(_hand_over, plain))  # type: ignore[no-untyped-call]
    return plain


def _hand_over(plain: nn.Parameter, parameter: Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        gradient = gradient.redistribute(placements=parameter.placements)
    if gradient is not None:
        own = _local(gradient)
        plain.grad = own if plain.grad is None else plain.grad.add_(own)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_divided(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and not all(placement.is_replicate() for placement in tensor.placements)
