"""Every private API of torch that Lockstep uses, probed when this module is imported.

Other modules import these names from here and touch no private name of torch themselves; a test of the architecture
holds that. Each block says what its names are for. If the installed torch lacks one, the import ends in an ImportError
that names the purpose, what was missing, and the torch version. What would import large parts of torch (DTensor, FSDP,
dynamo) is a function here, whose probe runs at the first call.
"""

from __future__ import annotations

import ctypes
import functools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import overrides
from torch.utils import _device, _python_dispatch

_GLOO_THREADS = 2
_Method = TypeVar("_Method", bound=Callable[..., Any])
TESTED = ("2.13",)
"""The torch versions that the tests ran with."""


@contextmanager
def _probe(purpose: str) -> Iterator[None]:
    """Reports a private API that is missing, or behaves in another way, as an ImportError."""
    try:
        yield
    # A removed name, a moved module, another signature: what a newer torch may change. Other errors are ours and pass.
    except (ImportError, AttributeError, KeyError, TypeError, RuntimeError) as error:
        raise ImportError(
            f"torch {torch.__version__} lacks what Lockstep needs for {purpose} ({error}); "
            f"install torch {' or '.join(TESTED)}, with which Lockstep was tested"
        ) from error


with _probe("batches, arguments and results that are nested structures"):
    from torch.utils._pytree import SUPPORTED_NODES as _NODES
    from torch.utils._pytree import TreeSpec as TreeSpec
    from torch.utils._pytree import keystr as keystr
    from torch.utils._pytree import register_pytree_node as register_pytree_node
    from torch.utils._pytree import tree_flatten as tree_flatten
    from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map as tree_map
    from torch.utils._pytree import tree_unflatten as tree_unflatten

    def is_leaf_kind(kind: type) -> bool:
        """Whether objects of a class are leaves of structures, as ``tree_flatten`` would tell."""
        return kind not in _NODES and not (issubclass(kind, tuple) and hasattr(kind, "_fields"))


with _probe("running the caller's function modes and default device in replica threads"):
    from torch.utils._device import DeviceContext as DeviceContext

    function_modes: Callable[[], list[Any]] = overrides._get_current_function_mode_stack
    push_function_mode: Callable[[Any], None] = overrides._push_mode
    pop_function_mode: Callable[[], Any] = overrides._pop_mode
    without_innermost_function_mode: Any = overrides._pop_mode_temporarily
    num_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
    num_function_modes()

with _probe("watching operators, and running the caller's dispatch modes in replica threads"):
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

    dispatch_modes: Callable[[], list[Any]] = _python_dispatch._get_current_dispatch_mode_stack
    push_dispatch_mode: Callable[[Any], None] = _python_dispatch._push_mode
    pop_dispatch_mode: Callable[[Any], Any] = _python_dispatch._pop_mode
    disable_dispatch_modes: Any = _python_dispatch._disable_current_modes
    num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
    num_dispatch_modes()

with _probe("looking at tensors past function modes and tensor subclasses"):
    DisableTorchFunction = torch._C.DisableTorchFunction
    DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
    EnableTorchFunction = torch._C._EnableTorchFunction

with _probe("the caller's hooks for saved tensors"):
    saved_tensors_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
    saved_tensors_hooks(False)
    saved_tensors_hooks_disabled: Callable[[], str | None] = (
        torch._C._autograd._saved_tensors_hooks_get_disabled_error_message
    )
    saved_tensors_hooks_disabled()

with _probe("telling the nodes of a loss from those of the model's outputs"):
    next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
    next_sequence_number()
    torch.ones((), requires_grad=True).exp().grad_fn._sequence_nr()  # type: ignore[union-attr]

with _probe("telling whether the calling thread is profiled"):
    is_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled
    is_profiled()

with _probe("telling whether tensors are batched or traced by torch.func"):
    functorch_is_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
    functorch_is_active()
    functorch_interpreter: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
    functorch_interpreter()

with _probe("telling which module torch.func.functional_call gives other weights"):
    functional_call_code: CodeType = torch.nn.utils.stateless._functional_call.__code__
    if functional_call_code.co_varnames[0] != "module":
        raise AttributeError("the first argument of functional_call is not the module")

with _probe("telling reads and writes of gradients and data in a step"):
    GET_GRAD: Any = vars(torch._C.TensorBase)["grad"].__get__
    SET_GRAD: Any = vars(torch._C.TensorBase)["grad"].__set__
    SET_DATA: Any = vars(torch._C.TensorBase)["data"].__set__
    GET_BASE: Any = vars(torch._C.TensorBase)["_base"].__get__
    SET_GRAD_MODE: Any = torch._C._set_grad_enabled
    VF: Any = torch._VF
    MAKE_DUAL: Any = VF._make_dual

# The import may be in a block without gradients.
with _probe("reading what the nodes of a loss have saved"), torch.inference_mode(False), torch.enable_grad():
    _leaf = torch.ones(2, requires_grad=True)
    _label = torch.nn.functional.nll_loss(_leaf, torch.tensor(0)).grad_fn
    for _node, _name in (
        *(
            (_leaf.sum().grad_fn, "self_sym_sizes"),
            ((_leaf * _leaf).grad_fn, "other"),
            ((_leaf * _leaf).grad_fn, "self"),
        ),
        *((_label, "self"), (_label, "target"), (_label, "reduction"), (_label, "total_weight")),
    ):
        getattr(_node, f"_saved_{_name}")

with _probe("noticing writes into tensors, views and shared storage"):
    _tensor = torch.zeros(())
    _tensor._version, _tensor._is_view(), _tensor._base, _tensor.untyped_storage()._cdata

with _probe("methods that torch.compile leaves as they are"):
    # The public torch.compiler.disable would import dynamo here, for half a second.
    not_compiled: Callable[[_Method], _Method] = torch._compile._disable_dynamo  # type: ignore[assignment]

with _probe("torch.compile around a mirrored module"):
    _frames = torch._C._dynamo.eval_frame
    _SKIPPED = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT)
    _frames.get_eval_frame_callback()

    def not_traced(method: _Method) -> _Method:
        """A method that dynamo runs as it is; what it calls is compiled.

        As ``torch.compiler.disable(recursive=False)``, which would import dynamo here.
        """
        _frames.set_code_exec_strategy(method.__code__, _SKIPPED)
        method._torchdynamo_disable = True  # type: ignore[attr-defined]
        method._torchdynamo_disable_msg = None  # type: ignore[attr-defined]
        return method

    @not_traced
    def compiling_backend() -> Any:
        """The backend of the ``torch.compile`` in which this thread runs; None outside of one."""
        callback = _frames.get_eval_frame_callback()
        if not callable(callback):
            return None
        return torch._dynamo.eval_frame.innermost_backend(callback)


with _probe("updates of many tensors in one call"):
    foreach_add_: Any = torch._foreach_add_
    foreach_copy_: Any = torch._foreach_copy_
    foreach_div_: Any = torch._foreach_div_
    foreach_mul_: Any = torch._foreach_mul_
    foreach_norm: Any = torch._foreach_norm

with _probe("random numbers of the replica's own"):
    standard_gamma: Any = torch._standard_gamma
    sample_dirichlet: Any = torch._sample_dirichlet
    OpOverload = torch._ops.OpOverload
    safe_softmax: Callable[[torch.Tensor, int], torch.Tensor] = torch._safe_softmax
    _device.CURRENT_DEVICE  # noqa: B018

with _probe("backward passes that compute some gradients at a time"):
    will_run_node: Callable[[Any], bool] = torch._C._will_engine_execute_node

with _probe("targets on a GPU that are checked without waiting for it"):
    assert_async: Callable[[torch.Tensor], None] = torch._assert_async

with _probe("tensors of the whole shape over a part of the data"):
    make_wrapper_subclass: Any = torch.Tensor._make_wrapper_subclass
    make_subclass: Any = torch.Tensor._make_subclass

with _probe("telling batch normalisation and dropout layers"):
    BatchNormBase = torch.nn.modules.batchnorm._BatchNorm
    NormBase = torch.nn.modules.batchnorm._NormBase
    DropoutBase = torch.nn.modules.dropout._DropoutNd

with _probe("Module.to() and load_state_dict() of mirrored and sharded modules"):
    IncompatibleKeys: Any = torch.nn.modules.module._IncompatibleKeys
    parse_to: Any = torch._C._nn._parse_to
    parse_to(torch.float32)

with _probe("the hooks that torch runs around every optimizer's step"):
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

    optimizer_pre_hooks: dict[int, Any] = _global_optimizer_pre_hooks
    optimizer_post_hooks: dict[int, Any] = _global_optimizer_post_hooks

with _probe("stores and process groups between workers"):
    from torch._C._distributed_c10d import HashStore as HashStore
    from torch._C._distributed_c10d import PrefixStore as PrefixStore
    from torch._C._distributed_c10d import Store as Store
    from torch._C._distributed_c10d import TCPStore as TCPStore

    if dist.is_gloo_available():
        for _name in ("_devices", "_threads", "_timeout"):
            getattr(dist.ProcessGroupGloo._Options(), _name)  # type: ignore[attr-defined]

# A faster kernel, on CPUs where torch was built with it; without it, torch's own linear is used.
mkldnn_linear: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def default_device() -> torch.device | None:
    """The device that ``torch.set_default_device`` has set; None if it was not called."""
    return _device.CURRENT_DEVICE


def innermost_function_mode() -> Any:
    """The function mode that was entered last in this thread; None where there is none."""
    modes = num_function_modes()
    return torch._C._get_function_stack_at(modes - 1) if modes else None


def dispatch_mode_key(mode: TorchDispatchMode) -> Any:
    """What ``pop_dispatch_mode`` needs of a mode."""
    return getattr(mode, "_mode_key", None)


def gloo_group(store: Store, rank: int, size: int, *, address: str, timeout: timedelta) -> Any:
    """A gloo process group that listens on ``address``; gloo's own choice is the address of the host's name."""
    with _probe("process groups over gloo"):
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._threads = _GLOO_THREADS
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


def nccl_group(store: Store, rank: int, size: int, *, timeout: timedelta) -> Any:
    """An NCCL process group."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def backend_of(group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> Any:
    """The backend of a group for ``device``, with another timeout than torch gave it."""
    backend: Any = group._get_backend(device)
    backend._set_default_timeout(timeout)
    return backend


def default_group_store() -> Store:
    """The store that torch's default process group was made with."""
    with _probe("a process group that the program has made"):
        from torch.distributed.distributed_c10d import _get_default_store
    return _get_default_store()


def innermost_store(store: Store) -> Any:
    """The store under all prefixes: a ``TCPStore`` has ``host`` and ``port``."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def forget_groups(mesh: Any) -> None:
    """Drops the process groups that a DeviceMesh holds: DTensor's caches keep meshes they have seen."""
    getattr(mesh, "_pg_registry", {}).clear()


def register_group(name: str, group: dist.ProcessGroup) -> None:
    """Has torch find a process group by one more name, until ``unregister_group``."""
    with _probe("a mesh beside a process group that the program has made"):
        from torch._C._distributed_c10d import _register_process_group
    _register_process_group(name, group)  # type: ignore[arg-type]  # GroupName is a str


def unregister_group(name: str) -> None:
    """Ends ``register_group``."""
    with _probe("a mesh beside a process group that the program has made"):
        from torch._C._distributed_c10d import _unregister_process_group
    _unregister_process_group(name)  # type: ignore[arg-type]


_FAILED_GRAPHS: list[Any] = []


def clear_failed_graph(graph: Any, device: int, pool: Any) -> None:
    """Resets a ``torch.cuda.CUDAGraph`` whose capture into ``pool`` has failed.

    Before 2.14 torch's reset leaves the pool taken, for as long as the process runs. In 2.11 and 2.12, where the stream
    refused to end the capture, the allocator also goes on calling the graph, which must therefore stay alive.
    """
    version = tuple(int(number) for number in torch.__version__.split(".")[:2])
    try:
        graph.pool()  # an error, unless the capture itself had ended
    except RuntimeError:
        if version < (2, 14):
            _FAILED_GRAPHS.append(graph)
            with suppress(RuntimeError):  # it is ended already
                torch._C._cuda_endAllocateToPool(device, pool)
            with suppress(RuntimeError):  # it was never begun
                torch._C._cuda_releasePool(device, pool)
    graph.reset()


def use_own_dtensor_rng(mesh: Any) -> None:
    """Keeps DTensor from giving all workers of ``mesh`` the chief's random state at its first random operator."""
    with _probe("random numbers of DTensors"):
        from torch.distributed.tensor import _random

        # torch 2.13 makes the tracker at the first random operator of a DTensor, with a broadcast of the chief's state;
        # it keeps one that is there.
        _random._rng_tracker = _random.OffsetBasedRNGTracker(mesh, run_state_sync=False)


def is_fsdp_hook(hook: Any) -> bool:
    """Whether a tensor's hook is one by which FSDP learns that a backward pass has come."""
    with _probe("full sharding beside sharded logits"):
        from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    return isinstance(getattr(hook, "__self__", None), FSDPState)


def dtensor_chunks(tensor: Any) -> list[Any]:
    """The parts of a DTensor that this worker holds, with ``sizes`` and ``offsets``."""
    with _probe("checkpoints of sharded parameters"):
        chunks: list[Any] = tensor.__create_chunk_list__()
    return chunks


@contextmanager
def compiled_code_for(threads: int) -> Iterator[None]:
    """A block whose context lets so many threads compile a function of the program's at once.

    Each thread that comes to it before the first has compiled it adds code of its own, which counts towards dynamo's
    limit of 8 (torch 2.13). Past the limit a function runs as it is, from a call on that threads decide.
    """
    config: Any = sys.modules.get("torch._dynamo.config")
    if config is None or threads == 1:
        yield
        return
    limit = config.recompile_limit
    config.recompile_limit = limit * threads
    try:
        yield
    finally:
        config.recompile_limit = limit


def dynamo() -> Any:
    """``torch._dynamo``, for ``lookup_backend`` and its errors."""
    with _probe("compile_module"):
        return torch._dynamo


def inductor() -> Any:
    """``torch._inductor``."""
    with _probe("compile_module"):
        return torch._inductor


def compile_backward_at_once() -> Any:
    """A block in which code for a backward pass is compiled with that of the forward, not when it is first run."""
    with _probe("compile_module"):
        import torch._functorch.config as functorch

        return functorch.patch(force_non_lazy_backward_lowering=True)


_CALL_WITHOUT_GIL = """
    struct Unlocked {{
        PyThreadState* state = PyEval_SaveThread();
        ~Unlocked() {{ PyEval_RestoreThread(state); }}
    }};
    auto arguments = std::make_tuple({});
    {{
        Unlocked unlocked;
        std::apply(kernel, arguments);
    }}
    Py_RETURN_NONE;
"""


_NOTES_DIVISION_BY_ZERO = re.compile(r"\b(floor_divide_integral|remainder_integral|mod)\(")
_SETS_NOTE = re.compile(r"\binductor_cpu_integer_div_error_flag = .*;")


@functools.cache
def release_gil_in_kernels() -> None:
    """Makes the C++ kernels that inductor compiles or loads in this process from now on release the GIL as they run.

    As torch makes them they hold it, and a kernel in one thread keeps all other threads from running Python. All
    kernels share one pointer to where a division of integers by zero is noted. Those that divide integers keep the GIL,
    and the others no longer set the pointer; otherwise the note could come to another replica, or to none.
    """
    with _probe("compile_module"):
        from torch._inductor.codecache import CppPythonBindingsCodeCache as Bindings

        if Bindings.call_entry_function != "kernel({}); Py_RETURN_NONE;":
            raise AttributeError(f"inductor calls kernels by {Bindings.call_entry_function!r}")
        load = Bindings.load_pybinding_async.__func__  # type: ignore[attr-defined]

    class Unlocked(Bindings):
        call_entry_function = _CALL_WITHOUT_GIL
        suffix_template = f"#include <tuple>\n{Bindings.suffix_template}"

    def load_unlocked(bindings: Any, argtypes: Any, code: str, *args: Any, **kwargs: Any) -> Any:
        # Subclasses have their own way to call kernels, and a kernel that divides integers must leave its note to the
        # thread that runs it.
        if bindings is Bindings and not _NOTES_DIVISION_BY_ZERO.search(code):
            bindings, code = Unlocked, _SETS_NOTE.sub("", code)
        return load(bindings, argtypes, code, *args, **kwargs)

    Bindings.load_pybinding_async = classmethod(load_unlocked)  # type: ignore[method-assign, assignment]


def graph_pass(change: Callable[[torch.fx.Graph], None], uuid: str) -> Any:
    """A pass of inductor that changes a graph of operators; ``uuid`` stands for it in torch's cache of code."""
    with _probe("compile_module"):
        from torch._inductor.custom_graph_pass import CustomGraphPass

    class Pass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            change(graph)

        def uuid(self) -> str:
            return uuid

    return Pass()


def detect_fake_mode(inputs: Any) -> Any:
    """The mode under which torch.compile traces ``inputs``; None where they are real tensors."""
    with _probe("compile_module"):
        return torch._guards.detect_fake_mode(inputs)


def library_path() -> str:
    """The file of torch's C++ extension."""
    return torch._C.__file__


_PROFILER_SYMBOLS = {
    "current": ("libc10.so", "_ZN3c1020ThreadLocalDebugInfo7currentEv"),
    "set_current": ("libc10.so", "_ZN3c1020ThreadLocalDebugInfo22_forceCurrentDebugInfoESt10shared_ptrIS0_E"),
    "callbacks": ("libtorch_cpu.so", "_ZN2at24get_record_function_tls_Ev"),
    "set_callbacks": ("libtorch_cpu.so", "_ZN2at24set_record_function_tls_ERKNS_17RecordFunctionTLSE"),
}


class SharedPtr(ctypes.Structure):
    """A ``std::shared_ptr``; torch's functions take it over, and leave an empty one."""

    _fields_ = (("pointer", ctypes.c_void_p), ("counts", ctypes.c_void_p))


class NoCallbacks(ctypes.Structure):
    """A new thread's ``at::RecordFunctionTLS``: an empty ``std::vector``, and recording allowed."""

    _fields_ = (("vector", ctypes.c_void_p * 3), ("enabled", ctypes.c_bool))


@functools.cache
def profiler_functions() -> dict[str, Any] | None:
    """Torch's functions for the profiler state of the calling thread; None in a torch without them."""
    folder = Path(torch.__file__).parent / "lib"
    try:
        functions = {
            name: getattr(ctypes.CDLL(str(folder / file)), symbol) for name, (file, symbol) in _PROFILER_SYMBOLS.items()
        }
    except (OSError, AttributeError):
        return None
    # The symbols are C++ functions without a Python binding (torch 2.13).
    pointer = ctypes.POINTER(SharedPtr)
    functions["current"].argtypes, functions["current"].restype = [pointer], None
    functions["set_current"].argtypes, functions["set_current"].restype = [pointer], None
    functions["callbacks"].argtypes, functions["callbacks"].restype = [], ctypes.c_void_p
    functions["set_callbacks"].argtypes, functions["set_callbacks"].restype = [ctypes.c_void_p], None
    return functions
