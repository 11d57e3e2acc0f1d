from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep_tools.recipes.mlm.batches import (
    IGNORED_LABEL,
    NO_POSITION,
    Inputs,
    MaskedBatches,
)
from lockstep_tools.recipes.mlm.config import MlmConfig
from lockstep_tools.recipes.text.tokenizer import TokenRows, WordPieceSettings, encode, new_tokenizer

CONFIG = MlmConfig(batch_size=16, length_window=4)


@pytest.fixture(scope="module")
def tokenizer(lines: list[str]) -> Any:
    return new_tokenizer(lines, WordPieceSettings(vocabulary=400), max_tokens=96)


@pytest.fixture(scope="module")
def rows(tokenizer: Any, lines: list[str]) -> TokenRows:
    return TokenRows(encode(tokenizer, lines, max_tokens=96))


def batches(
    rows: TokenRows, tokenizer: Any, *, max_tokens: int = 96, seed: int = 7, **changes: object
) -> MaskedBatches:
    config = replace(CONFIG, **changes)  # type: ignore[arg-type]
    return MaskedBatches(rows, tokenizer, config, max_tokens=max_tokens, seed=seed)


def unmasked(x: Inputs, labels: Tensor) -> list[list[int]]:
    """The rows as they were before masking, without padding."""
    tokens = x["input_ids"].clone()
    for row, (positions, answers) in enumerate(zip(x["masked_positions"], labels, strict=True)):
        valid = positions != NO_POSITION
        tokens[row, positions[valid]] = answers[valid]
    return [row[real.bool()].tolist() for row, real in zip(tokens, x["attention_mask"], strict=True)]


def equal(left: MaskedBatches, right: MaskedBatches) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a["input_ids"], b["input_ids"]) and torch.equal(y, z) for (a, y), (b, z) in pairs)


def test_every_row_comes_once_an_epoch_and_can_be_told_from_its_labels(rows: TokenRows, tokenizer: Any):
    data = batches(rows, tokenizer)
    found = [row for x, y in data for row in unmasked(x, y)]
    expected = [row.tolist() for row in rows.tokens.split(rows.lengths.tolist())]
    assert sorted(found) == sorted(expected)
    assert sorted(len(y) for _, y in data) == [12, *[16] * 8]
    assert len(data) == 9


def test_all_tensors_of_a_batch_have_its_rows_in_dim_0(rows: TokenRows, tokenizer: Any):
    for x, y in batches(rows, tokenizer):
        assert x["input_ids"].shape == x["attention_mask"].shape
        assert x["masked_positions"].shape == y.shape
        assert len(x["input_ids"]) == len(y)
        assert torch.equal(x["masked_positions"] == NO_POSITION, y == IGNORED_LABEL)
        assert {tensor.dtype for tensor in [*x.values(), y]} == {torch.int64}


def test_an_epoch_can_be_repeated_and_the_next_has_other_masks(rows: TokenRows, tokenizer: Any):
    data, same, other = (batches(rows, tokenizer, seed=seed) for seed in (7, 7, 8))
    assert equal(data, data)
    assert equal(data, same)
    assert not equal(data, other)
    same.set_epoch(1)
    assert not equal(data, same)
    data.set_epoch(1)
    assert equal(data, same)


def test_every_epoch_has_the_lines_in_another_order(rows: TokenRows, tokenizer: Any):
    data = batches(rows, tokenizer)
    first = [row for x, y in data for row in unmasked(x, y)]
    data.set_epoch(1)
    second = [row for x, y in data for row in unmasked(x, y)]
    assert first != second
    assert sorted(first) == sorted(second)


def test_a_batch_is_masked_anew_in_every_epoch_even_of_the_same_rows(tokenizer: Any, lines: list[str]):
    data = batches(TokenRows(encode(tokenizer, lines[:1], max_tokens=96)), tokenizer)
    (_, first) = next(iter(data))
    data.set_epoch(1)
    (_, second) = next(iter(data))
    assert first.shape == second.shape
    assert not torch.equal(first, second)


def test_the_published_order_is_drawn_once_through_a_buffer_and_masked_anew(rows: TokenRows, tokenizer: Any):
    data, other = (batches(rows, tokenizer, seed=seed, order="published", length_window=None) for seed in (7, 8))
    near = batches(rows, tokenizer, order="published", length_window=None, shuffle_buffer=20)
    expected = [row.tolist() for row in rows.tokens.split(rows.lengths.tolist())]

    first, masks = [[unmasked(x, y) for x, y in data], [y for _, y in data]]
    data.set_epoch(1)
    second = [unmasked(x, y) for x, y in data]

    assert first == second
    assert not any(torch.equal(a, b) for a, (_, b) in zip(masks, data, strict=True))
    assert first != [unmasked(x, y) for x, y in other]
    assert [len(batch) for batch in first] == [*[16] * 8, 12]
    assert sorted(row for batch in first for row in batch) == sorted(expected)
    order = [expected.index(row) for x, y in near for row in unmasked(x, y)]
    assert all(row < position + 20 for position, row in enumerate(order))
    assert order != sorted(order)


def test_special_tokens_are_never_predicted_nor_drawn(rows: TokenRows, tokenizer: Any):
    special = torch.tensor([0, 1, 2, 3])
    for x, y in batches(rows, tokenizer):
        assert not torch.isin(y, special).any()
        valid = x["masked_positions"] != NO_POSITION
        shown = x["input_ids"].gather(1, x["masked_positions"].clamp(min=0))[valid]
        assert not torch.isin(shown, special).any()


def test_a_batch_is_as_wide_as_its_longest_row_needs(rows: TokenRows, tokenizer: Any):
    for x, _ in batches(rows, tokenizer):
        longest = int(x["attention_mask"].sum(dim=1).max())
        assert x["input_ids"].shape[1] == -(-longest // 8) * 8


def test_full_padding_gives_every_batch_the_same_width(rows: TokenRows, tokenizer: Any):
    assert {x["input_ids"].shape[1] for x, _ in batches(rows, tokenizer, padding="full")} == {96}


def test_the_width_never_passes_the_sequence_length(tokenizer: Any, lines: list[str]):
    short = TokenRows(encode(tokenizer, lines, max_tokens=30))
    assert max(x["input_ids"].shape[1] for x, _ in batches(short, tokenizer, max_tokens=30)) == 30
