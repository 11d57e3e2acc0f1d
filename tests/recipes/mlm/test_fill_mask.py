"""What the model is asked at the end, and what it says: beside transformers' own pipeline, and by hand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from transformers import pipeline

from lockstep.config import LogicalDevice
from lockstep.errors import ConfigError
from lockstep.recipes.mlm.fill_mask import FilledSentence, mask_words, tokenize_examples
from lockstep.recipes.mlm.train import build_mlm, train_mlm
from lockstep.strategies.mirrored import MirroredStrategy

if TYPE_CHECKING:
    from tests.recipes.conftest import MakeConfig

SplitCpu = Callable[[int], tuple[LogicalDevice, ...]]
TWO = "A [MASK] is bound to a [MASK] in the current namespace."


@pytest.fixture
def tokenizer(tiny: MakeConfig) -> Any:
    return build_mlm(tiny()).tokenizer


def test_one_whole_word_is_hidden_in_each_of_some_lines_spread_over_the_text(tokenizer: Any, lines: list[str]):
    asked = mask_words(lines, tokenizer, number=7, seed=0)

    assert len(asked) == 7
    for question, line in zip(asked, lines[::20], strict=True):
        assert question.answer is not None
        assert question.text.count("[MASK]") == 1
        assert question.text.lower().replace("[mask]", question.answer) == line.lower()
        (place,) = question.positions
        encoding = tokenizer.backend_tokenizer.encode(line)
        assert question.tokens[place] == tokenizer.mask_token_id
        assert encoding.tokens[place] == question.answer
        assert [*question.tokens[:place], *question.tokens[place + 1 :]] == [
            *encoding.ids[:place],
            *encoding.ids[place + 1 :],
        ]
    assert mask_words(lines, tokenizer, number=7, seed=0) == asked
    assert mask_words(lines, tokenizer, number=7, seed=1) != asked
    assert mask_words(["1 + 2"], tokenizer, number=7, seed=0) == ()


def test_sentences_that_hide_nothing_are_refused(tokenizer: Any):
    assert tokenizer.mask_token == "[MASK]"
    with pytest.raises(ConfigError, match=r"the example 'A list.' has no \[MASK\]; write \[MASK\] for each word"):
        tokenize_examples(["The [MASK].", "A list."], tokenizer)
    with pytest.raises(ConfigError, match=r"has no \[MASK\] among the first 48 tokens"):
        tokenize_examples([f"{'words ' * 60}[MASK]"], tokenizer)


def test_the_model_says_what_transformers_pipeline_says(tiny: MakeConfig, split_cpu: SplitCpu, tmp_path: Path):
    said = {}
    for replicas in (1, 3):
        with closing(MirroredStrategy(list(split_cpu(3))[:replicas], seed=0)) as strategy:
            result = train_mlm(
                tiny(epochs=2, dropout=0.0),
                strategy,
                examples=[TWO, "The [MASK] statement."],
                output_dir=tmp_path / "model",
                verbose=0,
            )
        said[replicas] = result.filled
    theirs = pipeline("fill-mask", str(tmp_path / "model"), top_k=3)
    first, second = theirs(TWO), theirs("The [MASK] statement.")  # for a list it sets an environment variable for good

    assert [len(each.guesses) for each in said[3]] == [2, 1]
    assert words(said[3]) == [[[g["token_str"] for g in mask] for mask in first], [[g["token_str"] for g in second]]]
    assert said[3][0].guesses[1][2].probability == pytest.approx(first[1][2]["score"], rel=1e-4)
    assert words(said[3]) == words(said[1])
    assert said[3][0].sentence.answer is None


def words(filled: tuple[FilledSentence, ...]) -> list[list[list[str]]]:
    return [[[guess.word for guess in guesses] for guesses in each.guesses] for each in filled]
