"""Files whose tensors are not those of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.errors import CheckpointError
from lockstep.parallel.pretrained import PretrainedWeights


def test_experts_that_transformers_merges_are_refused_with_what_to_do(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=8,
        num_local_experts=2,
    )
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path)
    with torch.device("meta"):
        module = transformers.MixtralForCausalLM(config)

    with pytest.raises(CheckpointError, match=r"experts\.0\.w1.*make the model with from_pretrained") as raised:
        PretrainedWeights(tmp_path, module)
    assert "\n" not in str(raised.value)
