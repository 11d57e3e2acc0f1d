"""The training step of a compiled Model in another process, for trials of batch sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lockstep.config import (
    LogicalDeviceConfiguration,
    get_logical_device_configuration,
    list_physical_devices,
    set_logical_device_configuration,
)
from lockstep.data.structure import map_leaves, named_leaves
from lockstep.errors import ConfigError
from lockstep.launch.trial import Step
from lockstep.strategies.mirrored import MirroredStrategy
from lockstep.train.arrays import Arrays, floats_of
from lockstep.train.model import Model

_SAMPLE = 64  # rows that a fresh process gets, and repeats to fill a batch


def made_anew(model: Model, x: Any, y: Any) -> tuple[Callable[[], Step], int, str]:
    """For trial steps: what makes a compiled Model anew and returns its step, the rows of ``x``, and a key of both.

    The new model is that of one worker: its strategy has this worker's devices and talks to no other. A batch repeats
    the first rows of ``x`` and ``y``.

    Raises:
        ConfigError: there are no rows, or workers divide the model.
        UsageError: the model is not compiled with an optimizer.
    """
    setup, strategy = model._trainable("find_batch_size"), model.strategy
    if strategy.layout is not None:
        raise ConfigError(
            f"find_batch_size got a model that workers divide ({strategy.layout}), of which no worker can run a step"
            " alone; try batch sizes with fit"
        )
    if x is None or y is None:
        raise ConfigError("find_batch_size got a Model without x and y; give some rows, the longest ones")
    arrays = Arrays.of(x, y, floats=floats_of(model.module))
    sample = min(_SAMPLE, arrays.rows)
    columns = map_leaves(lambda _, leaf: leaf[:_SAMPLE].clone(), arrays.columns)
    kind, module, optimizer = type(model), model.module, setup.optimizer and setup.optimizer.plain
    settings = {name: value for name, value in vars(setup.config).items() if name != "loss_takes_tensors"}
    sync_batchnorm, threads = model._module.has_sync_batchnorm, strategy.threads_per_replica[0]
    # A subclass of Model may hold what its own step needs. What every Model has belongs to this process: its strategy,
    # optimizer and graphs.
    base = vars(Model(torch.nn.Identity())).keys()
    attributes = {name: value for name, value in vars(model).items() if name not in base}  # of a subclass
    shares = {
        physical.name: [share.memory_limit for share in get_logical_device_configuration(physical) or ()]
        for physical in list_physical_devices()
    }
    devices = [device.name for device in strategy.devices]

    def build() -> Step:
        for physical in list_physical_devices():
            if limits := shares[physical.name]:
                divided = [LogicalDeviceConfiguration(memory_limit=limit) for limit in limits]
                set_logical_device_configuration(physical, divided)
        names = list(dict.fromkeys(devices))
        replicas = len(devices) if len(names) < len(devices) else None
        with MirroredStrategy(names, replicas=replicas, threads_per_replica=threads).scope():
            # A subclass may ask for other arguments in ``__init__``, so that of Model is called in its place.
            remade = kind.__new__(kind)
            Model.__init__(remade, module, sync_batchnorm=sync_batchnorm)
        for name, value in attributes.items():
            setattr(remade, name, value)
        remade.compile(optimizer, **settings)

        def step(rows: int) -> None:
            index = torch.arange(rows) % sample
            remade.train_on_batch(*map_leaves(lambda _, leaf: leaf[index.to(leaf.device)], columns))

        return step

    weights = [
        (name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
        for name, parameter in module.named_parameters()
    ]
    shapes = [(name, tuple(leaf.shape[1:]), leaf.dtype) for name, leaf in named_leaves(columns)]
    key = repr((module, weights, type(optimizer), setup.config.precision, sync_batchnorm, shapes, devices))
    return build, arrays.rows, key
