"""LoRA in little memory: adapters of peft, bf16, activation checkpointing, no optimizer state for frozen weights.

    python examples/08_lora.py
    python examples/08_lora.py --devices cpu:4 --rank 16

A small GPT-2 learns English from docstrings of Python's own library; it stands for a model that you would load. Then
its weights are frozen, and adapters learn to write Python.
"""

import argparse
import ast
import importlib.util
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

import lockstep as ls

LENGTH = 64


def main() -> None:
    """Makes the model to adapt, adapts it, and says what that took."""
    args = parse_arguments()
    strategy = ls.MirroredStrategy(args.devices, seed=0)
    torch.manual_seed(0)
    english, code = texts()
    train, test = rows_of(code)
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=128, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    base = GPT2LMHeadModel(config)  # GPT2LMHeadModel.from_pretrained("gpt2"), without the next line
    before = fit(
        strategy, base, rows_of(english)[0], test, epochs=args.pretrain_epochs, lr=3e-3, precision=args.precision
    )

    # Add adapters before `ls.Model` copies the network to the devices. All other weights are frozen.
    lora = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    adapted = get_peft_model(base, lora)
    base.activation_checkpointing_enable({"use_reentrant": False})  # layers are computed again, not kept for backward
    after = fit(strategy, adapted, train, test, epochs=args.epochs, lr=5e-3, precision=args.precision)

    trained, of_all = adapted.get_nb_trainable_parameters()
    print(f"trained {trained:,} of {of_all:,} parameters ({trained / of_all:.1%})")
    # Float32 gradients and AdamW's two moments are 12 bytes for each trained parameter. All devices of one CPU have one
    # copy of weights and moments together, and so have those of one GPU without memory limits.
    print(f"gradients and moments: {trained * 12 / 2**20:.2f} MB; without LoRA {of_all * 12 / 2**20:.2f} MB")
    print(f"loss of a byte of Python: {before:.4f} before, {after:.4f} after (chance: {torch.tensor(256.0).log():.4f})")
    adapted.save_pretrained(args.output)  # the adapters alone; `adapted.merge_and_unload()` adds them to the weights


def fit(
    strategy: ls.Strategy, network: nn.Module, train: Tensor, test: Tensor, *, precision: str, epochs: int, lr: float
) -> float:
    """Trains what is not frozen. Returns the mean loss of a byte of the test."""
    optimizer = torch.optim.AdamW([parameter for parameter in network.parameters() if parameter.requires_grad], lr)
    with strategy.scope():
        model = ls.Model(network)
    model.compile(optimizer, next_byte_loss, precision=precision, clip_norm=1.0)  # the weights stay float32
    model.fit(DataLoader(TensorDataset(train), 32, shuffle=True, collate_fn=pair), epochs=epochs, verbose=2)
    return model.evaluate(DataLoader(TensorDataset(test), 128, collate_fn=pair), verbose=0)["loss"]


def next_byte_loss(outputs: CausalLMOutputWithCrossAttentions, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of all bytes of a device's rows, and their number.

    Rows end in padding (-100), so devices have different numbers of bytes. From the pair Lockstep takes the sum of all
    losses and divides it once by the number of all. A mean, such as `outputs.loss`, would not say how many it is of.
    """
    logits, targets = outputs.logits[:, :-1].flatten(0, 1).float(), targets[:, 1:].flatten()
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum"), (targets != -100).sum()


def pair(rows: list[tuple[Tensor]]) -> tuple[dict[str, Tensor], Tensor]:
    """What `fit` takes: (x, y). If x is a dict, the model gets it as keyword arguments."""
    targets = torch.stack([row for (row,) in rows])
    return {"input_ids": targets.clamp(min=0), "attention_mask": targets != -100}, targets


def texts() -> tuple[list[str], list[str]]:
    """Docstrings of functions of this Python, and the code of these functions."""
    english, code = [], []
    for package in ("asyncio", "email", "importlib", "logging"):
        for path in sorted(Path(importlib.util.find_spec(package).origin).parent.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
                    english.append(ast.get_docstring(node))
                    code.append(ast.unparse(node.body[1:]))
    return english, code


def rows_of(texts: list[str]) -> tuple[Tensor, Tensor]:
    """The first LENGTH bytes of each text, padded with -100: [rows, LENGTH]; a fifth of them is for the test."""
    found = [torch.tensor(list(text.encode()[:LENGTH])) for text in texts]
    rows = nn.utils.rnn.pad_sequence(found, batch_first=True, padding_value=-100)
    return rows[torch.arange(len(rows)) % 5 > 0], rows[::5]


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = "gpu" if ls.config.list_physical_devices("GPU") else "cpu:2"
    parser.add_argument("--devices", type=ls.config.request_devices, default=every, help="gpu, gpu:0,gpu:2 or cpu:4")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--pretrain-epochs", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--output", type=Path, default=Path("runs/lora"), help="folder of the adapters")
    return parser.parse_args()


if __name__ == "__main__":
    main()
