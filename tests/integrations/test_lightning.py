"""Lightning's Trainer on several replicas equals its own run on one device with the same batches."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiers import partly_slow
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

lightning = pytest.importorskip("lightning")
torchmetrics = pytest.importorskip("torchmetrics")

from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score  # noqa: E402

from lockstep.errors import ConfigError, UsageError  # noqa: E402  what it needs is there
from lockstep.integrations.lightning import LockstepStrategy  # noqa: E402

BATCH, EPOCHS = 8, 2
TOLERANCE = 1e-6

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*treespec.*"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*self.log.*floating.*"),
]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Network(lightning.LightningModule):
    """Two layers; SGD with momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def loss(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out, y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = self.loss(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.log("val_loss", self.loss(self.net(x), y))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.3, momentum=0.9)


class Ignored(Network):
    def loss(self, out, y):
        return F.cross_entropy(out, y.masked_fill(y == 0, -100))


class Weighted(Network):
    def loss(self, out, y):
        return F.cross_entropy(out, y, weight=torch.tensor([1.0, 3.0, 0.5]))


class Summed(Network):
    def loss(self, out, y):
        return 0.05 * F.cross_entropy(out, y, reduction="none").sum()


class Penalised(Network):
    def loss(self, out, y):
        return F.cross_entropy(out, y) + 0.1 * out.pow(2).mean() + 0.01 * self.net[0].weight.pow(2).sum()


class Metrics(Network):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.f1 = MulticlassF1Score(3, average="macro")
        self.areas = torchmetrics.MetricCollection(
            {"area": MulticlassAUROC(3), "f": MulticlassF1Score(3)}, prefix="val_"
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self.net(x)
        self.accuracy(out, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("f1", self.f1(out, y), on_step=True, on_epoch=False)
        return self.loss(out, y)

    def on_train_epoch_end(self) -> None:
        self.log("f1_epoch", self.f1.compute())
        self.f1.reset()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.areas.update(self.net(x).softmax(1), y)
        self.log_dict(self.areas)


class Logs(Network):
    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self.net(x)
        loss = self.loss(out, y)
        self.log("item", loss.item(), on_step=True, on_epoch=True)
        self.log("rows", float(len(x)), on_step=True, on_epoch=True)
        self.log("sum", out.detach().sum(), on_step=True, on_epoch=True, reduce_fx="sum")
        self.log("max", out.detach().max(), on_step=True, on_epoch=True, reduce_fx="max")
        self.log("min", out.detach().min(), on_step=True, on_epoch=True, reduce_fx=torch.min)
        self.log("right", (out.argmax(1) == y).float().mean(), batch_size=len(x), on_step=True, on_epoch=True)
        self.log_dict({"step": float(self.global_step), "epoch": float(self.current_epoch)})
        return {"loss": loss, "out": out.detach(), "number": loss.detach() * 2}


class Attributes(Network):
    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []
        self.seen, self.right, self.average = 0, 0.0, torch.zeros(())
        self.kept: list[Any] = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self.net(x)
        loss = self.loss(out, y)
        self.seen += len(x)
        self.right += float((out.argmax(1) == y).sum())
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        self.last = out.detach()
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("seen", float(self.seen))

    def validation_step(self, batch, batch_idx):
        x, y = batch
        out = self.net(x)
        self.outputs.append({"loss": self.loss(out, y), "out": out})
        return out

    def on_validation_epoch_end(self) -> None:
        out = torch.cat([output["out"] for output in self.outputs])
        self.kept.append((out.std(), len(self.outputs), sum(output["loss"] for output in self.outputs)))
        self.log("val_spread", out.std())
        self.outputs.clear()


class TwoLoaders(Network):
    def validation_step(self, batch, batch_idx, dataloader_idx):
        x, y = batch
        self.log("val_loss", self.loss(self.net(x), y))
        self.log(f"val_{dataloader_idx}", float(len(x)), add_dataloader_idx=False, reduce_fx="sum")


class Scheduled(Network):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Plateau(Network):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.5)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class Contrastive(Network):
    def training_step(self, batch, batch_idx):
        out = self.all_gather(F.normalize(self.net(batch[0]), dim=1), sync_grads=True)
        return (out @ out.T).logsumexp(1).mean()


class Mixing(Contrastive):
    def training_step(self, batch, batch_idx):
        out = F.normalize(self.net(batch[0]), dim=1)
        return (out @ out.T).logsumexp(1).mean()


class Manual(Network):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@dataclass
class Task:
    """What is trained, and with which arguments of the Trainer."""

    module: Callable[[], Any] = Network
    trainer: dict[str, Any] = field(default_factory=dict)
    rows: int = 29  # the last batch has 5
    loaders: int = 1


TASKS = {
    "plain": Task(),
    "one row in the last batch": Task(rows=25),
    "one row, with metrics": Task(Metrics, rows=25),
    "clipping": Task(trainer={"gradient_clip_val": 0.1}),
    "clipping by value": Task(trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "accumulation": Task(trainer={"accumulate_grad_batches": 3, "gradient_clip_val": 0.2}),
    "schedule": Task(Scheduled),
    "plateau": Task(Plateau),
    "ignored labels": Task(Ignored),
    "class weights": Task(Weighted),
    "sum": Task(Summed),
    "penalty": Task(Penalised),
    "metrics": Task(Metrics),
    "logs": Task(Logs),
    "attributes": Task(Attributes),
    "gathered": Task(Contrastive),
    "two loaders": Task(TwoLoaders, loaders=2),
    "validation within the epoch": Task(trainer={"val_check_interval": 2}),
    "limits": Task(trainer={"limit_train_batches": 3, "limit_val_batches": 1, "max_steps": 5}),
}


class Record(lightning.Callback):
    """What callbacks see of each batch and each validation."""

    def __init__(self) -> None:
        self.numbers: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        gradient = sum(float(weight.grad.abs().sum()) for weight in pl_module.parameters() if weight.grad is not None)
        rates = {"lr": trainer.optimizers[0].param_groups[0]["lr"], "gradient": gradient}
        extra = {f"out {name}": float(value.detach().sum()) for name, value in outputs.items()}
        self.numbers.append({**_numbers(trainer.callback_metrics), **rates, **extra})

    def on_validation_end(self, trainer, pl_module):
        self.numbers.append(_numbers(trainer.callback_metrics))

    def on_train_end(self, trainer, pl_module):
        self.numbers.append(_numbers(trainer.callback_metrics))


def _numbers(metrics: Any) -> dict[str, float]:
    return {name: float(value.detach()) for name, value in metrics.items()}


def data(rows: int, seed: int = 0) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    dataset = TensorDataset(
        torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator)
    )
    return DataLoader(dataset, BATCH)


def trainer_with(strategy: Any, **named: Any) -> Any:
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger"), False)
    return lightning.Trainer(**{"accelerator": "cpu", "strategy": strategy, "max_epochs": EPOCHS, **quiet, **named})


def trained(task: Task, strategy: Any) -> tuple[Any, list[dict[str, float]]]:
    torch.manual_seed(0)
    module, record = task.module(), Record()
    trainer = trainer_with(strategy, callbacks=[record], **task.trainer)
    trainer.fit(module, data(task.rows), [data(21, seed) for seed in range(1, task.loaders + 1)])
    return module, record.numbers


def check_same(module: Any, expected: Any) -> None:
    for (name, weight), other in zip(expected.state_dict().items(), module.state_dict().values(), strict=True):
        scale = max(1.0, float(weight.abs().max()))
        assert float((weight - other).abs().max()) <= TOLERANCE * scale, name


QUICK = ("plain", "accumulation", "metrics", "logs", "attributes", "ignored labels")


@pytest.mark.parametrize("replicas", partly_slow([2, 3], 2))
@pytest.mark.parametrize("name", partly_slow(TASKS, *(name for name in TASKS if name not in QUICK)))
def test_equals_one_device(name: str, replicas: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*one device.*")
        expected, numbers = trained(TASKS[name], "auto")
        module, same = trained(TASKS[name], LockstepStrategy(replicas=replicas))
    check_same(module, expected)
    assert [list(line) for line in same] == [list(line) for line in numbers]
    for line, other in zip(same, numbers, strict=True):
        assert line == pytest.approx(other, rel=2e-6, abs=TOLERANCE)
    for attribute in ("seen", "right", "average", "kept", "last"):
        if hasattr(expected, attribute):
            torch.testing.assert_close(getattr(module, attribute), getattr(expected, attribute))


def test_weights_of_their_own(layout: str) -> None:
    expected, numbers = trained(TASKS["accumulation"], "auto")
    module, same = trained(TASKS["accumulation"], LockstepStrategy(replicas=2))
    check_same(module, expected)
    assert same[-1] == pytest.approx(numbers[-1], abs=TOLERANCE)


def test_test_and_predict_equal_one_device() -> None:
    class Tested(Metrics):
        def test_step(self, batch, batch_idx):
            x, y = batch
            out = self.net(x)
            self.accuracy(out, y)
            self.log_dict({"loss": self.loss(out, y), "accuracy": self.accuracy})

        def predict_step(self, batch, batch_idx):
            out = self.net(batch[0])
            return {"out": out, "names": [f"row {row}" for row in batch[1].tolist()], "mean": out.mean()}

    torch.manual_seed(0)
    module = Tested()
    same = copy.deepcopy(module)
    plain, ours = trainer_with("auto"), trainer_with(LockstepStrategy(replicas=3))
    expected, scores = plain.test(module, data(25), verbose=False), ours.test(same, data(25), verbose=False)
    assert scores == [pytest.approx(line, abs=TOLERANCE) for line in expected]
    for out, other in zip(ours.predict(same, data(25)), plain.predict(module, data(25)), strict=True):
        assert out["names"] == other["names"]
        torch.testing.assert_close((out["out"], out["mean"]), (other["out"], other["mean"]), atol=TOLERANCE, rtol=0)


def test_checkpoints_are_lightning_s_and_resume(tmp_path: Path) -> None:
    def callbacks(folder: str) -> list[Any]:
        best = lightning.pytorch.callbacks.ModelCheckpoint(
            tmp_path / folder, monitor="val_loss", save_last=True, filename="{step}"
        )
        return [best, Record()]

    def fit(strategy: Any, folder: str, epochs: int, path: Any = None) -> tuple[Any, Any]:
        torch.manual_seed(0)
        module, chosen = Scheduled(), callbacks(folder)
        trainer = trainer_with(strategy, callbacks=chosen, max_epochs=epochs, enable_checkpointing=True)
        trainer.fit(module, data(29), data(21, 1), ckpt_path=path)
        return module, chosen[0]

    fit("auto", "plain", 2)
    expected, plain = fit("auto", "plain", 4, tmp_path / "plain" / "last.ckpt")
    fit(LockstepStrategy(replicas=2), "ours", 2)
    module, ours = fit(LockstepStrategy(replicas=3), "ours", 4, tmp_path / "ours" / "last.ckpt")
    check_same(module, expected)
    assert Path(ours.best_model_path).name == Path(plain.best_model_path).name
    state, other = (torch.load(tmp_path / folder / "last.ckpt", weights_only=True) for folder in ("ours", "plain"))
    assert list(state) == list(other)
    torch.testing.assert_close(state["state_dict"], other["state_dict"], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(state["optimizer_states"], other["optimizer_states"], atol=TOLERANCE, rtol=0)
    assert state["lr_schedulers"] == other["lr_schedulers"]
    resumed, _ = fit("auto", "again", 5, tmp_path / "ours" / "last.ckpt")  # without Lockstep
    same, _ = fit("auto", "and again", 5, tmp_path / "plain" / "last.ckpt")
    check_same(resumed, same)


def test_early_stopping_and_rates_are_those_of_one_device() -> None:
    def run(strategy: Any) -> tuple[int, dict[str, list[float]]]:
        torch.manual_seed(0)
        monitor = lightning.pytorch.callbacks.LearningRateMonitor("step", log_momentum=True)
        stop = lightning.pytorch.callbacks.EarlyStopping("val_loss", patience=1, min_delta=0.02)
        logger = Lines()
        trainer = trainer_with(strategy, callbacks=[monitor, stop], max_epochs=9, logger=logger, log_every_n_steps=1)
        trainer.fit(Scheduled(), data(29), data(21, 1))
        return trainer.current_epoch, logger.lines

    epochs, lines = run("auto")
    same, others = run(LockstepStrategy(replicas=2))
    assert same == epochs < 9
    assert [list(line) for line in others] == [list(line) for line in lines]
    assert others == [pytest.approx(line, abs=TOLERANCE) for line in lines]


class Lines(lightning.pytorch.loggers.Logger):
    """Keeps what is logged."""

    name, version = "lines", 0

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, float]] = []

    def log_metrics(self, metrics, step=None):
        self.lines.append({**metrics, "at": float(step or 0)})

    def log_hyperparams(self, *_, **__):
        pass


def test_the_module_is_plain_again_afterwards() -> None:
    module, _ = trained(TASKS["metrics"], LockstepStrategy(replicas=2))
    expected, _ = trained(TASKS["metrics"], "auto")
    assert type(module.accuracy) is MulticlassAccuracy
    assert vars(module.accuracy).keys() == vars(expected.accuracy).keys()
    assert type(module.trainer) is lightning.Trainer
    copy.deepcopy(module)
    trainer_with("auto", max_epochs=1).fit(module, data(29), data(21, 1))


class Greatest(Network):
    """The greatest loss of the rows: that of the halves too, but not a share of a replica's gradients."""

    def loss(self, out, y):
        return F.cross_entropy(out, y, reduction="none").max()


class MixingInTraining(Network):
    """Its term is not there in evaluation mode."""

    def loss(self, out, y):
        loss = F.cross_entropy(out, y)
        return loss + out.var(0).mean() if self.training else loss


class MeanOfLosses(Network):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = self.loss(self.net(batch[0]), batch[1])
        self.mean(loss)
        return loss


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (Manual, ConfigError, "automatic_optimization=False"),
        (Mixing, ConfigError, "neither a mean nor a sum over rows"),
        (MixingInTraining, ConfigError, "neither a mean nor a sum over rows"),
        (Greatest, ConfigError, "neither a mean nor a sum over rows"),
        (MeanOfLosses, UsageError, "MeanMetric got one number in a step"),
    ],
)
def test_refused(module: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        trained(Task(module), LockstepStrategy(replicas=2))


def test_an_output_without_rows_is_refused() -> None:
    class Odd(Network):
        def predict_step(self, batch, batch_idx):
            return torch.zeros(7) + batch[0].sum()

    with pytest.raises(UsageError, match=r"output of predict_step has shapes \(7,\), \(7,\) for shards of 4, 4 rows"):
        trainer_with(LockstepStrategy(replicas=2)).predict(Odd(), data(8))


def test_a_logged_value_that_is_no_mean_is_warned_of() -> None:
    class Exponential(Network):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("perplexity", loss.exp())
            return loss

    with pytest.warns(UserWarning, match="perplexity of training_step is .* neither a mean nor a sum over rows"):
        trained(Task(Exponential), LockstepStrategy(replicas=2))


def test_a_metric_of_the_losses_of_rows_is_that_of_one_device() -> None:
    class Rows(MeanOfLosses):
        def training_step(self, batch, batch_idx):
            losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
            self.mean(losses)
            self.mean.update(losses.mean(), weight=len(losses))
            return losses.mean()

    expected, _ = trained(Task(Rows), "auto")
    module, _ = trained(Task(Rows), LockstepStrategy(replicas=3))
    assert float(module.mean.compute()) == pytest.approx(float(expected.mean.compute()), rel=TOLERANCE)


def test_counts_that_some_shards_leave_as_they_were_are_those_of_one_device() -> None:
    class Counting(Network):
        def __init__(self) -> None:
            super().__init__()
            self.hard, self.steps = 0, 0

        def training_step(self, batch, batch_idx):
            self.hard += int((batch[1] == 2).sum())
            self.steps += 1
            return super().training_step(batch, batch_idx)

    expected, _ = trained(Task(Counting), "auto")
    module, _ = trained(Task(Counting), LockstepStrategy(replicas=3))
    assert (module.hard, module.steps) == (expected.hard, expected.steps)


def test_a_dict_that_a_step_changes_is_warned_of_and_has_no_rows_of_comparisons() -> None:
    class Collecting(Network):
        def __init__(self) -> None:
            super().__init__()
            self.found: dict[str, list[int]] = {"rows": []}

        def training_step(self, batch, batch_idx):
            self.found["rows"].append(len(batch[1]))
            return super().training_step(batch, batch_idx)

    with pytest.warns(UserWarning, match=r"training_step changes self.found, a dict or a list of lists"):
        module, _ = trained(Task(Collecting), LockstepStrategy(replicas=2))
    assert module.found["rows"] == [4, 4, 4, 3] * EPOCHS  # replica 0's of 8, 8, 8, 5 rows


def test_devices_of_the_trainer_are_not_ignored() -> None:
    with pytest.raises(ConfigError, match=r"devices=3 and LockstepStrategy has 2 replicas; .*replicas=3"):
        trained(Task(trainer={"devices": 3}), LockstepStrategy(replicas=2))
