"""The functions of Keras that this integration replaces, and a probe for each. Nothing is replaced elsewhere.

    Optimizer.apply, named_parameters            custom_loop    one update with the gradients of all replicas
    reduce_weighted_values, Mean, masks, losses  losses         numbers of the whole batch from those of shards
    convolutions and their kernels, random       kernels        layouts and draws of a replica
    torch_seed_generator                         seeded_draws   draws in compiled code

Keras has no hook in these places. A replacement calls the original outside replicas, so other models in the process
keep their numbers. Each is written for one signature: a Keras that has another one would train with other numbers, or
fail inside of a step, so the probe refuses it when the integration is imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras.src.backend.torch import nn as keras_nn
from keras.src.backend.torch import random as keras_random
from keras.src.backend.torch.layer import TorchLayer
from keras.src.losses import loss as keras_losses

from lockstep.errors import ConfigError
from lockstep.integrations.keras.custom_loop import of_replica, refusing_means, updating_once
from lockstep.integrations.keras.kernels import with_modes, with_plain_strides, without_copy
from lockstep.integrations.keras.losses import ids_of_scope, of_masks, of_means, of_shard
from lockstep.integrations.keras.seeded_draws import standing_for_seed


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """One function of Keras, and what it becomes.

    Args:
        owner: the module or class that has the function.
        name: of the function in its owner.
        parameters: the names of its parameters, in order, for which ``wrap`` is written.
        wrap: makes the new function of the original one.
        is_optional: a Keras without this function needs no replacement.
    """

    owner: Any
    name: str
    parameters: tuple[str, ...]
    wrap: Callable[[Any], Any]
    is_optional: bool = False

    def probe(self) -> bool:
        """Whether the function is there. Raises a ConfigError if it is missing, or has other parameters."""
        function = getattr(self.owner, self.name, None)
        if function is None and self.is_optional:
            return False
        parameters = () if function is None else tuple(inspect.signature(function).parameters)
        if function is None or parameters != self.parameters:
            reality = "is missing" if function is None else f"has the parameters ({', '.join(parameters)})"
            raise _unfit(f"{self.owner.__name__}.{self.name}", reality, f"({', '.join(self.parameters)})")
        return True

    def apply(self) -> None:
        """Puts the new function in the place of the original one."""
        setattr(self.owner, self.name, self.wrap(getattr(self.owner, self.name)))


def _unfit(name: str, reality: str, expected: str) -> ConfigError:
    return ConfigError(
        f"Keras {keras.__version__} does not fit this version of torch-lockstep: {name} {reality}, expected "
        f"{expected}; install Keras 3.15, or a newer torch-lockstep"
    )


_REDUCTION = ("values", "sample_weight", "mask", "reduction", "dtype")
REPLACEMENTS: tuple[Replacement, ...] = (
    *(
        Replacement(
            owner=optimizer, name="apply", parameters=("self", "grads", "trainable_variables"), wrap=updating_once
        )
        # Both have an ``apply`` of their own: that of LossScaleOptimizer unscales before it calls the inner one.
        for optimizer in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer)
    ),
    Replacement(
        owner=keras_losses,
        name="apply_mask",
        parameters=("sample_weight", "mask", "dtype", "reduction"),
        wrap=of_masks,
    ),
    # In this order: the refusal of means stands around the mean of a shard, which is never computed if it is refused.
    Replacement(owner=keras_losses, name="reduce_weighted_values", parameters=_REDUCTION, wrap=of_shard),
    Replacement(owner=keras_losses, name="reduce_weighted_values", parameters=_REDUCTION, wrap=refusing_means),
    Replacement(
        owner=keras.metrics.Mean,
        name="update_state",
        parameters=("self", "values", "sample_weight"),
        wrap=of_means,
    ),
    # zero_grad and clip_grad_norm_ go by these names.
    Replacement(
        owner=TorchLayer,
        name="named_parameters",
        parameters=("self", "prefix", "recurse", "remove_duplicate"),
        wrap=of_replica,
    ),
    Replacement(owner=keras_random, name="torch_seed_generator", parameters=("seed",), wrap=standing_for_seed),
    Replacement(
        owner=keras_nn, name="_transpose_spatial_inputs", parameters=("inputs",), wrap=without_copy, is_optional=True
    ),
    Replacement(
        owner=keras_nn, name="_transpose_conv_kernel", parameters=("kernel",), wrap=with_plain_strides, is_optional=True
    ),
    *(
        Replacement(owner=keras_random, name=name, parameters=parameters, wrap=with_modes, is_optional=True)
        for name, parameters in {
            "dropout": ("inputs", "rate", "noise_shape", "seed"),
            "gamma": ("shape", "alpha", "dtype", "seed"),
            "beta": ("shape", "alpha", "beta", "dtype", "seed"),
            "binomial": ("shape", "counts", "probabilities", "dtype", "seed"),
        }.items()
    ),
)


def probe_loss_ids(layer_class: Any) -> None:
    """Raises a ConfigError unless Keras's layers keep the ids of their losses in the attribute that is replaced."""
    # The attribute is made in __init__, so the class does not show it; the code that makes it does.
    if "_loss_ids" not in inspect.unwrap(layer_class.__init__).__code__.co_names:
        raise _unfit(f"{layer_class.__name__}._loss_ids", "is missing", "a set, made in __init__")


def replace_functions(replacements: Sequence[Replacement] = REPLACEMENTS) -> None:
    """Probes everything, and then replaces it, so that Keras is changed in full or not at all. Called once, at import.

    Raises:
        ConfigError: this version of Keras has another function than the one that a replacement is written for.
    """
    probe_loss_ids(keras.layers.Layer)
    fitting = [replacement for replacement in replacements if replacement.probe()]
    for replacement in fitting:
        replacement.apply()
    keras.layers.Layer._loss_ids = property(ids_of_scope, lambda layer, ids: layer.__dict__.update(_loss_ids=ids))
