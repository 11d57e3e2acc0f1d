"""Fingerprints: 16 hex digits of all state of a training, equal for equal bits on every layout of its replicas.

    a tensor      the sum over its elements of mixed (bits of the element + its index * a constant), modulo 2**64
    everything    the first 64 bits of the SHA-256 of all names, shapes, types, sums and plain values, as sorted JSON

A sum can be added up in parts. So each device looks at what it holds, workers exchange 8 bytes for a part of a tensor
instead of the part, and neither layout nor strides matter. It is no protection against forgery.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.adapter_choice import adapter_for
from lockstep.checkpoint.checkpoint import strategy_of
from lockstep.checkpoint.format import TAG, flatten
from lockstep.checkpoint.sharded_io import balance_writes
from lockstep.checkpoint.state_adapters import AdapterState, by_name
from lockstep.collectives.communicator import error_text, raise_gathered_errors
from lockstep.data.random_state import default_state
from lockstep.errors import CheckpointError
from lockstep.mirroring.module.module import MirroredModule
from lockstep.mirroring.module.wrappers import inner_tensors
from lockstep.parallel.regions import Sizes
from lockstep.parallel.tensor_files import TensorShard
from lockstep.replicas.context import refuse_in_replica
from lockstep.strategies.base import Strategy

DIGITS = 16
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio: spreads the indices
_FACTOR = 0xD6E8FEB86659FD93  # of the mixer of 64 bits that is known as degski64
_AT_ONCE = {"cpu": 2**15, "cuda": 2**21}
"""How many elements are mixed at a time: on a CPU as many as stay in its caches, and as torch does in one thread."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_KERNELS = frozenset({"foreach", "fused", "capturable"})
"""Settings of parameter groups that choose a kernel and are no state of the training."""
_LOW = 2**32 - 1
_NAME, _RANDOM = "fingerprint", "random"


def fingerprint_of(things: Mapping[str, Any]) -> str:
    """The fingerprint of named things, as a ``Checkpoint`` takes them, and of the random numbers of all replicas.

    Every worker of the things' strategy must call it, outside replicas; all get the same digits. Of what each worker
    has of its own, such as a ``torch.Generator``, the chief's is in it; what each replica has is, for all of them.

    Raises:
        CheckpointError: a state that no checkpoint can hold.
        CollectiveError, ClusterError: a worker did not call it; the message names it.
    """
    refuse_in_replica("fingerprint")
    strategy = strategy_of(things)
    modules = {name: thing for name, thing in things.items() if isinstance(thing, MirroredModule)}
    adapters = {name: adapter_for(name, thing, modules, strategy.workers) for name, thing in things.items()}
    processes = strategy.workers.processes
    states: dict[str, AdapterState] = {}
    error = error_text(lambda: states.update({name: adapter.state() for name, adapter in adapters.items()}))
    raise_gathered_errors(processes, _NAME, error)
    shards = {name: {**state.shards, **(state.weight_shards or {})} for name, state in states.items()}
    if any(module.is_part for module in modules.values()):
        shards = balance_writes(processes, shards)  # each part of a tensor is looked at once
    local: dict[str, Any] = {}
    error = error_text(lambda: local.update(_of_worker(strategy, states, shards)))
    raise_gathered_errors(processes, _NAME, error)
    gathered = processes.all_gather_bytes(_NAME, json.dumps(local).encode())
    document = json.dumps(_joined([json.loads(payload) for payload in gathered]), sort_keys=True)
    return hashlib.sha256(document.encode()).hexdigest()[:DIGITS]


@torch.no_grad()
def _of_worker(
    strategy: Strategy, states: Mapping[str, AdapterState], shards: Mapping[str, Mapping[str, TensorShard]]
) -> dict[str, dict[str, Any]]:
    """Returns one worker's part of the document of which the fingerprint is a digest.

    "alike" is equal on all workers, so the chief alone says it; "replicas" are the states of its own replicas.
    "weights" are those of modules, and "parts" the tensors that "alike" refers to: sums of what this worker holds.
    """
    workers = strategy.workers
    document: dict[str, dict[str, Any]] = {"alike": {}, "replicas": {}, "weights": {}, "parts": {}}
    items: dict[str, Sequence[Any]] = {}
    for name, state in states.items():
        of_parts = state.weight_shards is not None
        weights = state.weight_shards if of_parts else state.weights
        items[name] = [state.worker] if of_parts else state.replicas
        sums = {key: _sum_of_shard(shard) for key, shard in shards[name].items()}
        if weights is None:
            document["parts"] |= sums
        else:  # of a module: each replica has buffers of its own, and their averages are among the weights
            items[name] = [{key: buffers[key] for key in buffers.keys() & weights.keys()} for buffers in items[name]]
            if workers.leads and not of_parts:
                sums = {key: _sum_of_tensor(tensor) for key, tensor in (state.weights or {}).items()}
            document["weights"][name] = {key: value for key, value in sums.items() if key not in items[name][0]}
        if workers.leads:
            worker_state = None if of_parts else state.worker
            document["alike"][name] = _described({"shared": _by_names(state.shared), "worker": worker_state})
    if workers.processes.index in workers.leaders:
        items[_RANDOM] = _random_states(strategy)
    for name, states_of_item in items.items():
        for number, item in enumerate(states_of_item, start=workers.first_replica):
            document["replicas"].setdefault(str(number), {})[name] = _described(item)
    return document


def _joined(workers: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Joins the parts of all workers to the document. Pure."""
    weights: dict[str, dict[str, Any]] = {}
    replicas: dict[str, dict[str, Any]] = {}
    parts: dict[str, Any] = {}
    for worker in workers:
        for name, sums in worker["weights"].items():
            _add(sums, to=weights.setdefault(name, {}))
        _add(worker["parts"], to=parts)
        for number, items in worker["replicas"].items():
            items_of_replica = replicas.setdefault(number, {})
            for name, item in items.items():  # several workers may hold a replica's buffers together
                items_of_replica[name] = {**items_of_replica.get(name, {}), **item} if isinstance(item, dict) else item
    for sums in (*weights.values(), parts):
        for key, (_, shape, elements, _) in sums.items():
            if elements != prod(shape):
                raise CheckpointError(
                    f"the workers hold {elements} elements of {key!r}, which has {prod(shape)}: their parts overlap, "
                    "and there is no fingerprint of them"
                )
    return {"alike": _filled(workers[0]["alike"], parts), "weights": weights, "replicas": replicas}


def _add(sums: Mapping[str, Any], *, to: dict[str, Any]) -> None:
    for key, (dtype, shape, elements, total) in sums.items():
        _, _, before, so_far = to.get(key, (dtype, shape, 0, 0))
        to[key] = [dtype, shape, before + elements, (so_far + total) % 2**64]


def _by_names(shared: Any) -> Any:
    """A state with an optimizer's parameters by name where the names are known, and without the choice of kernels."""
    state = shared.get("state") if isinstance(shared, Mapping) else None
    if not (isinstance(state, Mapping) and "param_groups" in state):
        return shared
    names = shared.get("names")
    groups = [{key: value for key, value in group.items() if key not in _KERNELS} for group in state["param_groups"]]
    if names is None:
        return {"kind": shared["kind"], "groups": groups, "state": state["state"]}
    named = [{**group, "params": sorted(group_names)} for group, group_names in zip(groups, names, strict=True)]
    return {"kind": shared["kind"], "groups": named, "state": by_name(shared)}


def _random_states(strategy: Strategy) -> list[dict[str, Tensor]]:
    """The random numbers of the local replicas, each its own; on the default strategy those of torch.

    Those of a GPU are left out until the replica has drawn from them: on a CPU they do not exist.
    """
    states = strategy.generators.states()
    if not states:
        device = strategy.devices[0].torch_device
        states = [{"cpu": default_state()}]
        if device.type == "cuda":
            states[0]["cuda"] = torch.cuda.get_rng_state(device)
    states_drawn = []
    for state in states:
        drawn = "cuda" in state and bool(state["cuda"][8:].any())  # 8 bytes of seed, then 8 that count what was drawn
        states_drawn.append({name: state[name] for name in (("cpu", "cuda") if drawn else ("cpu",))})
    return states_drawn


def _described(state: Any) -> Any:
    """A nested state as JSON, with sums in the place of tensors. A ``TensorRef`` stays."""
    tree, tensors = flatten(state)
    return _filled(tree, {key: _sum_of_tensor(tensor) for key, tensor in tensors.items()})


def _filled(tree: Any, sums: Mapping[str, Any]) -> Any:
    """``tree``, which ``flatten`` made, with known sums in the place of tensors, and in an order of its own."""
    if isinstance(tree, list):
        return [_filled(item, sums) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if tree.get(TAG) == "tensor":
        return sums.get(tree["key"], tree)
    filled = {key: _filled(value, sums) for key, value in tree.items()}
    if TAG in tree and "items" in tree and tree[TAG] != "tuple":  # a dict whose keys are not strings
        filled["items"].sort(key=json.dumps)
    return filled


# ---- sums over the elements of tensors


def _sum_of_tensor(tensor: Tensor) -> list[Any]:
    """The dtype, shape, number of elements and sum of a whole tensor."""
    if inner := inner_tensors(tensor):
        total = sum(_sum_of_tensor(part)[-1] * 31**place for place, part in enumerate(inner.values())) % 2**64
        return [type(tensor).__name__, list(tensor.shape), tensor.numel(), total]
    total = element_sum(tensor, (0,) * tensor.ndim, tuple(tensor.shape))
    return [str(tensor.dtype), list(tensor.shape), tensor.numel(), total]


def _sum_of_shard(shard: TensorShard) -> list[Any]:
    """The same of a part of a tensor, with the shape of the whole."""
    total = sum(element_sum(shard.view(box), box.offsets, shard.whole) for box in shard.boxes) % 2**64
    return [str(shard.dtype), list(shard.whole), sum(box.elements for box in shard.boxes), total]


def element_sum(box: Tensor, offsets: Sizes, whole: Sizes) -> int:
    """The sum over the elements of a box, which begins at ``offsets`` in a tensor of shape ``whole``, modulo 2**64.

    The sums of boxes that make up a tensor add up to that of the tensor. Two tensors of one shape that differ in one
    element have different sums, and else equal ones with a probability of 2**-64.
    """
    if box.is_complex():
        box, offsets, whole = torch.view_as_real(box.resolve_conj()), (*offsets, 0), (*whole, 2)
    if not box.numel():
        return 0
    if not box.ndim:
        box, offsets, whole = box[None], (0,), (1,)
    sizes, starts, lengths = list(box.shape), list(offsets), list(whole)
    while len(sizes) > 1 and sizes[-1] == lengths[-1]:  # what the box has in full length is part of the row above
        length = lengths.pop()
        for numbers in (sizes, starts):
            numbers.pop()
            numbers[-1] *= length
        lengths[-1] *= length
    # torch may keep a negated tensor as its source and a flag; the bits below would be those of the source.
    words = box.resolve_neg().contiguous().view(-1).view(_INTEGERS[box.element_size()]).view(sizes)
    rows = max(1, _AT_ONCE.get(box.device.type, 2**15) // prod(sizes[1:]))
    places = torch.zeros((), dtype=torch.int64, device=box.device)
    for size, length in zip([min(rows, sizes[0]), *sizes[1:]], [1, *lengths[1:]], strict=True):
        places = places[..., None] * length + torch.arange(size, dtype=torch.int64, device=box.device)
    places *= _signed(_GOLDEN)
    strides = [prod(lengths[axis + 1 :]) for axis in range(len(lengths))]
    first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    total = torch.zeros((), dtype=torch.int64, device=box.device)
    for row in range(0, sizes[0], rows):
        slab = words[row : row + rows]
        total += _mixed(slab + places[: len(slab)], (first + row * strides[0]) * _GOLDEN).sum()
    return int(total) % 2**64


def _mixed(keys: Tensor, shift: int) -> Tensor:
    """Mixes int64 ``keys`` + ``shift`` in place, so that each bit of a key changes about half of the result's bits."""
    keys += _signed(shift)
    for _ in range(2):
        keys ^= (keys >> 32).bitwise_and_(_LOW)
        keys *= _signed(_FACTOR)
    keys ^= (keys >> 32).bitwise_and_(_LOW)
    return keys


def _signed(number: int) -> int:
    """The int64 with the bits of a number modulo 2**64."""
    return (number + 2**63) % 2**64 - 2**63
