"""Linear layers of tensor ranks have one device's gradients, those of gradients too, and a copy has its own weights."""

from __future__ import annotations

import pytest

import lockstep as ls

pytestmark = [pytest.mark.slow, pytest.mark.workers]


def job() -> tuple[list[float], float, float]:
    """The penalty divided and plain, the largest difference of a gradient, and what a copy with zeros computes."""
    import copy

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.tensor import parallel as tp

    torch.set_num_threads(1)
    strategy = ls.ParallelStrategy(tensor=2, seed=0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    plain = copy.deepcopy(net)
    divided = strategy.parallelize(net, tensor_plan={"0": tp.ColwiseParallel(), "2": tp.RowwiseParallel()})
    x = torch.randn(6, 4, dtype=torch.float64).requires_grad_()
    penalties = []
    for module in (divided, plain):
        (gradient,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        penalty = gradient.square().sum()
        penalty.backward()
        penalties.append(float(penalty))
    part, whole = next(iter(divided.parameters())).grad, plain[0].weight.grad
    difference = float((part - whole.chunk(2)[dist.get_rank()]).abs().max())
    twin = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
        of_zeros = float(twin(x).abs().max())
    strategy.close()
    return penalties, difference, of_zeros


def test_a_penalty_on_gradients_is_that_of_one_device_and_a_copy_has_its_own_weights():
    (divided, plain), difference, of_zeros = ls.launch(job, workers=2, timeout_s=120)

    assert divided == pytest.approx(plain, abs=1e-12)
    assert difference < 1e-12
    assert of_zeros == 0


def mixed_job(backend: str) -> tuple[list[str], list[float]]:
    """In bfloat16: the dtypes of the outputs, and how far gradients are from those of one device.

    With a backend the blocks around the layers are compiled.
    """
    import copy

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.tensor import parallel as tp

    torch.set_num_threads(1)
    strategy = ls.ParallelStrategy(tensor=2, seed=0)
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    net = nn.Sequential(nn.Linear(8, 8), block, nn.Linear(8, 3))  # the first one's gradient is a sum over the ranks
    plain = copy.deepcopy(net)
    if backend:
        block.compile(backend=backend)
    divided = strategy.parallelize(net, tensor_plan={"1.0": tp.ColwiseParallel(), "1.2": tp.RowwiseParallel()})
    x, dtypes = torch.randn(6, 8), []
    for module in (divided, plain):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = module(x)
        dtypes.append(str(outputs.dtype))
        outputs.float().square().sum().backward()
    differences = []
    for part, whole in zip(divided.parameters(), plain.parameters(), strict=True):
        expected = whole.grad
        for dim, size in enumerate(part.shape):
            expected = expected if size == whole.shape[dim] else expected.chunk(2, dim)[dist.get_rank()]
        differences.append(float((part.grad - expected).norm() / expected.norm()))
    strategy.close()
    return dtypes, differences


@pytest.mark.parametrize("backend", ["", "aot_eager"])
def test_in_bfloat16_and_inside_compiled_blocks_gradients_are_those_of_one_device(backend: str):
    dtypes, differences = ls.launch(mixed_job, workers=2, args=(backend,), timeout_s=120)

    assert dtypes == ["torch.bfloat16"] * 2
    assert max(differences) < 0.03  # the rounding of bfloat16 is 0.004; a term of a sum that is missing is half of it
