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
        self._keras_call: Callable[..., Any] = layer.call
        tensors = {id(tensor): tensor for tensor in (*layer.module.parameters(), *layer.module.buffers())}
        # The tensors are in the memo, so deepcopy takes them as copied already: the copies have Python state of their
        # own, such as the training mode, and share weights and buffers.
        self._copies: list[nn.Module] = [copy.deepcopy(layer.module, dict(tensors)) for _ in range(replicas)]
        if sync_batchnorm:
            self._copies = [convert_sync_batch_norm(module) for module in self._copies]
        variables = {id(variable.value): variable for variable in layer.variables}
        self._parameters = {name: variables[id(parameter)] for name, parameter in layer.module.named_parameters()}
        self.buffers = {
            name: keras.Variable(
                buffer,
                trainable=False,
                dtype=keras.backend.standardize_dtype(buffer.dtype),
                name=name.replace("/", "_"),
            )
            for name, buffer in layer.module.named_buffers()
        }

    def call(self, *args: Any, training: bool | None = None, **kwargs: Any) -> Any:
        """``TorchModuleWrapper.call``, with the variables of the ``StatelessScope``."""
        context, shard = get_replica_context(), current_shard.get()
        if not in_stateless_scope():
            return self._keras_call(*args, training=training, **kwargs)
        module = self._copies[context.local_replica if context else 0].train(
            training is not False and not is_compared.get()
        )
        values = {name: variable.value for name, variable in self._parameters.items()}
        values |= {name: variable.value.clone() for name, variable in self.buffers.items()}
        has_row = shard is None or shard.rows > 0 or not has_sync_batch_norm(module)
        if not has_row:  # the row that it computes with must not count in the statistics
            args, kwargs = tree_map(lambda leaf: leaf[:0] if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        with normalising_single_row(module, args, kwargs):
            outputs = torch.func.functional_call(module, values, args, kwargs)
        if module.training:
            for name, variable in self.buffers.items():
                if variable.value.dtype != torch.bool:
                    variable.assign(values[name])
        # The layers after this one expect a row. The sum over no rows is one of zeros, and keeps the graph through
        # which the batch norm's backward pass exchanges.
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
