"""What the workers of test_parallel_schedules.py compute, with any schedule; and the same by hand on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep as ls

WORDS = 34  # no multiple of 4
SIZES = (9, 8, 1, 5)  # the small ones leave microbatches, and whole replicas, without rows
Batch = tuple[dict[str, Tensor], Tensor]
Experiment = tuple[str, int, float, dict[str, Any]]
"""The model, its layers, its dropout, and the arguments of the strategy."""
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "bert": lambda p: torch.optim.SGD(p, 0.5, momentum=0.9),
    "gpt2": lambda p: torch.optim.AdamW(p, 0.01),
    "llama": lambda p: torch.optim.SGD(p, 0.5, momentum=0.9),
}


def build(name: str, layers: int, dropout: float = 0.0) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(1)
    if name == "bert":
        config = transformers.BertConfig(
            vocab_size=WORDS, hidden_size=16, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=8, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        )  # fmt: skip
        return transformers.BertForMaskedLM(config).double()
    if name == "llama":
        config = transformers.LlamaConfig(
            vocab_size=WORDS, hidden_size=16, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=2,
            intermediate_size=32, max_position_embeddings=8, attention_dropout=dropout, use_cache=False,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config).double()
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=layers, n_head=2, n_positions=8,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).double()


def batches() -> list[Batch]:
    random = torch.Generator().manual_seed(0)
    found = []
    for rows in SIZES:
        words = torch.randint(1, WORDS, (rows, 6), generator=random)
        mask = torch.ones_like(words)
        mask[0, 4:] = 0
        found.append(({"input_ids": words, "attention_mask": mask}, torch.randint(WORDS, (rows, 6), generator=random)))
    return found


def loss(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten(), reduction="none").reshape(targets.shape)


def run_jobs(experiments: list[Experiment]) -> list[dict[str, Any]]:
    """One after another, on all workers of a job."""
    torch.set_num_threads(1)
    return [run_job(*experiment) for experiment in experiments]


def run_job(name: str, layers: int, dropout: float, asked: dict[str, Any]) -> dict[str, Any]:
    options = ls.CommunicationOptions(lost_after_s=60)
    strategy = ls.ParallelStrategy(seed=7, communication=options, **asked)
    with closing(strategy), strategy.scope():
        model = ls.Model(strategy.parallelize(build(name, layers, dropout)))
        model.compile(OPTIMIZERS[name], loss, accumulate=2)
        tables: list[Any] = []
        watch = ls.LambdaCallback(on_train_batch_end=lambda *_: tables.append(model.module.timetable()))
        history = model.fit(batches(), callbacks=[watch], verbose=0)
        return {
            "held": sum(parameter.numel() for parameter in model.module.parameters()),
            "loss": history.history["loss"],
            "weights": {key: value.clone() for key, value in model.state_dict().items()},
            "evaluate": model.evaluate(batches(), verbose=0)["loss"],
            "predict": model.predict([x for x, _ in batches()])["logits"],
            "table": tables[0],
        }


def one_device(name: str, layers: int) -> dict[str, Any]:
    """The same fit, by hand."""
    module = build(name, layers)
    optimizer = OPTIMIZERS[name](module.parameters())
    total, count, cycle = 0.0, 0, 0
    for index, (x, y) in enumerate(batches()):
        values = loss(module(**x), y)
        values.sum().backward()
        cycle += values.numel()
        total, count = total + values.sum().item(), count + values.numel()
        if index % 2:
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad /= cycle
            optimizer.step()
            optimizer.zero_grad()
            cycle = 0
    module.eval()
    with torch.no_grad():
        every = [loss(module(**x), y).flatten() for x, y in batches()]
        return {
            "loss": [total / count],
            "weights": module.state_dict(),
            "evaluate": torch.cat(every).mean().item(),
            "predict": torch.cat([module(**x).logits for x, _ in batches()]),
            "size": sum(parameter.numel() for parameter in module.parameters()),
        }
