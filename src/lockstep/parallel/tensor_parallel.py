"""Layers divided among tensor ranks: torch's ``parallelize_module`` with a plan from the model's spec.

    embedding  vocabulary divided -> sum        column linears -> own heads, own inner units -> row linears -> sum
    head       vocabulary divided -> own logits -> the loss of all, or else the logits of the whole vocabulary

Everything between these is whole, and alike, on all tensor ranks (Shoeybi et al. 2019, "Megatron-LM"), unless ranks
divide the sequences (Korthikanti et al. 2022): then norms, dropout and residuals work on a rank's own tokens. Sequences
are whole before the first layer of a stage and after its last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatch
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor import parallel as tp
from torch.distributed.tensor.placement_types import Placement

from lockstep._torch_compat import dtensor_chunks, tree_map
from lockstep.checks import check_divides
from lockstep.errors import ConfigError, DataError, UsageError
from lockstep.parallel.forward_inputs import ForwardArguments
from lockstep.parallel.model_specs import (
    GATHERED_STYLES,
    ModelSpec,
    base_name,
    require_model_spec,
    sizes_of,
    with_wildcards,
)
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
            placed = distribute_tensor(whole, device_mesh, [placement], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(placed, requires_grad=whole.requires_grad))
        forward = module.forward

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self._experts:
                args, kwargs = tree_map(lambda leaf: sum_gradient(leaf, device_mesh), (args, kwargs))
            parameters = {name: module._parameters[name] for name in self._placements}
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


def summed(term: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of all ranks' terms. All must call it."""
    return (
        DTensor.from_local(term, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()
    )


def sum_gradient(value: Any, mesh: DeviceMesh) -> Any:
    """The same tensor, equal on all ranks, whose gradient is the sum of all ranks'."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return value
    return DTensor.from_local(value, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


class SharedExpertOutput(tp.RowwiseParallel):
    """A row linear whose output the model may change in place, as Llama 4 adds the experts' outputs to it."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        divided = super()._apply(module, device_mesh)
        # torch gives a view of a DTensor's own memory, which autograd does not let anybody write to.
        divided.register_forward_hook(lambda _, __, output: output.clone())
        return divided


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
            tensor = inputs[0]
            if isinstance(tensor, DTensor):
                return tensor
            return DTensor.from_local(tensor, mesh, [self._inputs], run_check=False)

        def give(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
            return output.redistribute(placements=[self._outputs]).to_local()

        return distribute_module(module, device_mesh, divide, take, give)  # type: ignore[arg-type]


def column_order(width: int, parts: int, degree: int) -> Tensor:
    """The columns of a layer that makes ``parts`` outputs in one, so that equal shares hold a share of each output.

    For 3 parts and degree 2: q0 q1 k0 k1 v0 v1 -> q0 k0 v0 q1 k1 v1.
    """
    return torch.arange(width).reshape(parts, degree, -1).transpose(0, 1).reshape(-1)


_ON_EXPERTS = {"colwise": -2, "rowwise": -1, "packed_colwise": -2, "packed_rowwise": -1}
"""By the style of a parameter with several dims: the dim that is divided. Features are before the last one."""
_LINEAR_STYLES = ("colwise", "rowwise", "packed_colwise", "rowwise_split_input", "rowwise_rep", *GATHERED_STYLES)
_LOCAL_COLUMNS = ("colwise", "packed_colwise")  # whose output stays divided
_ON_OWN_UNITS = ("q_norm", "k_norm", "act_fn")  # whole weights beside them, which some plans leave out
_PACKED = ("packed_colwise", "packed_rowwise")
_EMBEDDINGS = ("embedding_rowwise", "embedding_colwise")
_ON_OUTPUTS = ("all_reduce", "moe_identity_expert")  # of modules that may have no weights
_OWN_PARAMETERS = ("moe_tp_experts", "local_params", "replicated_with_grad_allreduce")
_ON_WEIGHTS = (*_LINEAR_STYLES, *_EMBEDDINGS, *_OWN_PARAMETERS, "mla_kv_a_proj", "replicate")
_IN_SEQUENCES = ("colwise", "packed_colwise", "rowwise", "embedding_rowwise", "replicated_with_grad_allreduce")


class DividedModel:
    """The modules and parameters of one model that its spec divides, by full names: those that this stage has."""

    def __init__(self, module: nn.Module, spec: ModelSpec) -> None:
        self._module, self._spec = module, spec
        self._base = f"{base}." if (base := base_name(module)) else ""
        self._modules = dict(module.named_modules(remove_duplicate=False))
        parameters = dict(module.named_parameters(remove_duplicate=False))
        styles = {name: style for name in self._modules if (style := self._style(name)) is not None}
        # A stand-in for another stage's module has no parameters. A norm inside an embedding would be given one rank's
        # term of the sum.
        self.modules = {
            name: style
            for name, style in styles.items()
            if (style not in _ON_WEIGHTS or any(True for _ in self._modules[name].parameters()))
            and style != "replicate"
            and not (style in _EMBEDDINGS and any(True for _ in self._modules[name].children()))
        }
        self.parameters = {name: style for name in parameters if (style := self._style(name)) is not None}
        inside = (f"{region}.{name}" for region in self.regions() for name in _ON_OWN_UNITS)
        for name in inside:
            if name not in styles and name in self._modules and any(True for _ in self._modules[name].parameters()):
                self.modules[name] = "replicated_with_grad_allreduce"

    def _style(self, name: str) -> str | None:
        if self._in_body(name):
            return self._spec.styles.get(with_wildcards(name.removeprefix(self._base)))
        return self._spec.head_styles.get(with_wildcards(name))

    def _in_body(self, name: str) -> bool:
        return name.startswith(self._base)

    def layers(self) -> list[nn.Module]:
        return [self._modules[name] for name in self.layer_names()]

    def layer_names(self) -> list[str]:
        layers = f"{self._base}{self._spec.layers}"
        return [f"{layers}.{number}" for number, _ in self._modules[layers].named_children()]

    def heads(self) -> list[str]:
        """The linear layers that compute logits over the vocabulary."""
        config: Any = self._module.config
        size = getattr(config.get_text_config(), "vocab_size", None)
        return [
            name
            for name, style in self.modules.items()
            if style in GATHERED_STYLES
            and not self._in_body(name)
            and getattr(self._modules[name], "out_features", None) == size
        ]

    def regions(self) -> list[str]:
        """The modules that begin with divided linear layers, and work on this rank's units."""
        names = (name.rpartition(".")[0] for name, style in self.modules.items() if style in _LOCAL_COLUMNS)
        return list(dict.fromkeys(names))

    def rank_rng(self) -> list[str]:
        """The modules that draw dropout for this rank's heads."""
        return [name for name in self.regions() if "Attention" in type(self._modules[name]).__name__]

    def dropouts(self, within: Iterable[str]) -> list[str]:
        """The dropout modules inside those named."""
        begins = tuple(f"{name}." for name in within)
        return [
            name for name, part in self._modules.items() if isinstance(part, nn.Dropout) and name.startswith(begins)
        ]

    def check(self, degree: int) -> None:
        """Raises a ConfigError for a style that cannot be applied, or sizes that ``degree`` does not divide."""
        for name, style in [*self.modules.items(), *self.parameters.items()]:
            self._check_style(name, style)
        heads = ("num_attention_heads", "num_key_value_heads") if self.rank_rng() else ()
        config: Any = self._module.config
        check_divides("tensor", degree, *((name, size) for name in heads for size in sizes_of(config, name)))
        for name, size in self._sizes():
            check_divides("tensor", degree, (f"the size of {name}", size))

    def _check_style(self, name: str, style: str) -> None:
        part = self._modules.get(name)
        if part is None:
            owner = name.rpartition(".")[0]
            is_supported = style in _ON_EXPERTS and self.modules.get(owner) in _OWN_PARAMETERS
        elif style in _LINEAR_STYLES:
            is_supported = isinstance(part, nn.Linear) or _is_conv1d(part)
        elif style == "moe_tp_experts":
            bare = [key for key, _ in part.named_parameters() if f"{name}.{key}" not in self.parameters]
            if bare:
                name, is_supported = f"{name}.{bare[0]}", False
            else:
                is_supported = True
        elif style in _EMBEDDINGS:
            is_supported = isinstance(part, nn.Embedding)
        else:
            is_supported = style in _ON_WEIGHTS or style in _ON_OUTPUTS
        if not is_supported:
            kind = "parameter" if part is None else type(part).__name__
            raise ConfigError(
                f'the plan of {type(self._module).__name__} divides {name} (a {kind}) in the style "{style}", which is '
                "not supported there; choose tensor=1, or give a tensor_plan of your own that leaves it whole"
            )
        if part is not None and (style in _LINEAR_STYLES or style in _EMBEDDINGS):
            _check_weights(name, part, "the model's plan")

    def _sizes(self) -> Iterator[tuple[str, int]]:
        """The sizes that must be divided evenly, by name: those of what is computed on divided units."""
        for name, style in self.modules.items():
            part: Any = self._modules[name]
            if style in ("colwise", "packed_colwise"):
                yield f"{name}'s output", self._width(part, 0) // self._packed(name, style)
            elif style == "rowwise":
                yield f"{name}'s input", self._width(part, 1)
        for name, style in self.parameters.items():
            dim, parameter = _ON_EXPERTS[style], self._module.get_parameter(name)
            yield name, parameter.shape[max(dim, -parameter.ndim)] // self._packed(name, style)

    @staticmethod
    def _width(part: Any, dim: int) -> int:
        """The number of outputs (dim 0) or inputs (dim 1) of a linear layer."""
        return int(part.weight.shape[1 - dim if _is_conv1d(part) else dim])

    def _packed(self, name: str, style: str) -> int:
        """How many outputs a module or parameter makes in one."""
        if style not in _PACKED:
            return 1
        return (self._spec.packed or {}).get(with_wildcards(name.removeprefix(self._base)), 2)

    def reorder(self, degree: int) -> dict[str, Tensor]:
        """Reorders what makes several outputs in one, so that equal shares hold a share of each; the orders."""
        orders: dict[str, Tensor] = {}
        for name, style in self.modules.items():
            if style in _PACKED:
                part = self._modules[name]
                for key, parameter in part.named_parameters(recurse=False):
                    dim = -1 if _is_conv1d(part) else 0
                    orders[f"{name}.{key}"] = _reorder(parameter, dim, self._packed(name, style), degree)
        for name, style in self.parameters.items():
            if style in _PACKED:
                parameter = self._module.get_parameter(name)
                orders[name] = _reorder(parameter, _ON_EXPERTS[style], self._packed(name, style), degree)
        return orders

    def scale(self, degree: int) -> None:
        """Divides the attributes that hold a number of units."""
        for name, part in self._modules.items():
            attribute = (self._spec.scaled or {}).get(with_wildcards(name.removeprefix(self._base)))
            if attribute is not None and hasattr(part, attribute):
                setattr(part, attribute, getattr(part, attribute) // degree)

    def styles(self, *, sequences: bool) -> dict[str, tp.ParallelStyle]:
        """How torch divides each module; with ``sequences``, the modules between them too."""
        heads = self.heads()
        output = Shard(TOKENS) if sequences else Replicate()
        styles = {name: self._torch_style(name, style, name in heads, output) for name, style in self.modules.items()}
        return {**styles, **self._sequence_styles()} if sequences else styles

    def _torch_style(self, name: str, style: str, is_head: bool, output: Placement) -> tp.ParallelStyle:
        part: Any = self._modules[name]
        whole = Replicate()
        if style in _LINEAR_STYLES:
            return self._linear_style(name, style, is_head, output)
        if style == "embedding_rowwise":
            return tp.RowwiseParallel(input_layouts=whole)
        if style == "embedding_colwise":
            return tp.ColwiseParallel(output_layouts=whole)
        if style == "mla_kv_a_proj":
            config: Any = self._module.config
            rotated = int(config.get_text_config().qk_rope_head_dim)
            return HookedOutput(lambda latent, mesh: _sum_rotated_gradient(latent, rotated, mesh))
        if style == "all_reduce":
            return HookedOutput(summed)
        if style == "moe_identity_expert":  # whole on each rank, and summed with the terms of the other experts
            return HookedOutput(lambda output, mesh: output / mesh.size())
        keys = [key for key, _ in part.named_parameters(recurse=False)]
        if style == "replicated_with_grad_allreduce":
            return LocalParameters(dict.fromkeys(keys, whole), partial=True)
        key_styles = {key: self.parameters[f"{name}.{key}"] for key in keys if f"{name}.{key}" in self.parameters}
        return LocalParameters(
            {
                key: Shard(max(_ON_EXPERTS[key_style] + part.get_parameter(key).ndim, 0))
                for key, key_style in key_styles.items()
            },
            experts=style == "moe_tp_experts",
        )

    def _linear_style(self, name: str, style: str, is_head: bool, output: Placement) -> tp.ParallelStyle:
        whole, split = Replicate(), Shard(-1)
        output_layout = whole if style in GATHERED_STYLES and not is_head else split
        input_layout = whole if style.endswith(("split_input", "rep")) else split
        if _is_conv1d(self._modules[name]):
            if style.startswith("rowwise"):
                return Conv1DParallel(Shard(0), whole, inputs=input_layout, outputs=output)
            return Conv1DParallel(Shard(1), Shard(0), inputs=whole, outputs=output_layout)
        if not style.startswith("rowwise"):
            return tp.ColwiseParallel(output_layouts=output_layout)
        has_experts_beside = f"{name.rsplit('.', 2)[0]}.experts" in self.modules
        kind = SharedExpertOutput if has_experts_beside else tp.RowwiseParallel
        return kind(input_layouts=input_layout, output_layouts=output)

    def _sequence_styles(self) -> dict[str, tp.ParallelStyle]:
        """The norms between divided layers take this rank's tokens, and the divided layers take all."""
        regions = self.regions()
        inside = tuple(f"{name}." for name in regions)
        styles: dict[str, tp.ParallelStyle] = dict.fromkeys(regions, WholeTokens())
        for layer in self.layer_names():
            for name, part in self._modules[layer].named_modules(prefix=layer):
                if "Norm" in type(part).__name__ and not name.startswith(inside):
                    styles[name] = tp.SequenceParallel(sequence_dim=TOKENS, use_local_output=True)
        return styles

    def check_sequences(self) -> None:
        """Raises a ConfigError unless all that is divided in a layer is pairs of linear layers."""
        for name, style in [*self.modules.items(), *self.parameters.items()]:
            if style not in _IN_SEQUENCES and self._in_body(name):
                raise ConfigError(
                    f'sequence_parallel=True does not go with the style "{style}", in which the plan of '
                    f"{type(self._module).__name__} divides {name}; leave it out"
                )


def _is_conv1d(part: object) -> bool:
    """Whether a module is transformers' Conv1D, which GPT-2 has in place of linear layers."""
    return type(part).__name__ == "Conv1D"


def _sum_rotated_gradient(latent: Tensor, rotated: int, mesh: DeviceMesh) -> Tensor:
    """Of a latent key and value [.., latent + rotated] whose rotated part goes to this rank's heads undivided."""
    return torch.cat([latent[..., :-rotated], sum_gradient(latent[..., -rotated:], mesh)], dim=-1)


def _reorder(parameter: nn.Parameter, dim: int, parts: int, degree: int) -> Tensor:
    order = column_order(parameter.shape[max(dim, -parameter.ndim)], parts, degree)
    if not parameter.is_meta:
        with torch.no_grad():
            parameter.copy_(parameter.index_select(max(dim, -parameter.ndim), order.to(parameter.device)))
    return order


TensorPlan = Literal["auto"] | Mapping[str, tp.ParallelStyle]
"""Names of modules, with "*" for any, and how each is divided; or "auto"."""


@dataclass(frozen=True, kw_only=True)
class TensorSharding:
    """How a module was divided."""

    # by name, for each parameter that was reordered along its divided dim: the index of what stands in each place
    orders: Mapping[str, Tensor] = field(default_factory=dict)
    rank_rng: tuple[str, ...] = ()  # the names of modules that draw random numbers for their own part
    common_rng: tuple[str, ...] = ()  # the names of modules inside those that draw alike on all tensor ranks


WHOLE = TensorSharding()


def check_plan(module: nn.Module, plan: TensorPlan, degree: int, *, sequences: bool) -> None:
    """Raises a ConfigError if a whole module cannot be divided among ``degree`` ranks by the plan "auto"."""
    if degree == 1 or plan != "auto":
        return
    model = DividedModel(module, require_model_spec(module, 'tensor_plan="auto"'))
    if not model.modules:
        raise ConfigError(
            f"{type(module).__name__} has no tensor plan, so tensor={degree} would divide nothing; choose tensor=1, or "
            "give a tensor_plan of your own"
        )
    model.check(degree)
    if sequences:
        model.check_sequences()


def shard_layers(module: nn.Module, plan: TensorPlan, mesh: DeviceMesh, *, sequences: bool = False) -> TensorSharding:
    """Divides a module, whole on every tensor rank of ``mesh`` and alike there, in place. Nothing is sent.

    ``sequences``: modules between divided layers work on this rank's part of the sequences; with the plan "auto".
    ``check_plan`` says beforehand whether it can be divided.
    """
    degree = mesh.size()
    if degree == 1:
        return WHOLE
    ties = ties_of(module)
    if plan != "auto":
        tp.parallelize_module(module, mesh, _local_styles(module, plan), src_data_rank=None)
        _tie(module, ties)
        return WHOLE
    model = DividedModel(module, require_model_spec(module, 'tensor_plan="auto"'))
    orders = model.reorder(degree)
    tp.parallelize_module(module, mesh, model.styles(sequences=sequences), src_data_rank=None)
    _make_buffers_plain(module)
    model.scale(degree)
    _tie(module, ties)
    for name in model.heads():
        _give_logits(module.get_submodule(name), mesh)
    rank_rng = model.rank_rng()
    if sequences:
        return TensorSharding(orders=orders, rank_rng=(*rank_rng, *model.dropouts(model.layer_names())))
    return TensorSharding(orders=orders, rank_rng=tuple(rank_rng), common_rng=tuple(model.dropouts(rank_rng)))


def _make_buffers_plain(module: nn.Module) -> None:
    """Undoes that torch makes buffers of divided modules DTensors, such as the scale of an embedding."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if isinstance(buffer, DTensor):
                part._buffers[name] = buffer.to_local()


def check_user_plan(module: nn.Module, plan: TensorPlan, degree: int) -> None:
    """Raises a ConfigError if a plan of the user's is none, or names no modules of the whole model that it fits."""
    if plan == "auto":
        return
    if not isinstance(plan, Mapping):
        raise ConfigError(f'tensor_plan={plan!r} is unknown; give "auto", or a dict of module names to styles')
    module_names = [name for name, _ in module.named_modules()]
    for pattern, style in plan.items():
        if not isinstance(style, tp.ParallelStyle):
            raise ConfigError(
                f"tensor_plan gives {pattern!r} {style!r}; give an object of one of torch's styles, such as "
                "ColwiseParallel()"
            )
        named = [name for name in module_names if _matches(name, pattern)]
        for name in named:
            _check_user_style(name, module.get_submodule(name), style, degree)
        if not named:
            near = get_close_matches(pattern, module_names, 3) or module_names[1:4]
            raise ConfigError(
                f"tensor_plan names {pattern!r}, and {type(module).__name__} has no such module; give names of its "
                f"modules, such as {', '.join(near)}"
            )


def _check_weights(name: str, part: Any, plan: str) -> None:
    """Refuses a layer whose weight is computed from other parameters: torch divides parameters, each by itself."""
    sources = [parameter for parameter, _ in part.named_parameters() if parameter not in ("weight", "bias")]
    if sources:
        raise ConfigError(
            f"{plan} divides {name!r}, whose weight is computed from {', '.join(sources)}, as weight_norm and "
            "spectral_norm do, and parts of those do not give parts of it; leave the layer out of the plan, choose "
            "tensor=1, or make the weight plain first (torch.nn.utils.parametrize.remove_parametrizations, or "
            "torch.nn.utils.remove_weight_norm)"
        )


def _check_user_style(name: str, part: nn.Module, style: tp.ParallelStyle, degree: int) -> None:
    if type(style) not in (tp.ColwiseParallel, tp.RowwiseParallel):
        return
    if degree > 1 and isinstance(part, (nn.Linear, nn.Embedding)):
        _check_weights(name, part, "tensor_plan")
    if isinstance(part, nn.Embedding):
        return
    if not isinstance(part, nn.Linear):
        raise ConfigError(
            f"tensor_plan gives {name!r} the style {type(style).__name__}, and it is a {type(part).__name__}; torch "
            "has this style for nn.Linear and nn.Embedding"
        )
    # torch takes the parts of a divided input for equal ones.
    if isinstance(style, tp.RowwiseParallel) and style.input_layouts == (Shard(-1),):
        check_divides("tensor", degree, (f"the in_features of {name!r}", part.in_features))


def _local_styles(module: nn.Module, plan: Mapping[str, tp.ParallelStyle]) -> dict[str, tp.ParallelStyle]:
    """The part of a plan for modules that this stage of a pipeline has, by their full names."""
    names = [name for name, part in module.named_modules() if not isinstance(part, StandIn)]
    return {name: style for pattern, style in plan.items() for name in names if _matches(name, pattern)}


def _matches(name: str, pattern: str) -> bool:
    """Whether a plan's pattern means a module, as ``parallelize_module`` has it: "*" stands for anything but a dot."""
    atoms, pattern_atoms = name.split("."), pattern.split(".")
    return len(atoms) == len(pattern_atoms) and all(map(fnmatch, atoms, pattern_atoms))


def _give_logits(head: nn.Module, mesh: DeviceMesh) -> None:
    """Has a head, which computes this rank's logits, return those of the whole vocabulary."""
    size: Any = head.out_features
    vocabulary = VocabShard(size=size, rank=mesh.get_local_rank(), ranks=mesh.size(), group=mesh.get_group())
    head.register_forward_hook(lambda _, __, part: vocab_parallel_logits(part, vocabulary))


def local_shard(whole: Tensor, like: Tensor, order: Tensor | None = None) -> Tensor:
    """This worker's plain shard of ``whole``, placed as its own tensor ``like``, reordered by ``order``."""
    if not isinstance(like, DTensor):
        return whole
    if order is not None:
        whole = whole.index_select(ordered_dim(like), order.to(whole.device))
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()


def ordered_dim(like: DTensor) -> int:
    """The dim that tensor ranks divide, along which a parameter may have been reordered."""
    names = like.device_mesh.mesh_dim_names or ()
    placement = like.placements[names.index("tensor")]
    assert isinstance(placement, Shard)
    return placement.dim


def region_of(value: Tensor, order: Tensor | None = None) -> Region:
    """The place in the whole tensor of this worker's shard ``value``, which stands in ``order``."""
    region = whole_region(value.shape)
    if not isinstance(value, DTensor):
        return region
    (chunk,) = dtensor_chunks(value)
    region = replace(region, sizes=tuple(chunk.sizes), offsets=tuple(chunk.offsets))
    if order is None:
        return region
    dim = ordered_dim(value)
    begin = region.offsets[dim]
    return replace(region, dim=dim, columns=tuple(order[begin : begin + region.sizes[dim]].tolist()))


def ties_of(module: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _tie(module: nn.Module, ties: list[list[str]]) -> None:
    """Makes each group of names one parameter again: torch divides a module's parameters one by one."""
    for names in ties:
        divided = [name for name in names if isinstance(module.get_parameter(name), DTensor)] or names
        parameter = module.get_parameter(divided[0])
        for name in names:
            owner, _, attribute = name.rpartition(".")
            module.get_submodule(owner).register_parameter(attribute, parameter)
