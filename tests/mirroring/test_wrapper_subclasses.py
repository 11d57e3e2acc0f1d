"""Weights without memory of their own but tensors in them: each copy has its own inner tensors on its device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.stand_in import stand_in_gpus
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import lockstep as ls
from lockstep.errors import CheckpointError
from lockstep.mirroring.module.copies import Copying

ATEN = torch.ops.aten
KEEPING = (ATEN.detach.default, ATEN.clone.default, ATEN.alias.default, ATEN._to_copy.default)


class Boxed(torch.Tensor):
    """Every operation is that of the tensor inside, and of ``scale``, which is part of the value."""

    @staticmethod
    def __new__(cls, inside: Tensor, scale: Tensor) -> Boxed:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, inside.shape, dtype=scale.dtype, device=inside.device
        )

    def __init__(self, inside: Tensor, scale: Tensor) -> None:
        self.inside, self.scale = inside, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inside", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Boxed:
        return cls(inner["inside"], inner["scale"])

    def value(self) -> Tensor:
        return self.inside.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in KEEPING:
            inside = func(args[0].inside, **{key: value for key, value in kwargs.items() if key != "dtype"})
            return cls(inside, func(args[0].scale, **kwargs))
        if func is ATEN.copy_.default:
            args[0].inside.copy_(args[1].inside)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        name = func.__name__.split(".")[0]
        if name.endswith("_"):  # an update of the weight; its scale is 1
            tensors = tree_map(lambda leaf: leaf.inside if isinstance(leaf, cls) else leaf, args)
            func(*tensors, **kwargs)
            return None if isinstance(args[0], (list, tuple)) else args[0]
        return func(*tree_map(lambda leaf: leaf.value() if isinstance(leaf, cls) else leaf, args), **kwargs)


def quantised(weight: Tensor) -> Boxed:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return Boxed((weight / scale).round().to(torch.int8), scale)


class Adapted(nn.Module):
    """A frozen quantised weight, and an adapter that is trained."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        weight = torch.randn(outputs, inputs, dtype=torch.float64)
        self.weight = nn.Parameter(quantised(weight), requires_grad=False)
        self.down = nn.Parameter(torch.randn(2, inputs, dtype=torch.float64))
        self.up = nn.Parameter(torch.zeros(outputs, 2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight) + x @ self.down.T @ self.up.T


class Trained(nn.Module):
    """A boxed weight that is trained itself."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        weight = torch.randn(outputs, inputs, dtype=torch.float64)
        self.weight = nn.Parameter(Boxed(weight, torch.ones((), dtype=torch.float64)))
        self.bias = nn.Parameter(torch.zeros(outputs, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


KINDS = (Adapted, Trained)


def network(kind: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(kind(8, 16), nn.ReLU(), kind(16, 3))


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([weight for weight in module.parameters() if weight.requires_grad], 0.01)


def plain(weight: Tensor) -> Tensor:
    return (weight.value() if isinstance(weight, Boxed) else weight).detach()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, 8, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (20,), generator=generator)
    return [(x[start : start + 7], y[start : start + 7]) for start in (0, 7, 14)]


def on_one_device(kind: Any) -> list[Tensor]:
    module = network(kind)
    optimizer = optimizer_of(module)
    for x, y in batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    return list(map(plain, module.parameters()))


def mirrored(strategy: ls.Strategy, kind: Any) -> Any:
    module = strategy.mirror(network(kind))
    optimizer = strategy.mirror(optimizer_of(module))

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        ls.compute_average_loss(nn.functional.cross_entropy(module(x), y, reduction="none")).backward()
        optimizer.step()

    for batch in strategy.distribute_dataset(batches()):
        strategy.run(step, batch)
    return module


def check(copies: Any, kind: Any) -> None:
    for copy in copies:
        for weight, expected in zip(copy.parameters(), on_one_device(kind), strict=True):
            torch.testing.assert_close(plain(weight), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_replicas_of_one_memory_alias_the_inner_tensors(make_strategy: Any, kind: Any) -> None:
    copies = mirrored(make_strategy(3), kind).copies
    check(copies, kind)
    assert len({copy[0].weight.inside.data_ptr() for copy in copies}) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_replicas_of_several_memories_have_inner_tensors_each(kind: Any) -> None:
    with stand_in_gpus() as (devices, _):
        strategy = ls.MirroredStrategy(list(devices))
        copies = mirrored(strategy, kind).copies
        check(copies, kind)
        for name in ("inside", "scale"):
            assert len({getattr(copy[2].weight, name).data_ptr() for copy in copies}) == 2
        strategy.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_on_another_device_is_there_with_all_of_its_tensors(kind: Any) -> None:
    meta = torch.device("meta")
    layer = kind(8, 16)
    layer.weight.mark = "the user's"
    weight = Copying(torch.device("cpu"), meta, alias=False).of(layer, "the layer").weight
    assert type(weight) is Boxed
    assert {weight.device, weight.inside.device, weight.scale.device} == {meta}
    assert weight.mark == "the user's"


def test_a_checkpoint_says_what_it_cannot_hold_and_fingerprints_tell_them_apart(
    make_strategy: Any, tmp_path: Path
) -> None:
    strategy = make_strategy(2)
    module = mirrored(strategy, Adapted)
    with pytest.raises(CheckpointError, match=r"'0\.weight' is a Boxed, which is made of inside, scale .* torch\.save"):
        ls.CheckpointManager(ls.Checkpoint(model=module), tmp_path).save(1)
    with strategy.scope():
        model = ls.Model(network(Adapted))
    with pytest.raises(CheckpointError, match=r"'0\.weight' is a Boxed"):
        model.save_weights(tmp_path / "weights.safetensors")
    before = ls.fingerprint(module)
    assert ls.fingerprint(module) == before
    module.module[0].weight.inside[0, 0] += 1
    assert ls.fingerprint(module) != before
