"""How one module is divided among tensor ranks: styles for torch's ``parallelize_module`` beside those of torch itself.

    LocalLinear, WholeTokens, LocalParameters, HookedOutput     one module each
    divide_sequences                                            the layers of a model

``tensor_plan`` chooses the style of each module. Sequences are divided as in Korthikanti et al. 2022:
norms, dropout and residuals between divided layers work on a rank's own tokens. Sequences are whole before the first
layer of a stage and after its last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as tp
from torch.distributed.tensor.placement_types import Placement

from lockstep._torch_compat import DisableTorchFunction, tree_map
from lockstep.errors import DataError, UsageError
from lockstep.parallel.forward_inputs import ForwardArguments

TOKENS = 1  # the dim of the sequence in hidden states


def divide_sequences(mesh: DeviceMesh, model: nn.Module, stages: Iterable[Sequence[str]]) -> None:
    """Has the first layer of each stage divide the sequences among the ranks of ``mesh``, and the last one gather them.

    ``stages`` are the names of the layers of this worker's stages. Called before the model is cut into stages, whose
    forwards go around those of the layers.
    """
    model.register_forward_pre_hook(_refuse_hidden_states, with_kwargs=True)
    for layers in stages:
        for name in dict.fromkeys([layers[0], layers[-1]] if layers else []):
            _wrap(model.get_submodule(name), mesh, is_first=name == layers[0], is_last=name == layers[-1])


def _wrap(layer: nn.Module, mesh: DeviceMesh, *, is_first: bool, is_last: bool) -> None:
    forward: Callable[..., Any] = layer.forward

    def wrapped(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = forward(_part_of(hidden_states, mesh) if is_first else hidden_states, *args, **kwargs)
        return _gathered(output, mesh) if is_last else output

    layer.forward = wrapped


def _part_of(hidden: Tensor, mesh: DeviceMesh) -> Tensor:
    ranks, tokens = mesh.size(), hidden.shape[TOKENS]
    if tokens % ranks:
        raise DataError(
            f"sequences of {tokens} tokens cannot be divided evenly among tensor={ranks} workers, as "
            f"sequence_parallel=True wants; pad them to a multiple of {ranks}, or leave it out"
        )
    return _redistributed(hidden, mesh, Replicate(), Shard(TOKENS))


def _gathered(output: Any, mesh: DeviceMesh) -> Any:
    if isinstance(output, tuple):
        return (_gathered(output[0], mesh), *output[1:])
    return _redistributed(output, mesh, Shard(TOKENS), Replicate())


def _redistributed(value: Tensor, mesh: DeviceMesh, before: Placement, after: Placement) -> Tensor:
    placed = DTensor.from_local(value, mesh, [before], run_check=False)
    return placed.redistribute(placements=[after]).to_local()


def _refuse_hidden_states(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
    named = ForwardArguments(model.forward).named(args, kwargs)
    if named.get("output_hidden_states") or model.config.output_hidden_states:
        raise UsageError(
            "output_hidden_states asks for what sequence_parallel=True divides among workers; leave one of them out"
        )


class WholeTokens(tp.ParallelStyle):
    """Has a module that is given this rank's tokens, first or as ``hidden_states``, work on all of them."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gathered(hidden: Any) -> Any:
            placed = DTensor.from_local(hidden, device_mesh, [Shard(TOKENS)], run_check=False)
            return placed.redistribute(placements=[Replicate()])

        def gather(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (gathered(args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": gathered(kwargs["hidden_states"])}

        module.register_forward_pre_hook(gather, with_kwargs=True)
        return module


class LocalParameters(tp.ParallelStyle):
    """Has a module compute with this rank's shards of its own parameters as plain tensors.

    Args:
        placements: those of its parameters, by name.
        partial: whether each rank has only a term of the gradients of whole parameters, as of a norm of its own heads.
        experts: whether the module takes whole tensors, and its output is a term of the whole one.
    """

    def __init__(self, placements: Mapping[str, Placement], *, partial: bool = False, experts: bool = False) -> None:
        self._placements, self._partial, self._experts = dict(placements), partial, experts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, placement in self._placements.items():
            whole = module.get_parameter(name)
            # torch sets src_data_rank as it applies a style; None has each rank cut its shard from its own whole
            # tensor.
            placed = distribute_tensor(whole, device_mesh, [placement], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(placed, requires_grad=whole.requires_grad))
        forward = module.forward

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self._experts:
                args, kwargs = tree_map(
                    lambda leaf: sum_gradient(leaf, device_mesh) if isinstance(leaf, Tensor) else leaf, (args, kwargs)
                )
            parameters = {name: module._parameters[name] for name in self._placements}
            # Set on the dict of parameters for the call only: setattr would register new parameters, and optimizers and
            # the state_dict see the DTensors.
            module._parameters.update({name: self._local(parameter) for name, parameter in parameters.items()})
            try:
                output = forward(*args, **kwargs)
            finally:
                module._parameters.update(parameters)
            return summed(output, device_mesh) if self._experts else output

        module.forward = wrapped
        return module

    def _local(self, parameter: Any) -> Any:
        return parameter.to_local(grad_placements=[Partial()] if self._partial else None)


class HookedOutput(tp.ParallelStyle):
    """Changes a module's output by a function of it and the mesh."""

    def __init__(self, change: Callable[[Tensor, DeviceMesh], Tensor]) -> None:
        self._change = change

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(lambda _, __, output: self._change(output, device_mesh))
        return module


class LocalLinear(tp.ParallelStyle):
    """A linear layer of which each rank computes some outputs (``columns``), or a term of all from some inputs.

    It does what ColwiseParallel and RowwiseParallel do, on plain tensors: their DTensors take hundreds of Python calls
    for each layer and microbatch. It also takes transformers' Conv1D, whose weight [in, out] is transposed.

    With ``tokens`` the outputs of rows are this rank's tokens, and not all.
    """

    def __init__(self, *, columns: bool, tokens: bool = False) -> None:
        self._columns, self._tokens = columns, tokens

    @staticmethod
    def instead_of(style: tp.ParallelStyle, part: nn.Module) -> tp.ParallelStyle:
        """This style in place of torch's for a plain linear layer with the layouts of the defaults; else torch's."""
        whole, split = (Replicate(),), (Shard(-1),)
        layouts = {tp.ColwiseParallel: (whole, split), tp.RowwiseParallel: (split, whole)}
        if not is_plain_linear(part):
            return style
        if not isinstance(style, tp.ColwiseParallel | tp.RowwiseParallel) or not style.use_local_output:
            return style
        is_default = layouts.get(type(style)) == (style.input_layouts, style.output_layouts)
        return LocalLinear(columns=isinstance(style, tp.ColwiseParallel)) if is_default else style

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # By its name: where a worker has several stages, the forward of a head is no longer the class's.
        is_conv1d = type(module).__name__ == "Conv1D"
        # The bias of rows is whole, and added once, to the sum.
        for name in ("weight", "bias") if self._columns else ("weight",):
            if (whole := module._parameters[name]) is not None:
                dim = whole.ndim - 1 if is_conv1d else 0
                placement = [Shard(dim if self._columns else 1 - dim)]
                placed = distribute_tensor(whole, device_mesh, placement, src_data_rank=self.src_data_rank)
                module.register_parameter(name, nn.Parameter(placed, requires_grad=whole.requires_grad))
        local: Callable[..., Any] = _Local.apply
        product: Callable[..., Tensor] = _product_of_transposed if is_conv1d else F.linear

        def columns(part: nn.Module, value: Tensor) -> Tensor:
            if isinstance(value, DTensor):
                value = value.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
            else:
                value = sum_gradient(value, device_mesh)
            return product(value, *local(part._parameters["weight"], part._parameters["bias"]))

        def rows(part: nn.Module, value: Tensor) -> Any:
            if isinstance(value, DTensor):
                value = value.redistribute(placements=[Shard(-1)]).to_local()
            (weight,) = local(part._parameters["weight"])
            bias: Tensor | None = part._parameters["bias"]
            term = product(value, weight)
            if self._tokens:
                output = _redistributed(term, device_mesh, Partial(), Shard(TOKENS))
                bias = None if bias is None else sum_gradient(bias, device_mesh)  # of which each rank has its tokens'
            else:
                output = summed(term, device_mesh)
            if bias is None:
                return output
            with DisableTorchFunction():  # the replica's function mode has nothing to do here
                return output + bias.to(output.dtype)  # under autocast the product has another one than the weights

        # A method, so that a copy of the module (copy.deepcopy) computes with its own weights.
        module.forward = MethodType(columns if self._columns else rows, module)
        return module


def _product_of_transposed(value: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(value, weight.t(), bias)


def is_plain_linear(part: nn.Module) -> bool:
    """Whether a module computes what nn.Linear does, and no more."""
    return type(part).forward is nn.Linear.forward and "forward" not in vars(part)


class _Local(torch.autograd.Function):
    """This rank's shards of parameters, as ``DTensor.to_local`` gives them."""

    @staticmethod
    def forward(ctx: Any, *parameters: DTensor | None) -> tuple[Tensor | None, ...]:
        ctx.parameters = parameters
        with DisableTorchFunction():
            shards: list[Tensor | None] = []
            for whole in parameters:  # no comprehension: that is a call more, for each layer and microbatch
                shards.append(None if whole is None else whole.to_local().detach())
            return tuple(shards)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[DTensor | None, ...]:
        divided: list[DTensor | None] = []
        with DisableTorchFunction():
            for like, local in zip(ctx.parameters, gradients, strict=True):
                if local is None:
                    divided.append(None)
                    continue
                mesh, placements, shape, stride = like.device_mesh, like.placements, like.shape, like.stride()
                placed = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
                divided.append(placed)
        return tuple(divided)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, term: Tensor, mesh: DeviceMesh) -> Tensor:
        # The replica's function mode has nothing to do here, and is Python at each call.
        with DisableTorchFunction():
            total = term.detach().clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total, group=mesh.get_group())
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _SummedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        with DisableTorchFunction():
            return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return summed(gradient, ctx.mesh), None  # ``apply``, so that a gradient of gradients is summed too


summed: Callable[[Tensor, DeviceMesh], Tensor] = _Summed.apply
"""The sum of all ranks' terms. All must call it."""
sum_gradient: Callable[[Tensor, DeviceMesh], Tensor] = _SummedGradient.apply
"""The same tensor, equal on all ranks, whose gradient is the sum of all ranks': each has that of its own part."""
