"""Models made on the meta device, begun by the workers that hold their parts: the same bits on every layout."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.replicas.resident_memory import ResidentPeak, resident_mb

pytestmark = pytest.mark.workers

LIMIT_S = 170
MODELS = Path(__file__).parent / "programs" / "small_models.py"
LAYOUTS: dict[str, dict[str, int]] = {
    "tensor": {"data": 1, "tensor": 4},
    "data and tensor": {"data": 2, "tensor": 2},
    "pipeline": {"data": 2, "pipeline": 2},
    "pipeline and tensor": {"pipeline": 2, "tensor": 2},
}
EXPERIMENTS = [*[(name, layout) for layout in LAYOUTS for name in ("bert", "gpt2")], ("llama", "pipeline and tensor")]
TRAINED = ("gpt2", "pipeline and tensor")
STEPS = 3
SEED = 5


def models() -> Any:
    return SimpleNamespace(**runpy.run_path(str(MODELS), run_name="small_models"))


def batches() -> list[tuple[dict[str, Tensor], Tensor]]:
    random = torch.Generator().manual_seed(0)
    words = [torch.randint(60, (6, 8), generator=random) for _ in range(STEPS)]
    return [({"input_ids": each}, each) for each in words]


def big() -> nn.Module:
    """80 MB, of which the largest tensor is 4."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=2048, hidden_size=512, num_hidden_layers=6, num_attention_heads=8, intermediate_size=2048
    )
    return transformers.BertForMaskedLM(config)


# What the workers run.


def begin(index: int, path: str) -> None:
    torch.set_num_threads(1)
    own = models()
    found: dict[Any, Any] = {}
    for name, layout in EXPERIMENTS:
        strategy = ls.ParallelStrategy(seed=SEED, **LAYOUTS[layout])
        with strategy.scope():
            with torch.device("meta"):
                module = own.build(name)
            model = ls.Model(strategy.parallelize(module))
            found[name, layout] = copied(model)
            if (name, layout) == TRAINED:
                model.compile(lambda parameters: torch.optim.AdamW(parameters, 0.01), own.loss)
                found["losses"] = model.fit(batches(), epochs=1, verbose=0).history["loss"]
                found["trained"] = copied(model)
        strategy.close()
    found["memory"] = measured()
    if index == 0:
        torch.save(found, path)


def copied(model: ls.Model) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def measured() -> list[tuple[float, float]]:
    """Of each worker: MB that it came to hold in the meantime, MB that its part is."""
    strategy = ls.ParallelStrategy(seed=SEED, pipeline=2, tensor=2)
    with strategy.scope():
        with torch.device("meta"):
            module = big()
        before = resident_mb()
        with ResidentPeak() as peak:
            part = strategy.parallelize(module)
    held = sum(each.numel() * each.element_size() for each in part.parameters()) / 2**20
    everyones = strategy._job.workers.exchange("memory", [peak.peak_mb - before, held])
    strategy.close()
    return [(float(more), float(own)) for more, own in everyones]


# What the tests see of them.


@pytest.fixture(scope="module")
def found(start_module_job: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    path: Path = tmp_path_factory.mktemp("meta") / "found.pt"
    job = start_module_job(begin, "index", str(path), workers=4)
    assert [worker.end(limit_s=LIMIT_S) for worker in job] == [0] * 4, job[0].errors
    result: dict[Any, Any] = torch.load(path, weights_only=False)
    return result


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Tensor]]:
    """The weights that one worker begins with."""
    own, result = models(), {}
    for name in ("bert", "gpt2", "llama"):
        strategy = ls.ParallelStrategy(seed=SEED)
        with strategy.scope(), torch.device("meta"):
            result[name] = copied(ls.Model(own.build(name)))
        strategy.close()
    return result


@pytest.mark.parametrize(("name", "layout"), EXPERIMENTS)
def test_a_model_begins_with_the_same_bits_on_every_layout(
    found: dict[Any, Any], alone: dict[str, dict[str, Tensor]], name: str, layout: str
):
    assert list(found[name, layout]) == list(alone[name])
    assert [key for key, value in alone[name].items() if not torch.equal(found[name, layout][key], value)] == []


def test_what_is_trained_from_there_is_what_one_device_trains(
    found: dict[Any, Any], alone: dict[str, dict[str, Tensor]]
):
    own = models()
    module = own.build(TRAINED[0])
    module.load_state_dict(alone[TRAINED[0]])
    optimizer, losses = torch.optim.AdamW(module.parameters(), 0.01), []
    for x, y in batches():
        optimizer.zero_grad()
        value = own.loss(module(**x), y).mean()
        value.backward()
        optimizer.step()
        losses.append(value.item())

    assert found["losses"] == pytest.approx([sum(losses) / STEPS], rel=1e-10)
    torch.testing.assert_close(found["trained"], dict(module.state_dict()), rtol=1e-9, atol=1e-9)


def test_no_worker_holds_more_than_its_part_and_one_tensor(found: dict[Any, Any]):
    for more, own in found["memory"]:
        assert 15 < own < 30  # of 80
        assert more < own + 12  # the largest tensor, 4, its share, and what the allocator keeps
