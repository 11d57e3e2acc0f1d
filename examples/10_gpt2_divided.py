"""A GPT-2 divided among eight workers: 2 replicas x 2 pipeline stages x 2 halves of each layer.

    python examples/10_gpt2_divided.py                    # starts the workers itself, on this machine
    lockstep run --workers 8 examples/10_gpt2_divided.py  # or lets a launcher do it, also on several hosts

Other layouts are a matter of flags, and give the same numbers: --data 1 --pipeline 1 --tensor 1 is one device. Each
worker holds a fourth of the model.
"""

import argparse
import ast
import importlib.util
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

import lockstep as ls

LENGTH = 64


def train(args: argparse.Namespace) -> None:
    """Every worker runs this."""
    # shard_optimizer: replicas also divide the optimizer's state among them (ZeRO-1); the numbers stay the same.
    strategy = ls.ParallelStrategy(
        data=args.data, pipeline=args.pipeline, tensor=args.tensor, shard_optimizer=args.data > 1,
        device=args.device, seed=0,
    )  # fmt: skip
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=128, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    with strategy.scope():
        # A module on the meta device has no memory: every worker makes its own part alone, so a model may be larger
        # than any of them. The weights depend on the strategy's seed, not on the layout.
        with torch.device("meta"):
            gpt2 = GPT2LMHeadModel(config)
        whole = gpt2.num_parameters()
        model = ls.Model(gpt2)
        # A function makes the optimizer, of the worker's own part.
        model.compile(lambda parameters: torch.optim.AdamW(parameters, 3e-3), loss=next_byte_loss, clip_norm=1.0)
    rows = docstrings()
    # The batch is that of all replicas. Within a replica, the pipeline divides its rows into microbatches.
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(rows.clamp(min=0), rows), 64, shuffle=True, collate_fn=pair)
    history = model.fit(data, epochs=args.epochs, verbose=2)
    parts = (parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in gpt2.parameters())
    own, first, last = sum(map(torch.numel, parts)), history.history["loss"][0], history.history["loss"][-1]
    if strategy.workers.is_chief:  # all workers have these numbers; one prints them
        print(f"{args.data} x {args.pipeline} x {args.tensor}: the chief has {own:,} of {whole:,} parameters")
        print(f"loss of a byte: {first:.4f}, then {last:.4f} (chance: {torch.tensor(256.0).log():.4f})", flush=True)
    strategy.close()


def next_byte_loss(outputs: CausalLMOutputWithCrossAttentions, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of all bytes of a shard, and their number: rows end in padding, so shards have different numbers."""
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten()
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum"), (targets != -100).sum()


def pair(rows: list[tuple[Tensor, Tensor]]) -> tuple[dict[str, Tensor], Tensor]:
    """What `fit` takes: (x, y), where x may be a dict of keyword arguments."""
    ids, targets = (torch.stack(column) for column in zip(*rows, strict=True))
    return {"input_ids": ids}, targets


def docstrings() -> Tensor:
    """The first LENGTH bytes of docstrings of this Python, padded with -100: [rows, LENGTH]."""
    found = []
    for path in sorted(Path(importlib.util.find_spec("asyncio").origin).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                found.append(torch.tensor(list(text.encode()[:LENGTH])))
    return torch.nn.utils.rnn.pad_sequence(found, batch_first=True, padding_value=-100)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for axis, what in (("data", "replicas"), ("pipeline", "stages of layers"), ("tensor", "parts of each layer")):
        parser.add_argument(f"--{axis}", type=int, default=2, help=what)
    parser.add_argument("--device", help="of each worker; default: its GPU, or the CPU")
    parser.add_argument("--epochs", type=int, default=6)
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse_arguments()
    if "RANK" in os.environ:  # a launcher has started this worker
        train(arguments)
    else:
        workers = arguments.data * arguments.pipeline * arguments.tensor
        enough = torch.cuda.device_count() >= workers  # each worker needs a GPU of its own, or none of them has one
        ls.launch(train, workers=workers, args=(arguments,), gpus_per_worker=None if enough else 0)
