"""What a trained model says: of new texts through transformers' ``pipeline``, and of the test's reviews as a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.checkpoint.whole_file import write_whole
from lockstep.extras import require
from lockstep.recipes.reviews.table import Review


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the model says of a text.

    Args:
        text: what it was asked.
        label: the name of the likeliest class.
        score: its probability, as the model has it.
    """

    text: str
    label: str
    score: float


def ask(model: Any, tokenizer: Any, texts: Sequence[str], *, max_tokens: int) -> tuple[Answer, ...]:
    """Has a text-classification pipeline classify the texts.

    Args:
        model: a transformers model for sequence classification; it is put into eval mode.
        tokenizer: its own.
        texts: what to ask.
        max_tokens: where a text is cut off.
    """
    if not texts:
        return ()
    pipeline = require("transformers", "text").pipeline(
        "text-classification", model=model.eval(), tokenizer=tokenizer, device=model.device
    )
    # One at a time: for a list it sets an environment variable for good.
    found = [pipeline(text, truncation=True, max_length=max_tokens)[0] for text in texts]
    return tuple(
        Answer(text=text, label=answer["label"], score=float(answer["score"]))
        for text, answer in zip(texts, found, strict=True)
    )


def write_predictions(path: Path, reviews: Sequence[Review], logits: Tensor, names: Sequence[str]) -> None:
    """Writes a CSV file with the columns label, predicted, score and review, which any spreadsheet opens.

    Args:
        path: the file.
        reviews: of the test.
        logits: [reviews, classes].
        names: of the classes.
    """
    best = logits.float().softmax(dim=1).max(dim=1)
    written = io.StringIO(newline="")
    rows = csv.writer(written)
    rows.writerow(["label", "predicted", "score", "review"])
    for review, place, score in zip(reviews, best.indices.tolist(), best.values.tolist(), strict=True):
        rows.writerow([review.label, names[place], f"{score:.4f}", review.text])
    write_whole(path, written.getvalue())
