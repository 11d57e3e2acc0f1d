from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import lockstep as ls
from lockstep.checkpoint.folder import CheckpointFolder
from lockstep.checkpoint.format import CheckpointRecord, Contents
from lockstep.checkpoint.weights import stream_weights
from lockstep.errors import CheckpointError
from lockstep.parallel.pretrained import INDEX

WEIGHTS = {
    "bias": torch.tensor(0.5, dtype=torch.bfloat16),
    "mask": torch.tensor([True, False, True]),
    "weight": torch.randn(3, 5),
    "empty": torch.empty(0, 4),
    "numbers": torch.arange(4),
}


def written(folder: Path, step: int, **modules: dict[str, torch.Tensor]) -> Path:
    record = CheckpointRecord(step=step, run="a", replicas=(1,))
    return CheckpointFolder(folder).write(Contents(record=record, states={}, weights=modules))


def test_a_file_written_in_any_order_is_what_safetensors_reads(tmp_path: Path):
    path = tmp_path / "deep" / "model.safetensors"
    blank = {name: torch.empty_like(value, device="meta") for name, value in WEIGHTS.items()}

    stream_weights(path, blank, reversed(WEIGHTS.items()))

    found = load_file(path)
    assert {name: value.dtype for name, value in found.items()} == {name: each.dtype for name, each in WEIGHTS.items()}
    assert all(torch.equal(found[name], value) for name, value in WEIGHTS.items())
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert [each.name for each in path.parent.iterdir()] == ["model.safetensors"]


def test_a_stream_that_fails_leaves_the_file_of_before(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"before")

    def broken() -> object:
        yield "a", torch.ones(2)
        raise CheckpointError("broken")

    with pytest.raises(CheckpointError, match="broken"):
        stream_weights(path, {"a": torch.empty(2, device="meta")}, broken())  # type: ignore[arg-type]
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_type_without_a_word_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"a is torch\.complex128, which safetensors does not have"):
        stream_weights(tmp_path / "f", {"a": torch.empty(2, dtype=torch.complex128, device="meta")}, [])


def test_the_newest_checkpoint_is_exported(tmp_path: Path):
    written(tmp_path, 1, model={"weight": torch.zeros(2)})
    newest = written(tmp_path, 2, model=WEIGHTS)
    assert ls.export_weights(tmp_path, tmp_path / "out" / "model.safetensors") == newest
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["weight"], WEIGHTS["weight"])


def test_of_several_modules_one_is_named(tmp_path: Path):
    path = written(tmp_path, 1, generator={"a": torch.zeros(2)}, critic={"a": torch.ones(2)})
    with pytest.raises(CheckpointError, match="no weights of module=None; it has: 'critic', 'generator'"):
        ls.export_weights(path, tmp_path / "f")
    ls.export_weights(path, tmp_path / "f", module="critic")
    assert load_file(tmp_path / "f")["a"].tolist() == [1, 1]


def test_no_checkpoint_is_told(tmp_path: Path):
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        ls.export_weights(tmp_path, tmp_path / "f")


def test_damaged_weights_are_named_and_those_of_the_older_checkpoint_are_exported(tmp_path: Path):
    older = written(tmp_path, 1, model=WEIGHTS)
    newest = written(tmp_path, 2, model={"weight": torch.zeros(2)})
    flip_the_last_bit(newest / "weights.safetensors")

    with pytest.warns(UserWarning, match=r"step-00000002 is damaged \(weights.safetensors: the checksum of 'weight'"):
        assert ls.export_weights(tmp_path, tmp_path / "f") == older
    assert load_file(tmp_path / "f").keys() == WEIGHTS.keys()

    with pytest.raises(CheckpointError, match=r"step-00000002 is damaged \(weights.safetensors: the checksum of"):
        ls.export_weights(newest, tmp_path / "f")
    flip_the_last_bit(older / "weights.safetensors")
    with (
        pytest.warns(UserWarning, match="step-00000002 is damaged"),
        pytest.raises(CheckpointError, match="step-00000001 is damaged"),
    ):
        ls.export_weights(tmp_path, tmp_path / "f")


def flip_the_last_bit(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def tiny(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40}
    if name == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=40))
    kind, config = {
        "bert": (transformers.BertForMaskedLM, transformers.BertConfig),
        "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig),
        "mixtral": (transformers.MixtralForCausalLM, transformers.MixtralConfig),  # files have experts one by one
    }[name]
    return kind(config(**sizes, intermediate_size=32))


def saved(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder, max_shard_size="8KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def rekey(folder: Path, change: Any) -> None:
    """Renames the keys of all files of a folder, and of its index, as older versions wrote them."""
    for file in folder.glob("*.safetensors"):
        save_file({change(key): value for key, value in load_file(file).items()}, file, metadata={"format": "pt"})
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {change(key): file for key, file in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(index))


def contents(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.iterdir()}


OLDER = {
    "gpt2": lambda key: key.removeprefix("transformer."),
    "bert": lambda key: key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"),
}


@pytest.mark.parametrize(
    ("name", "older"),
    [*((name, False) for name in ("gpt2", "bert", "llama", "mixtral")), ("gpt2", True), ("bert", True)],
)
def test_files_like_others_are_the_same_and_have_the_new_weights(tmp_path: Path, name: str, older: bool):
    model = tiny(name)
    like = saved(tmp_path / "hub", model)
    (like / "tokenizer.json").write_text("{}")
    if older:
        rekey(like, OLDER[name])
    same = written(tmp_path / "same", 1, model=model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    trained = written(tmp_path / "trained", 1, model=model.state_dict())

    ls.export_weights(same, tmp_path / "back", like=like)
    ls.export_weights(trained, tmp_path / "new", like=like / INDEX)

    assert contents(tmp_path / "back") == contents(like)
    assert contents(tmp_path / "new").keys() == contents(like).keys()
    found = type(model).from_pretrained(tmp_path / "new").state_dict()
    assert all(torch.equal(found[key], value) for key, value in model.state_dict().items())


def test_files_like_others_have_their_dtypes(tmp_path: Path):
    model = tiny("gpt2")
    like = saved(tmp_path / "hub", model.bfloat16())
    path = written(tmp_path, 1, model=model.float().state_dict())
    ls.export_weights(path, tmp_path / "out", like=like)
    assert contents(tmp_path / "out") == contents(like)


def refusal(path: Path, target: Path, like: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        ls.export_weights(path, target, like=like)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_files_of_another_model_are_refused_before_anything_is_written(tmp_path: Path):
    state = tiny("gpt2").state_dict()
    like, target = saved(tmp_path / "hub", tiny("gpt2")), tmp_path / "out"
    bias = "transformer.h.0.ln_1.bias"

    lacking = written(tmp_path / "a", 1, model={key: value for key, value in state.items() if key != bias})
    assert bias in refusal(lacking, target, like)
    surplus = written(tmp_path / "b", 1, model={**state, "head": torch.randn(16)})
    assert "'head'" in refusal(surplus, target, like)
    other = written(tmp_path / "c", 1, model={**state, bias: torch.zeros(3)})
    assert all(word in refusal(other, target, like) for word in (bias, "(3,)", "(16,)"))
    path = written(tmp_path / "d", 1, model=state)
    assert "another folder" in refusal(path, like, like)
    assert "save_pretrained" in refusal(path, target, tmp_path / "nowhere")
    damaged = next(like.glob("*.safetensors"))
    damaged.write_bytes(b"\xff" * 8 + damaged.read_bytes()[8:])
    assert damaged.name in refusal(path, target, like)
    assert not target.exists()
