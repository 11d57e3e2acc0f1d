"""A batch with fewer rows than replicas: what a step that cannot take 0 rows gets to know, and what fit does."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from tests.oracle import assert_close, sgd, train, vectors
from torch import Tensor, nn

import lockstep as ls

SIZES = (9, 5, 2)


class TakesNoEmptyBatch(nn.Module):
    """Reshapes as attention layers do, which has no answer for 0 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.InstanceNorm1d(2, affine=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if not len(x):
            raise RuntimeError("cannot reshape tensor of 0 elements")
        out: Tensor = self.last(self.norm(x.reshape(len(x), 2, 3)).flatten(1))
        return out


def module() -> nn.Module:
    torch.manual_seed(0)
    return TakesNoEmptyBatch().double()


def batches() -> list[tuple[Tensor, Tensor]]:
    return vectors(SIZES, inputs=6)


def test_fit_runs_no_forward_pass_without_rows_and_equals_one_device(make_strategy):
    trained = module()
    with make_strategy(4).scope():
        model = ls.Model(trained)
        model.compile(optimizer=sgd, loss=F.cross_entropy)
    model.fit(batches(), epochs=1, verbose=0)
    alone = train(module(), batches()).module
    assert_close(trained, alone)
    x, y = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    assert model.evaluate(batches(), verbose=0)["loss"] == pytest.approx(F.cross_entropy(alone(x), y).item(), rel=1e-6)
    assert_close(model.predict([x for x, _ in batches()]), alone(x).detach())


def test_the_error_of_a_step_that_cannot_take_0_rows_says_so(make_strategy):
    strategy = make_strategy(4)
    mirrored = strategy.mirror(module())
    (batch,) = strategy.distribute_dataset(batches()[2:])
    with pytest.raises(RuntimeError) as raised:
        strategy.run(lambda x, y: mirrored(x), batch)
    notes = " ".join(raised.value.__notes__)
    assert all(word in notes for word in ("0 rows", "4 replicas", "drop_last", "ls.has_rows", "optimizer.step()"))


def test_an_error_in_a_shard_with_rows_says_nothing_of_0_rows(make_strategy):
    strategy = make_strategy(2)
    (batch,) = strategy.distribute_dataset([torch.ones(3)])
    with pytest.raises(ZeroDivisionError) as raised:
        strategy.run(lambda x: 1 // 0, (batch,))
    assert not any("0 rows" in note for note in raised.value.__notes__)


def test_a_step_that_runs_its_passes_only_where_there_are_rows_equals_one_device(make_strategy):
    strategy = make_strategy(4)
    plain = module()
    mirrored = strategy.mirror(plain)
    optimizer = strategy.mirror(sgd(plain.parameters()))

    def step(x: Tensor, y: Tensor, rows: int) -> None:
        optimizer.zero_grad()
        if ls.has_rows((x, y)):
            losses = F.cross_entropy(mirrored(x), y, reduction="none")
            ls.compute_average_loss(losses, global_batch_size=rows).backward()
        optimizer.step()

    for (x, y), rows in zip(strategy.distribute_dataset(batches()), SIZES, strict=True):
        strategy.run(step, (x, y, rows))
    assert_close(plain, train(module(), batches()).module)


def test_has_rows_looks_at_tensors_and_lists_of_rows(make_strategy):
    batch = {"x": [torch.ones(row + 3) for row in range(2)], "name": ["a", "b"], "n": 3}
    (shards,) = make_strategy(3).distribute_datasets_from_function(lambda _: [batch])
    assert [ls.has_rows(make_strategy(3).local_results(shards)[replica]) for replica in range(3)] == [
        True,
        False,
        False,
    ]
    assert not ls.has_rows(torch.ones(0, 3))
    with pytest.raises(ls.errors.DataError, match="has_rows"):
        ls.has_rows(3)


def test_a_module_that_cannot_take_0_rows_trains_where_no_shard_is_empty(make_strategy):
    strategy = make_strategy(4)
    plain = module()
    mirrored = strategy.mirror(plain)
    optimizer = strategy.mirror(sgd(plain.parameters()))

    def step(x: Tensor, y: Tensor) -> None:
        ls.compute_average_loss(F.cross_entropy(mirrored(x), y, reduction="none")).backward()
        optimizer.step()
        optimizer.zero_grad()

    data = batches()[:2]
    for batch in strategy.distribute_dataset(copy.deepcopy(data)):
        strategy.run(step, batch)
    assert_close(plain, train(module(), data).module)


@pytest.mark.parametrize("name", ["BERT", "GPT-2"])
def test_models_of_transformers_train_and_predict_where_shards_are_empty(make_strategy, name: str):
    transformers = pytest.importorskip("transformers")

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if name == "BERT":
                small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
                self.inner = transformers.BertModel(transformers.BertConfig(vocab_size=20, **small))
            else:
                tokens = {"vocab_size": 20, "bos_token_id": 0, "eos_token_id": 0}
                config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=8, **tokens)
                self.inner = transformers.GPT2Model(config)
            self.last = nn.Linear(16, 3)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            assert len(input_ids), "a forward pass without rows"
            hidden = self.inner(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            out: Tensor = self.last(hidden[:, -1])
            return out

    random = torch.Generator().manual_seed(1)
    data = [
        (
            {"input_ids": torch.randint(0, 20, (n, 6), generator=random), "attention_mask": torch.ones(n, 6).long()},
            torch.randint(0, 3, (n,), generator=random),
        )
        for n in (5, 2, 1)
    ]
    torch.manual_seed(0)
    trained = Scores().double()
    for part in trained.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    alone = train(copy.deepcopy(trained), data).module.eval()
    with make_strategy(4).scope():
        model = ls.Model(trained)
        model.compile(optimizer=sgd, loss=F.cross_entropy)
    model.fit(data, epochs=1, verbose=0)
    assert_close(trained, alone)
    expected = torch.cat([alone(**x) for x, _ in data]).detach()
    assert_close(model.predict([x for x, _ in data]), expected)
