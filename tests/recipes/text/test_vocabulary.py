from __future__ import annotations

import pytest
import torch

from lockstep.recipes.text.tokenizer import Vocabulary, WordPieceSettings, train_wordpiece, wordpiece_vocabulary


@pytest.fixture(scope="module")
def vocabulary(lines: list[str]) -> Vocabulary:
    return wordpiece_vocabulary(train_wordpiece(lines, WordPieceSettings(vocabulary=400)))


def test_it_knows_its_special_tokens(vocabulary: Vocabulary):
    assert (vocabulary.size, vocabulary.pad_id, vocabulary.mask_id) == (400, 0, 4)
    assert vocabulary.is_special().nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4]


def test_lines_become_rows_cut_off_with_their_end_token(vocabulary: Vocabulary, lines: list[str]):
    rows = vocabulary.encode(lines, max_tokens=30)

    assert len(rows) == len(lines)
    assert int(rows.lengths.max()) == 30
    assert len(rows.tokens) == int(rows.lengths.sum())
    tokens, real = rows.padded(torch.arange(len(rows)), width=32, pad_id=0)
    ends = tokens.gather(1, rows.lengths[:, None] - 1)[:, 0]
    assert (ends == vocabulary.tokenizer.token_to_id("[SEP]")).all()
    assert (tokens[:, 0] == vocabulary.tokenizer.token_to_id("[CLS]")).all()
    assert (tokens[~real] == 0).all()


def test_rows_are_padded_in_the_order_asked_for(vocabulary: Vocabulary):
    texts = ["a statement", "an expression is evaluated", "x"]
    rows = vocabulary.encode(texts, max_tokens=64)

    tokens, real = rows.padded(torch.tensor([2, 0]), width=16, pad_id=0)

    assert [vocabulary.tokenizer.decode(row.tolist()) for row in tokens] == ["x", "a statement"]
    assert real.sum(dim=1).tolist() == rows.lengths[[2, 0]].tolist()
    assert tokens.dtype == torch.int64
