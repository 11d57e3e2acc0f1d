"""The forms in which a batch has the model's inputs: with a pipeline they are what they are for every strategy."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import lockstep as ls
from lockstep.errors import LockstepError

pytestmark = [pytest.mark.workers, pytest.mark.slow]

PROGRAM = Path(__file__).parent / "programs" / "small_models.py"
SIZES = (5, 4, 3)
Inputs = dict[str, Tensor]
FORMS: dict[str, Callable[[Inputs], Any]] = {
    "alone": lambda x: x["input_ids"],
    "a tuple": lambda x: (x["input_ids"], x["attention_mask"]),
    "a list": lambda x: [x["input_ids"], x["attention_mask"]],
    "a dict": dict,
}
REFUSED: dict[str, Callable[[Inputs], Any]] = {
    "misspelled": lambda x: {"input_ids": x["input_ids"], "atention_mask": x["attention_mask"]},
    "no words": lambda x: {"attention_mask": x["attention_mask"]},
}


def models() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(PROGRAM), run_name="small_models"))


def run_job() -> dict[str, Any]:
    torch.set_num_threads(1)
    small = models()
    found: dict[str, Any] = {}
    for form, given in (FORMS | REFUSED).items():
        batches = [(given(x), y) for x, y in small.batches(SIZES)]
        strategy = ls.ParallelStrategy(seed=7, pipeline=2, communication=ls.CommunicationOptions(lost_after_s=60))
        with closing(strategy), strategy.scope():
            model = ls.Model(strategy.parallelize(small.build("bert")))
            model.compile(small.OPTIMIZERS["bert"], small.loss)
            if form in REFUSED:
                try:
                    model.predict(batches)
                except LockstepError as error:
                    found[form] = f"{type(error).__name__}: {error}"
                continue
            history = model.fit(batches, verbose=0)
            predicted = model.predict(batches)
            found[form] = (history.history["loss"], model.state_dict(), predicted["logits"])
    strategy = ls.ParallelStrategy(seed=7, pipeline=2, communication=ls.CommunicationOptions(lost_after_s=60))
    with closing(strategy), strategy.scope():
        model = ls.Model(strategy.parallelize(small.build("bert")))
        model.compile(small.OPTIMIZERS["bert"], by_name)
        history = model.fit([(x, named(y)) for x, y in small.batches(SIZES)], verbose=0)
        found["named"] = (history.history["loss"], model.state_dict())
    return found


def named(targets: Tensor) -> dict[str, Any]:
    """Targets with a list that has one item a row, by which the loss is weighed."""
    return {"targets": targets, "names": [f"{2 + row}" for row in range(len(targets))]}


def by_name(outputs: Any, y: dict[str, Any]) -> Tensor:
    values: Tensor = models().loss(outputs, y["targets"])
    return values * torch.tensor([float(name) for name in y["names"]], dtype=values.dtype)[:, None]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return ls.launch(run_job, workers=2, timeout_s=200)


def call(module: torch.nn.Module, x: Any) -> Any:
    if isinstance(x, dict):
        return module(**x)
    return module(*x) if isinstance(x, (tuple, list)) else module(x)


@pytest.mark.parametrize("form", FORMS)
def test_a_pipeline_takes_the_inputs_as_one_device_does(results: dict[str, Any], form: str):
    small = models()
    module = small.build("bert")
    optimizer = small.OPTIMIZERS["bert"](module.parameters())
    batches = [(FORMS[form](x), y) for x, y in small.batches(SIZES)]
    total = count = 0.0
    for x, y in batches:
        values = small.loss(call(module, x), y)
        optimizer.zero_grad()
        values.mean().backward()
        optimizer.step()
        total, count = total + values.sum().item(), count + values.numel()
    module.eval()
    with torch.no_grad():
        logits = torch.cat([call(module, x).logits for x, _ in batches])
    losses, weights, predicted = results[form]

    assert losses == pytest.approx([total / count], rel=1e-10)
    torch.testing.assert_close(weights, dict(module.state_dict()), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(predicted, logits, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("form", "names"), [("misspelled", ["atention_mask", "input_ids"]), ("no words", ["input_ids"])]
)
def test_inputs_that_the_model_does_not_take_are_refused(results: dict[str, Any], form: str, names: list[str]):
    assert results[form].startswith("DataError")
    assert all(name in results[form] for name in names)


def test_a_list_of_rows_in_the_targets_goes_with_their_rows(results: dict[str, Any]):
    small = models()
    module = small.build("bert")
    optimizer = small.OPTIMIZERS["bert"](module.parameters())
    total = count = 0.0
    for x, y in small.batches(SIZES):
        values = by_name(module(**x), named(y))
        optimizer.zero_grad()
        values.mean().backward()
        optimizer.step()
        total, count = total + values.sum().item(), count + values.numel()
    losses, weights = results["named"]

    assert losses == pytest.approx([total / count], rel=1e-10)
    torch.testing.assert_close(weights, dict(module.state_dict()), rtol=1e-9, atol=1e-10)
