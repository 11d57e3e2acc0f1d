"""Steps of compiled modules are not captured, and torch runs the compiled code where waits for a device are noted."""

from __future__ import annotations

import pytest
import torch
from tests.train.cuda_graphs.conftest import Net, Train, alike, batches
from torch._dynamo.utils import counters

from lockstep.replicas.device.host_syncs import HostSyncs

pytestmark = pytest.mark.usefixtures("nothing_compiled")


def test_steps_of_a_compiled_module_run_as_usual(train: Train, net: Net) -> None:
    plain = train(net, batches(48), graphs=False)
    compiled = train(net, batches(48), compile_module={"backend": "aot_eager"})
    assert len(compiled.reasons) == 1
    assert "the module is compiled" in compiled.reasons[0]
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
