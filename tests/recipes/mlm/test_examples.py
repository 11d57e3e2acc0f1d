"""What the accuracy of a masked language model is compared with, and the tokens of the test text that it fills in."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from tests.conftest import MakeStrategy
from tests.recipes.conftest import MakeConfig

from lockstep_tools.recipes.mlm.examples import constant_answer, fill_tokens
from lockstep_tools.recipes.mlm.model import IGNORED_LABEL
from lockstep_tools.recipes.mlm.train import build_mlm
from lockstep_tools.recipes.training import compile_task


def test_the_constant_answer_is_the_most_frequent_token_of_the_training_text(tiny: MakeConfig):
    task = build_mlm(tiny())
    tokens = [token for line in task.text.train for token in task.tokenizer(line, truncation=True)["input_ids"][1:-1]]
    answer = Counter(tokens).most_common(1)[0][0]
    hidden = [label for _, labels in task.test for label in labels.flatten().tolist() if label != IGNORED_LABEL]
    constant = constant_answer(task.train, task.test, task.tokenizer)
    assert constant.token == task.tokenizer.convert_ids_to_tokens(answer)
    assert constant.accuracy == pytest.approx(hidden.count(answer) / len(hidden))
    assert constant.chance == 1 / len(task.tokenizer)


def test_tokens_are_hidden_one_at_a_time_and_filled_in_alike_on_any_number_of_replicas(
    tiny: MakeConfig, make_strategy: MakeStrategy
):
    filled = []
    for replicas in (1, 3):
        task = build_mlm(tiny())
        model = compile_task(task, make_strategy(replicas))
        filled.append(fill_tokens(model, task.text.test, task.tokenizer, most_frequent=7))

    assert filled[0].hidden == filled[1].hidden == 40
    assert filled[0].right == filled[1].right
    assert filled[0].surest
    for one, three in zip(filled[0].surest, filled[1].surest, strict=True):
        assert (one.text, str(one)) == (three.text, str(three))
        assert [token for token, _ in one.answers] == [token for token, _ in three.answers]
        assert [p for _, p in one.answers] == pytest.approx([p for _, p in three.answers], rel=1e-5)
        assert any(one.before + one.text + one.after in line for line in task.text.test)
    assert len({token.answers[0][0] for token in filled[0].surest}) == len(filled[0].surest)


def test_an_answer_is_that_of_the_module_for_the_line_with_the_token_hidden(
    tiny: MakeConfig, make_strategy: MakeStrategy
):
    task = build_mlm(tiny())
    line = task.text.test[0]
    tokens = task.tokenizer(line, truncation=True)["input_ids"]
    positions = [len(tokens) // 3, 2 * len(tokens) // 3]
    right, answers = 0, set()
    for position in positions:
        ids = torch.tensor([tokens])
        ids[0, position] = task.tokenizer.mask_token_id
        logits = task.module.eval()(input_ids=ids, masked_positions=torch.tensor([[position]]))
        answer = int(logits[0, : len(task.tokenizer)].argmax())
        answers.add(task.tokenizer.convert_ids_to_tokens(answer))
        right += answer == tokens[position]
    model = compile_task(task, make_strategy(1))
    filled = fill_tokens(model, [line], task.tokenizer, most_frequent=tokens[positions[1]])

    assert (filled.hidden, filled.right) == (2, right)
    assert filled.constant == 1 + (tokens[positions[0]] == tokens[positions[1]])
    assert {token.answers[0][0] for token in filled.surest} == answers


def test_no_line_has_nothing_to_fill_in(tiny: MakeConfig, make_strategy: MakeStrategy):
    task = build_mlm(tiny())
    filled = fill_tokens(compile_task(task, make_strategy(1)), [], task.tokenizer, most_frequent=7)
    assert (filled.hidden, filled.right, filled.surest) == (0, 0, ())
