"""Batch norm over the whole global batch against torch's batch norm on one device, and shards without rows."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.conftest import MakeStrategy
from torch import Tensor, nn

from lockstep.collectives.per_replica import PerReplica
from lockstep.errors import ConfigError
from lockstep.mirroring.module.batch_norm import SyncBatchNorm


class NormAct(nn.BatchNorm2d):
    """Batch norm, then a layer and an activation, written out as timm's BatchNormAct2d is."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features, eps=1e-3, momentum=0.2)
        self.drop: nn.Module = nn.Identity()
        self.act = nn.PReLU(num_features)

    def forward(self, input: Tensor) -> Tensor:
        assert self.momentum is not None
        if self.training:
            self.num_batches_tracked.add_(1)
        x = F.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        output: Tensor = self.act(self.drop(x))
        return output


class NormOfSteps(nn.BatchNorm1d):
    """Takes [N, T, C] through torch's own forward."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.flatten(0, 1)).view_as(input) * 2


class NormByTorch(nn.BatchNorm1d):
    """Calls the function under torch.nn.functional's."""

    def forward(self, input: Tensor) -> Tensor:
        self.num_batches_tracked.add_(int(self.training))
        mean, var = self.running_mean, self.running_var
        return torch.batch_norm(input, self.weight, self.bias, mean, var, self.training, 0.1, self.eps, False)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(3), (3,)),
    "1d with length": (lambda: nn.BatchNorm1d(3), (3, 5)),
    "2d": (lambda: nn.BatchNorm2d(3), (3, 4, 4)),
    "3d": (lambda: nn.BatchNorm3d(3), (3, 2, 2, 2)),
    "cumulative": (lambda: nn.BatchNorm1d(3, momentum=None), (3,)),
    "not affine": (lambda: nn.BatchNorm1d(3, affine=False), (3,)),
    "no running statistics": (lambda: nn.BatchNorm1d(3, track_running_stats=False), (3,)),
    "torch's synchronised": (lambda: nn.SyncBatchNorm(3), (3,)),
    "with an activation": (lambda: NormAct(3), (3, 4, 4)),
    "around torch's": (lambda: NormOfSteps(3), (5, 3)),
    "by torch.batch_norm": (lambda: NormByTorch(3, affine=False), (3,)),
}


@pytest.mark.parametrize("sizes", [(4, 4, 3), (4, 1, 2), (4, 3, 0), (1, 0, 1)])
@pytest.mark.parametrize("name", LAYERS)
def test_it_is_one_device_on_the_whole_batch(name: str, sizes: tuple[int, ...], make_strategy: MakeStrategy):
    make, shape = LAYERS[name]
    alone, ours = make().double(), make().double()
    strategy = make_strategy(3)
    mirrored = strategy.mirror(nn.Sequential(ours), sync_batchnorm=True)
    assert mirrored.has_sync_batchnorm
    random = torch.Generator().manual_seed(0)
    for _ in range(2):
        rows = torch.randn(sum(sizes), *shape, generator=random, dtype=torch.float64) * 3 + 5
        weight = torch.randn(rows.shape, generator=random, dtype=torch.float64)

        def step(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            x = x.clone().requires_grad_()
            output = mirrored(x)
            (output * weight).sum().backward()
            assert x.grad is not None
            return output.detach(), x.grad

        whole = rows.clone().requires_grad_()
        expected = alone(whole)
        (expected * weight).sum().backward()
        outputs, gradients = strategy.run(step, (PerReplica(rows.split(sizes)), PerReplica(weight.split(sizes))))
        torch.testing.assert_close(strategy.gather(outputs, 0), expected.detach())
        torch.testing.assert_close(strategy.gather(gradients, 0), whole.grad)

    for duplicate in mirrored.copies:
        torch.testing.assert_close([*duplicate.buffers()], [*alone.buffers()])
    for index, parameter in enumerate(alone.parameters()):
        copies = [[*duplicate.parameters()][index].grad for duplicate in mirrored.copies]
        torch.testing.assert_close(torch.stack([grad for grad in copies if grad is not None]).sum(0), parameter.grad)
    mirrored.eval()
    alone.eval()
    torch.testing.assert_close(mirrored(rows), alone(rows))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_added_in_float32(dtype: torch.dtype, make_strategy: MakeStrategy):
    # 2 x 90,000 values: more than float16 can count and bfloat16 can add.
    images = (torch.randn(2, 1, 300, 300, generator=torch.Generator().manual_seed(0)) + 4).to(dtype)
    alone = nn.BatchNorm2d(1)
    strategy = make_strategy(2)
    mirrored = strategy.mirror(nn.Sequential(nn.BatchNorm2d(1)), sync_batchnorm=True)

    outputs = strategy.run(mirrored, (PerReplica(images.split(1)),))

    expected = alone(images)
    assert outputs[0].dtype == expected.dtype == dtype
    torch.testing.assert_close(strategy.gather(outputs, 0), expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(mirrored.state_dict()["0.running_mean"], alone.running_mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mirrored.state_dict()["0.running_var"], alone.running_var, rtol=1e-4, atol=1e-4)


def test_keys_parameters_and_the_user_s_module_stay(make_strategy: MakeStrategy):
    inner = nn.BatchNorm1d(3)
    module = nn.Sequential(nn.Linear(3, 3), nn.Sequential(inner))
    keys = [*module.state_dict()]
    mirrored = make_strategy(2).mirror(module, sync_batchnorm=True)

    assert mirrored.module is module
    assert [*mirrored.state_dict()] == keys
    assert module[1][0] is inner  # type: ignore[index]
    assert isinstance(inner, SyncBatchNorm)
    assert isinstance(inner, nn.BatchNorm1d)
    assert type(inner).__name__ == "BatchNorm1d"


def test_a_subclass_keeps_its_forward_hooks_and_keys(make_strategy: MakeStrategy):
    alone, ours = (nn.Sequential(nn.Conv2d(3, 4, 3), NormAct(4), nn.Flatten(), nn.Linear(64, 2)) for _ in range(2))
    ours.load_state_dict(alone.state_dict())
    plain = torch.optim.SGD(alone.parameters(), 0.1, momentum=0.9)
    calls: list[int] = []
    ours[1].register_forward_hook(lambda *_: calls.append(1))
    strategy = make_strategy(3)
    mirrored = strategy.mirror(ours, sync_batchnorm=True)
    optimizer = strategy.mirror(torch.optim.SGD(ours.parameters(), 0.1, momentum=0.9))
    random = torch.Generator().manual_seed(0)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        (F.cross_entropy(mirrored(x), y, reduction="sum") / 11).backward()
        optimizer.step()

    for _ in range(5):
        x = torch.randn(11, 3, 6, 6, generator=random)
        y = torch.randint(2, (11,), generator=random)
        plain.zero_grad()
        F.cross_entropy(alone(x), y).backward()
        plain.step()
        strategy.run(step, (PerReplica(x.split(4)), PerReplica(y.split(4))))

    assert len(calls) == 15
    assert isinstance(ours[1], NormAct)
    torch.testing.assert_close(mirrored.state_dict(), alone.state_dict(), rtol=1e-4, atol=1e-5)


def test_the_user_s_module_can_be_copied_and_saved_whole(make_strategy: MakeStrategy):
    module = nn.Sequential(NormAct(3), nn.BatchNorm2d(3))
    make_strategy(2).mirror(module, sync_batchnorm=True)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    x = torch.randn(5, 3, 2, 2)

    for same in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        assert [type(part) for part in same] == [type(part) for part in module]
        torch.testing.assert_close(same.eval()(x), module.eval()(x))
        module.train()


class WithoutTorchsFunction(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return (input - input.mean(0)) / input.std(0)


class OfChunks(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([super(OfChunks, self).forward(chunk) for chunk in input.split(2)])


class OfExamples(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        return F.batch_norm(input.reshape(1, -1, 5), None, None, training=True).view_as(input)


class ByHand(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return F.batch_norm(input, torch.zeros(3), torch.ones(3), training=self.training)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: WithoutTorchsFunction(3), "WithoutTorchsFunction"),
        (lambda: OfChunks(3), "OfChunks"),
        (lambda: OfExamples(3), "OfExamples"),
        (ByHand, "torch.nn.BatchNorm"),
    ],
)
def test_statistics_that_cannot_be_synchronised_are_refused(
    make: Callable[[], nn.Module], named: str, make_strategy: MakeStrategy
):
    strategy = make_strategy(2)
    mirrored = strategy.mirror(nn.Sequential(make()), sync_batchnorm=True)
    with pytest.raises(ConfigError, match=named):
        strategy.run(mirrored, (torch.randn(4, 3, 5),))
    mirrored.eval()
    strategy.run(mirrored, (torch.randn(4, 3, 5),))


def test_a_forward_set_on_the_object_is_refused(make_strategy: MakeStrategy):
    norm = nn.BatchNorm1d(3)
    norm.forward = lambda x: x  # type: ignore[method-assign, assignment]
    with pytest.raises(ConfigError, match="subclass of BatchNorm1d"):
        make_strategy(2).mirror(nn.Sequential(norm), sync_batchnorm=True)


def test_one_value_in_the_global_batch_is_refused_as_on_one_device(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    mirrored = strategy.mirror(nn.BatchNorm1d(3), sync_batchnorm=True)
    with pytest.raises(ValueError, match="one value per channel"):
        strategy.run(mirrored, (PerReplica(torch.ones(1, 3).split((1, 0))),))


def test_outside_a_replica_it_is_plain_batch_norm(make_strategy: MakeStrategy):
    mirrored = make_strategy(2).mirror(nn.Sequential(nn.BatchNorm1d(3)), sync_batchnorm=True)
    x = torch.randn(5, 3)
    torch.testing.assert_close(mirrored(x), nn.BatchNorm1d(3)(x))
    with pytest.raises(ValueError, match="expected 2D or 3D input"):
        mirrored(torch.ones(3))


def test_a_global_batch_without_rows_leaves_the_statistics_alone(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    mirrored = strategy.mirror(nn.Sequential(nn.BatchNorm1d(3)), sync_batchnorm=True)
    strategy.run(mirrored, (torch.zeros(0, 3),))
    assert bool(torch.equal(mirrored.state_dict()["0.running_mean"], torch.zeros(3)))
    assert int(mirrored.state_dict()["0.num_batches_tracked"]) == 0


@pytest.mark.parametrize(
    "wrap", [lambda x: (x,), lambda x: ({"x": x},), lambda x: ([x],)], ids=["bare", "dict", "list"]
)
def test_an_empty_shard_does_not_poison_the_statistics(
    wrap: Callable[[Tensor], tuple[object, ...]], make_strategy: MakeStrategy
):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False))

        def forward(self, x: Tensor | dict[str, Tensor] | list[Tensor]) -> Tensor:
            tensor = x["x"] if isinstance(x, dict) else x[0] if isinstance(x, list) else x
            output: Tensor = self.norms(tensor)
            return output

    strategy = make_strategy(3)
    mirrored = strategy.mirror(Net())
    statistics = [buffer for buffer in mirrored.copies[2].buffers() if buffer.is_floating_point()]
    before = [buffer.clone() for buffer in statistics]
    shards = [wrap(rows) for rows in (torch.randn(4, 3), torch.randn(2, 3), torch.randn(0, 3))]

    def step(*args: object) -> Tensor:
        output: Tensor = mirrored(*args)
        output.sum().backward()
        return output

    outputs = strategy.run(lambda args: step(*args), (PerReplica(shards),))

    assert outputs[2].shape == (0, 3)
    assert all(map(torch.equal, statistics, before))
    assert all(bool(torch.isfinite(value).all()) for value in mirrored.state_dict().values())
    assert all(
        parameter.grad is None or bool((parameter.grad == 0).all()) for parameter in mirrored.copies[2].parameters()
    )


def test_a_shard_of_one_row_is_normalised_by_the_running_statistics(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    mirrored = strategy.mirror(module)
    strategy.run(mirrored, (torch.randn(6, 3),))
    single = torch.randn(1, 3)
    before = [buffer.clone() for buffer in mirrored.copies[1].buffers() if buffer.is_floating_point()]

    outputs = strategy.run(mirrored, (PerReplica([torch.randn(2, 3), single]),))

    after = [buffer for buffer in mirrored.copies[1].buffers() if buffer.is_floating_point()]
    assert all(map(torch.equal, before, after))
    torch.testing.assert_close(outputs[1], mirrored.copies[1].eval()(single))


def test_pictures_of_one_row_are_normalised_by_themselves(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    mirrored = strategy.mirror(nn.BatchNorm2d(3))
    picture = torch.randn(1, 3, 4, 4)
    torch.testing.assert_close(strategy.run(mirrored, (picture,))[1], nn.BatchNorm2d(3)(picture))


def test_one_row_on_one_device_stays_torch_s_error(make_strategy: MakeStrategy):
    mirrored = make_strategy(1).mirror(nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        mirrored(torch.ones(1, 3))
    strategy = make_strategy(1)
    alone = strategy.mirror(nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        strategy.run(alone, (torch.ones(1, 3),))
