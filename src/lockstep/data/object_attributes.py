"""What is in the dict and the slots of an object, read and set as no code of the object's own does."""

from __future__ import annotations

import contextlib
import copyreg
import types
from typing import Any

from torch import nn

_MODULE_TENSORS = ("_parameters", "_buffers")


def content_of(value: Any, *, tensors: bool = False) -> dict[str, Any]:
    """Returns name -> value; of a module the buffers and parameters only if ``tensors``."""
    content: dict[str, Any] = {}
    # object's own getter, here and below. A property or a __getattr__ of the program would run, and might change what
    # is looked at (test_no_code_of_the_data_s_objects_runs).
    with contextlib.suppress(AttributeError):
        content |= object.__getattribute__(value, "__dict__")
    for name in copyreg._slotnames(type(value)):  # type: ignore[attr-defined]
        slot = _slot(value, name)
        if slot is not None:
            try:
                content[name] = slot.__get__(value)
            except AttributeError:  # not set
                continue
    if isinstance(value, nn.Module):
        # A module has its parameters and buffers in dicts of these names; the program knows them as attributes.
        parts = {name: part for kind in _MODULE_TENSORS for name, part in content.pop(kind, {}).items()}
        content |= parts if tensors else {}
    return content


def set_attribute(owner: Any, name: str, value: Any) -> None:
    """Sets an attribute that ``content_of`` returns, or adds one."""
    slot = _slot(owner, name)
    if slot is not None:
        slot.__set__(owner, value)
        return
    content = object.__getattribute__(owner, "__dict__")
    holders = [content[kind] for kind in _MODULE_TENSORS] if isinstance(owner, nn.Module) else []
    next((holder for holder in holders if name in holder), content)[name] = value


def _slot(value: Any, name: str) -> types.MemberDescriptorType | None:
    slot = next((vars(kind)[name] for kind in type(value).__mro__ if name in vars(kind)), None)
    return slot if isinstance(slot, types.MemberDescriptorType) else None
