"""What an experiment changes in the mirrored modules of a run; ``randomness`` has what it changes in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from lockstep.data.sharding import shard_sizes
from lockstep.mirroring.batch_norm import SyncBatchNorm, convert_sync_batch_norm, has_sync_batch_norm
from lockstep.mirroring.module import MirroredModule
from lockstep.verify.config import Switches


class ModuleSwitches:
    """Applies ``Switches`` to mirrored modules, and says what there is to switch."""

    def __init__(self, switches: Switches) -> None:
        self._switches = switches

    @property
    def hold_weights(self) -> bool:
        """Whether parameters get the values of their last update back."""
        return self._switches.hold_weights

    def batch_norms(self, modules: Sequence[MirroredModule]) -> Iterator[str]:
        """The names of the batch norms that take the statistics of a replica's shard."""
        for name, part in _named_parts(modules):
            if isinstance(part, _BatchNorm) and not isinstance(part, SyncBatchNorm) and part.training:
                yield name

    def dropouts(self, modules: Sequence[MirroredModule]) -> Iterator[str]:
        """The names of the dropout modules that drop something."""
        for name, part in _named_parts(modules):
            if isinstance(part, _DropoutNd) and part.training and part.p > 0:
                yield name

    def before_first_step(self, modules: Sequence[MirroredModule]) -> None:
        """Outside replicas, before the first run."""
        for module in modules:
            if self._switches.batch_norm == "synced":
                _synchronise(module)
            if self._switches.nudge:
                _nudge(module, self._switches.nudge)
            if self._switches.shards > 1 and self._switches.shard is None:
                module.module.forward = _in_shards(module.module.forward, self._switches.shards)

    def before_run(self, modules: Sequence[MirroredModule]) -> None:
        """Outside replicas, before every run; a run gives all copies the training mode of the user's module first."""
        if self._switches.batch_norm == "frozen":
            for part in (part for module in modules for copy in module.copies for part in copy.modules()):
                if isinstance(part, _BatchNorm):
                    part.eval()


def _named_parts(modules: Sequence[MirroredModule]) -> Iterator[tuple[str, nn.Module]]:
    for module in modules:
        for name, part in module.module.named_modules():
            yield name or type(part).__name__, part


def _synchronise(module: MirroredModule) -> None:
    for duplicate in module.copies:
        convert_sync_batch_norm(duplicate)
    module.has_sync_batchnorm = has_sync_batch_norm(module.module)


@torch.no_grad()
def _nudge(module: MirroredModule, relative: float) -> None:
    """Every weight up or down by a rounding error. Copies that share their storage are moved once."""
    seen: set[int] = set()
    for duplicate in module.copies:
        generator = torch.Generator().manual_seed(0)
        for parameter in duplicate.parameters():
            sign = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            if parameter.data_ptr() not in seen and parameter.is_floating_point():
                parameter.mul_(1 + relative * sign.to(parameter.device, parameter.dtype))
            seen.add(parameter.data_ptr())


def _in_shards(forward: Callable[..., Any], number: int) -> Callable[..., Any]:
    """``forward`` called once for each shard of its arguments' rows, the outputs placed one after another."""

    def in_shards(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        lengths = [leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
        if not lengths or lengths[0] < 2:
            return forward(*args, **kwargs)
        results = []
        begin = 0
        for size in shard_sizes(lengths[0], min(number, lengths[0])):
            own = [_part(leaf, lengths[0], begin, size) for leaf in leaves]
            begin += size
            shard_args, shard_kwargs = tree_unflatten(own, spec)
            results.append(forward(*shard_args, **shard_kwargs))
        columns = iter(zip(*(tree_leaves(result) for result in results), strict=True))
        return tree_map(lambda _: _joined(next(columns)), results[0])

    return in_shards


def _part(leaf: Any, rows: int, begin: int, size: int) -> Any:
    divided = isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == rows
    return leaf[begin : begin + size] if divided else leaf


def _joined(parts: tuple[Any, ...]) -> Any:
    return torch.cat(parts) if isinstance(parts[0], Tensor) and parts[0].ndim else parts[0]
