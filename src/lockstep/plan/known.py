"""Sizes of well-known models, for where there is neither a folder nor a network. Published figures; a table."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from lockstep.errors import ConfigError
from lockstep.plan.shape import BERT_KEPT, GPT2_KEPT, LLAMA_KEPT, ModelShape

_gpt2 = partial(ModelShape, vocabulary=50257, sequence=1024, kept=GPT2_KEPT)
# As trained: 15% of the tokens are asked about; two rows of segments beside the positions.
_bert = partial(ModelShape, vocabulary=30522, sequence=512, embedding_rows=514, predicted=0.15, kept=BERT_KEPT)
_llama: Any = partial(ModelShape, gated=True, biases=False, tied=False, embedding_rows=0, kept=LLAMA_KEPT)
_llama2 = partial(_llama, vocabulary=32000, sequence=4096)
_llama3 = partial(_llama, vocabulary=128256, sequence=8192, kv_heads=8)
_megatron = partial(ModelShape, vocabulary=51200, sequence=2048)

KNOWN_SHAPES: Mapping[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _bert(name="bert-tiny", layers=2, hidden=128, heads=2),
        _bert(name="bert-base", layers=12, hidden=768, heads=12),
        _bert(name="bert-large", layers=24, hidden=1024, heads=16),
        _gpt2(name="gpt2", layers=12, hidden=768, heads=12),
        _gpt2(name="gpt2-medium", layers=24, hidden=1024, heads=16),
        _gpt2(name="gpt2-large", layers=36, hidden=1280, heads=20),
        _gpt2(name="gpt2-xl", layers=48, hidden=1600, heads=25),
        _llama2(name="llama-2-7b", layers=32, hidden=4096, heads=32, feed_forward=11008),
        _llama2(name="llama-2-13b", layers=40, hidden=5120, heads=40, feed_forward=13824),
        _llama2(name="llama-2-70b", layers=80, hidden=8192, heads=64, feed_forward=28672, kv_heads=8),
        _llama3(name="llama-3-8b", layers=32, hidden=4096, heads=32, feed_forward=14336),
        _llama3(name="llama-3-70b", layers=80, hidden=8192, heads=64, feed_forward=28672),
        _llama3(name="llama-3-405b", layers=126, hidden=16384, heads=128, feed_forward=53248),
        # Narayanan et al. 2021 (arXiv 2104.04473), tables 1 and 2.
        _megatron(name="megatron-1.7b", layers=24, hidden=2304, heads=24),
        _megatron(name="megatron-3.6b", layers=30, hidden=3072, heads=32),
        _megatron(name="megatron-7.5b", layers=36, hidden=4096, heads=32),
        _megatron(name="megatron-18b", layers=40, hidden=6144, heads=48),
        _megatron(name="megatron-39b", layers=48, hidden=8192, heads=64),
        _megatron(name="megatron-76b", layers=60, hidden=10240, heads=80),
        _megatron(name="megatron-145b", layers=80, hidden=12288, heads=96),
        _megatron(name="megatron-310b", layers=96, hidden=16384, heads=128),
        _megatron(name="megatron-530b", layers=105, hidden=20480, heads=128),
        _megatron(name="megatron-1t", layers=128, hidden=25600, heads=160),
        # Korthikanti et al. 2022 (arXiv 2205.05198), table 3.
        _megatron(name="megatron-22b", layers=48, hidden=6144, heads=64),
        _megatron(name="gpt-3", layers=96, hidden=12288, heads=96),
    )
}


def known_shape(name: str) -> ModelShape:
    """The model called ``name``, in any case, with or without the owner before it.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    short = name.rpartition("/")[2].lower().removesuffix("-uncased").removesuffix("-cased").removesuffix("-hf")
    if short not in KNOWN_SHAPES:
        raise ConfigError(
            f"the model {name!r} is no folder with a config.json and not in the table; give its sizes, its folder, or"
            f" one of {', '.join(KNOWN_SHAPES)}"
        )
    return KNOWN_SHAPES[short]
