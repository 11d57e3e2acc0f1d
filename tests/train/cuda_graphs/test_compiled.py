"""Steps of compiled modules are looked at and recorded as others are, and torch goes on to run the compiled code."""

from __future__ import annotations

import pytest
import torch
from tests.train.cuda_graphs.conftest import Net, Train, alike, batches
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import _disable_current_modes

from lockstep.replicas.device.host_syncs import HostSyncs
from lockstep.train.cuda_graphs.trace import StepTrace

pytestmark = pytest.mark.usefixtures("nothing_compiled")


def test_steps_of_a_compiled_module_are_recorded(train: Train, net: Net) -> None:
    plain = train(net, batches(48), graphs=False)
    compiled = train(net, batches(48), compile_module={"backend": "aot_eager"})

    assert compiled.reasons == []
    assert compiled.replays == [3 + 5]
    assert counters["stats"]["unique_graphs"] == 1
    assert alike(plain, compiled)


def test_compiled_code_runs_on_where_the_waits_for_a_device_are_noted() -> None:
    network = torch.compile(Net(), backend="aot_eager", fullgraph=True)
    x = torch.ones(2, 16)
    for _ in range(2):
        with HostSyncs() as reads:
            network(x).sum().item()
        network(x).sum().backward()

    assert len(reads.syncs) == 1
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("left", [False, True])
def test_what_compiled_code_makes_unseen_may_lie_elsewhere_in_every_step(left: bool) -> None:
    weight = torch.ones(4)
    held: list[Tensor] = []

    def step() -> StepTrace:
        trace = StepTrace(1, [])
        with trace.in_replica():
            with _disable_current_modes():
                unseen = torch.empty(4)
            held.append(torch.add(weight, 1.0, out=unseen))
        del unseen
        trace.drop_internal(held[-1:] if left else [])
        return trace

    first, second = step(), step()  # the first one's is held, so that the second's lies elsewhere
    assert (first.difference(second) is None) is left

    weight = torch.ones(4)
    assert "reads a tensor that is another one in every step" in str(second.difference(step()))
