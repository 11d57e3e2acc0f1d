"""A small GPT-2 on lines of text with Lockstep's Trainer, on two replicas.

python examples/coming_from/transformers_trainer_after.py
"""

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

import lockstep as ls
from lockstep.integrations.transformers import Trainer

TEXT = (TrainingArguments.__doc__ or "").splitlines()
LINES = [line.strip() for line in TEXT if line.strip()][:192]


def collate(lines: list[str]) -> dict[str, Tensor]:
    """Bytes as tokens; padding to the longest line does not count."""
    rows = [torch.tensor(list(line.encode()[:64])) for line in lines]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {
        "input_ids": tokens,
        "attention_mask": (tokens != 0).long(),
        "labels": tokens.masked_fill(tokens == 0, -100),
    }


def main() -> None:
    """Trains, prints the losses, and saves the weights."""
    set_seed(0)
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(
        vocab_size=256,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
        **no_dropout,
    )
    args = TrainingArguments(
        output_dir="trained",
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=3e-3,
        warmup_steps=2,
        logging_steps=2,
        remove_unused_columns=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    model = GPT2LMHeadModel(config)
    devices = ls.config.request_devices("cpu:2")  # on GPUs neither this nor the scope
    with ls.MirroredStrategy(devices).scope():
        trainer = Trainer(model, args, data_collator=collate, train_dataset=LINES)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
