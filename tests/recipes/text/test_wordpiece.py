from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from lockstep.errors import ConfigError
from lockstep_tools.recipes.text.tokenizer import (
    SPECIAL_TOKENS,
    WordPieceSettings,
    train_wordpiece,
)

SETTINGS = WordPieceSettings(vocabulary=300)


def test_a_line_becomes_pieces_between_start_and_end_and_comes_back(lines: list[str]):
    tokenizer = train_wordpiece(lines, WordPieceSettings(vocabulary=2000))
    encoding = tokenizer.encode("The Statement, in a café, is evaluated.")
    assert encoding.tokens[0] == "[CLS]"
    assert encoding.tokens[-1] == "[SEP]"
    assert tokenizer.decode(encoding.ids) == "the statement, in a cafe, is evaluated."
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS.values()] == [0, 1, 2, 3, 4]


def test_the_vocabulary_is_at_most_what_was_asked_for(lines: list[str]):
    assert train_wordpiece(lines, SETTINGS).get_vocab_size() == 300
    assert train_wordpiece(lines[:2], WordPieceSettings()).get_vocab_size() < 400


def test_the_same_text_gives_the_same_ids_every_time(lines: list[str]):
    vocabularies = [train_wordpiece(lines, WordPieceSettings(vocabulary=900)).get_vocab() for _ in range(4)]
    assert all(vocabulary == vocabularies[0] for vocabulary in vocabularies)


def test_only_the_five_special_tokens_are_special(lines: list[str]):
    tokenizer = train_wordpiece(lines, SETTINGS)
    assert tokenizer.encode("a ##b [MASK]", add_special_tokens=False).tokens == ["a", "#", "#", "b", "[MASK]"]
    assert sorted(tokenizer.get_added_tokens_decoder()) == [0, 1, 2, 3, 4]


def test_a_vocabulary_below_the_characters_of_the_text(lines: list[str]):
    with pytest.raises(
        ConfigError, match=r"vocabulary=20 was given, but the special .* alone are 1\d\d; give at least"
    ):
        train_wordpiece(lines, WordPieceSettings(vocabulary=20))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocabulary": 5}, r"vocabulary=5 was given, expected more than the 5 special tokens and at most"),
    ],
)
def test_bad_settings(settings: dict[str, int], message: str):
    with pytest.raises(ConfigError, match=message):
        WordPieceSettings(**settings)


CHINESE = ["房间很不错，服务也不错", "这本书不错，内容很不错。", "不错的书", "很不错的房间"] * 3


def test_words_of_several_chinese_characters_are_one_token_wherever_they_stand():
    settings = WordPieceSettings(vocabulary=60, chinese="words")
    tokenizer = train_wordpiece(CHINESE, settings)
    assert tokenizer.encode("不错").tokens == ["[CLS]", "不错", "[SEP]"]
    assert tokenizer.encode("书，不错的").tokens == ["[CLS]", "书", "，", "不错", "的", "[SEP]"]
    assert not any(token.startswith("##") for token in tokenizer.get_vocab())
    assert tokenizer.get_vocab() == train_wordpiece(CHINESE, settings).get_vocab()
    assert tokenizer.decode(tokenizer.encode(CHINESE[0]).ids) == CHINESE[0]


def test_a_long_run_without_a_space_is_no_unknown_word():
    tokenizer = train_wordpiece(CHINESE, WordPieceSettings(vocabulary=60, chinese="words"))
    assert tokenizer.encode("房间不错" * 500).tokens.count("[UNK]") == 0


def test_a_character_that_is_not_known_leaves_its_neighbours_known():
    tokenizer = train_wordpiece(CHINESE, WordPieceSettings(vocabulary=60, chinese="words"))
    again = Tokenizer.from_str(tokenizer.to_str())
    assert again.encode("的真不错").tokens == ["[CLS]", "的", "[UNK]", "不错", "[SEP]"]
    assert again.encode("不错]的^-\\").tokens.count("[UNK]") == 4


def test_by_default_a_chinese_character_is_a_token_as_in_bert():
    tokenizer = train_wordpiece(CHINESE, WordPieceSettings(vocabulary=60))
    assert tokenizer.encode("不错").tokens == ["[CLS]", "不", "错", "[SEP]"]
