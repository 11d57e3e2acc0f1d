"""Files whose tensors are not those of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lockstep.errors import CheckpointError
from lockstep.parallel.pretrained import PretrainedWeights
from lockstep.parallel.regions import Region, whole_region

SIZES = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 8,
}
EXPERTS: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"num_local_experts": 11},  # sorted as text 10 would be before 2
    "Qwen3MoeForCausalLM": {"num_experts": 4, "moe_intermediate_size": 6},
}


def model(name: str, sizes: dict[str, Any]) -> nn.Module:
    cls = getattr(pytest.importorskip("transformers"), name)
    made: nn.Module = cls(cls.config_class(**{**SIZES, **sizes}))
    return made


def saved(folder: Path, module: Any) -> Path:
    module.save_pretrained(folder, max_shard_size="2KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.mark.parametrize(("name", "sizes"), EXPERTS.items())
def test_experts_that_files_have_one_by_one_are_read_into_their_places(
    tmp_path: Path, name: str, sizes: dict[str, Any]
):
    whole = model(name, sizes)
    with torch.device("meta"):
        weights = PretrainedWeights(saved(tmp_path, whole), model(name, sizes))
    state = whole.state_dict()

    assert weights.names == state.keys()
    for key, value in state.items():
        assert torch.equal(weights.read(key, whole_region(value.shape), value.dtype), value), key
    gates = next(key for key in state if key.endswith("experts.gate_up_proj"))
    experts, rows, columns = state[gates].shape
    half = [*range(rows // 4), *range(rows // 2, 3 * rows // 4)]  # of both projections
    sizes_of_half = (experts, len(half), columns)
    region = Region(whole=(experts, rows, columns), sizes=sizes_of_half, offsets=(0, 0, 0), dim=1, columns=tuple(half))
    assert torch.equal(weights.read(gates, region, torch.float64), state[gates][:, half].double())


@pytest.mark.parametrize("lost", ["experts.3.w1", "experts.3."])
def test_a_lost_expert_is_told(tmp_path: Path, lost: str):
    name, sizes = next(iter(EXPERTS.items()))
    folder = saved(tmp_path, model(name, sizes))
    for file in folder.glob("*.safetensors"):
        held = load_file(file)
        save_file({key: value for key, value in held.items() if lost not in key}, file)
    with torch.device("meta"):
        module = model(name, sizes)

    with pytest.raises(CheckpointError, match=r"lacks .*model\.layers\.0\.mlp\.experts\.gate_up_proj.*experts\.0\.w1"):
        PretrainedWeights(folder, module)


def test_tensors_that_transformers_computes_are_refused_with_what_to_do(tmp_path: Path):
    sizes = {"pad_token_id": 0, "num_hidden_layers": 3}
    folder = saved(tmp_path, model("NomicBertModel", sizes))
    with torch.device("meta"):
        module = model("NomicBertModel", sizes)

    with pytest.raises(CheckpointError, match=r"Wqkv.*make the model with from_pretrained") as raised:
        PretrainedWeights(folder, module)
    assert "\n" not in str(raised.value)
