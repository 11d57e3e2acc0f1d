"""Lightning's strategy on the replicas of a strategy of ours: one process, all devices, one device's numbers.

    Lightning's loops    batch -> training_step -> zero_grad -> backward -> hooks, clip -> optimizer.step -> schedulers
    here                          on shards                     of shards, summed          of all replicas

Lightning sees one process with one wide device. This module imports none of its packages: ``lightning`` and
``pytorch_lightning`` have classes of their own, to which ``ReplicaStrategy`` is added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.cluster.environment import declared_job
from lockstep.collectives.communicator import all_gather_object, refuse_to_train
from lockstep.config import list_logical_devices
from lockstep.errors import ConfigError, UsageError
from lockstep.integrations.lightning.logged import TrainerView
from lockstep.integrations.lightning.metrics import ReplicatedMetric, replicate_metrics
from lockstep.integrations.lightning.optimizer import LightningStep, mirror_optimizer
from lockstep.integrations.lightning.steps import ModuleSteps
from lockstep.mirroring.module.module import MirroredModule
from lockstep.replicas.context import get_replica_context
from lockstep.strategies.base import Strategy, current_strategy
from lockstep.strategies.mirrored import MirroredStrategy
from lockstep.strategies.multi_worker import MultiWorkerMirroredStrategy


class ReplicaStrategy:
    """What ``LockstepStrategy`` is of itself. Stands before Lightning's ``Strategy`` among the bases of a class.

    Args:
        devices: those of the replicas, as of ``ls.MirroredStrategy``; None for all of the kind that the Trainer uses.
        replicas: how many there are; None for one on each device.
        seed: of the replicas' random numbers.
        strategy: a strategy of ours to train on, in place of the arguments above.
        **named: ``checkpoint_io`` and ``precision_plugin``, as Lightning's strategies take them.

    Raises:
        ConfigError: the arguments, the module or the Trainer ask for what replicas cannot do.
    """

    strategy_name = "lockstep"
    _lightning_module: Any
    precision_plugin: Any
    optimizers: Any
    lr_scheduler_configs: Any

    def __init__(
        self,
        devices: Sequence[Any] | None = None,
        *,
        replicas: int | None = None,
        seed: int | None = None,
        strategy: Strategy | None = None,
        **named: Any,
    ) -> None:
        super().__init__(**named)
        if strategy is not None and (devices is not None or replicas is not None or seed is not None):
            raise ConfigError("LockstepStrategy got strategy= and devices=, replicas= or seed=; give one or the other")
        self._devices, self._number, self._seed = devices, replicas, seed
        self._strategy = strategy or current_strategy()
        self._layer_sync: Any = None  # Lightning sets it with sync_batchnorm=True
        self.parallel_devices: list[Any] | None = None  # those of Trainer(devices=...)
        self._steps: ModuleSteps | None = None
        self._mirrored: MirroredModule | None = None
        self._metrics: list[ReplicatedMetric] = []
        self._leaf: Tensor | None = None

    # What Lightning asks of a strategy about devices and processes.

    @property
    def strategy(self) -> Strategy:
        """The strategy on whose replicas the steps run."""
        if self._strategy is None:
            self._strategy = self._choose()
        return self._strategy

    def _choose(self) -> Strategy:
        if declared_job() is not None:
            return MultiWorkerMirroredStrategy(self._devices, replicas=self._number, seed=self._seed)
        devices = self._devices
        accelerator = getattr(self, "accelerator", None)
        if devices is None and type(accelerator).__name__ == "CPUAccelerator":
            devices = list_logical_devices("CPU")
        return MirroredStrategy(devices, replicas=self._number, seed=self._seed)

    @property
    def root_device(self) -> torch.device:
        return self.strategy.devices[0].torch_device

    @property
    def is_global_zero(self) -> bool:
        return self.strategy.workers.is_chief

    @property
    def global_rank(self) -> int:
        return self.strategy.workers.index

    local_rank = global_rank
    world_size = 1  # all workers read the same batches: to Lightning they are one device

    def model_to_device(self) -> None:
        self._lightning_module.to(self.root_device)

    def reduce(self, tensor: Any, *_: Any, **__: Any) -> Any:
        """The value, which is that of all replicas already."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        answers = self.strategy.workers.all_gather_numbers("a decision", [float(decision)])
        yes = [bool(answer) for (answer,) in answers]
        return sum(yes) == len(yes) if all else any(yes)

    def barrier(self, name: str | None = None) -> None:
        self.strategy.workers.all_gather_numbers(f"barrier {name or ''}".strip())

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return all_gather_object(self.strategy.workers, "an object of Lightning's", obj)[src]

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """In a step: the rows of all replicas, [rows of the batch, ...], as one device has them."""
        context = get_replica_context()
        if context is None or not tensor.ndim:
            return tensor
        gathered: Tensor = context.all_gather(tensor, axis=0)
        return gathered if sync_grads else gathered.detach()

    # The life of a run.

    def setup_environment(self) -> None:
        super().setup_environment()  # type: ignore[misc]
        if not self.strategy.workers.is_single:
            from lightning_utilities.core.rank_zero import rank_zero_only

            rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]  # only one worker logs and warns

    def setup(self, trainer: Any) -> None:
        self._refuse_what_differs(trainer)
        super().setup(trainer)  # type: ignore[misc]

    def _refuse_what_differs(self, trainer: Any) -> None:
        module, replicas = self._lightning_module, self.strategy.num_replicas_in_sync
        if trainer.state.fn == "fit":
            refuse_to_train(self.strategy.workers, "Trainer.fit")
            if not module.automatic_optimization:
                raise ConfigError(
                    f"{type(module).__name__} sets automatic_optimization=False, and Lightning counts the steps of its "
                    "optimizers in each replica; write the loop with strategy.run (docs/how-to/custom-loop.md), or "
                    "run it with strategy='ddp' under lockstep run"
                )
        if not isinstance(self.strategy, (MirroredStrategy, MultiWorkerMirroredStrategy)):
            raise ConfigError(
                f"LockstepStrategy got {self.strategy!r}, and needs replicas that have the whole model; give a "
                "MirroredStrategy or a MultiWorkerMirroredStrategy"
            )
        devices = self.parallel_devices or []
        if len(devices) not in (0, 1, replicas) and devices[0].type == "cpu":
            raise ConfigError(
                f"the Trainer got devices={len(devices)} and LockstepStrategy has {replicas} replicas; leave devices "
                f"out, and give LockstepStrategy(replicas={len(devices)})"
            )
        if getattr(module, "_compiler_ctx", None) is not None:
            raise ConfigError(
                "the Trainer got a module from torch.compile, whose code is that of one copy; give the plain module, "
                "and compile parts of it in configure_model"
            )

    def _setup_model(self, model: Any) -> Any:
        """Mirrors the module, which stays what it was for Lightning: replica 0's copy."""
        trainer = model.trainer
        model.trainer = TrainerView(trainer)
        self._metrics = replicate_metrics(model, self.strategy)
        self._mirrored = self.strategy.mirror(model, sync_batchnorm=self._layer_sync is not None)
        for duplicate in self._mirrored.copies:  # Lightning leaves the trainer out when a module is copied
            duplicate.trainer = model.trainer
        kind = next(base for base in type(model).__mro__ if base.__name__ == "LightningModule")
        ignored = frozenset(vars(kind()))
        watched = [
            [part for part in duplicate.modules() if isinstance(part, kind)] for duplicate in self._mirrored.copies
        ]
        self._steps = ModuleSteps(self.strategy, self._mirrored, watched, ignored)
        return model

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)  # type: ignore[misc]
        mirrored = {id(optimizer): mirror_optimizer(self.strategy, optimizer) for optimizer in self.optimizers}
        for config in self.lr_scheduler_configs:
            plain = config.scheduler.optimizer
            config.scheduler.optimizer = mirrored.get(id(plain), plain)
        self.optimizers = list(mirrored.values())

    def teardown(self) -> None:
        if self._mirrored is not None:
            self._mirrored.sync_buffers()
            view = self._lightning_module.trainer
            self._lightning_module.trainer = view.plain if isinstance(view, TrainerView) else view
        for metric in self._metrics:
            metric.give_back()
        self._mirrored, self._steps, self._metrics, self._leaf = None, None, [], None
        super().teardown()  # type: ignore[misc]

    # Steps.

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            loss, extra = self._run("training_step", args, kwargs)
        if loss is None:
            self._leaf = None
            return extra
        # A leaf: its gradient, once Lightning has divided, scaled and differentiated it, is the factor for backward.
        self._leaf = loss.requires_grad_()
        return self._leaf if extra is None else {**extra, "loss": self._leaf}

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._run("validation_step", args, kwargs)[1]

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._run("test_step", args, kwargs)[1]

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._run("predict_step", args, kwargs)[1]

    def _run(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor | None, Any]:
        if self._steps is None:
            raise UsageError(f"{name} was called before the Trainer had set the strategy up; call trainer.fit")
        batch, *rest = (*args, *kwargs.values())
        if type(batch).__name__ == "_DataFetcherWrapper":
            raise ConfigError(
                f"{name} takes dataloader_iter, and replicas get shards of batches; take batch and batch_idx"
            )
        trainer, factor = self._lightning_module.trainer, 1.0
        if name == "training_step":
            # In float16 small gradients need the scale in the backward pass, which comes before Lightning scales.
            scaler = getattr(self.precision_plugin, "scaler", None)
            factor = (1.0 if scaler is None else scaler.get_scale()) / trainer.accumulate_grad_batches
        return self._steps.run(trainer, name, batch, tuple(rest), factor=factor)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        if self._leaf is None or self._steps is None:
            raise UsageError("the strategy runs backward for the loss that training_step returned, once a step")
        module, precision = self._lightning_module, self.precision_plugin
        self.pre_backward(closure_loss)  # type: ignore[attr-defined]
        closure_loss = precision.pre_backward(closure_loss, module)
        precision.backward(closure_loss, module, optimizer, *args, **kwargs)
        factor, self._leaf = self._leaf.grad, None
        if factor is None:
            raise UsageError(
                f"{type(module).__name__}.backward did not call backward of the loss that it got; call loss.backward()"
            )
        sums = not module.trainer.fit_loop._should_accumulate()
        self._steps.backward(float(factor), self._mirrored_optimizers, sums=sums)
        closure_loss = precision.post_backward(closure_loss, module)
        self.post_backward(closure_loss)  # type: ignore[attr-defined]
        return closure_loss

    @property
    def _mirrored_optimizers(self) -> list[LightningStep]:
        return [optimizer for optimizer in self.optimizers if isinstance(optimizer, LightningStep)]

    # Buffers, such as statistics of batch norms, are averaged where Lightning reads them.

    def _sync_buffers(self) -> None:
        if self._mirrored is not None:
            self._mirrored.sync_buffers()

    def on_validation_start(self) -> None:
        self._sync_buffers()

    def on_test_start(self) -> None:
        self._sync_buffers()

    def on_predict_start(self) -> None:
        self._sync_buffers()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._sync_buffers()
        state: dict[str, Any] = self._lightning_module.state_dict()
        return state

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register(cls.strategy_name, cls, description=cls.__name__)
