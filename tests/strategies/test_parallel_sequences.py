"""sequence_parallel=True: the numbers are those of one device, and each tensor rank keeps its own tokens' share."""

from __future__ import annotations

import hashlib
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep as ls
from lockstep.errors import ConfigError, DataError, UsageError

pytestmark = [pytest.mark.workers, pytest.mark.slow, pytest.mark.usefixtures("one_core")]

LIMIT_S = 250
MODELS = Path(__file__).parent / "programs" / "small_models.py"
LAYOUTS: dict[str, dict[str, Any]] = {
    "bert": {"tensor": 4},
    "gpt2": {"pipeline": 2, "tensor": 2, "schedule": "interleaved"},  # layers of two stages on each worker
    "llama": {"data": 2, "tensor": 2},
}
LAYERS = {"bert": 2, "gpt2": 4, "llama": 2}
TOKENS, CLIP, SEED = 8, 0.5, 3


def models() -> Any:
    return SimpleNamespace(**runpy.run_path(str(MODELS), run_name="small_models"))


def batches(tokens: int = TOKENS) -> list[tuple[dict[str, Tensor], Tensor]]:
    random = torch.Generator().manual_seed(0)
    found = []
    for rows in (8, 5, 1):
        words = torch.randint(1, 60, (rows, tokens), generator=random)
        mask = torch.ones_like(words)
        mask[0, tokens - 2 :] = 0
        found.append(({"input_ids": words, "attention_mask": mask}, words))
    return found


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.5, momentum=0.9)


# What the workers run.


def divide(index: int, path: str) -> None:
    torch.set_num_threads(1)
    own = models()
    found: dict[Any, Any] = {name: trained(own, name, grid) for name, grid in LAYOUTS.items()}
    found["dropped"] = [trained(own, "gpt2", {"data": 2, "tensor": 2}, dropout=0.3) for _ in range(2)]
    found["refused"] = refused(own)
    if index == 0:
        torch.save(found, path)


def trained(own: Any, name: str, grid: dict[str, Any], dropout: float = 0.0) -> dict[str, Any]:
    strategy = ls.ParallelStrategy(seed=SEED, sequence_parallel=True, **grid)
    widths: list[int] = []
    masks: list[bytes] = []
    with strategy.scope():
        module = own.build(name, layers=LAYERS[name], dropout=dropout)
        for part in module.modules():
            if isinstance(part, nn.LayerNorm) or "RMSNorm" in type(part).__name__:
                part.register_forward_pre_hook(lambda _, inputs: widths.append(inputs[0].shape[1]))
        if dropout:
            dropped = module.get_submodule("transformer.h.0.mlp.dropout")
            dropped.register_forward_hook(lambda _, __, kept: masks.append((kept == 0).numpy().tobytes()))
        model = ls.Model(module)
        model.compile(optimizer, own.loss, clip_norm=CLIP)
        history = model.fit(batches(), epochs=1, verbose=0).history["loss"]
        part = model.module
        whole = hashlib.sha256(
            b"".join(each.detach().numpy().tobytes() for each in part.parameters() if id(each) not in part.divided)
        )
        result = {
            "loss": history,
            "weights": {key: value.clone() for key, value in model.state_dict().items()},
            "predict": model.predict([x for x, _ in batches()])["logits"],
            "widths": sorted(set(widths)),
        }
    result["whole"] = strategy._job.workers.all_gather_bytes("whole parameters", whole.digest())
    masks.append(b"")
    result["masks"] = strategy._job.workers.all_gather_bytes("what was dropped", masks[0])
    result["grid"] = strategy.layout
    strategy.close()
    return result


def refused(own: Any) -> list[str]:
    strategy = ls.ParallelStrategy(seed=SEED, sequence_parallel=True, data=2, tensor=2)
    said = []
    with strategy.scope():
        part = strategy.parallelize(own.build("bert")).module
        for words in (batches(7)[0][0], {**batches()[0][0], "output_hidden_states": True}):
            try:
                part(**words)
            except (DataError, UsageError) as error:
                said.append(str(error))
    strategy.close()
    return said


# What the tests see of them.


@pytest.fixture(scope="module")
def found(start_module_job: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    path: Path = tmp_path_factory.mktemp("sequences") / "found.pt"
    job = start_module_job(divide, "index", str(path), workers=4)
    assert [worker.end(limit_s=LIMIT_S) for worker in job] == [0] * 4, job[0].errors
    result: dict[Any, Any] = torch.load(path, weights_only=False)
    return result


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_numbers_are_those_of_one_device(found: dict[Any, Any], name: str):
    own = models()
    module = own.build(name, layers=LAYERS[name])
    steps, total, count = optimizer(module.parameters()), 0.0, 0
    for x, y in batches():
        steps.zero_grad()
        values = own.loss(module(**x), y)
        values.mean().backward()
        nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        steps.step()
        total, count = total + values.sum().item(), count + values.numel()
    module.eval()

    near = 1e-6 if name == "llama" else 1e-9  # its norms compute in single precision
    assert found[name]["loss"] == pytest.approx([total / count], rel=near)
    torch.testing.assert_close(found[name]["weights"], dict(module.state_dict()), rtol=near, atol=near)
    with torch.no_grad():
        expected = torch.cat([module(**x).logits for x, _ in batches()])
    torch.testing.assert_close(found[name]["predict"], expected, rtol=near, atol=near)


@pytest.mark.parametrize("name", LAYOUTS)
def test_norms_see_their_own_tokens_only(found: dict[Any, Any], name: str):
    assert found[name]["widths"][0] == TOKENS // LAYOUTS[name]["tensor"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_ranks_hold_alike_stays_alike(found: dict[Any, Any], name: str):
    grid, whole = found[name]["grid"], found[name]["whole"]
    for worker in range(grid.size):
        place = grid.coordinate(worker)
        assert [whole[other] for other in range(grid.size) if grid.coordinate(other).stage == place.stage] == [
            whole[worker]
        ] * (grid.size // grid.pipeline)


def test_dropout_on_the_same_layout_twice_gives_the_same_bits(found: dict[Any, Any]):
    one, other = found["dropped"]
    assert all(torch.equal(other["weights"][name], value) for name, value in one["weights"].items())
    assert len(set(one["whole"])) == 1
    assert one["masks"] == other["masks"]


def test_each_rank_drops_units_of_its_own_tokens(found: dict[Any, Any]):
    masks = found["dropped"][0]["masks"]
    assert len(set(masks)) == 4  # two replicas of two tensor ranks
    assert [len(each) for each in masks] == [4 * TOKENS // 2 * 16] * 4  # rows, own tokens, units


def test_what_cannot_be_divided_is_refused(found: dict[Any, Any]):
    uneven, hidden = found["refused"]
    assert uneven.startswith("sequences of 7 tokens cannot be divided evenly among tensor=2 workers, as sequence_")
    assert hidden.startswith("output_hidden_states asks for what sequence_parallel=True divides among workers; leave")


def test_without_tensor_ranks_there_is_nothing_to_divide():
    with pytest.raises(ConfigError, match=r"sequence_parallel=True divides .* tensor=1 there is one; choose tensor=2"):
        ls.ParallelStrategy(sequence_parallel=True)
