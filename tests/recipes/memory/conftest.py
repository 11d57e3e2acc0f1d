"""A small BERT of transformers to add adapters to."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture
def bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForSequenceClassification(BertConfig(vocab_size=50, **shape))
