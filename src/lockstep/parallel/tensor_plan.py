"""Which modules of a model tensor ranks divide, and in which style: from the model's spec, or from a user's plan.

    embedding  vocabulary divided -> sum        column linears -> own heads, own inner units -> row linears -> sum
    head       vocabulary divided -> own logits -> the loss of all, or else the logits of the whole vocabulary

Everything between these is whole, and alike, on all tensor ranks (Shoeybi et al. 2019, "Megatron-LM"), unless ranks
divide the sequences. ``tensor_parallel`` applies what is planned here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatch
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as tp

from lockstep.checks import check_divides
from lockstep.errors import ConfigError
from lockstep.parallel.tensor_styles import (
    TOKENS,
    HookedOutput,
    LocalLinear,
    LocalParameters,
    WholeTokens,
    is_plain_linear,
    sum_gradient,
    summed,
)
from lockstep.parallel.transformers_plans import (
    GATHERED_STYLES,
    ModelSpec,
    base_name,
    require_layers,
    require_model_spec,
    sizes_of,
    with_wildcards,
)

TensorPlan = Literal["auto"] | Mapping[str, tp.ParallelStyle]
"""Names of modules, with "*" for any, and how each is divided; or "auto"."""


@dataclass(frozen=True, kw_only=True)
class ColumnOrder:
    """The order that a parameter is put into along its divided dim, so that equal shares hold a share of each output.

    ``columns`` has the index, in the model's own order, of what stands in each place.
    """

    dim: int
    columns: Tensor


@dataclass(frozen=True, kw_only=True)
class TensorDivision:
    """How tensor ranks divide a model, by the full names of its modules and parameters."""

    styles: Mapping[str, tp.ParallelStyle] = field(default_factory=dict)  # of modules
    orders: Mapping[str, ColumnOrder] = field(default_factory=dict)  # of parameters, where it is not the model's own
    scaled: Mapping[str, str] = field(default_factory=dict)  # modules, and an attribute that the degree divides
    heads: tuple[str, ...] = ()  # linear layers that compute logits over the vocabulary
    rank_rng: tuple[str, ...] = ()  # modules that draw random numbers for their own part
    common_rng: tuple[str, ...] = ()  # modules inside those that draw alike on all tensor ranks
    layers: tuple[str, ...] = ()  # the layers in which ranks divide the sequences; empty if they do not
    has_plain_buffers: bool = False  # whether buffers of divided modules stay plain; else torch does as it likes

    def within(self, modules: Collection[str]) -> TensorDivision:
        """What concerns these modules alone, which one stage of a pipeline has."""
        return replace(
            self,
            styles={name: style for name, style in self.styles.items() if name in modules},
            orders={name: order for name, order in self.orders.items() if name.rpartition(".")[0] in modules},
            scaled={name: attribute for name, attribute in self.scaled.items() if name in modules},
            heads=tuple(name for name in self.heads if name in modules),
            rank_rng=tuple(name for name in self.rank_rng if name in modules),
            common_rng=tuple(name for name in self.common_rng if name in modules),
        )


WHOLE = TensorDivision()


def column_order(width: int, parts: int, degree: int) -> Tensor:
    """The columns of a layer that makes ``parts`` outputs in one, so that equal shares hold a share of each output.

    For 3 parts and degree 2: q0 q1 k0 k1 v0 v1 -> q0 k0 v0 q1 k1 v1.
    """
    return torch.arange(width).reshape(parts, degree, -1).transpose(0, 1).reshape(-1)


_ON_EXPERTS = {"colwise": -2, "rowwise": -1, "packed_colwise": -2, "packed_rowwise": -1}
"""By the style of a parameter with several dims: the dim that is divided. Features are before the last one."""
_LINEAR_STYLES = ("colwise", "rowwise", "packed_colwise", "rowwise_split_input", "rowwise_rep", *GATHERED_STYLES)
_LOCAL_COLUMNS = ("colwise", "packed_colwise")  # whose output stays divided
_SPLIT = (*_LOCAL_COLUMNS, "rowwise")  # which have divided units on the inner side
_ON_OWN_UNITS = ("q_norm", "k_norm", "act_fn")  # whole weights beside them, which some plans leave out
_PACKED = ("packed_colwise", "packed_rowwise")
_EMBEDDINGS = ("embedding_rowwise", "embedding_colwise")
_ON_OUTPUTS = ("all_reduce", "moe_identity_expert")  # of modules that may have no weights
_OWN_PARAMETERS = ("moe_tp_experts", "local_params", "replicated_with_grad_allreduce")
_ON_WEIGHTS = (*_LINEAR_STYLES, *_EMBEDDINGS, *_OWN_PARAMETERS, "mla_kv_a_proj", "replicate")
_IN_SEQUENCES = ("colwise", "packed_colwise", "rowwise", "embedding_rowwise", "replicated_with_grad_allreduce")


class DividedModel:
    """The modules and parameters of one whole model that its spec divides, by full names. Nothing is changed."""

    def __init__(self, module: nn.Module, spec: ModelSpec) -> None:
        self._module, self._spec = module, spec
        self._base = f"{base}." if (base := base_name(module)) else ""
        # A tied module has several names, and a plan may have a style for any of them.
        self._modules = dict(module.named_modules(remove_duplicate=False))
        parameters = dict(module.named_parameters(remove_duplicate=False))
        styles = {name: style for name in self._modules if (style := self._style(name)) is not None}
        # A norm inside an embedding would be given one rank's term of the sum.
        self.modules = {
            name: style
            for name, style in styles.items()
            if (style not in _ON_WEIGHTS or any(True for _ in self._modules[name].parameters()))
            and style != "replicate"
            and not (style in _EMBEDDINGS and any(True for _ in self._modules[name].children()))
        }
        self.parameters = {name: style for name in parameters if (style := self._style(name)) is not None}
        # Their weights are whole on every rank and see that rank's heads only, so each rank has one term of their
        # gradient (tests/parallel/test_tensor_plans.py:
        # test_norms_of_own_heads_that_a_plan_leaves_out_get_the_sum_of_all_gradients).
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

    def division(self, degree: int, *, sequences: bool) -> TensorDivision:
        """How ``degree`` ranks divide the model; with ``sequences``, what is between divided layers too."""
        rank_rng, layers = self.rank_rng(), self.layer_names() if sequences else []
        spec_scaled = self._spec.scaled or {}
        wildcards = {name: with_wildcards(name.removeprefix(self._base)) for name in self._modules}
        scaled = {name: spec_scaled[key] for name, key in wildcards.items() if key in spec_scaled}
        return TensorDivision(
            styles=self._torch_styles(sequences=sequences),
            orders=self._orders(degree),
            scaled={name: attribute for name, attribute in scaled.items() if hasattr(self._modules[name], attribute)},
            heads=tuple(self.heads()),
            rank_rng=(*rank_rng, *self.dropouts(layers)),
            common_rng=() if sequences else tuple(self.dropouts(rank_rng)),
            layers=tuple(layers),
            has_plain_buffers=True,
        )

    def layer_names(self) -> list[str]:
        layers = f"{self._base}{self._spec.layers}"
        return [f"{layers}.{number}" for number, _ in self._modules[layers].named_children()]

    def heads(self) -> list[str]:
        """The linear layers that compute logits over the vocabulary."""
        config: Any = self._module.config
        # A linear layer of the same style with other outputs is a classifier, whose logits a loss of another kind
        # takes.
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
        # Scores of attention are those of a rank's heads, so ranks must drop different ones. No configuration names the
        # modules, and in transformers their classes all have "Attention" in their names.
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
            is_supported = isinstance(part, nn.Linear) or (_is_conv1d(part) and style in _SPLIT)
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

    def _orders(self, degree: int) -> dict[str, ColumnOrder]:
        """Of what makes several outputs in one: the order in which equal shares hold a share of each."""
        packed = [(name, style) for name, style in self.modules.items() if style in _PACKED]
        places = [
            (f"{name}.{key}", -1 if _is_conv1d(self._modules[name]) else 0, self._packed(name, style))
            for name, style in packed
            for key, _ in self._modules[name].named_parameters(recurse=False)
        ]
        places += [
            (name, _ON_EXPERTS[style], self._packed(name, style))
            for name, style in self.parameters.items()
            if style in _PACKED
        ]
        orders = {}
        for name, dim, parts in places:
            shape = self._module.get_parameter(name).shape
            place = max(dim, -len(shape)) % len(shape)
            orders[name] = ColumnOrder(dim=place, columns=column_order(shape[place], parts, degree))
        return orders

    def _torch_styles(self, *, sequences: bool) -> dict[str, tp.ParallelStyle]:
        """How torch divides each module; with ``sequences``, the modules between them too."""
        heads = self.heads()
        styles = {
            name: self._torch_style(name, style, is_head=name in heads, sequences=sequences)
            for name, style in self.modules.items()
        }
        return {**styles, **self._sequence_styles()} if sequences else styles

    def _torch_style(self, name: str, style: str, *, is_head: bool, sequences: bool) -> tp.ParallelStyle:
        part: Any = self._modules[name]
        whole = Replicate()
        if style in _LINEAR_STYLES:
            is_split = style in _SPLIT or is_head
            if is_split and (is_plain_linear(part) or _is_conv1d(part)):
                return LocalLinear(columns=style != "rowwise", tokens=sequences)
            if not style.startswith("rowwise"):
                return tp.ColwiseParallel(output_layouts=Shard(-1) if is_split else whole)
            outputs = Shard(TOKENS) if sequences else whole
            return tp.RowwiseParallel(input_layouts=Shard(-1) if is_split else whole, output_layouts=outputs)
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


def plan_tensors(module: nn.Module, plan: TensorPlan, degree: int, *, sequences: bool = False) -> TensorDivision:
    """How ``degree`` ranks divide a whole module, which stays as it is; raises a ConfigError if they cannot.

    ``sequences``: modules between divided layers work on a rank's part of the sequences; with the plan "auto".
    """
    if plan != "auto":
        named = _named_styles(module, plan, degree)
        if sequences:
            raise ConfigError(
                'sequence_parallel=True goes with tensor_plan="auto"; leave it out, and name torch\'s SequenceParallel '
                "in your plan"
            )
        return TensorDivision(styles=named) if degree > 1 else WHOLE
    if degree == 1:
        return WHOLE
    model = DividedModel(module, require_model_spec(module, 'tensor_plan="auto"'))
    if not model.modules:
        raise ConfigError(
            f"{type(module).__name__} has no tensor plan, so tensor={degree} would divide nothing; choose tensor=1, or "
            "give a tensor_plan of your own"
        )
    model.check(degree)
    if sequences:
        model.check_sequences()
        require_layers(module, "sequence_parallel=True")
    return model.division(degree, sequences=sequences)


def _named_styles(module: nn.Module, plan: TensorPlan, degree: int) -> dict[str, tp.ParallelStyle]:
    """The styles of a plan of the user's, by full names; ConfigError if it is none, or does not fit the module."""
    if not isinstance(plan, Mapping):
        raise ConfigError(f'tensor_plan={plan!r} is unknown; give "auto", or a dict of module names to styles')
    module_names = [name for name, _ in module.named_modules()]
    styles: dict[str, tp.ParallelStyle] = {}
    for pattern, style in plan.items():
        if not isinstance(style, tp.ParallelStyle):
            raise ConfigError(
                f"tensor_plan gives {pattern!r} {style!r}; give an object of one of torch's styles, such as "
                "ColwiseParallel()"
            )
        named = [name for name in module_names if _matches(name, pattern)]
        for name in named:
            _check_user_style(name, module.get_submodule(name), style, degree)
            styles[name] = LocalLinear.instead_of(style, module.get_submodule(name))
        if not named:
            near = get_close_matches(pattern, module_names, 3) or module_names[1:4]
            raise ConfigError(
                f"tensor_plan names {pattern!r}, and {type(module).__name__} has no such module; give names of its "
                f"modules, such as {', '.join(near)}"
            )
    return styles


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


def _matches(name: str, pattern: str) -> bool:
    """Whether a plan's pattern means a module, as ``parallelize_module`` has it: "*" stands for anything but a dot."""
    atoms, pattern_atoms = name.split("."), pattern.split(".")
    return len(atoms) == len(pattern_atoms) and all(map(fnmatch, atoms, pattern_atoms))
