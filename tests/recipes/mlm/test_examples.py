"""What the accuracy of a masked language model is compared with, and the words of the test text that it fills in."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
import torch

from lockstep.recipes.mlm.examples import constant_answer, fill_words
from lockstep.recipes.mlm.model import IGNORED_LABEL
from lockstep.recipes.mlm.train import build_mlm
from lockstep.recipes.training import compile_task
from lockstep.strategies.mirrored import MirroredStrategy

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.recipes.conftest import MakeConfig

    from lockstep.config import LogicalDevice


def test_the_constant_answer_is_the_most_frequent_token_of_the_training_text(tiny: MakeConfig):
    task = build_mlm(tiny())
    tokens = [token for line in task.text.train for token in task.tokenizer(line, truncation=True)["input_ids"][1:-1]]
    answer = Counter(tokens).most_common(1)[0][0]
    hidden = [label for _, labels in task.test for label in labels.flatten().tolist() if label != IGNORED_LABEL]

    constant = constant_answer(task.train, task.test, task.tokenizer)

    assert constant.token == task.tokenizer.convert_ids_to_tokens(answer)
    assert constant.accuracy == pytest.approx(hidden.count(answer) / len(hidden))
    assert constant.chance == 1 / len(task.tokenizer)


def test_words_are_hidden_one_at_a_time_and_filled_in_alike_on_any_number_of_replicas(
    tiny: MakeConfig, split_cpu: Callable[[int], tuple[LogicalDevice, ...]]
):
    devices = split_cpu(3)
    filled = []
    for replicas in (1, 3):
        task = build_mlm(tiny())
        with closing(MirroredStrategy(list(devices[:replicas]), seed=0)) as strategy:
            filled.append(fill_words(compile_task(task, strategy), task.text.test, task.tokenizer))

    assert filled[0].hidden == filled[1].hidden > 20
    assert filled[0].right == filled[1].right
    assert filled[0].surest
    for one, three in zip(filled[0].surest, filled[1].surest, strict=True):
        assert (one.word, str(one)) == (three.word, str(three))
        assert [token for token, _ in one.answers] == [token for token, _ in three.answers]
        assert [p for _, p in one.answers] == pytest.approx([p for _, p in three.answers], rel=1e-5)
        assert one.answers[0][0].isalpha()
        assert any(one.before + one.word + one.after in line for line in task.text.test)
    assert len({word.answers[0][0] for word in filled[0].surest}) == len(filled[0].surest)


def test_an_answer_is_that_of_the_module_for_the_line_with_the_word_hidden(tiny: MakeConfig):
    task = build_mlm(tiny())
    line = "alpha " * 3 + task.text.test[0]
    with closing(MirroredStrategy(seed=0)) as strategy:
        (first, *_) = fill_words(compile_task(task, strategy), [line], task.tokenizer).surest

    encoded = task.tokenizer(line, truncation=True, return_offsets_mapping=True)
    start = line.index(first.before + first.word) + len(first.before)
    position = [offset for offset, _ in encoded["offset_mapping"]].index(start, 1)
    ids = torch.tensor([encoded["input_ids"]])
    ids[0, position] = task.tokenizer.mask_token_id
    logits = task.module.eval()(input_ids=ids, masked_positions=torch.tensor([[position]]))[0, : len(task.tokenizer)]

    assert task.tokenizer.convert_ids_to_tokens(int(logits.argmax())) == first.answers[0][0]


@pytest.mark.parametrize("test_lines", [[], ["12 + 34 = 46; " * 10]], ids=["no line", "no word"])
def test_a_text_without_words_has_nothing_to_fill_in(test_lines: list[str], tiny: MakeConfig):
    task = build_mlm(tiny())
    with closing(MirroredStrategy(seed=0)) as strategy:
        filled = fill_words(compile_task(task, strategy), test_lines, task.tokenizer)

    assert (filled.hidden, filled.right, filled.surest) == (0, 0, ())
