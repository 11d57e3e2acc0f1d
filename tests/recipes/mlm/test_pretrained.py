from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.recipes.conftest import MakeConfig
from transformers import BertConfig, BertForMaskedLM, BertModel, GPT2Config, PreTrainedTokenizerFast

from lockstep.errors import ConfigError
from lockstep_tools.recipes.mlm.batches import special_tokens
from lockstep_tools.recipes.mlm.model import load_pretrained
from lockstep_tools.recipes.mlm.train import build_mlm
from lockstep_tools.recipes.text.tokenizer import WordPieceSettings, train_wordpiece


@pytest.fixture
def folder(lines: list[str], tmp_path: Path) -> Path:
    """A tiny BertForMaskedLM of 500 tokens and its tokenizer, as transformers saves them."""
    torch.manual_seed(5)
    config = BertConfig(
        vocab_size=500, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    PreTrainedTokenizerFast(
        tokenizer_object=train_wordpiece(lines, WordPieceSettings(vocabulary=450)),
        **{f"{name}_token": token for name, token in names.items()},
    ).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def load(name: str | Path) -> object:
    return load_pretrained(str(name), dropout=0.0)


def test_weights_and_tokenizer_are_those_in_the_folder(folder: Path):
    module, tokenizer = load_pretrained(str(folder), dropout=0.2)
    theirs = BertForMaskedLM.from_pretrained(folder)
    state = module.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in theirs.state_dict().items())
    assert (len(tokenizer), tokenizer.pad_token_id, tokenizer.mask_token_id) == (450, 0, 4)
    assert special_tokens(tokenizer).sum() == 5
    assert module.bert.config.hidden_dropout_prob == 0.2


def test_a_run_begins_with_them_at_the_published_rate(folder: Path, tiny: MakeConfig):
    config = tiny(pretrained=str(folder), learning_rate=None, layers=2, hidden=128, feed_forward=512, vocabulary=30522)
    task = build_mlm(config)
    x, y = task.valid[0]
    assert task.module(**x).shape == (int((y != -100).sum()), 500)
    assert len(task.tokenizer) == 450
    assert config.first_rate == 1e-4


def test_a_size_given_beside_them_is_ignored_with_a_warning(folder: Path, tiny: MakeConfig):
    with pytest.warns(UserWarning, match=r"without effect, since pretrained='.*bert': layers, vocabulary"):
        build_mlm(tiny(pretrained=str(folder), hidden=128, feed_forward=512))


def test_lines_are_cut_off_at_the_positions_it_has(folder: Path, tiny: MakeConfig):
    edit(folder, max_position_embeddings=40)
    with pytest.raises(ConfigError, match=r"could not be loaded"):  # the weights have 512 positions
        load(folder)
    BertModel(BertConfig.from_pretrained(folder)).save_pretrained(folder)
    task = build_mlm(tiny(pretrained=str(folder), hidden=128, layers=2, feed_forward=512, vocabulary=30522))
    assert max(x["input_ids"].shape[1] for x, _ in task.train) == 40


def edit(folder: Path, **settings: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def tear(folder: Path, lines: list[str]) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def add_tokens(folder: Path, lines: list[str]) -> None:
    train_wordpiece(lines, WordPieceSettings(vocabulary=600)).save(str(folder / "tokenizer.json"))


def forget_mask(folder: Path, lines: list[str]) -> None:
    tokenizer = train_wordpiece(lines, WordPieceSettings(vocabulary=450))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]").save_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda folder, _: folder.rename(folder.with_name("moved")), "bert' could not be loaded ("),
        (lambda folder, _: (folder / "config.json").unlink(), "expected a folder written by save_pretrained, or a Hug"),
        (tear, "could not be loaded (SafetensorError: "),
        (lambda folder, _: GPT2Config().save_pretrained(folder), "is a model of type 'gpt2', expected a BERT"),
        (add_tokens, "has 500 embeddings for a tokenizer of 600 tokens; give"),
        (forget_mask, "has a tokenizer without a mask or padding token"),
    ],
)
def test_a_folder_that_cannot_be_used_is_told_in_one_line(
    folder: Path, lines: list[str], change: Callable[[Path, list[str]], object], complaint: str
):
    change(folder, lines)
    with pytest.raises(ConfigError) as raised:
        load(folder)
    assert complaint in str(raised.value)
    assert "\n" not in str(raised.value)
