"""The Trainer: transformers' own, with each step run on the replicas of a strategy.

    transformers' loop    batch -> training_step -> clip -> callbacks -> optimizer.step -> scheduler -> log, save
    training_step here    batch -> shards -> in each replica: its training_step, backward -> gradients summed

Everything that is not overridden here is transformers' own code, which sees one process with one wide device.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import transformers
from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
from torch import Tensor, nn
from transformers import TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from lockstep._torch_compat import tree_map
from lockstep.checkpoint.fingerprint import fingerprint_of
from lockstep.collectives.communicator import all_gather_object, refuse_to_save, refuse_to_train
from lockstep.collectives.per_replica import PerReplica
from lockstep.data.batch_lists import ListReader
from lockstep.data.readers import batch_digest
from lockstep.data.typed_batches import TypedMapping
from lockstep.errors import UsageError
from lockstep.integrations.transformers import arguments, sharding, sync
from lockstep.integrations.transformers.examples import count_examples, division_of
from lockstep.integrations.transformers.loss_normalization import (
    LossCheck,
    Share,
    current_share,
    is_left_out,
    loss_difference,
    weighing,
    weighted,
    whole_loss,
)
from lockstep.integrations.transformers.replica_view import (
    TrainerViews,
    bind_forwards,
    mirrored_modules,
    modules_in,
    other_modules,
)
from lockstep.integrations.transformers.whole_batch_losses import check_losses, gathering, losses_of_whole_batch
from lockstep.mirroring.module.batch_norm import normalising_single_row
from lockstep.mirroring.module.module import MirroredModule
from lockstep.mirroring.optim.optimizer import MirroredOptimizer
from lockstep.replicas.context import get_replica_context, in_context
from lockstep.replicas.device.memory import is_out_of_memory
from lockstep.strategies.base import Strategy
from lockstep.strategies.gather_rows import gather_block, has_gathered_rows
from lockstep.train.batch import keeping_modes, preserving_rng, replica_of_step
from lockstep.train.callbacks.progress import write_fingerprint


class Trainer(transformers.Trainer):
    """``transformers.Trainer`` on all replicas of a strategy, with the numbers of one device.

    ``distribute`` puts it before another subclass of transformers' Trainer, whose methods are then its ``super()``.

    Args:
        *positional: as in transformers. Of ``args``, ``per_device_train_batch_size`` and
            ``per_device_eval_batch_size`` are per replica. The Trainer changes them: ``n_gpu`` becomes the number of
            replicas.
        strategy: the strategy to train on. None takes the one in scope, else all local devices, or in a job of several
            workers all devices of all workers.
        **named: as in transformers.
    """

    __signature__ = arguments.signature_with_strategy(transformers.Trainer)
    _one_process: arguments.OneProcess | None = None

    def __init__(self, *positional: Any, strategy: Strategy | None = None, **named: Any) -> None:
        args = arguments.arguments_in(positional, named)
        # Not that of a wrapped function: sentence-transformers' wrapper takes older names too.
        accepted = inspect.signature(super().__init__, follow_wrapped=False)
        arguments.check_program(self, accepted, named, args)
        self.strategy = arguments.chosen_strategy(strategy, on_cpu=args is not None and args.use_cpu)
        self._workers = self.strategy.workers
        self._mirrored: MirroredModule | None = None
        self._other_mirrored: dict[str, Any] = {}
        self._list_reader = ListReader(records_are_rows=True, copies=self._workers.any_layout)
        self._holds_best = self._gathers = self._is_prepared = False
        self._whole_batch_losses: list[list[nn.Module]] = [[] for _ in self.strategy.devices]
        self._loss_check = LossCheck(0)
        if args is not None:
            self._begin(args)
        try:
            super().__init__(*positional, **named)
        finally:
            if self._one_process is not None:
                self._one_process.narrow()
        self._callbacks = self.callback_handler = sync.AgreeingCallbacks(self.callback_handler, self._workers)

    def _begin(self, args: TrainingArguments) -> None:
        """What depends on the arguments: before the client's class sees them, or once it has made its own."""
        replicas = self.strategy.num_replicas_in_sync
        arguments.check_arguments(args, workers=self._workers.size, replicas=replicas)
        self._one_process = arguments.OneProcess(args, self.strategy)
        self._one_process.widen()
        sync.begin_random_numbers(self.strategy, args.seed)

    @property
    def _devices_seen(self) -> arguments.OneProcess:
        if self._one_process is None:
            raise UsageError("the Trainer has no arguments yet; call super().__init__ first")
        return self._one_process

    def __deepcopy__(self, memo: Any) -> Self:
        """Returns itself: models that know their Trainer, as those of sentence-transformers do, are copied."""
        return self

    def create_accelerator_and_postprocess(self) -> None:
        """The loss is weighed by its shard's share before backward."""
        arguments.check_model(self.model)
        if self._one_process is None:
            self._begin(self.args)
        super().create_accelerator_and_postprocess()
        self._devices_seen.keep()
        backward = self.accelerator.backward
        # transformers calls backward in the middle of its training_step; there is no hook between the loss and its
        # gradients.
        self.accelerator.backward = lambda loss, **named: (
            None if is_left_out() and not has_gathered_rows() else backward(weighted(loss), **named)
        )

    def call_model_init(self, trial: Any = None) -> Any:
        """Transformers sets the seed for it; so the replicas' random states are seeded again too."""
        sync.begin_random_numbers(self.strategy, self.args.seed)
        return super().call_model_init(trial)

    def train(self, *args: Any, **named: Any) -> Any:
        """As in transformers. Every worker must call it."""
        refuse_to_train(self._workers, "Trainer.train")
        self._devices_seen.establish()
        sync.agree_on_arguments(self._workers, self.args)
        self._holds_best, self._callbacks.resumed_from = False, None
        self._loss_check = LossCheck(self.strategy.num_replicas_in_sync)
        output = super().train(*args, **named)
        if not self._holds_best:
            self._mirrored_module.sync_buffers()
        prints = any(
            isinstance(callback, (PrinterCallback, ProgressCallback)) for callback in self.callback_handler.callbacks
        )
        write_fingerprint(self._workers, self.fingerprint, verbose=int(prints))
        return output

    def fingerprint(self) -> str:
        """16 hex digits of all state of the training; see ``ls.fingerprint``. Every worker must call it.

        A training writes them as its last line, if one of its callbacks prints transformers' logs.
        """
        things = {"model": self._mirrored_module, "optimizer": self._mirrored_optimizer, "scheduler": self.lr_scheduler}
        return fingerprint_of({**things, "position": {"step": self.state.global_step}})

    def evaluate(self, *args: Any, **named: Any) -> Any:
        """As in transformers. Every worker must call it; all get the chief's metrics."""
        with self._devices_seen.as_wide_device():
            return super().evaluate(*args, **named)

    def predict(self, *args: Any, **named: Any) -> Any:
        """As in transformers. Every worker must call it."""
        with self._devices_seen.as_wide_device():
            return super().predict(*args, **named)

    def evaluation_loop(self, *args: Any, **named: Any) -> Any:
        """As in transformers. Every worker must call it; all get the chief's metrics."""
        self._devices_seen.establish()
        self._copy_reference()
        count_examples(named["dataloader"] if "dataloader" in named else args[0], self.strategy.num_replicas_in_sync)
        output = super().evaluation_loop(*args, **named)
        metrics = all_gather_object(self._workers, "the metrics", output.metrics)[0]
        return output._replace(metrics=metrics)

    def _maybe_log_save_evaluate(self, *args: Any, **named: Any) -> None:
        due = self.control.should_log or self.control.should_evaluate or self.control.should_save
        super()._maybe_log_save_evaluate(*args, **named)
        if due:  # callbacks were asked
            sync.agree_on_flags(self._workers, self.control)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in transformers. Every worker must call it; the chief writes."""
        refuse_to_save(self._workers, "Trainer.save_model")
        super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, *args: Any, **named: Any) -> None:
        self._mirrored_module.sync_buffers()
        super()._save_checkpoint(*args, **named)
        # Every worker must know it, whether it sees the chief's files or not; and the files are complete now.
        best = all_gather_object(self._workers, "the best checkpoint", self.state.best_model_checkpoint)
        self.state.best_model_checkpoint = best[0]

    def _save_rng_state(self, output_dir: str) -> None:
        if self._workers.is_chief:
            super()._save_rng_state(output_dir)
        sync.save_random_numbers(self.strategy, Path(output_dir))
        sync.save_conditions(self.strategy, Path(output_dir), self.args)
        self._callbacks.save_data_state(Path(output_dir), epoch_ended=float(self.state.epoch or 0).is_integer())

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            step = self.state.global_step
            sync.load_random_numbers(self.strategy, Path(checkpoint), seed=self.args.seed, step=step)
            sync.compare_conditions(self.strategy, Path(checkpoint), self.args)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any) -> None:
        sync.agree_on_checkpoint(self._workers, resume_from_checkpoint)
        self._callbacks.resumed_from = Path(resume_from_checkpoint)
        super()._load_from_checkpoint(resume_from_checkpoint, *args)

    def _load_best_model(self) -> None:
        if self._workers.is_chief:
            super()._load_best_model()
        mirrored = self._mirrored_module
        mirrored.load_state_dict(mirrored.module.state_dict())  # gives all replicas of all workers the chief's
        self._holds_best = True

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """The model on all replicas, copied again except for an evaluation during training."""
        if training or self._mirrored is None or not self.is_in_train:
            first, start = not self.accelerator._models, time.time()
            self._mirror()
            if first and not training:
                self.model_preparation_time = round(time.time() - start, 4)
        if training:
            self._mirror_optimizer()
        return self._mirrored_module

    def _mirror(self) -> None:
        """Copies the model as it is now: it may have new hooks, adapters or weights since the last time."""
        model: Any = self.model
        if not self.is_in_train and (self.args.fp16_full_eval or self.args.bf16_full_eval):
            model.to(torch.float16 if self.args.fp16_full_eval else torch.bfloat16)
        self.model_wrapped, self._mirrored = model, None
        self._mirrored = self.strategy.mirror(model)
        for copy in self._mirrored.copies:
            if "_original_forward" not in copy.__dict__:  # set by accelerate where it handles the precision
                self.accelerator.prepare_model(copy, device_placement=False, evaluation_mode=True)
        # After the model: copies of a module that holds it, such as a loss, hold its copies.
        modules_by_name = other_modules(self)
        divides = self.strategy.num_replicas_in_sync > 1
        if divides:
            check_losses(module for value in modules_by_name.values() for module in modules_in(value))
        self._other_mirrored = {name: self._mirrored_in(value) for name, value in modules_by_name.items()}
        modules = [self._mirrored, *mirrored_modules(self._other_mirrored)]
        for module in modules:
            bind_forwards(module)
        if divides:
            copies = zip(*(module.copies for module in modules), strict=True)
            self._whole_batch_losses = [losses_of_whole_batch(parts) for parts in copies]
            self._gathers |= any(self._whole_batch_losses)

    def _mirrored_in(self, value: Any) -> Any:
        """Returns a module mirrored, or a list, tuple or dict in which modules are mirrored."""
        if isinstance(value, nn.Module):
            return self._mirrored if value is self.model else self.strategy.mirror(value)
        if isinstance(value, dict):
            return {key: self._mirrored_in(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._mirrored_in(item) for item in value)
        return value

    def _mirror_optimizer(self) -> None:
        optimizer = self.optimizer
        if isinstance(optimizer, AcceleratedOptimizer):  # of an earlier training
            self._mirrored_optimizer = optimizer.optimizer = self._renewed(optimizer.optimizer)
        else:
            self._mirrored_optimizer = self.optimizer = self._renewed(optimizer)

    def _renewed(self, optimizer: Any) -> MirroredOptimizer:
        result = self.strategy.mirror(optimizer.plain if isinstance(optimizer, MirroredOptimizer) else optimizer)
        # The step sums gradients itself, at the end of an accumulation cycle (_sums_in_step).
        result.gradients.sums_after_runs = False
        return result

    def _get_dataloader(self, *args: Any, **named: Any) -> Any:
        with arguments.seen_as_chief(self.args):  # every worker loads the same batches, with the same random numbers
            return super()._get_dataloader(*args, **named)

    def _get_num_items_in_batch(self, *args: Any, **named: Any) -> Any:
        share = current_share()
        with arguments.seen_as_one_device(self.args):
            items = super()._get_num_items_in_batch(*args, **named)
        return items if share is None else share.watch(items, self._device)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """As in transformers, on all replicas, each with its shard of ``inputs``."""
        if isinstance(inputs, list):
            self._mirrored_module.module.train()
        self._copy_reference()
        inputs = self._prepared_once(inputs)
        self._add_digest(inputs)
        with arguments.seen_as_one_device(self.args):
            # Before the step: what the loss averages decides how this batch is weighed already.
            if self._loss_check.is_due():
                self._decide_items(inputs, num_items_in_batch)
            shards = self._divided(inputs)
            rows = self._loss_check.rows_of_step(self.strategy, shards.values)
            with nullcontext() if rows is None else self.strategy.watched_by(rows):
                losses = self._run_in_views(self._train_shard, inputs, shards, num_items_in_batch)
            if self._agrees_on_memory and self.accelerator.sync_gradients:
                self.strategy.run(self._mirrored_optimizer.sum_gradients)
            if rows is not None:
                self._loss_check.warn_of_mixed_rows(rows)
        loss: Tensor = self.strategy.reduce("sum", losses)
        return loss

    @property
    def _agrees_on_memory(self) -> bool:
        return bool(self.args.auto_find_batch_size) and self._workers.size > 1

    def _views(self, rows: Sequence[int] | None) -> TrainerViews:
        """The views of the local replicas, whose shards have so many rows; None for a check."""
        devices = [device.torch_device for device in self.strategy.devices]
        return TrainerViews(self, self._mirrored_module.copies, self._other_mirrored, devices, rows)

    def _run_in_views(self, fn: Callable[..., Any], inputs: Any, shards: PerReplica[sharding.Shard], *args: Any) -> Any:
        """Runs ``fn(view, shard, *args)`` in the replicas; what the client's methods set on ``self`` remains."""
        views = self._views([shard.rows for shard in shards.values])
        if self._gathers and not all(shard.rows for shard in shards.values):
            # Trainers gather in their steps, which all replicas must do.
            stand_in = sharding.stand_in(inputs, self._list_reader)
            shards = PerReplica([shard if shard.rows else stand_in for shard in shards.values])
        result = self._run(fn, (PerReplica(views.views), shards, *args))
        views.bring_back()
        self._gathers |= views.have_gathered
        return result

    def _run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """``strategy.run``. With ``auto_find_batch_size`` all workers raise if one has no memory. All must call it.

        ``fn`` must not wait for other workers then: the error would reach them as that of a lost worker.
        """
        if not self._agrees_on_memory:
            return self.strategy.run(fn, args)
        results = self.strategy.run(partial(_tried, fn), args)
        failures = [value.args[0] for value in self.strategy.local_results(results) if isinstance(value, MemoryError)]
        worker_failures = all_gather_object(self._workers, "whether the batch fits", failures)
        for worker, texts in zip(self._workers.names, worker_failures, strict=True):
            if texts:  # the first words are those that accelerate knows
                raise torch.OutOfMemoryError(f"CUDA out of memory. {worker}: {texts[0]}")
        return results

    def _decide_items(self, inputs: dict[str, Any], number: Any) -> None:
        """Finds out what the loss averages, of ``number`` items. Every worker must call it."""
        differences: dict[sharding.Items, list[tuple[float, float] | None]] = {}
        for items in self._loss_check.candidates(self.model):
            views = PerReplica(self._views(None).views)
            results = self._run(self._check_loss, (views, self._divided(inputs, items), number, items))
            local = self.strategy.local_results(results)
            worker_differences = all_gather_object(self._workers, "the check of the loss", local)
            differences[items] = [difference for worker in worker_differences for difference in worker]
            if not any(differences[items]):
                break
        self._loss_check.decide(differences)

    def _check_loss(
        self, view: Self, shard: sharding.Shard, number: Any, items: sharding.Items
    ) -> tuple[float, float] | None:
        """Compares the loss of this replica's shard with its halves."""
        copy = self._copy

        def loss_of(inputs: Any, share: Share) -> Tensor:
            with weighing(share), view.compute_loss_context_manager(), self._gathering(view):
                count = share.watch(number, self._device)
                loss: Any = view.compute_loss(copy, view._prepare_inputs(inputs), num_items_in_batch=count)
            return torch.as_tensor(loss)

        context = replica_of_step()
        # The step after the check draws the numbers that it would have drawn without it. A loss that gathers rows with
        # ls.gather_rows is not checked: halves are not the batch.
        with preserving_rng(context), in_context(context.alone()):
            difference = loss_difference(loss_of, shard, copy, items=items)
            if difference is None or not view.accelerator.has_gathered:
                return difference
            # A loss that uses what it gathers, as that of KTO does, is that of the whole batch.
            view.accelerator.offset = 1.0
            with torch.no_grad(), keeping_modes(copy):
                copy.eval()
                return difference if whole_loss(loss_of, shard) == difference[0] else None

    def _train_shard(self, view: Self, shard: sharding.Shard, items: Any) -> Tensor:
        """This replica's training step; returns its weighed loss. Every replica must call it."""
        copy = self._copy
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        if shard.count or self._gathers:
            sends = nullcontext() if self._sums_in_step else self._mirrored_module.no_sync()
            with (
                sends,
                weighing(Share(shard.count, shard.total)) as share,
                normalising_single_row(copy, (), dict(shard.inputs)),
                self._gathering(view),
                gather_block(counts=shard.rows > 0) as gathered,
            ):
                step = super(Trainer, view).training_step
                part = step(copy, shard.inputs, share.watch(items, self._device)) * share.factor
                if shard.count:
                    loss += part
            view.accelerator.has_gathered |= gathered.any
        if self._sums_in_step:
            self._mirrored_optimizer.sum_gradients()
        return loss

    def _gathering(self, view: Self) -> AbstractContextManager[None]:
        """A block in which this replica's losses that compare rows are those of the whole batch."""
        return gathering(self._whole_batch_losses[replica_of_step().local_replica], view.accelerator)

    @property
    def _sums_in_step(self) -> bool:
        """Whether a step sums gradients; else the sum waits for the next steps, or for the workers to agree."""
        return bool(self.accelerator.sync_gradients) and not self._agrees_on_memory

    def _clip_grad_norm(self, model: Any) -> Any:
        """As in transformers, which clips the gradients of the model; the replicas do if those are the optimizer's."""
        ids = {id(parameter) for group in self._mirrored_optimizer.param_groups for parameter in group["params"]}
        of_model = {id(parameter) for parameter in model.parameters()}
        has_others = any(parameter.grad is not None and id(parameter) not in ids for parameter in model.parameters())
        if has_others or ids - of_model or self.accelerator.scaler is not None:
            return super()._clip_grad_norm(model)  # type: ignore[no-untyped-call]
        return self._mirrored_optimizer.clip_sums(self.args.max_grad_norm)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        """As in transformers, on all replicas, each with its shard of ``inputs``."""
        inputs = self._prepared_once(inputs)
        _, division = division_of(inputs)
        self._add_digest(inputs)
        with arguments.seen_as_one_device(self.args):
            shards = self._divided(inputs)
            parts = self._run_in_views(self._predict_shard, inputs, shards, prediction_loss_only, ignore_keys)
        return sharding.joined(self.strategy.local_results(parts), self._workers, self.args.device, division)

    def _predict_shard(
        self, view: Self, shard: sharding.Shard, prediction_loss_only: bool, ignore_keys: Any
    ) -> sharding.Prediction | None:
        if not shard.rows and not self._gathers:
            return None
        with (
            weighing(Share(shard.count, shard.total)) as share,
            self._gathering(view),
            gather_block(counts=shard.rows > 0) as gathered,
        ):
            step = super(Trainer, view).prediction_step
            loss, *outputs = step(self._copy, shard.inputs, prediction_loss_only, ignore_keys)
        view.accelerator.has_gathered |= gathered.any
        if not shard.rows:
            return None
        if self._is_prepared and share.uses_items and loss is not None:  # of the whole batch: a part of a sum
            return sharding.Prediction(shard.rows, shard.count, loss.mul(shard.total / shard.count), *outputs)
        return sharding.Prediction(shard.rows, share.weight, loss, *outputs)

    def _copy_reference(self) -> None:
        """Copies a reference model that TRL's callback has brought nearer to the model since the last step."""
        # It writes to .data, which changes no version of a weight, so that the copies would not follow.
        period = getattr(self.args, "sync_ref_model", False) and getattr(self.args, "ref_model_sync_steps", 0)
        if period and self.state.global_step % period == 0:
            for mirrored in mirrored_modules(self._other_mirrored):
                mirrored.load_state_dict(mirrored.module.state_dict())

    def _prepared_once(self, inputs: Any) -> Any:
        """Batches that are lists of examples become the model's inputs here, for all replicas at once.

        GRPO generates completions and compares their rewards in this, so that they are those of one device.
        """
        self._is_prepared = isinstance(inputs, list)
        if not self._is_prepared:
            return inputs
        wrapped = self.model_wrapped
        self.model_wrapped = self._mirrored_module.module
        try:
            with arguments.seen_as_one_device(self.args):
                return super()._prepare_inputs(inputs)
        finally:
            self.model_wrapped = wrapped

    def _prepare_inputs(self, inputs: Any) -> Any:
        if get_replica_context() is None or not self._is_prepared:
            return super()._prepare_inputs(inputs)
        prepared, share = transformers.Trainer._prepare_inputs(self, inputs), current_share()
        number = prepared.get("num_items_in_batch")
        if share is None or not isinstance(number, Tensor):
            return prepared
        return {**prepared, "num_items_in_batch": share.watch(number, self._device)}

    def _prepare_input(self, data: Any) -> Any:
        if get_replica_context() is None:
            return super()._prepare_input(data)
        device = self._device

        def moved(leaf: Any) -> Any:
            if isinstance(leaf, Mapping):  # of its own type, as transformers does
                return tree_map(moved, TypedMapping.like(leaf, dict(leaf)))
            return leaf.to(device) if isinstance(leaf, Tensor) else leaf

        return tree_map(moved, data)

    def _add_digest(self, inputs: dict[str, Any]) -> None:
        if self._workers.size > 1:
            self._workers.add_digest(batch_digest(dict(inputs)))

    def _divided(self, inputs: dict[str, Any], items: sharding.Items | None = None) -> PerReplica[sharding.Shard]:
        """The shards of a batch, weighed by ``items``; None is what the loss averages as far as is known."""
        return sharding.divided(
            inputs, self._workers, self._list_reader, items=items or self._loss_check.items(self.model)
        )

    @property
    def _mirrored_module(self) -> MirroredModule:
        if self._mirrored is None:
            raise UsageError("the model is not mirrored yet; call train, evaluate or predict first")
        return self._mirrored

    @property
    def _copy(self) -> nn.Module:
        """The current replica's copy of the model."""
        return self._mirrored_module.copies[replica_of_step().local_replica]

    @property
    def _device(self) -> torch.device:
        return replica_of_step().device.torch_device


def _tried(fn: Callable[..., Any], *args: Any) -> Any:
    """The result of ``fn``; a MemoryError in its place where there was no more memory, on any device."""
    try:
        return fn(*args)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return MemoryError(str(error) or type(error).__name__)
