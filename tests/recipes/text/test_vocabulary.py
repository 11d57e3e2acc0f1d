from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep_tools.recipes.mlm.batches import special_tokens
from lockstep_tools.recipes.text.tokenizer import TokenRows, WordPieceSettings, encode, new_tokenizer


@pytest.fixture
def tokenizer(lines: list[str]) -> Any:
    return new_tokenizer(lines, WordPieceSettings(vocabulary=400), max_tokens=64)


def test_it_knows_its_special_tokens(tokenizer: Any):
    assert (len(tokenizer), tokenizer.pad_token_id, tokenizer.mask_token_id) == (400, 0, 4)
    assert special_tokens(tokenizer).nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4]


def test_lines_become_rows_cut_off_with_their_end_token(tokenizer: Any, lines: list[str]):
    rows = TokenRows(encode(tokenizer, lines, max_tokens=30))

    assert len(rows) == len(lines)
    assert int(rows.lengths.max()) == 30
    assert len(rows.tokens) == int(rows.lengths.sum())
    tokens, real = rows.padded(torch.arange(len(rows)), width=32, pad_id=0)
    ends = tokens.gather(1, rows.lengths[:, None] - 1)[:, 0]
    assert (ends == tokenizer.sep_token_id).all()
    assert (tokens[:, 0] == tokenizer.cls_token_id).all()
    assert (tokens[~real] == 0).all()


def test_rows_are_padded_in_the_order_asked_for(tokenizer: Any):
    texts = ["a statement", "an expression is evaluated", "x"]
    rows = TokenRows(encode(tokenizer, texts, max_tokens=64))
    tokens, real = rows.padded(torch.tensor([2, 0]), width=16, pad_id=0)
    assert [tokenizer.decode(row, skip_special_tokens=True) for row in tokens] == ["x", "a statement"]
    assert real.sum(dim=1).tolist() == rows.lengths[[2, 0]].tolist()
    assert tokens.dtype == torch.int64
