"""One worker's part of a sharded model, as a module whose parameters are plain tensors.

    inside    the user's model, some of whose parameters are DTensors, with which torch computes
    outside   one plain parameter for each, over the same memory, for optimizers and for exchanges between replicas

A backward pass leaves the gradients in the plain parameters. ``state_dict`` is that of the whole model: plain tensors
under plain names, gathered from all workers that hold a replica together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep._torch_compat import DisableTorchFunction, IncompatibleKeys
from lockstep.collectives.communicator import all_gather_object
from lockstep.errors import CheckpointError, UsageError
from lockstep.parallel.forward_inputs import call_on_dummy_row, has_no_rows
from lockstep.parallel.model_plan import ModelPlan
from lockstep.parallel.pipeline import WITHOUT_PENALTY, Pipeline
from lockstep.parallel.pipeline_trace import PipelineTrace
from lockstep.parallel.regions import Region
from lockstep.parallel.tensor_parallel import local_shard, region_of
from lockstep.parallel.tensor_plan import ColumnOrder

Receive = Callable[[nn.Parameter, Tensor, bool], None]
"""Adds to a plain parameter's gradient one that a backward pass has made, of a part of it if the bool says so."""


class ShardedModule(nn.Module):
    """A worker's part of a model. Made by ``strategy.parallelize(module)``.

    Args:
        inside: the model, divided in place by ``plan``; also an attribute.
        orders: the parameters that stand in another order than the model's own, by name.
        pipeline: runs a step through the stages; None without a pipeline.
        receive: adds a gradient to a plain parameter, of which this worker may have a part only (``divided``).
    """

    def __init__(
        self,
        inside: nn.Module,
        plan: ModelPlan,
        orders: Mapping[str, ColumnOrder],
        *,
        pipeline: Pipeline | None,
        receive: Receive,
    ) -> None:
        super().__init__()
        self.names = plan.names
        self._firsts = {name: names[0] for names in plan.ties for name in names}
        self._tied, self.pipeline = plan.tied, pipeline
        # In a tuple, so that nn.Module does not register it, which would put a prefix before every name.
        self._inside = (inside,)
        self._orders = orders
        self._plain = {id(parameter): _plain(parameter, receive) for parameter in inside.parameters()}
        self._sources = {id(self._plain[id(parameter)]): parameter for parameter in inside.parameters()}
        self.holders = (*inside.parameters(), *self._plain.values())
        if pipeline is not None:  # autograd calls no hooks for gradients that a schedule computes by itself
            hooks = [
                (parameter, _HandOver(self._plain[id(parameter)], receive, divided=_is_divided(parameter)))
                for parameter in inside.parameters()
            ]

            def hand_over() -> None:
                with DisableTorchFunction():
                    for parameter, hook in hooks:
                        if parameter.grad is not None:
                            hook(parameter)

            pipeline.after_backward = hand_over
            pipeline.weights = frozenset([*self._plain, *map(id, self._plain.values())])
        self._is_fully_sharded = any(_is_divided(parameter, "data") for parameter in inside.parameters())
        self.training = inside.training

    @property
    def inside(self) -> nn.Module:
        return self._inside[0]

    @property
    def divided(self) -> frozenset[int]:
        """The ids of the plain parameters that tensor ranks divide; the others are whole and equal on all ranks."""
        named = self.inside.parameters()
        return frozenset(id(self._plain[id(parameter)]) for parameter in named if _is_divided(parameter, "tensor"))

    def source_of(self, weight: nn.Parameter) -> nn.Parameter | None:
        """The parameter inside that has the memory of a plain one, and gets its gradients first."""
        return self._sources.get(id(weight))

    def whole(self) -> dict[str, nn.Parameter]:
        """By name, the plain parameters that every tensor rank holds."""
        named = self.inside.named_parameters()
        return {name: self._plain[id(parameter)] for name, parameter in named if not _is_divided(parameter, "tensor")}

    @property
    def tied(self) -> list[nn.Parameter]:
        """The plain parameters that another stage holds too, in the same order there."""
        return [self._plain[id(self.inside.get_parameter(name))] for name in self._tied]

    def first_name(self, name: str) -> str:
        return self._firsts.get(name, name)

    def local_tensors(self) -> dict[str, Tensor]:
        return {name: _local(value.detach()) for name, value in self.inside.state_dict().items()}

    def regions(self) -> dict[str, Region]:
        """The regions of ``local_tensors`` in the whole tensors, whose columns are in the model's own order."""
        return {name: region_of(value, self._orders.get(name)) for name, value in self.inside.state_dict().items()}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs, whole, on all workers that hold a replica together; all must call it."""
        if self.pipeline is not None:
            raise UsageError(
                "a pipeline cannot be called like a module, since this worker has one of its stages; train and run it "
                "with ls.Model's fit, evaluate and predict"
            )
        # FSDP gathers weights in every worker's forward and sums gradients in its backward, so a worker that left its
        # pass out would keep the others waiting.
        if self._is_fully_sharded and has_no_rows(args, kwargs):
            return call_on_dummy_row(self.inside, args, kwargs)
        return self.inside(*args, **kwargs)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.inside.named_parameters(prefix, recurse, remove_duplicate):
            yield name, self._plain[id(parameter)]

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        return self.inside.named_buffers(prefix, recurse, remove_duplicate)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        yield prefix, self
        for name, part in self.inside.named_modules(memo, prefix, remove_duplicate):
            if part is not self.inside:
                yield name, part

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        return self.inside.named_children()

    def train(self, mode: bool = True) -> ShardedModule:
        self.training = mode
        self.inside.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The state of the whole model, as plain tensors. All workers that hold a replica together must call it."""
        return dict(self.stream())

    def described(self) -> dict[str, Tensor]:
        """The whole model's state on the meta device, without values. All stages must call it."""
        local = {name: (tuple(value.shape), value.dtype) for name, value in self.inside.state_dict().items()}
        group = None if self.pipeline is None else self.pipeline.workers
        stages = [local] if group is None else all_gather_object(group, "the names of the weights", local)
        # Reversed, so that of a tied weight the first stage's entry stays.
        specs = {name: spec for stage in reversed(stages) for name, spec in stage.items()}
        return {name: torch.empty(specs[name][0], dtype=specs[name][1], device="meta") for name in self.names}

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the whole model's state, a tensor at a time. All workers of a replica must call it, and consume it."""
        state, described = self.inside.state_dict(), self.described()
        for name in self.names:
            with torch.no_grad():
                local = self._in_plain_order(name, state[name].detach()) if name in state else None
                yield name, self._from_stages(described[name], local)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads this worker's part of the whole model's state_dict."""
        local_state = self.inside.state_dict()
        names = set(self.names)
        missing, unknown = names - state_dict.keys(), state_dict.keys() - names
        if strict and (missing or unknown):
            raise CheckpointError(
                f"the weights lack {sorted(missing)[:3]} and have {sorted(unknown)[:3]} beside the model's; "
                "load those of the same model"
            )
        with torch.no_grad():
            for name in local_state.keys() & state_dict.keys():
                self._take(name, local_state[name], state_dict[name].detach())
        return IncompatibleKeys(sorted(missing), sorted(unknown))

    def pipeline_trace(self) -> PipelineTrace:
        """The actions of all workers of this pipeline in the last pass, by each host's clock. All must call it."""
        if self.pipeline is None:
            raise UsageError("this model is no pipeline; ask for a pipeline trace where pipeline is above 1")
        return self.pipeline.trace()

    @torch.no_grad()
    def take(self, name: str, whole: Tensor) -> None:
        """Loads this worker's part, if any, of one tensor of a whole model's state_dict."""
        local = self.inside.state_dict().get(name)
        if local is not None:
            self._take(name, local, whole)

    def _apply(self, fn: Any, recurse: bool = True) -> ShardedModule:
        """Called by ``.to(device)``; the tensors are on their devices already."""
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError("a part of a model belongs to its workers; save its state_dict() instead")

    def _take(self, name: str, local: Tensor, whole: Tensor) -> None:
        if local.shape != whole.shape:
            shapes = f"{tuple(whole.shape)} in the weights and {tuple(local.shape)} in the model"
            raise CheckpointError(f"{name} has shape {shapes}")
        _local(local).copy_(local_shard(whole, local, self._orders.get(name)))

    def _from_stages(self, described: Tensor, local: Tensor | None) -> Tensor:
        """A whole tensor that this stage or another one holds."""
        if self.pipeline is None:
            assert local is not None
            return local
        # Stages that do not hold the tensor take part with no elements, for the gather is a collective of all stages.
        flat = torch.empty(0, dtype=described.dtype) if local is None else local.reshape(-1)
        stages = self.pipeline.workers.all_gather("a tensor of the model", flat, 0)
        return next((part for part in stages if part.numel()), flat).view(described.shape)

    def _in_plain_order(self, name: str, value: Tensor) -> Tensor:
        """A tensor whole, in the order of the model's own."""
        if name not in self._orders or not isinstance(value, DTensor):
            return _whole(value)
        order = self._orders[name]
        return _whole(value).index_select(order.dim, torch.argsort(order.columns).to(value.device))


def _plain(parameter: nn.Parameter, receive: Receive) -> nn.Parameter:
    """A plain parameter over the memory of this worker's share of another one, which gets its gradients."""
    plain = nn.Parameter(_local(parameter.detach()), requires_grad=parameter.requires_grad)
    if parameter.requires_grad:
        if divided := _is_divided(parameter):
            # A hook on the plain tensor runs only if autograd reaches it by itself. The model computes with the DTensor
            # inside, so that is a loss that reads the weight (tests/strategies/test_parallel_statistics.py).
            plain.register_hook(_RefusedGradient(tuple(plain.shape)))  # type: ignore[no-untyped-call]
        parameter.register_post_accumulate_grad_hook(_HandOver(plain, receive, divided=divided))  # type: ignore[no-untyped-call]
    return plain


class _RefusedGradient:
    """A hook on a plain part of a weight, which raises: autograd reaches it only from a loss that reads the weight.

    It has no reference to the parameter, whose memory a circle would hold.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape

    def __call__(self, _: Tensor) -> None:
        raise UsageError(
            f"the loss reads a weight of which this worker holds a part (of shape {self._shape}), by itself and not "
            f"through the model, so that a sum over weights is here one over parts; {WITHOUT_PENALTY}"
        )


class _HandOver:
    """The hook by which a parameter inside hands its gradient over. Its class tells it from the hooks of a user."""

    def __init__(self, plain: nn.Parameter, receive: Receive, *, divided: bool) -> None:
        self._plain, self._divided, self._receive = plain, divided, receive

    def __call__(self, parameter: Tensor) -> None:
        # The step guard would take this look at .grad for a read by the step.
        with DisableTorchFunction():
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                return
            if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
                # torch may leave a term of a sum or a whole gradient for a divided parameter; placed as the parameter
                # it is one.
                if gradient.placements != parameter.placements:
                    gradient = gradient.redistribute(placements=parameter.placements)
                gradient = gradient.to_local()
            self._receive(self._plain, gradient, self._divided)


def is_divided(parameter: nn.Parameter) -> bool:
    """Whether this worker has a part only of a parameter inside."""
    return _is_divided(parameter)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) and _is_divided(tensor) else _local(tensor)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_divided(tensor: Tensor, axis: str | None = None) -> bool:
    """Whether this worker has a part only, along one axis of the mesh or along any."""
    if not isinstance(tensor, DTensor):
        return False
    placed = zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True)
    return any(not placement.is_replicate() for name, placement in placed if axis in (None, name))
