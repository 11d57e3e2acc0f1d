from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer

from lockstep_tools.recipes.reviews.batches import ReviewRows
from lockstep_tools.recipes.text.tokenizer import WordPieceSettings, encode, new_tokenizer

ENCODED = [[2, 10, 11, 12, 3], [2, 20, 3], [2, 30, 31, 3]]


def test_a_new_tokenizer_is_one_that_transformers_saves_and_loads(rows: list[tuple[int, str]], tmp_path: Path):
    texts = [text for _, text in rows]
    settings = WordPieceSettings(vocabulary=200, chinese="words")

    tokenizer = new_tokenizer(texts, settings, max_tokens=16)
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")

    assert encode(again, texts, max_tokens=16) == encode(tokenizer, texts, max_tokens=16)
    assert set(again("书不错。")) == {"input_ids", "attention_mask"}
    assert (again.pad_token_id, again.mask_token_id, again.model_max_length) == (0, 4, 16)
    assert max(len(row) for row in encode(again, ["房间很好。" * 9], max_tokens=7)) == 7


def test_rows_are_what_a_collator_takes():
    rows = ReviewRows(ENCODED, [1, 0, 1])
    assert rows[1] == {"input_ids": [2, 20, 3], "attention_mask": [1, 1, 1], "labels": 0}
    assert rows.lengths.tolist() == [5, 3, 4]


def test_rows_can_be_sorted_by_length():
    in_order = ReviewRows(ENCODED, [1, 0, 1]).sorted_by_length()
    assert in_order.lengths.tolist() == [3, 4, 5]
    assert [in_order[n]["labels"] for n in range(3)] == [0, 1, 1]


def test_a_part_of_the_tokens_is_hidden_but_never_the_ends_and_others_in_each_epoch():
    rows = ReviewRows([[2, *range(100, 1100), 3]], [1], hide=0.3, mask_id=4, seed=5)

    def seen(epoch: int) -> torch.Tensor:
        rows.set_epoch(epoch)
        return torch.tensor(rows[0]["input_ids"])

    first, second = seen(0), seen(1)

    assert 240 < int((first == 4).sum()) < 360
    assert (first[0], first[-1]) == (2, 3)
    assert torch.equal(first[first != 4], torch.tensor([2, *range(100, 1100), 3])[first != 4])
    assert not torch.equal(first, second)
    assert torch.equal(first, seen(0))
