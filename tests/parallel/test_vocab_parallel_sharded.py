"""Scores of words stay divided among tensor ranks where replicas share the weights too."""

from __future__ import annotations

import pytest

import lockstep as ls

pytestmark = pytest.mark.slow


def job() -> tuple[list[bool], list[float]]:
    """In every worker: whether the loss was given divided scores, and the losses of two steps."""
    import torch
    import torch.nn.functional as F
    from transformers import GPT2Config, GPT2LMHeadModel

    from lockstep.parallel.vocab_parallel import VocabParallelLogits

    torch.set_num_threads(1)
    divided: list[bool] = []

    def loss(outputs, words):
        divided.append(isinstance(outputs.logits, VocabParallelLogits) and outputs.logits.divided)
        return F.cross_entropy(outputs.logits.transpose(1, 2), words, reduction="none")

    sizes = {"vocab_size": 40, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
    off = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 1, "eos_token_id": 1}
    strategy = ls.ParallelStrategy(data=2, tensor=2, shard_parameters=True, seed=0)
    words = torch.arange(5 * 8).view(5, 8) % 40
    with strategy.scope():
        torch.manual_seed(0)
        model = ls.Model(GPT2LMHeadModel(GPT2Config(**sizes, **off)))
        model.compile(lambda parameters: torch.optim.SGD(parameters, 0.5), loss)
    history = model.fit([({"input_ids": words}, words.roll(-1, 1))], epochs=3, verbose=0)
    strategy.close()
    torch.manual_seed(0)
    plain, found = GPT2LMHeadModel(GPT2Config(**sizes, **off)), []
    optimizer = torch.optim.SGD(plain.parameters(), 0.5)
    for _ in range(3):
        value = F.cross_entropy(plain(input_ids=words).logits.flatten(0, 1), words.roll(-1, 1).flatten())
        found.append(float(value))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    assert history.history["loss"] == pytest.approx(found, rel=1e-5)
    return divided, found


@pytest.mark.workers
def test_scores_stay_divided_where_weights_are_shared():
    divided, losses = ls.launch(job, workers=4, timeout_s=120)

    assert divided == [True] * 3
    assert losses[2] < losses[0]
