"""What the jobs of test_parallel_checkpoints.py do with checkpoints, on any layout; and a training by hand."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import shutil
import signal
import sys
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lockstep as ls

_MODELS = runpy.run_path(str(Path(__file__).with_name("small_models.py")), run_name="small_models")
EPOCHS = 3
SIZES = (9, 1, 8)  # of the batches of an epoch
EVERY = 4  # batches, so that it is saved in the middle of the second and the third epoch
loss, batches = _MODELS["loss"], partial(_MODELS["batches"], SIZES)


def build(name: str, dropout: float = 0.0) -> nn.Module:
    module: nn.Module = _MODELS["build"](name, layers=4, dropout=dropout)
    if name == "gpt2":
        module.get_parameter("transformer.h.1.mlp.c_proj.bias").requires_grad_(False)
    return module


class Shuffled(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """The rows of all batches."""

    def __init__(self) -> None:
        self.x = torch.cat([x["input_ids"] for x, _ in batches()])
        self.y = torch.cat([y for _, y in batches()])

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[dict[str, Tensor], Tensor]:
        return {"input_ids": self.x[row]}, self.y[row]


def shuffled() -> Iterable[Any]:
    return torch.utils.data.DataLoader(Shuffled(), 7, shuffle=True)


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Matrices decay, the others do not: two groups, as recipes have them."""
    every = list(parameters)
    groups = [[each for each in every if each.ndim > 1], [each for each in every if each.ndim < 2]]
    decays = zip(groups, (0.1, 0.0), strict=True)
    return torch.optim.AdamW([{"params": own, "weight_decay": decay} for own, decay in decays], 0.01)


def scheduler(made: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (1 + step))


def by_hand(name: str) -> dict[str, Tensor]:
    """The weights after an undisturbed training on one device."""
    module = build(name)
    made = optimizer(module.parameters())
    rate = scheduler(made)
    for _ in range(EPOCHS):
        for x, y in batches():
            loss(module(**x), y).mean().backward()
            made.step()
            made.zero_grad()
            rate.step()
    return module.state_dict()


def compiled(name: str, dropout: float = 0.0) -> ls.Model:
    """In the scope that is open, or on one device."""
    module = build(name, dropout)
    model = ls.Model(module)
    model.compile(optimizer, loss, scheduler=scheduler)
    return model


def trained(
    name: str, folder: str, *, resumed_from: str = "", kept_in: str = "", data: Any = None, dropout: float = 0.0
) -> dict[str, Any]:
    """A training that may go on from a copy of another one's checkpoint, and keeps its own."""
    model = compiled(name, dropout)
    callbacks: list[ls.Callback] = []
    if kept_in:
        callbacks.append(
            ls.ModelCheckpoint(f"{folder}/{kept_in}", save_weights_only=False, save_freq=EVERY, asynchronous=True)
        )
    if resumed_from:
        callbacks.append(ls.BackupAndRestore(f"{folder}/{resumed_from}", save_freq=False, delete_checkpoint=False))
    torch.manual_seed(3)
    history = model.fit(batches() if data is None else data, epochs=EPOCHS, callbacks=callbacks, verbose=0)
    return {"weights": copied(model), "history": history.history, "model": model}


def copied(model: ls.Model) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@contextlib.contextmanager
def on(**grid: Any) -> Iterator[ls.ParallelStrategy]:
    torch.set_num_threads(1)
    strategy = ls.ParallelStrategy(seed=7, communication=ls.CommunicationOptions(lost_after_s=60), **grid)
    try:
        with strategy.scope():
            yield strategy
    finally:
        strategy.close()


def pick(strategy: ls.Strategy, folder: str, kept_in: str, into: str, step: int = EVERY) -> None:
    """Puts one checkpoint of a training into a folder of its own."""
    if strategy.workers.is_chief:
        name = f"step-{step:08d}"
        shutil.copytree(f"{folder}/{kept_in}/{name}", f"{folder}/{into}/{name}")
    strategy.workers.all_gather_numbers("picked")


def damage(shard: Path) -> None:
    """Changes one bit."""
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def resaved(name: str, source: Path | str, into: str) -> None:
    """Loads a checkpoint into a new model, and saves that."""
    model = compiled(name)
    position = model.load_checkpoint(source)
    ls.CheckpointManager(model.checkpoint(), into).save(position.step)


def eight(folder: str) -> dict[str, Any]:
    """2 x 2 x 2."""
    results: dict[str, Any] = {}
    with on(data=2, pipeline=2, tensor=2) as strategy:
        results["undisturbed"] = trained("gpt2", folder, kept_in="kept", data=shuffled(), dropout=0.1)
        pick(strategy, folder, "kept", "again", 2 * EVERY)
        if strategy.workers.is_chief:
            damage(next(Path(f"{folder}/again").glob("step-*/weights/shard-00003*")))
        pick(strategy, folder, "kept", "again")
    with on(data=2, pipeline=2, tensor=2), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        results["again"] = trained("gpt2", folder, resumed_from="again", data=shuffled(), dropout=0.1)
        results["told"] = {"of the damage": [str(each.message) for each in said if "damaged" in str(each.message)]}
        resaved("gpt2", f"{folder}/one", f"{folder}/one on eight")
        results["from one"] = trained("gpt2", folder, resumed_from="one", kept_in="eight")
        model = results["from one"]["model"]
        results["gpt2 predicted"] = model.predict([batches()[0][0]])["logits"]
        model.save_weights(f"{folder}/gpt2/model.safetensors")
        model.load_weights(f"{folder}/gpt2/model.safetensors")
        results["loaded"] = copied(model)
    with on(data=2, pipeline=2, tensor=2, shard_optimizer=True):
        model = compiled("bert")
        model.fit(batches()[:1], verbose=0)
        results["bert predicted"] = model.predict([batches()[0][0]])["logits"]
        model.save_weights(f"{folder}/bert/model.safetensors")
        ls.CheckpointManager(model.checkpoint(), f"{folder}/bert on eight").save(1)
    return {name: plain(found) for name, found in results.items()}


def four(folder: str) -> dict[str, Any]:
    """1 x 4 x 1, and 2 x 1 x 2."""
    results: dict[str, Any] = {}
    with on(pipeline=4) as strategy:
        pick(strategy, folder, "eight", "line", 2 * EVERY)
        resaved("gpt2", f"{folder}/line", f"{folder}/eight on four")
        results["line"] = trained("gpt2", folder, resumed_from="line")
    with on(data=2, tensor=2, shard_parameters=True):
        resaved("bert", f"{folder}/bert on eight", f"{folder}/bert on four")
        resaved("gpt2", f"{folder}/line", f"{folder}/four on shares")
    with on(data=2, tensor=2) as strategy:
        results["norms"] = norms(strategy, folder)
        halves(strategy, folder)
    return {name: plain(found) for name, found in results.items()}


def own_model(
    strategy: ls.ParallelStrategy | None, last: nn.Module, dtype: torch.dtype
) -> tuple[ls.Model, nn.Sequential]:
    """Two layers of a user's own, divided if there is a strategy, and another module."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), last).to(dtype)
    styles = torch.distributed.tensor.parallel
    plan = {"0": styles.ColwiseParallel(), "2": styles.RowwiseParallel()}
    model = ls.Model(module if strategy is None else strategy.parallelize(module, tensor_plan=plan))
    model.compile(lambda p: torch.optim.AdamW(p, 0.1), nn.MSELoss(reduction="none"))
    return model, module


def halves(strategy: ls.ParallelStrategy, folder: str) -> None:
    """A model in bf16, saved, and saved again by one that has loaded it."""
    x = torch.ones(8, 4, dtype=torch.bfloat16)
    for source, target in ((None, "halves"), ("halves", "halves again")):
        model, _ = own_model(strategy, nn.Identity(), torch.bfloat16)
        if source is None:
            model.fit([(x, x)], verbose=0)
        else:
            model.load_checkpoint(f"{folder}/{source}")
        ls.CheckpointManager(model.checkpoint(), f"{folder}/{target}").save(1)


def norms(strategy: ls.ParallelStrategy, folder: str) -> dict[str, Any]:
    """A model of the user's own, whose norms count on each replica; the statistics of all, and those gone back to."""

    model, module = own_model(strategy, nn.BatchNorm1d(4), torch.float64)
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model.fit([(x, x)], verbose=0)
    ls.CheckpointManager(model.checkpoint(), f"{folder}/norms").save(1)
    again, restored = own_model(strategy, nn.BatchNorm1d(4), torch.float64)
    again.load_checkpoint(f"{folder}/norms")
    pairs = [(each[3].running_mean.tolist(), each[3].running_var.tolist()) for each in (module, restored)]
    everyones = strategy.workers.processes.all_gather_bytes("statistics", repr(pairs).encode())
    return {"statistics": [each.decode() for each in everyones], "weights": copied(again)}


def plain(found: Any) -> Any:
    """What another process can be given."""
    return {name: value for name, value in found.items() if name != "model"} if isinstance(found, dict) else found


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def refused(act: Callable[[], Any]) -> None:
    try:
        act()
    except ls.errors.LockstepError as error:
        say(f"{type(error).__name__}: {error}")


def terminated(model: ls.Model, index: int, folder: str) -> None:
    """Worker 1 gets SIGTERM in a fit with a backup."""

    def hear(batch: int, _: Any) -> None:
        if index == 1 and batch == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    callbacks = [ls.LambdaCallback(on_train_batch_end=hear), ls.BackupAndRestore(folder, save_freq=False)]
    try:
        model.fit(batches() * 3, callbacks=callbacks, verbose=0)
    except SystemExit as ending:
        say(f"ended with {ending.code}")


def in_trouble(folder: str) -> None:
    """What is refused; then worker 1 dies in a save, when it has written its own files."""
    from lockstep.checkpoint.manager import ShardedSave

    with on(tensor=2) as strategy:
        index = strategy.workers.processes.index
        model = compiled("gpt2")
        manager = ls.CheckpointManager(model.checkpoint(), folder)
        model.fit(batches()[:1], verbose=0)
        manager.save(1)
        own = f"{folder} of {index}"
        Path(own).mkdir()
        os.chdir(own)
        refused(lambda: ls.CheckpointManager(model.checkpoint(), "/proc/self/cwd/kept").save(1))
        refused(lambda: ls.Checkpoint(optimizer=model.optimizer))
        if index == 0:
            shutil.copytree(f"{folder}/step-00000001", "step-00000001")
            record = Path("step-00000001/checkpoint.json")
            document = json.loads(record.read_text().replace('"names": ', '"others": '))
            del document["checksum"]
            record.write_text(json.dumps({**document, "checksum": zlib.crc32(json.dumps(document).encode())}))
        refused(lambda: model.load_checkpoint(f"{folder} of 0"))
        if index == 0:
            shutil.copytree(folder, f"{folder} damaged")
            shutil.copytree(f"{folder}/step-00000001", f"{folder} damaged/step-00000003")
            shard = next(Path(f"{folder} damaged/step-00000003/weights").glob("shard-00002*"))
            damage(shard)
        strategy.workers.all_gather_numbers("damaged")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = model.load_checkpoint(f"{folder} damaged")
        say(f"went back to {found.step}: {[str(each.message) for each in said]}")
        terminated(model, index, f"{folder} ended")
        say("dies now")
        if index == 1:
            write = ShardedSave.write

            def die(writing: ShardedSave) -> None:
                write(writing)
                os.kill(os.getpid(), signal.SIGKILL)

            ShardedSave.write = die
        manager.save(2)
