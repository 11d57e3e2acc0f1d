"""Models made on the meta device, begun by the workers that hold their parts: the same bits on every layout."""

from __future__ import annotations

import gc
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep as ls

pytestmark = [pytest.mark.workers, pytest.mark.slow, pytest.mark.usefixtures("one_core")]

LIMIT_S = 250
MODELS = Path(__file__).parent / "programs" / "small_models.py"
# Of each layout the models, one after another with one strategy.
LAYOUTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "tensor": ({"data": 1, "tensor": 4}, ("bert", "gpt2")),
    "data and tensor": ({"data": 2, "tensor": 2}, ("bert", "plain")),
    "shared weights": ({"data": 2, "tensor": 2, "shard_parameters": True}, ("bert",)),
    "pipeline": ({"data": 2, "pipeline": 2}, ("gpt2",)),
    "pipeline and tensor": ({"pipeline": 2, "tensor": 2}, ("bert", "gpt2", "llama")),
}
EXPERIMENTS = [(name, layout) for layout, (_, names) in LAYOUTS.items() for name in names]
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
    for layout, (degrees, names) in LAYOUTS.items():
        strategy = ls.ParallelStrategy(seed=SEED, **degrees)
        with strategy.scope():
            for name in names:
                with torch.device("meta"):
                    module = own.build(name)
                model = ls.Model(strategy.parallelize(module, **plan(name)))
                found[name, layout] = copied(model)
                if (name, layout) == TRAINED:
                    model.compile(lambda parameters: torch.optim.AdamW(parameters, 0.01), own.loss)
                    found["losses"] = model.fit(batches(), epochs=1, verbose=0).history["loss"]
                    found["trained"] = copied(model)
        strategy.close()
    found["memory"] = measured()
    if index == 0:
        torch.save(found, path)


def plan(name: str) -> dict[str, Any]:
    """A plan of the user's own for the model that is of no known family."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {"tensor_plan": {"0": ColwiseParallel(), "2": RowwiseParallel()}} if name == "plain" else {}


def copied(model: ls.Model) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def memory_mb(line: str) -> float:
    """MB of this process, of a line of its status such as "VmRSS"."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kb,) = (int(each.split()[1]) for each in lines if each.startswith(f"{line}:"))
    return kb / 2**10


def measured() -> list[tuple[float, float]]:
    """Of each worker: MB that it came to hold in the meantime, MB that its part is."""
    strategy = ls.ParallelStrategy(seed=SEED, pipeline=2, tensor=2)
    with strategy.scope():
        with torch.device("meta"):
            module = big()
        gc.collect()  # what the models before it leave is no part of either number
        before = memory_mb("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        part = strategy.parallelize(module)
        more = memory_mb("VmHWM") - before
    held = sum(each.numel() * each.element_size() for each in part.parameters()) / 2**20
    everyones = strategy._job.workers.all_gather_numbers("memory", [more, held])
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
def alone() -> dict[tuple[str, str], dict[str, Tensor]]:
    """The weights that one worker begins with, which makes the same models one after another."""
    own, result = models(), {}
    for layout, (_, names) in LAYOUTS.items():
        strategy = ls.ParallelStrategy(seed=SEED)
        with strategy.scope(), torch.device("meta"):
            for name in names:
                result[name, layout] = copied(ls.Model(own.build(name)))
        strategy.close()
    return result


@pytest.mark.parametrize(("name", "layout"), EXPERIMENTS)
def test_a_model_begins_with_the_same_bits_on_every_layout(
    found: dict[Any, Any], alone: dict[tuple[str, str], dict[str, Tensor]], name: str, layout: str
):
    expected = alone[name, layout]
    assert list(found[name, layout]) == list(expected)
    assert [key for key, value in expected.items() if not torch.equal(found[name, layout][key], value)] == []


def test_models_of_one_strategy_begin_with_different_weights(alone: dict[tuple[str, str], dict[str, Tensor]]):
    first, second = alone["gpt2", "pipeline"], alone["gpt2", "tensor"]  # the first and the second of a strategy
    assert not torch.equal(first["transformer.wte.weight"], second["transformer.wte.weight"])


def test_what_is_trained_from_there_is_what_one_device_trains(
    found: dict[Any, Any], alone: dict[tuple[str, str], dict[str, Tensor]]
):
    own = models()
    module = own.build(TRAINED[0])
    module.load_state_dict(alone[TRAINED])
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
        assert more < own + 30  # the largest tensor, 4, and what imports and the allocator keep; the whole would be 80
