"""In which order the Trainer's sampler gives the rows of an epoch: batches of like length, in random order.

transformers' own ``group_by_length`` goes through an epoch from long to short a few times, which is another order than
a random one where long reviews are better than short ones, and it leaves the order of ``predict`` permuted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from lockstep.errors import ConfigError
from lockstep.extras import require
from lockstep.recipes.from_hub import load_named
from lockstep.recipes.shuffling import plan_batches, seeded_generator
from lockstep.recipes.text.tokenizer import END, MASK, PAD, START, UNKNOWN, WordPieceSettings, cached_wordpiece


def new_tokenizer(texts: Sequence[str], settings: WordPieceSettings, *, max_tokens: int, cache_dir: Path) -> Any:
    """A tokenizer for these texts, as a transformers tokenizer.

    Args:
        texts: the training part.
        settings: what to train with.
        max_tokens: longest row.
        cache_dir: folder of trained tokenizers.
    """
    transformers = require("transformers", "text")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=cached_wordpiece(texts, settings, cache_dir=cache_dir.expanduser()),
        model_max_length=max_tokens,
        model_input_names=["input_ids", "attention_mask"],
        pad_token=PAD,
        unk_token=UNKNOWN,
        cls_token=START,
        sep_token=END,
        mask_token=MASK,
    )


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a pretrained model.

    Raises:
        ConfigError: not found, or it cannot pad.
    """
    transformers = require("transformers", "text")
    tokenizer = load_named(name, transformers.AutoTokenizer, extra="text")
    if tokenizer.pad_token_id is None:
        raise ConfigError(
            f"pretrained={name!r} has a tokenizer without a padding token; expected BERT's [PAD]; give a folder whose"
            " tokenizer was saved with its special tokens"
        )
    return tokenizer


class ReviewRows(Dataset[dict[str, Any]]):
    """Reviews as the Trainer takes them: dicts of ``input_ids``, ``attention_mask`` (lists) and ``labels`` (int).

    Args:
        encoded: the tokens of each review, special ones at its ends.
        classes: the class of each.
        hide: part of the tokens, but for the ends, that stand as ``mask_id``; which ones depends on seed and epoch.
        mask_id: the token that stands for a hidden one.
        seed: where the drawing begins.
    """

    def __init__(
        self,
        encoded: Sequence[Sequence[int]],
        classes: Sequence[int],
        *,
        hide: float = 0.0,
        mask_id: int = 0,
        seed: int = 0,
    ) -> None:
        self._lengths = torch.tensor([len(row) for row in encoded], dtype=torch.int64)
        self._ends: list[int] = self._lengths.cumsum(0).tolist()
        self._tokens = torch.tensor([token for row in encoded for token in row], dtype=torch.int64)
        self._classes = list(classes)
        self._hide, self._mask_id, self._seed = hide, mask_id, seed
        self.set_epoch(0)

    @property
    def lengths(self) -> Tensor:
        """[rows] int64: tokens of each."""
        return self._lengths

    def set_epoch(self, epoch: int) -> None:
        """Has the tokens of that epoch hidden, counted from 0."""
        self._shown = self._tokens
        if self._hide:
            self._shown = self._tokens.masked_fill(self._hidden(seeded_generator(self._seed, epoch)), self._mask_id)

    def sorted_by_length(self) -> tuple[ReviewRows, list[int]]:
        """The same rows from the shortest to the longest, which pads least, and where each of them stood."""
        order: list[int] = self._lengths.argsort(stable=True).tolist()
        return ReviewRows([self._row(self._tokens, n) for n in order], [self._classes[n] for n in order]), order

    def __len__(self) -> int:
        return len(self._classes)

    def __getitem__(self, row: int) -> dict[str, Any]:
        tokens = self._row(self._shown, row)
        return {"input_ids": tokens, "attention_mask": [1] * len(tokens), "labels": self._classes[row]}

    def _row(self, tokens: Tensor, row: int) -> list[int]:
        end = self._ends[row]
        found: list[int] = tokens[end - int(self._lengths[row]) : end].tolist()
        return found

    def _hidden(self, generator: torch.Generator) -> Tensor:
        """[tokens of all rows] bool. Drawn at once: a generator for each row took 2 ms of a step."""
        hidden = torch.rand(len(self._tokens), generator=generator) < self._hide
        ends = self._lengths.cumsum(0)
        hidden[ends - 1] = False
        hidden[ends - self._lengths] = False
        return hidden


def encode(tokenizer: Any, texts: Sequence[str], *, max_tokens: int) -> list[list[int]]:
    """The tokens of each text, special ones included, cut off at ``max_tokens``."""
    rows: list[list[int]] = tokenizer(list(texts), truncation=True, max_length=max_tokens)["input_ids"]
    return rows


class GroupedOrder(Sampler[int]):
    """Row numbers whose every ``batch_size`` make a global batch; what is left over comes last.

    Depends on seed and epoch alone: not on the number of replicas, and an epoch that is begun again is the same.

    Args:
        rows: told the epoch too.
        batch_size: rows of a global batch.
        window: global batches that are sorted together.
        seed: where the drawing begins.
    """

    def __init__(self, rows: ReviewRows, *, batch_size: int, window: int, seed: int) -> None:
        self._rows, self._batch_size, self._window, self._seed = rows, batch_size, window, seed
        self._lengths = rows.lengths
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration that of the epoch, counted from 0."""
        self._epoch = epoch
        self._rows.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[int]:
        plan = plan_batches(
            self._lengths,
            batch_size=self._batch_size,
            window=self._window,
            generator=seeded_generator(self._seed, self._epoch),
        )
        plan.sort(key=lambda batch: len(batch) < self._batch_size)
        return iter(torch.cat(plan).tolist())
