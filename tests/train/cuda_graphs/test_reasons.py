"""Where steps cannot be recorded: the reason is in the log, once, and the numbers are those without recordings."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.stand_in import StandInDriver
from tests.train.cuda_graphs.conftest import Net, Train, alike, batches
from torch import Tensor, nn

from lockstep.collectives.communicator import SingleWorkerCommunicator
from lockstep.config import LogicalDevice, PhysicalDevice
from lockstep.replicas.watcher import Watcher, watching
from lockstep.train import cuda_graphs
from lockstep.train.callbacks.base import Callback, LambdaCallback, Logs
from lockstep.train.cuda_graphs import NotCapturableError, check_setup


def each(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def reading(outputs: Tensor, targets: Tensor) -> Tensor:
    return each(outputs, targets) * max(1.0, outputs.detach().sum().item())


def growing(number: Callable[[float], Any] = float) -> Callable[[Tensor, Tensor], Tensor]:
    numbers = itertools.count(1)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return each(outputs, targets) * number(float(next(numbers)))

    return loss


def branching() -> Callable[[Tensor, Tensor], Tensor]:
    numbers = itertools.count()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        values = each(outputs, targets)
        return values.neg().neg() if next(numbers) % 3 == 2 else values

    return loss


def own_generator() -> Callable[[Tensor, Tensor], Tensor]:
    generator = torch.Generator()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return each(outputs, targets) * torch.rand(len(targets), generator=generator)

    return loss


class Counting(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Averaging(Net):
    """Replaces a tensor that it reads in the next step, where it should write to it."""

    average: Tensor = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        average = self.average
        self.average = average * 0.5 + out.detach().mean(0)
        return self.outer(out - average)  # type: ignore[no-any-return]


class Hooked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.inner.register_forward_hook(lambda *_: None)


def rmsprop(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, 0.01)


def of_some(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(list(parameters)[:2], 2**-5)


@pytest.mark.parametrize(
    ("module", "settings", "reason"),
    [
        (
            Net,
            {"loss": lambda: reading},
            r"reads from the device: aten._local_scalar_dense.default at test_reasons.py:\d+ in reading",
        ),
        (
            Net,
            {"loss": growing, "shares": None},
            r"aten.mul.Tensor\(torch.float32\[8\], 2.0\) at test_reasons.py:\d+ in loss is aten.mul.Tensor",
        ),
        (
            Net,
            {"loss": lambda: growing(torch.tensor), "shares": None},
            r"aten.lift_fresh.default\(torch.float32\[\] of \[2.0\]\) at test_reasons.py:\d+ in loss is ",
        ),
        (
            Net,
            {"loss": lambda: growing(lambda number: torch.tensor([number] * 99).mean()), "shares": None},
            "lift_fresh",
        ),
        (
            Net,
            {"loss": branching, "shares": None},
            r"aten.sum.default\(torch.float32\[8\]\) at test_reasons.py:\d+ in loss is aten.neg",
        ),
        (
            Net,
            {"loss": own_generator, "shares": None},
            "captured: RuntimeError: aten.rand.generator draws from",
        ),
        (Counting, {}, "the attributes of a module changed between steps"),
        (Averaging, {}, "reads a tensor that is another one in every step; update it in place"),
        (Hooked, {}, "the hooks of a Linear would run once"),
        (Net, {"optimizer": rmsprop}, "not made by fused kernels: torch has no fused RMSprop"),
        (Net, {"optimizer": of_some}, "gradients are left after the update"),
        (Net, {"precision": "fp16"}, 'precision="fp16" asks on the host'),
        (Net, {"accumulate": 2}, "accumulate keeps gradients from step to step"),
        (lambda: Net(norm=True), {"sync_batchnorm": True}, "sync_batchnorm=True reads its counts on the host"),
    ],
    ids=[
        "host",
        "numbers",
        "host tensors",
        "large host tensors",
        "branches",
        "generator",
        "attributes",
        "tensors",
        "hooks",
        "optimizer",
        "other gradients",
        "fp16",
        "accumulation",
        "sync batch norm",
    ],
)
def test_steps_that_cannot_be_recorded(
    train: Train,
    module: Callable[[], nn.Module],
    settings: dict[str, Any],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_BEGINNINGS", 4)
    trained = []
    for graphs in (False, True):
        torch.manual_seed(0)
        made = {name: value() if name == "loss" else value for name, value in settings.items()}
        trained.append(train(module(), batches(80), epochs=1, graphs=graphs, **made))
    plain, refused = trained

    assert len(refused.reasons) == 1
    assert re.search(reason, refused.reasons[0]), refused.reasons
    assert sum(refused.replays) == 0
    assert alike(plain, refused)


def test_shapes_that_change_all_the_time(train: Train, net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_BEGINNINGS", 3)
    data = [tuple(column[: 4 + step] for column in batches(16, 16)[0]) for step in range(6)]
    refused = train(net, data)
    assert len(refused.reasons) == 1
    assert "more than 3 shapes" in refused.reasons[0]
    assert alike(train(net, data, graphs=False), refused)


def test_without_memory_for_the_batch_of_a_recording_the_training_goes_on(
    train: Train, net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(batch: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(cuda_graphs, "_cloned", full)
    refused = train(net, batches())
    assert refused.reasons == ["the step could not be captured: OutOfMemoryError: CUDA out of memory."]
    assert alike(train(net, batches(), graphs=False), refused)


class Meddling(Callback):
    """Changes things at the end of steps 5 and 7."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        super().__init__()
        self._change = change

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        if batch in (5, 7):
            self._change(self.model)


def scale_weights(model: Any) -> None:
    with torch.no_grad():
        model.module.inner.weight.mul_(0.5)


def load_optimizer(model: Any) -> None:
    model.optimizer.load_state_dict(model.optimizer.state_dict())


def more_decay(model: Any) -> None:
    for group in model.optimizer.param_groups:
        group["weight_decay"] += 0.25


def freeze(model: Any) -> None:
    model.module.outer.bias.requires_grad_(not model.module.outer.bias.requires_grad)


def drop_more(model: Any) -> None:
    model.module.drop.p += 0.25


def stop_dropping(model: Any) -> None:
    model.module.drop.train(not model.module.drop.training)


def add_hook(model: Any) -> None:
    model.module.register_forward_pre_hook(lambda module, given: (given[0] * 2.0,))


@pytest.mark.parametrize(
    ("change", "replays"),
    [
        (scale_weights, [11]),
        # Steps 6 and 7 are looked at, 8 and 9 again, and step 10 is recorded anew.
        *((change, [3, 4]) for change in (load_optimizer, more_decay, freeze, drop_more, stop_dropping)),
        (add_hook, [3]),
    ],
)
def test_what_callbacks_change_between_steps(train: Train, change: Callable[[Any], None], replays: list[int]) -> None:
    torch.manual_seed(0)
    # A hook is refused where there are other copies of the module.
    net, data, shares = Net(0.25), batches(8 * 14), None if change is add_hook else (2048, 2048)
    plain = train(net, data, epochs=1, shares=shares, graphs=False, callbacks=[Meddling(change)])
    recorded = train(net, data, epochs=1, shares=shares, callbacks=[Meddling(change)])
    assert recorded.replays == replays
    assert alike(plain, recorded)


def test_the_first_step_of_an_epoch_is_compared_again(train: Train, net: Net) -> None:
    trained = []
    for graphs in (False, True):
        held = [1.0]

        def loss(outputs: Tensor, targets: Tensor, held: list[float] = held) -> Tensor:
            return each(outputs, targets) * torch.tensor(0.5) * torch.tensor(held).sum()

        change = LambdaCallback(on_epoch_begin=lambda epoch, logs, held=held: held.append(float(epoch == 1)))
        trained.append(train(net, batches(64), epochs=3, loss=loss, graphs=graphs, shares=None, callbacks=[change]))
    plain, recorded = trained
    assert recorded.replays == [5]
    assert "lift_fresh" in recorded.reasons[0]
    assert alike(plain, recorded)


def test_a_watcher_hears_every_step(train: Train, net: Net) -> None:
    heard: list[float] = []

    class Listening(Watcher):
        def update_begins(self, replica: int, parameters: Any, totals: Any) -> None:
            heard.append(float(totals.count))

    with watching(Listening()):
        assert train(net, batches(64), epochs=1).replays == []
    assert heard == [4.0] * 2 * 8


def test_replicas_on_several_gpus() -> None:
    gpus = [
        PhysicalDevice(name=f"gpu:{n}", kind="GPU", memory=8, torch_device=torch.device("cpu"), driver=StandInDriver())
        for n in range(2)
    ]
    devices = tuple(
        LogicalDevice(name=gpu.name, kind="GPU", physical=gpu, memory_limit=None, torch_device=gpu.torch_device)
        for gpu in gpus
    )
    strategy = SimpleNamespace(devices=devices, workers=SingleWorkerCommunicator(2))
    module = SimpleNamespace(
        module=nn.Linear(1, 1), is_compiled=False, pipeline=None, shards_weights=False, has_sync_batchnorm=False
    )
    optimizer = SimpleNamespace(
        plain=torch.optim.Adam(module.module.parameters()), storages=SimpleNamespace(not_fused=None)
    )
    config = SimpleNamespace(precision="fp32", accumulate=1)
    setup: Any = SimpleNamespace(strategy=strategy, module=module, optimizer=optimizer, config=config, train_step=None)
    with pytest.raises(NotCapturableError, match="several GPUs"):
        check_setup(setup, optimizer)
