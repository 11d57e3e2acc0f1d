"""Any module cut into stages: the forwards around the cuts are one graph, of which each stage has a part.

    names at which stages begin -> containers: the modules around these names; all modules inside them are leaves
    forward of the containers, traced -> a graph of calls of leaves, and of what is computed between them
    the graph, cut where a call of a named module begins -> one GraphModule for each stage

Leaves run as they are, with their own Python, modes and hooks. What a stage computes and a later one uses travels
through all stages between them, so skip connections need no more.

torch's ``pipelining.pipeline`` does not serve here: it exports operators, which fixes dropout and batch norm to one
mode, needs examples of the inputs, and leaves no ``nn.Linear`` for a tensor plan to divide.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import accumulate
from typing import Any

import torch
from torch import fx, nn

from lockstep.errors import ConfigError, UsageError
from lockstep.parallel.forward_inputs import ForwardArguments
from lockstep.parallel.layer_split import check_layers, check_split, split_layers
from lockstep.parallel.pipeline_config import PipelineConfig
from lockstep.parallel.pipeline_stage import PipelineSplit, Stage, StageCut, StandIn, weights_in
from lockstep.parallel.stage_tracer import ADVICE, IN_PLACE, PLAIN, AttributeRead, outline, trace_stages

_INPUTS = "inputs"
_RANDOM = ("bernoulli", "multinomial")


class ModuleGraph(StageCut):
    """The forward of any module, as a graph of stages; traced anew for other inputs, and for other modes.

    Args:
        module: the whole model.
        split: "auto" or numbers of blocks, for an ``nn.Sequential`` or a module with one list of blocks; or the names
            of the modules at which the second and each further stage begins.

    Raises:
        ConfigError: names of no modules, or that are not called in this order; code that cannot be traced.
    """

    def __init__(self, module: nn.Module, split: PipelineSplit, pipelining: PipelineConfig) -> None:
        self._module, self._starts = module, tuple(starts := stage_starts(module, split, pipelining))
        self._containers = {parent for name in starts for parent in _parents(name)}
        self._named_containers = [(name, module.get_submodule(name)) for name in sorted(self._containers)]
        self._outline = outline(module)
        self._arguments = ForwardArguments(module.forward)
        self._graphs: dict[Any, fx.Graph] = {}
        self._read: dict[Any, list[AttributeRead]] = {}
        self._stages: dict[Any, fx.GraphModule] = {}
        self._holders: dict[str, set[int]] = {}
        self._check_hooks()
        self._find_holders()

    @property
    def stages(self) -> int:
        return len(self._starts) + 1

    def held_by(self, stage: int) -> list[str]:
        return [name for name, stages in self._holders.items() if stage in stages]

    def cut(self, numbers: Sequence[int]) -> tuple[Stage, ...]:
        for name, stages in self._holders.items():
            if stages & set(numbers):
                continue
            parent, _, attribute = name.rpartition(".")
            owner: Any = self._module.get_submodule(parent)
            # None stays under the name: torch's named_parameters() leaves it out, and code that looks for the name
            # finds no AttributeError.
            for kind in (owner._parameters, owner._buffers):
                if attribute in kind:
                    kind[attribute] = None
            if attribute in owner._modules:
                setattr(owner, attribute, StandIn())
        return tuple(GraphStage(self, self._module, number) for number in numbers)

    def key(self, names: Iterable[str]) -> Any:
        """A key for what a trace depends on: the names of the inputs, and the plain attributes of the containers."""
        # Python branches on such values as training=True leave no node in a graph, so a graph holds for one set of
        # them.
        settings: list[Any] = [tuple(sorted(names))]
        for name, container in self._named_containers:
            settings.append(name)
            for attribute, value in vars(container).items():
                if type(value) in PLAIN:
                    settings += attribute, value
        return tuple(settings)

    def part(self, stage: int, names: Iterable[str], key: Any) -> fx.GraphModule:
        """A stage for inputs of these names. It takes the inputs, and what travels from the stage before."""
        # Again in each step, since a hook may be registered between two of them.
        self._check_hooks()
        if (key, stage) not in self._stages:
            graph = self._graph(frozenset(names))
            self._check_holders(graph)
            self._stages[key, stage] = self._build(graph, stage)
        return self._stages[key, stage]

    def check_attributes(self, stage: int, key: Any) -> None:
        """Raises a UsageError if an attribute that the graph has the value of is another since the stage has run."""
        for read in self._read[key]:
            is_local = read.module in self._containers or stage in self._holders.get(self._leaf_of(read.module), ())
            if is_local and not read.is_still(self._module.get_submodule(read.module)):
                raise UsageError(
                    f"the forward of {type(self._module).__name__} reads {read.attribute!r} of "
                    f"{read.module or 'itself'}, which has changed since it was traced; have the module return "
                    "it, or give it to the model as an input"
                )

    def _check_hooks(self) -> None:
        for name, container in self._named_containers:
            attributes = vars(container)
            # Written out, as is ``key``: both are called for each microbatch.
            if (
                attributes["_forward_hooks"]
                or attributes["_forward_pre_hooks"]
                or attributes["_backward_hooks"]
                or attributes["_backward_pre_hooks"]
            ):
                raise ConfigError(
                    f"{name or type(self._module).__name__} has hooks, and is itself never called where a pipeline "
                    "cuts inside it; register them on modules that are whole in one stage"
                )

    def _graph(self, names: frozenset[str]) -> fx.Graph:
        key = self.key(names)
        if key not in self._graphs:
            for name in self._containers:
                original, copy = (root.get_submodule(name) for root in (self._module, self._outline))
                copy.__dict__.update(
                    {attribute: value for attribute, value in vars(original).items() if type(value) in PLAIN}
                )
            graph, self._read[key] = trace_stages(self._outline, self._starts, self._containers, names)
            self._place(graph)
            self._graphs[key] = graph
        return self._graphs[key]

    def _place(self, graph: fx.Graph) -> None:
        """Sets the stage of each node. It is None for nodes that every stage can compute from the inputs."""
        called: dict[str, int] = {}
        for node in graph.nodes:
            if node.op == "call_module":
                called.setdefault(node.meta["name"], node.meta["stage"])
        for node in graph.nodes:
            stage = node.meta["stage"]
            if node.op == "placeholder" or "constant" in node.meta or _is_repeatable(node):
                node.meta["stage"] = None
            elif node.op == "output":
                node.meta["stage"] = self.stages - 1
            elif node.op == "get_attr":  # a weight travels from the stage that has it anyway
                node.meta["stage"] = min(stage, called.get(self._leaf_of(node.meta["name"]), stage))
            elif _is_in_place(node) and node.all_input_nodes[0].meta["stage"] is None:
                raise ConfigError(
                    f"the forward of {type(self._module).__name__} changes an input in place, which one stage would do "
                    "and others would not; change a copy"
                )

    def _leaf_of(self, name: str) -> str:
        """The leaf module that a name is in, or the name itself, of a container's own tensor."""
        while (parent := name.rpartition(".")[0]) not in self._containers:
            name = parent
        return name

    def _find_holders(self) -> None:
        """Finds the stages that have each leaf and each tensor of a container, in both modes and with all inputs."""
        # A trace runs the forward's Python, so a random number that it draws would be in the graph as a constant. The
        # states of the generators before and after tell.
        parts = [self._module.get_submodule(name) for name in self._containers]
        modes, drawn = [part.training for part in parts], (random.getstate(), torch.get_rng_state().tolist())
        failures: list[ConfigError] = []
        # Every leaf must have a stage before a step needs it, and some are only called in training or with an optional
        # input. The mode of now comes first: where traces disagree, its stages hold.
        for mode in dict.fromkeys((self._module.training, True, False)):
            for part in parts:
                part.training = mode
            for names in dict.fromkeys((self._arguments.required, self._arguments.all)):
                try:
                    self._note_holders(self._graph(names))
                except ConfigError as error:
                    failures.append(error)
            if not self._holders:
                break
        for part, mode in zip(parts, modes, strict=True):
            part.training = mode
        if not self._holders:
            raise failures[0]
        if drawn != (random.getstate(), torch.get_rng_state().tolist()):
            raise ConfigError(
                f"the forward of {type(self._module).__name__} draws random numbers that no input has a part in, which "
                f"only a trace of it would do; {ADVICE}"
            )
        self._add_uncalled()

    def _note_holders(self, graph: fx.Graph) -> None:
        stages_by_name: dict[str, set[int]] = {}
        for name, stage in self._uses(graph):
            stages_by_name.setdefault(name, set()).add(stage)
        for name, stages in stages_by_name.items():
            self._holders.setdefault(name, stages)

    def _uses(self, graph: fx.Graph) -> Iterator[tuple[str, int]]:
        """The leaves that a graph calls and the tensors of containers that it reads, each with the stage."""
        for node in graph.nodes:
            if "name" in node.meta:
                yield self._leaf_of(node.meta["name"]), node.meta["stage"]

    def _check_holders(self, graph: fx.Graph) -> None:
        for name, stage in self._uses(graph):
            if stage not in self._holders[name]:
                raise ConfigError(
                    f"{name} is used in stage {stage}, and belongs to stage {min(self._holders[name])} by the calls "
                    "without optional inputs; choose other names for pipeline_split"
                )

    def _add_uncalled(self) -> None:
        """Gives the modules and tensors that no trace uses the stage of the module registered before them."""
        # Named modules come in the order of their registration, so a module that no trace calls is given the stage of
        # its neighbour, and its weights are in the state of one worker.
        stages = {0}
        for name, part in self._module.named_modules():
            if name in self._containers:
                tensors = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
                names = [f"{name}.{key}" if name else key for key, _ in tensors]
            else:
                names = [name] if _parent(name) in self._containers else []
            for leaf in names:
                stages = self._holders.setdefault(leaf, {min(stages)})

    def _build(self, graph: fx.Graph, stage: int) -> fx.GraphModule:
        """The nodes of a stage, with what they take from before and give on."""
        built, copies = fx.Graph(), {}
        takes, gives = _travelling(graph, stage - 1), _travelling(graph, stage)
        (placeholder,) = (node for node in graph.nodes if node.op == "placeholder")
        copies[placeholder] = built.placeholder(_INPUTS)
        for number, node in enumerate(takes):
            copies[node] = built.placeholder(f"taken_{number}")

        def copied(node: fx.Node) -> fx.Node:
            # A node without a stage is copied into each stage that uses it, with all that it is computed from.
            if node not in copies:
                copies[node] = built.node_copy(node, copied)
            return copies[node]

        for node in graph.nodes:
            if node.op == "output":
                if stage == self.stages - 1:
                    built.output(fx.node.map_arg(node.args[0], copied))
            elif node.meta["stage"] == stage:
                copied(node)
        if stage < self.stages - 1:
            built.output(tuple(map(copied, gives)))
        return fx.GraphModule(self._objects(built), built)

    def _objects(self, graph: fx.Graph) -> dict[str, Any]:
        """The modules and tensors that a stage's graph uses, by new names. It changes the graph to these names."""
        objects: dict[str, Any] = {}
        for node in graph.nodes:
            if node.op in ("call_module", "get_attr"):
                meta, node.target = node.meta, f"own_{len(objects)}"
                objects[node.target] = meta["constant"] if "constant" in meta else _resolve(self._module, meta["name"])
        return objects


class GraphStage(Stage):
    """A stage of a ``ModuleGraph``."""

    def __init__(self, graph: ModuleGraph, model: nn.Module, number: int) -> None:
        super().__init__(model, number=number, stages=graph.stages)
        self._graph = graph

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        return tuple(part for part in self._holdings() if isinstance(part, nn.Module))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return weights_in(self._holdings())

    def key(self, inputs: Mapping[str, Any]) -> Any:
        return self._graph.key(inputs)

    def forward(self, *values: Any, inputs: Mapping[str, Any]) -> Any:
        key = self._graph.key(inputs)
        values = self._graph.part(self.number, inputs, key)(inputs, *values)
        self._graph.check_attributes(self.number, key)
        return values

    def _holdings(self) -> list[Any]:
        return [_resolve(self.model, name) for name in self._graph.held_by(self.number)]


def _travelling(graph: fx.Graph, stage: int) -> list[fx.Node]:
    """The nodes that are computed in a stage or before it, and used after it: they travel to the next stage."""

    def travels(node: fx.Node) -> bool:
        origin = node.meta["stage"]
        return origin is not None and origin <= stage and any((user.meta["stage"] or 0) > stage for user in node.users)

    return [node for node in graph.nodes if travels(node)]


def _is_repeatable(node: fx.Node) -> bool:
    """Whether each stage can compute it by itself: something plain of the inputs, such as a size or a mask."""
    if any(source.meta["stage"] is not None for source in node.all_input_nodes) or _is_in_place(node):
        return False
    if node.op == "call_method":
        return node.target not in _RANDOM
    return node.op == "call_function" and getattr(node.target, "__module__", "") in ("_operator", "builtins")


def _is_in_place(node: fx.Node) -> bool:
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__")
    return node.op == "call_function" and node.target in IN_PLACE


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _parents(name: str) -> list[str]:
    """The names of the modules around a module, from the outermost, which has none, on."""
    atoms = name.split(".")
    return [".".join(atoms[:end]) for end in range(len(atoms))]


def _resolve(module: nn.Module, name: str) -> Any:
    value: Any = module
    for atom in name.split("."):
        value = getattr(value, atom)
    return value


# Where a module is cut: at blocks, so that stages have about equal weights, or at names.


def stage_starts(module: nn.Module, split: PipelineSplit, pipelining: PipelineConfig) -> list[str]:
    """The names of the modules at which the second and each further stage begins; raises a ConfigError."""
    if not isinstance(split, str) and all(isinstance(entry, str) for entry in split):
        return _checked_names(module, [str(entry) for entry in split], pipelining)
    blocks = _blocks(module, pipelining.stages)
    check_layers(pipelining, len(blocks))
    if isinstance(split, str):
        costs = [_weight(module.get_submodule(name)) for name in blocks]
        counts = split_layers(costs, pipelining.stages, after=_weight_after(module, blocks))
    else:
        counts = check_split([int(count) for count in split], pipelining.stages, len(blocks))
    return [blocks[end] for end in list(accumulate(counts))[:-1]]


def _checked_names(module: nn.Module, names: list[str], pipelining: PipelineConfig) -> list[str]:
    module_names = [name for name, _ in module.named_modules() if name]
    for name in names:
        if name not in module_names:
            near = get_close_matches(name, module_names, 3) or module_names[:3]
            raise ConfigError(
                f"pipeline_split names {name!r}, and {type(module).__name__} has no such module; give names of its "
                f"modules, such as {', '.join(near)}"
            )
    if len(set(names)) != pipelining.stages - 1:
        raise ConfigError(
            f"pipeline_split={names} begins {len(set(names))} stages after the first, and pipeline={pipelining.workers}"
            f" with {pipelining.stages_per_worker} stages on each worker is {pipelining.stages} stages; give "
            f"{pipelining.stages - 1} different names"
        )
    return names


def _blocks(module: nn.Module, stages: int) -> list[str]:
    """The names of the blocks of an ``nn.Sequential``, or of a module with one list of them."""
    if isinstance(module, nn.Sequential):
        return [name for name, _ in module.named_children()]
    for kind in (nn.ModuleList, nn.Sequential):
        candidates = [name for name, part in module.named_modules() if isinstance(part, kind) and len(part) >= stages]
        outermost = [name for name in candidates if not any(name.startswith(f"{other}.") for other in candidates)]
        if len(outermost) == 1:
            (owner,) = outermost
            return [f"{owner}.{name}" for name, _ in module.get_submodule(owner).named_children()]
        if outermost:
            break
    else:
        outermost = []
    lists = f"several lists of blocks, {', '.join(outermost)}" if outermost else f"no list of {stages} blocks or more"
    raise ConfigError(
        f"{type(module).__name__} has {lists}; name the {stages - 1} modules at which a new stage begins, as "
        f'pipeline_split=["..."] of strategy.parallelize, or choose fewer stages'
    )


def _weight_after(module: nn.Module, blocks: Sequence[str]) -> float:
    """The weights of the modules that are registered after the blocks, which the last stage has."""
    owner = blocks[0].rpartition(".")[0]
    names = [name for name, _ in module.named_children()]
    child = owner.partition(".")[0]
    after = names[names.index(child) + 1 :] if child else []
    return sum(_weight(module.get_submodule(name)) for name in after)


def _weight(module: nn.Module) -> float:
    return float(sum(parameter.numel() for parameter in module.parameters()))
