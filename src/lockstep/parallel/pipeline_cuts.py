"""Where a plain module is cut into stages: at blocks, so that stages have about equal weights, or at names. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from itertools import accumulate

from torch import nn

from lockstep.errors import ConfigError
from lockstep.parallel.pipeline_config import PipelineConfig, check_layers, check_split, split_layers
from lockstep.parallel.pipeline_stage import PipelineSplit


def stage_starts(module: nn.Module, split: PipelineSplit, pipelining: PipelineConfig) -> list[str]:
    """The names of the modules at which the second and each further stage begins; raises a ConfigError."""
    if not isinstance(split, str) and all(isinstance(each, str) for each in split):
        return _checked_names(module, [str(each) for each in split], pipelining)
    blocks = _blocks(module, pipelining.stages)
    check_layers(pipelining, len(blocks))
    if isinstance(split, str):
        costs = [_weight(module.get_submodule(name)) for name in blocks]
        counts = split_layers(costs, pipelining.stages, after=_weight_after(module, blocks))
    else:
        counts = check_split([int(each) for each in split], pipelining.stages, len(blocks))
    return [blocks[end] for end in list(accumulate(counts))[:-1]]


def _checked_names(module: nn.Module, names: list[str], pipelining: PipelineConfig) -> list[str]:
    known = [name for name, _ in module.named_modules() if name]
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, 3) or known[:3]
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
        found = [name for name, part in module.named_modules() if isinstance(part, kind) and len(part) >= stages]
        outermost = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
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
    own = owner.partition(".")[0]
    after = names[names.index(own) + 1 :] if own else []
    return sum(_weight(module.get_submodule(name)) for name in after)


def _weight(module: nn.Module) -> float:
    return float(sum(parameter.numel() for parameter in module.parameters()))
