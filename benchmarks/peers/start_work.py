"""The work of the programs of the suite ``start``, on torch and transformers alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from program import Job
from torch import Tensor, nn

from benchmarks.workloads import WORKLOADS

_FORMATS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}
Losses = Callable[[Any, Any, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class StartWork:
    """What a program trains."""

    module: nn.Module  # in training mode
    batches: Iterator[tuple[Any, Tensor]]  # global ones
    loss_of: Losses  # ``loss_of(model, x, y)``: the sum over the rows given, over the count of the whole batch
    learning_rate: float
    log: Callable[[float], None] = lambda loss: None


def _workload(job: Job) -> StartWork:
    """One of ``benchmarks.workloads``; a layout that torch has is the memory format of the weights."""
    workload = WORKLOADS[job.workload]

    def loss_of(model: Any, x: Any, y: Tensor) -> Tensor:
        return workload.loss(call(model, x), y)[0] / workload.count

    module = workload.make_module().train()
    return StartWork(
        module=module.to(memory_format=_FORMATS[job.layout]) if job.layout in _FORMATS else module,  # type: ignore[call-overload]
        batches=iter(workload.make_batches(2)),
        loss_of=loss_of,
        learning_rate=workload.learning_rate,
    )


def call(model: Any, x: Any) -> Any:
    """The model's outputs; a dict holds its keyword arguments."""
    return model(**x) if isinstance(x, dict) else model(x)


def part_of(value: Any, rank: int, parts: int) -> Any:
    """The rows of one process, of a tensor or of each in a dict."""
    if isinstance(value, dict):
        return {name: part_of(each, rank, parts) for name, each in value.items()}
    return value.tensor_split(parts)[rank]


def launcher_of(rank: int) -> int | None:
    """The process of torchrun, for the one of its processes that counts its CPU time."""
    return os.getppid() if rank == 0 else None


def work_of(job: Job) -> StartWork:
    """The work of a job, by the name of its workload."""
    return {"train-images": _recipe_images, "train-mlm": _recipe_mlm}.get(job.workload, _workload)(job)


def _recipe_images(job: Job) -> StartWork:
    """What ``lockstep train images`` trains: the recipe's images and batches; the model as transformers has it."""
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    from lockstep_tools.recipes.images.batches import ImageBatches
    from lockstep_tools.recipes.images.config import ImagesConfig
    from lockstep_tools.recipes.images.dataset import load_images

    config = ImagesConfig()
    data = load_images(config)
    settings = MobileNetV2Config(image_size=config.size, output_stride=config.output_stride, num_labels=10)
    module = MobileNetV2ForImageClassification(settings).train().to(memory_format=torch.channels_last)
    correct = torch.zeros(())

    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        logits = model(pixel_values=x).logits
        correct.add_((logits.detach().argmax(dim=1) == y).sum())
        return F.cross_entropy(logits, y, reduction="sum") / config.batch_size

    batches = iter(ImageBatches(data.splits["train"], config, training=True))
    return StartWork(
        module=module, batches=batches, loss_of=loss_of, learning_rate=config.learning_rate, log=_logger(job)
    )


def _recipe_mlm(job: Job) -> StartWork:
    """What ``lockstep train mlm`` trains: the recipe's text, tokenizer, batches and model.

    The first process alone reads the text and trains the tokenizer; the others get both from it.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    from lockstep_tools.recipes.mlm.batches import MaskedBatches
    from lockstep_tools.recipes.mlm.config import MlmConfig
    from lockstep_tools.recipes.mlm.model import IGNORED_LABEL, masked_token_loss, new_bert
    from lockstep_tools.recipes.text.corpus import python_text
    from lockstep_tools.recipes.text.tokenizer import SPECIAL_TOKENS, TokenRows, encode, train_wordpiece

    config, made = MlmConfig(), [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        lines = python_text().train
        made = [lines, train_wordpiece(lines, config.tokenizer).to_str()]
    if dist.is_initialized():
        dist.broadcast_object_list(made)
    lines, text = made
    names = {f"{name}_token": token for name, token in SPECIAL_TOKENS.items()}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(text), **names)
    rows = TokenRows(encode(tokenizer, lines, max_tokens=config.sequence_length))
    batches = MaskedBatches(rows, tokenizer, config, max_tokens=config.sequence_length, seed=0)
    correct = torch.zeros(())

    def loss_of(model: Any, x: Any, y: Tensor) -> Tensor:
        logits = model(**x)
        labels = y[y != IGNORED_LABEL]
        correct.add_((logits.detach().argmax(dim=1) == labels).sum())
        # Their number in this process's rows, and not in all: a small difference that a plain program would have too.
        parts = dist.get_world_size() if dist.is_initialized() else 1
        return masked_token_loss(logits, y)[0] / (len(labels) * parts)

    module = new_bert(config).train()
    return StartWork(
        module=module, batches=iter(batches), loss_of=loss_of, learning_rate=config.first_rate, log=_logger(job)
    )


def _logger(job: Job) -> Callable[[float], None]:
    """Writes losses for TensorBoard, in the first process, as the recipes do."""
    if int(os.environ.get("RANK", 0)) != 0:
        return lambda loss: None
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(f"{job.source}/logs")
    return lambda loss: writer.add_scalar("batch_loss", loss)
