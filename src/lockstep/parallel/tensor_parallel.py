"""Layers divided among tensor ranks: torch's ``parallelize_module`` with a plan from the model's spec.

    embedding  vocabulary divided -> sum        column linears -> own heads, own inner units -> row linears -> sum
    head       vocabulary divided -> own logits -> the loss of all, or else the logits of the whole vocabulary

Everything between these is whole, and alike, on all tensor ranks (Shoeybi et al. 2019, "Megatron-LM"), unless ranks
divide the sequences (Korthikanti et al. 2022): then norms, dropout and residuals work on a rank's own tokens. Sequences
are whole before the first layer of a stage and after its last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatch
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor import parallel as tp
from torch.distributed.tensor.placement_types import Placement

from lockstep._torch_compat import dtensor_chunks
from lockstep.checks import check_divides
from lockstep.errors import ConfigError, DataError, UsageError
from lockstep.parallel.forward_inputs import ForwardArguments
from lockstep.parallel.model_specs import ModelSpec, base_name, require_model_spec
from lockstep.parallel.pipeline_stage import StandIn
from lockstep.parallel.regions import Region, whole_region
from lockstep.parallel.vocab_parallel import VocabShard, vocab_parallel_logits

TOKENS = 1  # the dim of the sequence in hidden states


class SequenceSharding:
    """Has the first layer of each stage divide the sequences among the ranks of ``mesh``, and the last one gather them.

    It takes all ``layers`` of the model, before any is cut off.
    """

    def __init__(self, mesh: DeviceMesh, model: nn.Module, layers: Iterable[nn.Module]) -> None:
        self._mesh = mesh
        self._layers = WeakSet(layers)
        self._first: set[int] = set()
        self._last: set[int] = set()
        model.register_forward_pre_hook(_refuse_hidden_states, with_kwargs=True)
        for layer in self._layers:
            self._wrap(layer)

    def set_stages(self, stages: Iterable[Iterable[nn.Module]]) -> None:
        """Sets this worker's stages, each as modules of the model, its layers among them in order."""
        runs = [run for parts in stages if (run := [part for part in parts if part in self._layers])]
        self._first, self._last = {id(run[0]) for run in runs}, {id(run[-1]) for run in runs}

    def _wrap(self, layer: nn.Module) -> None:
        forward: Callable[..., Any] = layer.forward

        def wrapped(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if id(layer) in self._first:
                hidden_states = self._divide(hidden_states)
            output = forward(hidden_states, *args, **kwargs)
            return self._gather(output) if id(layer) in self._last else output

        layer.forward = wrapped

    def _divide(self, hidden: Tensor) -> Tensor:
        ranks, tokens = self._mesh.size(), hidden.shape[TOKENS]
        if tokens % ranks:
            raise DataError(
                f"sequences of {tokens} tokens cannot be divided evenly among tensor={ranks} workers, as "
                f"sequence_parallel=True wants; pad them to a multiple of {ranks}, or leave it out"
            )
        return self._redistributed(hidden, Replicate(), Shard(TOKENS))

    def _gather(self, output: Any) -> Any:
        if isinstance(output, tuple):
            return (self._gather(output[0]), *output[1:])
        return self._redistributed(output, Shard(TOKENS), Replicate())

    def _redistributed(self, hidden: Tensor, before: Any, after: Any) -> Tensor:
        placed = DTensor.from_local(hidden, self._mesh, [before], run_check=False)
        return placed.redistribute(placements=[after]).to_local()


def _refuse_hidden_states(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
    named = ForwardArguments(model.forward).named(args, kwargs)
    if named.get("output_hidden_states") or model.config.output_hidden_states:
        raise UsageError(
            "output_hidden_states asks for what sequence_parallel=True divides among workers; leave one of them out"
        )


class Conv1DParallel(tp.ParallelStyle):
    """Divides a Conv1D of transformers, which is a linear layer with a transposed weight [in, out].

    The arguments are placements: ``weight`` Shard(1) divides the outputs, Shard(0) the inputs.
    """

    def __init__(self, weight: Placement, bias: Placement, inputs: Placement, outputs: Placement) -> None:
        self._parameters = {"weight": weight, "bias": bias}
        self._inputs, self._outputs = inputs, outputs

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def divide(_: str, part: nn.Module, mesh: DeviceMesh) -> None:
            for name, placement in self._parameters.items():
                whole = part.get_parameter(name)
                placed = distribute_tensor(whole, mesh, [placement], src_data_rank=self.src_data_rank)
                part.register_parameter(name, nn.Parameter(placed, requires_grad=whole.requires_grad))

        def take(_: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
            given = inputs[0]
            if isinstance(given, DTensor):
                return given
            return DTensor.from_local(given, mesh, [self._inputs], run_check=False)

        def give(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
            return output.redistribute(placements=[self._outputs]).to_local()

        return distribute_module(module, device_mesh, divide, take, give)  # type: ignore[arg-type]


def column_order(width: int, parts: int, degree: int) -> Tensor:
    """The columns of a layer that makes ``parts`` outputs in one, so that equal shares hold a share of each output.

    For 3 parts and degree 2: q0 q1 k0 k1 v0 v1 -> q0 k0 v0 q1 k1 v1.
    """
    return torch.arange(width).reshape(parts, degree, -1).transpose(0, 1).reshape(-1)


class SpecNames:
    """The full names of a spec's modules in one model, with or without a head."""

    def __init__(self, module: nn.Module, spec: ModelSpec) -> None:
        self._module, self._spec = module, spec
        self._base = f"{base}." if (base := base_name(module)) else ""
        layers = module.get_submodule(f"{self._base}{spec.layers}")
        self._layers = [f"{self._base}{spec.layers}.{number}." for number, _ in layers.named_children()]

    def layers(self) -> list[nn.Module]:
        return [self._module.get_submodule(name.removesuffix(".")) for name in self._layers]

    def in_layers(self, names: Iterable[str]) -> tuple[str, ...]:
        """The modules of these names, relative to a layer, in all layers that have them."""
        modules = dict(self._module.named_modules(remove_duplicate=False))
        return tuple(full for layer in self._layers for name in names if (full := layer + name) in modules)

    def heads(self) -> tuple[str, ...]:
        return self._with_weights(self._spec.heads)

    def styles(self, *, sequences: bool) -> dict[str, tp.ParallelStyle]:
        """How each linear layer and embedding is divided; with ``sequences``, the modules between them too."""
        output = Shard(TOKENS) if sequences else Replicate()
        found: dict[str, tp.ParallelStyle] = {}
        for name in self.in_layers(self._spec.column_linears):
            conv1d = Conv1DParallel(Shard(1), Shard(0), inputs=Replicate(), outputs=Shard(-1))
            found[name] = tp.ColwiseParallel() if self._is_linear(name) else conv1d
        for name in self.in_layers(self._spec.row_linears):
            conv1d = Conv1DParallel(Shard(0), Replicate(), inputs=Shard(-1), outputs=output)
            found[name] = tp.RowwiseParallel(output_layouts=output) if self._is_linear(name) else conv1d
        for name in self._with_weights([self._base + self._spec.embedding]):
            found[name] = tp.RowwiseParallel(input_layouts=Replicate())
        found |= {name: tp.ColwiseParallel() for name in self.heads()}
        return {**found, **self._sequence_styles()} if sequences else found

    def _sequence_styles(self) -> dict[str, tp.ParallelStyle]:
        """The modules between divided layers take this rank's tokens, and the divided layers take all."""
        spec, tokens, whole = self._spec.sequence, Shard(TOKENS), Replicate()
        found: dict[str, tp.ParallelStyle] = {}
        for name in self.in_layers(spec.norms):
            found[name] = tp.SequenceParallel(sequence_dim=TOKENS, use_local_output=True)
        for name in self.in_layers(spec.regions):
            found[name] = tp.PrepareModuleInput(input_layouts=tokens, desired_input_layouts=whole)
        for name in self.in_layers(spec.regions_by_name):
            found[name] = tp.PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": tokens}, desired_input_kwarg_layouts={"hidden_states": whole}
            )
        return found

    def _with_weights(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of the modules that this stage has: stand-ins for another stage's have no weight."""
        weights = dict(self._module.named_parameters(remove_duplicate=False))
        return tuple(name for name in names if f"{name}.weight" in weights)

    def _is_linear(self, name: str) -> bool:
        return isinstance(self._module.get_submodule(name), nn.Linear)


TensorPlan = Literal["auto"] | Mapping[str, tp.ParallelStyle]
"""Names of modules, with "*" for any, and how each is divided; or "auto"."""


@dataclass(frozen=True, kw_only=True)
class TensorSharding:
    """How a module was divided."""

    # by name, for each parameter whose columns were reordered: the column that stands in each place
    orders: Mapping[str, Tensor] = field(default_factory=dict)
    own_rng: tuple[str, ...] = ()  # the names of modules that draw random numbers for their own part
    common_rng: tuple[str, ...] = ()  # the names of modules inside those that draw alike on all tensor ranks


WHOLE = TensorSharding()


def shard_layers(module: nn.Module, plan: TensorPlan, mesh: DeviceMesh, *, sequences: bool = False) -> TensorSharding:
    """Divides a module, whole on every tensor rank of ``mesh`` and alike there, in place. Nothing is sent.

    ``sequences``: modules between divided layers work on this rank's part of the sequences; with the plan "auto".
    Raises ConfigError for a module without a spec, or sizes that the number of ranks does not divide.
    """
    degree = mesh.size()
    if degree == 1:
        return WHOLE
    ties = ties_of(module)
    if plan != "auto":
        tp.parallelize_module(module, mesh, _here(module, plan), src_data_rank=None)
        _tie(module, ties)
        return WHOLE
    spec = require_model_spec(module, 'tensor_plan="auto"')
    config: Any = module.config
    check_divides("tensor", degree, *((name, int(getattr(config, name))) for name in spec.divisible))
    names = SpecNames(module, spec)
    orders: dict[str, Tensor] = {}
    for short, parts in spec.fused:
        for linear in names.in_layers([short]):
            orders |= _reorder(module, linear, parts, degree)
    tp.parallelize_module(module, mesh, names.styles(sequences=sequences), src_data_rank=None)
    for short, attribute in spec.scaled:
        for part in map(module.get_submodule, names.in_layers([short])):
            setattr(part, attribute, getattr(part, attribute) // degree)
    _tie(module, ties)
    for name in names.heads():
        _give_logits(module.get_submodule(name), mesh)
    return TensorSharding(
        orders=orders,
        own_rng=names.in_layers([*spec.own_rng, *(spec.sequence.dropouts if sequences else ())]),
        common_rng=() if sequences else names.in_layers(spec.common_rng),
    )


def check_names(module: nn.Module, plan: TensorPlan) -> None:
    """Raises a ConfigError if a plan of the user's is none, or names no modules of the whole model."""
    if plan == "auto":
        return
    if not isinstance(plan, Mapping):
        raise ConfigError(f'tensor_plan={plan!r} is unknown; give "auto", or a dict of module names to styles')
    known = [name for name, _ in module.named_modules()]
    for pattern in plan:
        if not any(_matches(name, pattern) for name in known):
            near = get_close_matches(pattern, known, 3) or known[1:4]
            raise ConfigError(
                f"tensor_plan names {pattern!r}, and {type(module).__name__} has no such module; give names of its "
                f"modules, such as {', '.join(near)}"
            )


def _here(module: nn.Module, plan: Mapping[str, tp.ParallelStyle]) -> dict[str, tp.ParallelStyle]:
    """The part of a plan for modules that this stage of a pipeline has, by their full names."""
    own = [name for name, part in module.named_modules() if not isinstance(part, StandIn)]
    return {name: style for pattern, style in plan.items() for name in own if _matches(name, pattern)}


def _matches(name: str, pattern: str) -> bool:
    """Whether a plan's pattern means a module, as ``parallelize_module`` has it: "*" stands for anything but a dot."""
    own, given = name.split("."), pattern.split(".")
    return len(own) == len(given) and all(map(fnmatch, own, given))


def _give_logits(head: nn.Module, mesh: DeviceMesh) -> None:
    """Has a head, which computes this rank's logits, return those of the whole vocabulary."""
    size: Any = head.out_features
    vocabulary = VocabShard(size=size, rank=mesh.get_local_rank(), ranks=mesh.size(), group=mesh.get_group())
    head.register_forward_hook(lambda _, __, part: vocab_parallel_logits(part, vocabulary))


def _reorder(module: nn.Module, linear: str, parts: int, degree: int) -> dict[str, Tensor]:
    found = {}
    for name, parameter in module.get_submodule(linear).named_parameters(recurse=False):
        order = column_order(parameter.shape[-1], parts, degree)
        if not parameter.is_meta:
            with torch.no_grad():
                parameter.copy_(parameter[..., order].clone())
        found[f"{linear}.{name}"] = order
    return found


def local_shard(whole: Tensor, like: Tensor, order: Tensor | None = None) -> Tensor:
    """This worker's plain shard of ``whole``, placed as its own tensor ``like``, with columns in ``order``."""
    whole = whole if order is None else whole[..., order]
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()


def region_of(value: Tensor, order: Tensor | None = None) -> Region:
    """The place in the whole tensor of this worker's shard ``value``, whose columns stand in ``order``."""
    region = whole_region(value.shape)
    if isinstance(value, DTensor):
        (chunk,) = dtensor_chunks(value)
        region = replace(region, sizes=tuple(chunk.sizes), offsets=tuple(chunk.offsets))
    if order is not None:
        begin = region.offsets[-1]
        region = replace(region, columns=tuple(order[begin : begin + region.sizes[-1]].tolist()))
    return region


def ties_of(module: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def _tie(module: nn.Module, ties: list[list[str]]) -> None:
    """Makes each group of names one parameter again: torch divides a module's parameters one by one."""
    for names in ties:
        divided = [name for name in names if isinstance(module.get_parameter(name), DTensor)] or names
        parameter = module.get_parameter(divided[0])
        for name in names:
            owner, _, attribute = name.rpartition(".")
            module.get_submodule(owner).register_parameter(attribute, parameter)
