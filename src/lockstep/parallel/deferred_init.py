"""Deferred initialisation: a worker's part of a model that was made on the meta device gets its initial values.

The tensors of each module are initialised whole, by the model's functions and from a seed of the module's name, and
this worker keeps its shards; so the values do not depend on how the model is divided.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.errors import ConfigError
from lockstep.parallel.pretrained import PretrainedWeights
from lockstep.parallel.tensor_parallel import local_shard, region_of
from lockstep.parallel.tensor_plan import ColumnOrder
from lockstep.replicas.rng.function_mode import default_generator_as


class DeferredInit:
    """The initial values of a whole model, some of whose tensors are on the meta device. The model is left as it is.

    A module's tensors are initialised by torch's ``reset_parameters`` and then transformers' ``_init_weights``, first
    of the module and then of those that it is in; not by what constructors did besides. A tensor that has several names
    is initialised by the first of them.
    """

    def __init__(self, module: nn.Module, seed: str) -> None:
        self._seed = seed
        self._firsts: dict[str, str] = {}  # by name the first name of the same tensor
        self._missing: set[str] = set()
        first: dict[int, str] = {}
        blanks: dict[int, Any] = {}
        tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        for name, tensor in tensors:
            self._firsts[name] = first.setdefault(id(tensor), name)
            blanks[id(tensor)] = _meta(tensor)
            if tensor.is_meta:
                self._missing.add(name)
        # The copy has a blank on the meta device for each tensor. So it takes no memory for weights, and initialising
        # it cannot write to the user's tensors (tests/parallel/test_deferred_init.py:
        # test_values_that_are_there_are_left_alone).
        self._module = copy.deepcopy(module, blanks)
        self._latest: tuple[str | None, dict[str, Tensor]] = None, {}

    def make(self, name: str) -> Tensor:
        """The initial values of a parameter or buffer, whole, on the CPU; equal in every call.

        Raises ConfigError if nothing in the model initialises it, or it is computed from tensors of other modules.
        """
        name = self._firsts[name]
        owner = name.rpartition(".")[0]
        if self._latest[0] != owner:
            # The values of one module are kept: its tensors are asked for one after another, and its reset_parameters
            # writes all of them at once. Those of the module before are freed first, so that a worker holds its part
            # and one module.
            self._latest = None, {}
            self._latest = owner, self._initialised(owner)
        return self._latest[1][name].detach()

    def _initialised(self, owner: str) -> dict[str, Tensor]:
        """The values of the module called ``owner``, by the names of its tensors."""
        part = self._module.get_submodule(owner)
        tensors: dict[str, Any] = {**part._parameters, **part._buffers}
        names = {key: f"{owner}.{key}" if owner else key for key in tensors}
        values = {key: _unset(blank) for key, blank in tensors.items() if names[key] in self._missing}
        # The seed comes from the module's name and not from its turn: a worker makes the modules of its part only, and
        # each layout begins with the same bits (tests/strategies/test_parallel_meta.py). Python's hash() of a string
        # differs from process to process.
        number = hashlib.sha256(f"{self._seed}/{owner}".encode()).digest()[:8]
        generator = torch.Generator().manual_seed(int.from_bytes(number, "little", signed=True))
        try:
            for key, whole in values.items():
                setattr(part, key, whole)
            with torch.no_grad(), torch.device("cpu"), default_generator_as(generator):
                for function in self._functions(owner):
                    function()
        except (NotImplementedError, RuntimeError) as error:  # raised by torch where values are needed
            raise ConfigError(
                f"the first values of {owner or 'the model'} cannot be made on the meta device ({error}); make the "
                'model outside torch.device("meta")'
            ) from error
        finally:
            for key in values:
                setattr(part, key, tensors[key])
        for key, whole in values.items():
            if whole.numel() and _has_unset(whole):
                raise ConfigError(
                    f"{names[key]} is on the meta device, and nothing in the model tells its first values; give "
                    f"{type(part).__name__} a reset_parameters() that writes it, or make the model outside "
                    'torch.device("meta")'
                )
        return {names[key]: whole for key, whole in values.items()}

    def _functions(self, owner: str) -> Iterator[Callable[[], Any]]:
        """The functions that may write a module's tensors, in the order in which they run when a model is made."""
        steps = owner.split(".") if owner else []
        around = [self._module.get_submodule(".".join(steps[:end])) for end in range(len(steps), -1, -1)]
        for part in around:
            # torch 2.13: the one module of torch.nn with weights whose initialisation has an underscore in its name.
            if isinstance(part, nn.MultiheadAttention):
                yield part._reset_parameters
            elif callable(reset := getattr(part, "reset_parameters", None)):
                yield reset
        for place, part in enumerate(around):
            # transformers has each module initialised by the nearest model around it, as a vision tower inside another
            # model is.
            models = [init for outer in around[place:] if callable(init := getattr(outer, "_init_weights", None))]
            if models:
                yield partial(models[0], part)


def _meta(tensor: Tensor) -> Tensor:
    blank = torch.empty_like(tensor, device="meta")
    return nn.Parameter(blank, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else blank


_UNSET_BYTE = 0xFF
"""Makes NaN of floating-point numbers."""


def _unset(blank: Tensor) -> Tensor:
    """A tensor whose elements show whether they have been written."""
    memory = torch.full((blank.numel() * blank.element_size(),), _UNSET_BYTE, dtype=torch.uint8, device="cpu")
    whole = memory.view(blank.dtype).view(blank.shape)
    return nn.Parameter(whole, requires_grad=blank.requires_grad) if isinstance(blank, nn.Parameter) else whole


def _has_unset(whole: Tensor) -> bool:
    # NaN is no initial value, so one shows that something was not written. An integer may rightly be -1, whose bytes
    # are these, so an integer tensor counts as not written only if it is all of them.
    if whole.is_floating_point():
        return bool(whole.isnan().any())
    return bool((whole.reshape(-1).view(torch.uint8) == _UNSET_BYTE).all())


@torch.no_grad()
def materialize(
    module: nn.Module,
    initial: DeferredInit | None,
    orders: Mapping[str, ColumnOrder],
    device: torch.device | None = None,
    stored: PretrainedWeights | None = None,
) -> None:
    """Gives the tensors of a worker's part their values, one after another.

    Those that are in ``stored`` are read from there. The others, if they are on the meta device, get their ``initial``
    values. Raises CheckpointError if a file cannot be read, and ConfigError as ``DeferredInit.make`` does.
    """

    def values(name: str, blank: Tensor) -> Tensor | None:
        order = orders.get(name)
        if stored is not None and name in stored.names:
            return stored.read(name, region_of(blank, order), blank.dtype)
        if blank.is_meta and initial is not None:
            return local_shard(initial.make(name), blank, order)
        return None

    # By the id of a blank, the blank and the tensor in its place, for tied tensors. The blank is kept so that no other
    # object gets its id.
    filled: dict[int, tuple[Tensor, Tensor]] = {}
    for prefix, part in module.named_modules():
        tensors: dict[str, Any]
        for tensors in (part._parameters, part._buffers):
            for key, blank in tensors.items():
                if blank is None:
                    continue
                if id(blank) not in filled:
                    local = values(f"{prefix}.{key}" if prefix else key, blank)
                    filled[id(blank)] = blank, blank if local is None else _filled(blank, local, device)
                tensors[key] = filled[id(blank)][1]


def _filled(blank: Tensor, local: Tensor, device: torch.device | None) -> Tensor:
    """The tensor with this worker's values ``local``: ``blank`` itself if it is not on the meta device."""
    if not blank.is_meta:
        (blank.to_local() if isinstance(blank, DTensor) else blank.detach()).copy_(local)
        return blank
    local = local if device is None else local.to(device)
    if local.untyped_storage().nbytes() > local.numel() * local.element_size():
        # A shard is a view of the whole tensor, whose memory it would hold (tests/strategies/test_parallel_meta.py:
        # test_no_worker_holds_more_than_its_part_and_one_tensor).
        local = local.clone()
    if isinstance(blank, DTensor):
        local = DTensor.from_local(
            local, blank.device_mesh, blank.placements, run_check=False, shape=blank.shape, stride=blank.stride()
        )
    return nn.Parameter(local, requires_grad=blank.requires_grad) if isinstance(blank, nn.Parameter) else local


@torch.no_grad()
def move_to_device(module: nn.Module, device: torch.device) -> None:
    """Moves the plain tensors of a divided model to this worker's device, in place, one by one.

    They stay the same objects, so that tied ones stay tied and an optimizer keeps its own.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if not isinstance(tensor, DTensor) and tensor.device != device:
            tensor.data = tensor.data.to(device)
