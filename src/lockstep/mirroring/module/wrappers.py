"""Wrapper subclasses: tensors without memory of their own, but with tensors in them, as quantised weights of torchao.

They tell their inner tensors by the protocol of torch.compile and of checkpoints, ``__tensor_flatten__``.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def is_wrapper(tensor: Tensor) -> bool:
    """Whether it is one, and none of torch's own, such as a DTensor."""
    kind = type(tensor)
    return (
        hasattr(kind, "__tensor_flatten__")
        and hasattr(kind, "__tensor_unflatten__")
        # A DTensor has the protocol too, but collectives of its own.
        and not kind.__module__.startswith("torch.")
    )


def inner_tensors(tensor: Tensor) -> dict[str, Tensor]:
    """By the names of attributes, the tensors in one that are no wrappers; empty for another tensor."""
    if not is_wrapper(tensor):
        return {}
    inner: dict[str, Tensor] = {}
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    for name in names:
        value = getattr(tensor, name)
        if isinstance(value, Tensor):
            inner |= {f"{name}.{below}": part for below, part in inner_tensors(value).items()} or {name: value}
    return inner


def with_memory(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors, and in the place of each wrapper those in it, for what is sent to other workers."""
    return [part for tensor in tensors for part in (list(inner_tensors(tensor).values()) or [tensor])]
