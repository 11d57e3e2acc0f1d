"""What one stage of a pipeline gives the next: tensors of known shapes, and the plain values between them.

    values of a stage -> its tensors, padded to those of a whole microbatch, are sent
    received tensors -> cut to this microbatch's own shapes -> the same structure of values

A microbatch may have fewer rows than the others, in any dim: which one shows when a pass with fewer is compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep._torch_compat import TreeSpec, tree_flatten, tree_map, tree_unflatten
from lockstep.errors import ConfigError

_PLAIN = (bool, int, float, str, type(None))
_NODES = (dict, list, tuple)


class StageValues:
    """The structure of the values that a stage gives the next, for microbatches of one shape.

    ``values`` are an example, of which the shapes and dtypes of tensors are kept, and other values as they are.

    Attributes:
        tensors: of the shapes and dtypes, on the meta device; they require gradients where those of the example do.
    """

    def __init__(self, stage: int, values: Sequence[Any]) -> None:
        leaves, self._spec = tree_flatten(list(values))
        self._stage = stage
        self._leaves = [_blank(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._description = _description(self._leaves, self._spec)
        self.tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]

    def take(self, received: Sequence[Tensor]) -> list[Any]:
        """The values, from tensors that may be padded."""
        tensors = iter(received)
        leaves = [_cut(next(tensors), leaf) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        values: list[Any] = tree_unflatten(leaves, self._spec)
        return values

    def give(self, values: Sequence[Any], padded: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors of a stage's values, in the shapes of ``padded``; ConfigError for another structure."""
        leaves, spec = tree_flatten(list(values))
        if _description(leaves, spec) != self._description:
            raise ConfigError(
                f"stage {self._stage} of the pipeline gives the next one {_text(leaves)} for one microbatch and "
                f"{_text(self._leaves)} for another of the same shape; cut the model where shapes depend on those of "
                "the inputs alone"
            )
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return tuple([_to_send(tensor, whole) for tensor, whole in zip(tensors, padded, strict=True)])


def check_values(stage: int, values: Any) -> None:
    """Raises a ConfigError unless the values of a stage are tensors and plain values, in tuples, lists and dicts."""
    pending = list(values)
    while pending:
        value = pending.pop()
        # By type and not by isinstance: torch's trees take a subclass of dict for a leaf, in which no tensor would be
        # found.
        if type(value) in _NODES:
            pending += value.values() if isinstance(value, dict) else value
        elif not isinstance(value, (Tensor, *_PLAIN)):
            raise ConfigError(
                f"stage {stage} of the pipeline would give the next one a {type(value).__name__}, which cannot travel "
                "between workers; return tensors, or tuples, lists or dicts of them, or choose another pipeline_split"
            )


def sendable(values: Any) -> Any:
    """Copies of the values, to be written."""

    def copied(leaf: Any) -> Any:
        return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf

    return tree_map(copied, values)


@contextmanager
def leaving_no_trace(module: nn.Module, device: torch.device) -> Iterator[None]:
    """A block whose forward passes change no buffers or numbers of modules, and none of the random numbers after it."""
    parts = list(module.modules())
    before = [(part, dict(part._buffers), numbers_of(part)) for part in parts]
    values = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        # The trial pass is one more than one device makes: dropout in it must not move the generators
        # (tests/parallel/test_microbatch_state.py: test_a_trial_pass_leaves_nothing).
        with torch.random.fork_rng([device.index] if device.type == "cuda" else []):
            yield
    finally:
        for part, buffers, numbers in before:
            # A forward may have put a new tensor in place of a buffer; others it has written to in place, so their
            # values are restored below.
            part._buffers.update(buffers)
            part.__dict__.update(numbers)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)


def numbers_of(part: nn.Module) -> dict[str, int | float]:
    """The attributes of a module that are numbers, such as a count of its calls."""
    return {name: value for name, value in vars(part).items() if type(value) in (int, float)}


def _blank(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)


def _cut(tensor: Tensor, like: Tensor) -> Tensor:
    for dim, size in enumerate(like.shape):
        tensor = tensor.narrow(dim, 0, size) if size != tensor.shape[dim] else tensor
    # The received tensor is a leaf of autograd, which layers that work in place may not change.
    return tensor.clone() if tensor.requires_grad else tensor


def _to_send(tensor: Tensor, like: Tensor) -> Tensor:
    if tensor.shape != like.shape:
        missing = [whole - length for length, whole in zip(tensor.shape, like.shape, strict=True)]
        return F.pad(tensor, [padding for size in reversed(missing) for padding in (0, size)])
    # torch detaches it in place, which a view refuses and a leaf should be spared.
    return tensor.contiguous().clone() if tensor._is_view() or tensor.is_leaf else tensor.contiguous()


def _description(leaves: Sequence[Any], spec: TreeSpec) -> Any:
    return spec, [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _text(leaves: Sequence[Any]) -> str:
    return ", ".join(
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
        for leaf in leaves
    )
