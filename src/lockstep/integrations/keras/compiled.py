"""``jit_compile=True``: a model's forward and backward pass as one compiled code, which all replicas share.

    values of variables, x  ->  code  ->  outputs, their masks, what layers have assigned, losses that they added

Keras's own way on torch, ``torch.compile`` around its Python step, makes many small codes, and which of them there are
depends on threads. Here the model is called once for each shape, on tensors without values, while torch's AOTAutograd
notes down the operators of both passes. Losses and metrics are computed outside. What layers with a seed draw is what
they draw uncompiled; the seeds of others are the replica's own (``replicas.compiled``).
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.common.stateless_scope import get_stateless_scope
from torch import Tensor, nn

from lockstep._torch_compat import DisableTorchFunction, EnableTorchFunction, tree_flatten, tree_unflatten
from lockstep.errors import CollectiveError, ConfigError, LockstepError, ReplicaError
from lockstep.integrations.keras.losses import current_shard
from lockstep.integrations.keras.seeded_draws import draws_by_operators
from lockstep.integrations.keras.variables import stateless_scope
from lockstep.replicas.compiled import COMPILE_LIMIT_S, compile_for_replicas
from lockstep.replicas.context import in_context
from lockstep.replicas.rng.function_mode import without_replica_rng
from lockstep.train.batch import replica_of_step


class CompiledForward:
    """The compiled calls of a model, one for each shape of its inputs; made by the first replica that needs it.

    Args:
        model: the model.
        variables: all that its layers read or assign, but for the default seed generators of replicas.
    """

    def __init__(self, model: Any, variables: Sequence[Any]) -> None:
        self._model, self._variables = model, list(variables)
        self._codes: dict[Hashable, _Code] = {}
        self._lock = threading.Lock()

    def __call__(self, x: Any, default_seed: Any, *, training: bool) -> Any:
        """``model(x, training=training)`` in a replica, with the values that variables have in its scope.

        Args:
            x: the inputs.
            default_seed: the variable of the replica's own default seed generator.
            training: as given to the model.

        Raises:
            ConfigError: the forward pass cannot be compiled.
            ReplicaError: another replica has compiled for half an hour.
        """
        tensors, rebuild = _tensors_of(x)
        shard = current_shard.get()
        variables = [*self._variables, default_seed]
        inputs = [*(variable.value for variable in variables), *tensors]
        constants = (training, torch.is_grad_enabled(), shard and (shard.rows, shard.all_rows), rebuild.form)
        shapes = ((tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors)
        # All that the code depends on beside values. Strides too: it is compiled for the memory layout that was traced.
        kind = (*constants, *shapes, *(value.requires_grad for value in inputs))
        with DisableTorchFunction():
            code = self._codes.get(kind) or self._compile(kind, variables, rebuild, training, inputs)
            return code(variables, inputs)

    def _compile(
        self, kind: Hashable, variables: Sequence[Any], rebuild: _Rebuild, training: bool, inputs: list[Tensor]
    ) -> _Code:
        # One replica traces while the others wait for its code, with a limit as for every wait
        # (test_predict_before_any_training_compiles_once_and_ends).
        if not self._lock.acquire(timeout=COMPILE_LIMIT_S):
            raise ReplicaError(
                f"{self._model.name!r} has waited {COMPILE_LIMIT_S:g} s for another replica to compile it"
            )
        try:
            if kind not in self._codes:
                self._codes[kind] = _Code(_Forward(self._model, variables, rebuild, training), inputs)
            return self._codes[kind]
        finally:
            self._lock.release()


class _Code:
    """The compiled code of a model's call with inputs of certain shapes."""

    def __init__(self, forward: _Forward, inputs: list[Tensor]) -> None:
        self._forward = forward
        try:
            with EnableTorchFunction(), without_replica_rng():
                self._code = compile_for_replicas(forward, inputs, {})
        except Exception as error:  # torch has errors of many kinds, around those of the model's code
            cause = _innermost(error)
            if isinstance(cause, CollectiveError):
                raise ConfigError(
                    f"a layer of {forward.model.name!r} exchanges values with other replicas in its call, and compiled "
                    "code cannot; leave jit_compile out"
                ) from error
            if isinstance(cause, LockstepError):
                raise cause from None
            reason = str(cause).strip().split("\n", 1)[0]
            raise ConfigError(
                f"jit_compile=True cannot take the whole forward pass of {forward.model.name!r}: "
                f"{type(cause).__name__}: {reason}; change it, or leave jit_compile out"
            ) from error

    def __call__(self, variables: Sequence[Any], inputs: list[Tensor]) -> Any:
        """The model's outputs; what its layers assign and the losses that they add go into the replica's scope."""
        results, scope, forward = iter(self._code(*inputs)), get_stateless_scope(), self._forward
        outputs = [next(results) for _ in range(forward.outputs)]
        for at in forward.masked:
            set_keras_mask(outputs[at], next(results))
        for at in forward.assigned:
            scope.add_update((variables[at], next(results)))
        for loss in results:
            forward.model.add_loss(loss)
        return forward.rebuild_outputs(outputs)


class _Forward(nn.Module):
    """A call of a model as a function of tensors alone: the values of its variables, then its inputs.

    Attributes:
        model: the model.
        outputs: how many tensors the model returns.
        rebuild_outputs: makes of them what the model returns.
        masked: the numbers of those that have a mask.
        assigned: the numbers of the variables that layers assign.
    """

    model: Any
    outputs: int
    rebuild_outputs: _Rebuild
    masked: list[int]
    assigned: list[int]

    def __init__(self, model: Any, variables: Sequence[Any], rebuild: _Rebuild, training: bool) -> None:
        super().__init__()
        self.__dict__["model"] = model  # no part of this module, whose parameters would become constants
        self._variables, self._rebuild, self._training = variables, rebuild, training

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs, their masks, what layers have assigned and the losses that they have added."""
        values = inputs[: len(self._variables)]
        scope = stateless_scope()
        scope.state_mapping.update(
            (id(variable), value) for variable, value in zip(self._variables, values, strict=True)
        )
        with scope, _tracing():
            x = self._rebuild(inputs[len(values) :])
            y = self.model(x, training=self._training) if self.model._call_has_training_arg else self.model(x)
        outputs, self.rebuild_outputs = _tensors_of(y)
        masks = [get_keras_mask(output) for output in outputs]
        new = [scope.state_mapping[id(variable)] for variable in self._variables]
        self.outputs, self.masked = len(outputs), [at for at, mask in enumerate(masks) if mask is not None]
        self.assigned = [at for at, (one, other) in enumerate(zip(new, values, strict=True)) if one is not other]
        return (*outputs, *(masks[at] for at in self.masked), *(new[at] for at in self.assigned), *scope.losses)


class _Rebuild:
    """Makes a structure of tensors and other values of its tensors.

    Attributes:
        form: equal for structures that differ in their tensors only.
    """

    def __init__(self, leaves: Sequence[Any], structure: Any) -> None:
        self._leaves, self._structure = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure
        self._is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        self.form: Hashable = (structure, repr(self._leaves), *self._is_tensor)

    def __call__(self, tensors: Iterable[Tensor]) -> Any:
        iterator = iter(tensors)
        leaves = [
            next(iterator) if is_tensor else leaf for leaf, is_tensor in zip(self._leaves, self._is_tensor, strict=True)
        ]
        return tree_unflatten(leaves, self._structure)


def _tensors_of(structure: Any) -> tuple[list[Tensor], _Rebuild]:
    leaves, form = tree_flatten(structure)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], _Rebuild(leaves, form)


@contextmanager
def _tracing() -> Iterator[None]:
    """A block in which layers draw by operators that take their seeds, and meet no other replica.

    One replica traces while the others wait for its code, so a collective would never end.
    """
    shard = current_shard.get()
    token = current_shard.set(shard and replace(shard, add=_refuse_to_add))
    try:
        with draws_by_operators(), in_context(replica_of_step().alone()):
            yield
    finally:
        current_shard.reset(token)


def _refuse_to_add(_: Tensor) -> Tensor:
    raise ConfigError(
        "a layer computes a loss of Keras in its call, for which replicas add their counts, and compiled code cannot; "
        "give the loss to compile(), or leave jit_compile out"
    )


def _innermost(error: BaseException) -> BaseException:
    """The error that torch's compiler, and Keras with a layer's arguments, have put into others."""
    inner = getattr(error, "inner_exception", None) or error.__cause__
    if inner is None and hasattr(error, "_keras_call_info_injected"):
        inner = error.__context__
    return error if inner is None else _innermost(inner)
