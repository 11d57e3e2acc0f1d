"""Hooks on torch for the length of a run: calls of mirrored modules, and what is back-propagated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lockstep.mirroring.module import MirroredModule
from lockstep.replicas.hooks import observing
from lockstep.verify.recorder import Recorder


@contextmanager
def watching(recorder: Recorder) -> Iterator[None]:
    """Lets ``recorder`` hear strategies, mirrored modules and backward passes inside the block; process-wide."""
    original = torch.autograd.backward

    def before(module: nn.Module, args: Any) -> None:
        if isinstance(module, MirroredModule):
            recorder.drawing_begins()

    def after(module: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any) -> None:
        if isinstance(module, MirroredModule):
            with torch._C.DisableTorchFunction():
                recorder.module_called(module, (args, kwargs), outputs)

    with ExitStack() as stack:
        for handle in (
            register_module_forward_pre_hook(before),
            register_module_forward_hook(after, with_kwargs=True),
        ):
            stack.callback(handle.remove)
        # Tensor.backward calls it too.
        stack.enter_context(patch.object(torch.autograd, "backward", _told(original, recorder)))
        stack.enter_context(observing(recorder))
        yield


def _told(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        scalars = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        recorder.back_propagated(sum(float(each.detach()) for each in scalars if each.numel() == 1))
        return original(tensors, *args, **kwargs)

    return backward
