"""Evaluation and prediction of the Trainer on many replicas: transformers' own numbers on one device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import MakeStrategy

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")

from lockstep.integrations.transformers import Trainer  # noqa: E402  what it needs is there

REPLICAS = 4


def both(tiny: Any, task: Any, strategy: Any, folder: Any) -> list[Any]:
    """transformers' own Trainer, and ours, neither trained."""
    made = []
    for base, per_device, more in ((transformers.Trainer, 8, {}), (Trainer, 8 // REPLICAS, {"strategy": strategy})):
        args = tiny.arguments(str(folder), per_device, **task.args)
        given = {"data_collator": tiny.collate, "eval_dataset": task.valid, **task.more, **more}
        made.append(task.trainer(base)(model=task.model(), args=args, **given))
    return made


def numbers(metrics: dict[str, float], tiny: Any) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.endswith(tiny.TIMES)}


def inputs_and_losses(prediction: Any) -> dict[str, float]:
    return {
        "tokens": float(np.where(prediction.inputs > 0, prediction.inputs, 0).sum()),
        "far": float(np.std(prediction.losses)),
        "logits": float(np.abs(prediction.predictions).sum()),
    }


class Counted:
    """Metrics that are added up batch by batch."""

    def __init__(self) -> None:
        self.right = self.all = 0

    def __call__(self, prediction: Any, compute_result: bool = False) -> dict[str, float]:
        self.right += int((prediction.predictions.argmax(-1) == prediction.label_ids).sum())
        self.all += len(prediction.label_ids)
        return {"accuracy": self.right / self.all} if compute_result else {}


def features(tiny: Any) -> dict[str, Any]:
    task, rows = tiny.Task, tiny.rows
    tokens = {"model": lambda: tiny.model("MaskedLM"), "valid": rows(11, "tokens")}
    several = {"a": rows(5), "b": rows(9, seed=3)}
    return {
        "loss": task(),
        "metrics": task(more={"compute_metrics": tiny.accuracy}),
        "inputs": task(args={"include_for_metrics": ["inputs", "loss"]}, more={"compute_metrics": inputs_and_losses}),
        "batch by batch": task(args={"batch_eval_metrics": True}, more={"compute_metrics": Counted()}),
        "often to numpy": task(args={"eval_accumulation_steps": 1}, more={"compute_metrics": tiny.accuracy}),
        "several data sets": task(valid=several, more={"compute_metrics": tiny.accuracy}),
        "fewer logits": task(
            **tokens,
            more={"preprocess_logits_for_metrics": lambda logits, _: logits.argmax(-1), "compute_metrics": distinct},
        ),
        "hidden states": task(
            model=lambda: tiny.model(output_hidden_states=True), more={"compute_metrics": tiny.accuracy}
        ),
        "label smoothing": task(args={"label_smoothing_factor": 0.1}, more={"compute_metrics": tiny.accuracy}),
        "tokens": task(**tokens),
        "causal": task(model=lambda: tiny.model("CausalLM"), valid=rows(11, "tokens")),
        "bf16": task(model=lambda: tiny.model().float(), args={"bf16": True}, more={"compute_metrics": tiny.accuracy}),
        "all in bf16": task(
            model=lambda: tiny.model().float(), args={"bf16_full_eval": True}, more={"compute_metrics": tiny.accuracy}
        ),
    }


def distinct(prediction: Any) -> dict[str, float]:
    return {"distinct": float(len(np.unique(prediction.predictions))), "sum": float(prediction.label_ids.sum())}


NAMES = (
    *("loss", "metrics", "inputs", "batch by batch", "often to numpy", "several data sets", "fewer logits"),
    *("hidden states", "label smoothing", "tokens", "causal", "bf16", "all in bf16"),
)


@pytest.mark.parametrize("name", NAMES)
def test_evaluate_equals_one_device(tiny: Any, make_strategy: MakeStrategy, tmp_path: Any, name: str):
    task = features(tiny)[name]
    theirs, ours = both(tiny, task, make_strategy(REPLICAS), tmp_path)
    expected = numbers(theirs.evaluate(), tiny)
    found = numbers(ours.evaluate(), tiny)
    assert found == pytest.approx(expected, rel=1e-2 if "bf16" in name else 1e-5)
    assert len(found) > 1 or name in ("loss", "tokens", "causal")


def test_predict_gives_all_rows_in_order(tiny: Any, make_strategy: MakeStrategy, tmp_path: Any):
    theirs, ours = both(tiny, tiny.Task(more={"compute_metrics": tiny.accuracy}), make_strategy(REPLICAS), tmp_path)
    rows = tiny.rows(19, seed=4)  # batches of 8, 8 and 3 rows: one replica has none of the last

    expected, found = theirs.predict(rows), ours.predict(rows)

    np.testing.assert_allclose(found.predictions, expected.predictions, rtol=1e-10)
    np.testing.assert_array_equal(found.label_ids, expected.label_ids)
    assert numbers(found.metrics, tiny) == pytest.approx(numbers(expected.metrics, tiny), rel=1e-6)
    assert set(found.metrics) == set(expected.metrics)

    unlabelled = [{"input_ids": row["input_ids"]} for row in rows]
    expected, found = theirs.predict(unlabelled), ours.predict(unlabelled)
    np.testing.assert_allclose(found.predictions, expected.predictions, rtol=1e-10)
    assert found.label_ids is None


def test_what_is_changed_between_evaluations_counts(tiny: Any, make_strategy: MakeStrategy, tmp_path: Any, layout: str):
    _, ours = both(tiny, tiny.Task(), make_strategy(REPLICAS), tmp_path)
    before = ours.evaluate()["eval_loss"]
    with torch.no_grad():
        ours.model.classifier.bias += torch.tensor([5.0, -5.0])
    after = ours.evaluate()["eval_loss"]
    theirs, _ = both(tiny, tiny.Task(model=lambda: ours.model), make_strategy(REPLICAS), tmp_path)
    assert after == pytest.approx(theirs.evaluate()["eval_loss"], rel=1e-6)
    assert abs(after - before) > 1


def test_without_a_label_there_is_no_loss_and_no_nan(tiny: Any, make_strategy: MakeStrategy, tmp_path: Any):
    """One row of the batch has a label; three replicas have nothing to count."""
    valid = [{**row, "labels": row["labels"] if number == 5 else -100} for number, row in enumerate(tiny.rows(8))]
    theirs, ours = both(tiny, tiny.Task(valid=valid), make_strategy(REPLICAS), tmp_path)
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], rel=1e-6)
