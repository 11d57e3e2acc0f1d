"""The check that the recipe ``reviews`` is exact: the Trainer's first steps on the replicas, and again in a plain loop.

Dropout is off: its masks are drawn per replica by definition. So are clipping and the change of the rate, without which
the plain loop is shorter.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from lockstep.recipes.exactness import (
    Difference,
    ExactnessReport,
    MakeOptimizer,
    check_steps,
    largest_difference,
    plain_sgd,
    train_in_plain_pytorch,
)
from lockstep.recipes.quiet import quiet_transformers
from lockstep.recipes.reviews.build import ReviewsTask, build_collator, build_reviews
from lockstep.recipes.reviews.config import ReviewsConfig
from lockstep.recipes.reviews.order import GroupedOrder
from lockstep.strategies.base import Strategy


def check_exactness(config: ReviewsConfig, strategy: Strategy, steps: int = 3) -> ExactnessReport:
    """Trains the first steps with the Trainer and again without it, from the same weights on the same batches.

    Args:
        config: the run; its dropout is taken as 0.
        strategy: the replicas to compare with one device.
        steps: global batches to train, each one update.

    Raises:
        ConfigError: ``steps`` is below 1.
        DataError: the reviews cannot be used.
    """
    check_steps(steps)
    task = build_reviews(replace(config, dropout=0.0), device=strategy.devices[0].torch_device)
    for part in task.model.modules():  # pretrained models bring their own
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    batches = _first_batches(config, task, strategy, steps)
    adam = partial(torch.optim.AdamW, lr=config.rate, weight_decay=config.weight_decay, fused=True)
    return ExactnessReport(
        steps=len(batches),
        replicas=strategy.num_replicas_in_sync,
        condition="no dropout",
        sgd=_between("SGD", config, task, strategy, batches, plain_sgd),
        adam=_between("Adam", config, task, strategy, batches, adam),
    )


def _first_batches(config: ReviewsConfig, task: ReviewsTask, strategy: Strategy, steps: int) -> Sequence[Any]:
    """The first global batches of the first epoch, in plain PyTorch."""
    size = config.per_device_train_batch_size * strategy.num_replicas_in_sync
    order = GroupedOrder(task.train, batch_size=size, window=config.length_window, seed=config.seed)
    order.set_epoch(0)
    loader = DataLoader(task.train, batch_size=size, sampler=order, collate_fn=build_collator(task))
    return list(islice(loader, steps))


def _between(
    name: str,
    config: ReviewsConfig,
    task: ReviewsTask,
    strategy: Strategy,
    batches: Sequence[Any],
    optimizer: MakeOptimizer,
) -> Difference:
    ours, plain = copy.deepcopy(task.model), copy.deepcopy(task.model)
    our_losses = _trainer_losses(config, replace(task, model=ours), strategy, len(batches), optimizer)
    plain_losses = train_in_plain_pytorch(plain, batches, _plain_loss, optimizer)
    return Difference(
        optimizer=name,
        loss=max(abs(a - b) for a, b in zip(our_losses, plain_losses, strict=True)),
        weight=largest_difference(ours, plain),
        moved=largest_difference(task.model, plain),
    )


def _trainer_losses(
    config: ReviewsConfig, task: ReviewsTask, strategy: Strategy, steps: int, make_optimizer: MakeOptimizer
) -> list[float]:
    """The loss of every step."""
    from lockstep.recipes.reviews.trainer import ReviewsTrainer, training_arguments

    optimizer = make_optimizer([p for p in task.model.parameters() if p.requires_grad])
    with TemporaryDirectory(prefix="lockstep-exact-") as folder, quiet_transformers(extra="text"):
        args = training_arguments(
            replace(config, clip_norm=0.0),
            folder,
            on_cpu=strategy.devices[0].kind == "CPU",
            max_steps=steps,
            logging_steps=1,
            eval_strategy="no",
            save_strategy="no",
            load_best_model_at_end=False,
        )
        trainer = ReviewsTrainer(
            config,
            task,
            args=args,
            strategy=strategy,
            callbacks=[],
            optimizers=(optimizer, LambdaLR(optimizer, lambda step: 1.0)),
        )
        trainer.train()
        return [logs["loss"] for logs in trainer.state.log_history if "loss" in logs]


def _plain_loss(module: nn.Module, batch: Any) -> Tensor:
    logits = module(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return nn.functional.cross_entropy(logits, batch["labels"])
