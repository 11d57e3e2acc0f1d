"""Torch modules in Keras layers: each replica calls a copy of the module with its own values of the variables.

Keras makes a variable of each parameter. The buffers, which it leaves to the module, get variables here that share
their memory, so that what replicas make of them is merged as the state of other layers: averaged over the rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import keras
import torch
from keras.src.backend.common.stateless_scope import in_stateless_scope
from torch import Tensor, nn

from lockstep._torch_compat import tree_map
from lockstep.integrations.keras.losses import current_shard, is_compared
from lockstep.mirroring.module.batch_norm import convert_sync_batch_norm, has_sync_batch_norm, normalising_single_row
from lockstep.replicas.context import get_replica_context


class ReplicatedModule:
    """The torch module of a ``TorchModuleWrapper`` in replicas.

    Args:
        layer: the wrapper.
        replicas: the number of local replicas.
        sync_batchnorm: whether torch's batch norms take their statistics from the whole batch.
    """

    def __init__(self, layer: Any, replicas: int, *, sync_batchnorm: bool) -> None:
        self._own: Callable[..., Any] = layer.call
        tensors = {id(each): each for each in (*layer.module.parameters(), *layer.module.buffers())}
        self._copies: list[nn.Module] = [copy.deepcopy(layer.module, dict(tensors)) for _ in range(replicas)]
        if sync_batchnorm:
            self._copies = [convert_sync_batch_norm(each) for each in self._copies]
        variables = {id(each.value): each for each in layer.variables}
        self._parameters = {name: variables[id(each)] for name, each in layer.module.named_parameters()}
        self.buffers = {
            name: keras.Variable(
                each, trainable=False, dtype=keras.backend.standardize_dtype(each.dtype), name=name.replace("/", "_")
            )
            for name, each in layer.module.named_buffers()
        }

    def call(self, *args: Any, training: bool | None = None, **kwargs: Any) -> Any:
        """``TorchModuleWrapper.call``, with the variables of the ``StatelessScope``."""
        context, shard = get_replica_context(), current_shard.get()
        if not in_stateless_scope():
            return self._own(*args, training=training, **kwargs)
        module = self._copies[context.local_replica if context else 0].train(
            training is not False and not is_compared.get()
        )
        values = {name: each.value for name, each in self._parameters.items()}
        values |= {name: each.value.clone() for name, each in self.buffers.items()}
        has_row = shard is None or shard.rows > 0 or not has_sync_batch_norm(module)
        if not has_row:  # the row that it computes with must not count in the statistics
            args, kwargs = tree_map(lambda leaf: leaf[:0] if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        with normalising_single_row(module, args, kwargs):
            outputs = torch.func.functional_call(module, values, args, kwargs)
        if module.training:
            for name, each in self.buffers.items():
                if each.value.dtype != torch.bool:
                    each.assign(values[name])
        return outputs if has_row else tree_map(lambda output: output.sum(0, keepdim=True), outputs)


def replicate_torch_modules(model: Any, replicas: int, *, sync_batchnorm: bool) -> None:
    """Has each layer of a model that wraps a torch module call it in replicas too."""
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.TorchModuleWrapper):
            module = ReplicatedModule(layer, replicas, sync_batchnorm=sync_batchnorm)
            object.__setattr__(layer, "call", module.call)


def buffer_variables(model: Any) -> Iterator[Any]:
    """The variables of the buffers of a model's torch modules."""
    for layer in model._flatten_layers():
        module = getattr(vars(layer).get("call"), "__self__", None)
        if isinstance(module, ReplicatedModule):
            yield from module.buffers.values()
