"""Each private API of torch that is missing is named when ``lockstep._torch_compat`` is imported, or first used."""

from __future__ import annotations

import runpy
from typing import Any

import pytest
import torch

from lockstep import _torch_compat as compat

MISSING = [
    ("torch.utils._pytree", "tree_map", "nested structures"),
    ("torch.overrides", "_push_mode", "function modes"),
    ("torch.utils._python_dispatch", "_get_current_dispatch_mode_stack", "dispatch modes"),
    ("torch._C", "_len_torch_dispatch_stack", "dispatch modes"),
    ("torch._C", "DisableTorchFunction", "past function modes"),
    ("torch._C._autograd", "_top_saved_tensors_default_hooks", "saved tensors"),
    ("torch._C._autograd", "_get_sequence_nr", "nodes of a loss"),
    ("torch._C._autograd", "_profiler_enabled", "profiled"),
    ("torch._C", "_are_functorch_transforms_active", "torch.func"),
    ("torch._C", "_set_grad_enabled", "gradients and data"),
    ("torch", "_foreach_add_", "many tensors"),
    ("torch", "_safe_softmax", "random numbers"),
    ("torch.utils._device", "CURRENT_DEVICE", "random numbers"),
    ("torch._C", "_will_engine_execute_node", "backward passes"),
    ("torch", "_assert_async", "targets on a GPU"),
    ("torch.nn.modules.module", "_IncompatibleKeys", "load_state_dict"),
    ("torch.nn.modules.batchnorm", "_NormBase", "batch normalisation"),
    ("torch._C._distributed_c10d", "TCPStore", "between workers"),
]


@pytest.mark.parametrize(("owner", "name", "purpose"), MISSING)
def test_what_is_missing_is_named_with_its_purpose_and_the_version(
    owner: str, name: str, purpose: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delattr(f"{owner}.{name}")
    with pytest.raises(ImportError, match=purpose) as raised:
        runpy.run_path(compat.__file__)
    assert torch.__version__ in str(raised.value)
    assert name in str(raised.value)


def test_a_node_that_saves_something_else_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.Tensor, "sum", torch.Tensor.exp)

    with pytest.raises(ImportError, match=r"nodes of a loss have saved.*_saved_self_sym_sizes"):
        runpy.run_path(compat.__file__)


def test_with_this_torch_nothing_is_missing():
    assert runpy.run_path(compat.__file__)["tree_map"] is compat.tree_map


def test_tensors_count_writes_and_know_their_base():
    tensor = torch.zeros(2)
    view = tensor[:1]
    view.add_(1)
    assert tensor._version == 1
    assert view._is_view()
    assert compat.GET_BASE(view) is tensor


def test_getters_and_setters_are_what_function_modes_see():
    seen: list[Any] = []

    class Sees(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            with compat.DisableTorchFunction():
                return func(*args, **(kwargs or {}))

    tensor = torch.zeros(2, requires_grad=True)
    with Sees():
        assert compat.num_function_modes() == 1
        assert isinstance(compat.innermost_function_mode(), Sees)
        tensor.grad = tensor.grad
        tensor.data = torch.ones(2)

    assert {compat.GET_GRAD, compat.SET_GRAD, compat.SET_DATA} <= set(seen)


def test_the_default_device_is_seen():
    assert compat.default_device() is None
    with compat.DeviceContext(torch.device("meta")):
        assert compat.default_device() == torch.device("meta")


@pytest.mark.parametrize("module", ["dynamo", "inductor"])
def test_what_is_large_is_imported_when_it_is_used(module: str):
    assert hasattr(getattr(compat, module)(), "compile" if module == "inductor" else "lookup_backend")


class FailedGraph:
    """A graph whose capture has failed, and the state of torch's allocator, as torch's sources have it by version.

    Args:
        version: of torch.
        begun: whether the stream began the capture; only its end stops the routing, from 2.13 on.
    """

    def __init__(self, version: tuple[int, int], *, begun: bool) -> None:
        self._resets_all = version >= (2, 14)
        self.routed = not (begun and version >= (2, 13))
        self.users = 2  # of the pool: this graph, and one that was captured before

    def pool(self) -> object:
        raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")

    def end_routing(self, device: int, pool: object) -> None:
        if not self.routed:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.routed = False

    def release(self, device: int, pool: object) -> None:
        self.users -= 1

    def reset(self) -> None:
        if self._resets_all:
            self.routed = False
            self.users -= 1


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.13.0", "2.14.1"])
def test_a_failed_graph_leaves_its_pool_to_the_others_alone(
    version: str, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    major, minor, _ = version.split(".", 2)
    graph = FailedGraph((int(major), int(minor)), begun=begun)
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", graph.end_routing, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", graph.release, raising=False)
    compat.clear_failed_graph(graph, 0, (0, 1))
    assert (graph.routed, graph.users) == (False, 1)
