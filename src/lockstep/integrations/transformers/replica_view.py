"""What a replica's step sees as the Trainer: the Trainer's attributes, with the replica's copies of models.

    trainer  model, loss, ref_model, args, accelerator, _metrics
    view     copy,  copies of both,  n_gpu 1, gathers,  the same of replica 0, copies of the others

A Trainer's methods that run in replicas use ``self``: its model, the modules of its loss, the numbers that it logs.
Each replica's ``self`` is a view, so that no two threads write to one object. A replica is to the methods what a
process is to them under torchrun: ``self.accelerator`` gathers over all replicas. What the step of replica 0 leaves in
its view is the Trainer's afterwards; of a float that differs between replicas, the mean weighted by rows.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
import transformers
from accelerate import Accelerator  # type: ignore[import-untyped]
from torch import Tensor, nn

from lockstep._torch_compat import DisableTorchFunctionSubclass, tree_map
from lockstep.mirroring.module.module import MirroredModule
from lockstep.replicas.context import ReplicaContext
from lockstep.train.batch import replica_of_step

T = TypeVar("T", bound=transformers.Trainer)

_CONTAINERS = (dict, list, deque, set)
_DATA = frozenset(["train_dataset", "eval_dataset"])  # may be long lists, which no step changes
_LARGE = 4096  # elements; what a Trainer adds up is small, and what it buffers is not changed in place
_MEANS = frozenset([torch.mean, torch.Tensor.mean, torch.nanmean, torch.Tensor.nanmean])


class GatheredNumbers(Tensor):
    """One number of each replica that has rows, [replicas]: its mean is weighted by their rows.

    Trainers gather the mean of each process and take the mean of those, which is one device's where all have as many
    rows.
    """

    rows: Tensor

    @classmethod
    def of(cls, values: Tensor, rows: Sequence[int]) -> GatheredNumbers:
        """Wraps ``values``, of replicas with so many ``rows``."""
        gathered = values.as_subclass(cls)
        gathered.rows = torch.tensor(rows, dtype=torch.float64, device=values.device)
        return gathered

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Computes as with a plain tensor, but for the mean over all replicas."""
        with DisableTorchFunctionSubclass():
            if func in _MEANS and len(args) == 1 and not kwargs and isinstance(args[0], cls):
                values, weights = args[0].as_subclass(Tensor).double(), args[0].rows
                if "nan" in func.__name__:
                    values, weights = values[~values.isnan()], weights[~values.isnan()]
                return ((values * weights).sum() / weights.sum()).to(args[0].dtype)
            return func(*args, **(kwargs or {}))


class ReplicaAccelerator(Accelerator):  # type: ignore[misc]
    """A Trainer's accelerator in one replica: on the replica's device, gathering over all replicas.

    Attributes:
        has_gathered: whether the step has gathered anything.
        offset: in a check of the loss, which each replica makes alone, what is added to numbers that are gathered.
    """

    def __init__(self, plain: Accelerator, device: torch.device, rows: int | None) -> None:
        # Not Accelerator.__init__, which would set up the state of all.
        self.__dict__.update(plain.__dict__)
        self._replica_device = device
        self._rows = rows
        self.has_gathered = False
        self.offset = 0.0

    @property
    def device(self) -> torch.device:
        """The replica's."""
        return self._replica_device

    @property
    def is_alone(self) -> bool:
        """Whether this is a check of the loss, which each replica makes alone."""
        return self._rows is None

    @property
    def rows(self) -> int:
        """The number of rows of the replica's shard; 0 where it computes a row that does not count."""
        return self._rows or 0

    def gather(self, tensor: Any) -> Any:
        """The tensors of all replicas with rows, concatenated; numbers become [replicas]. Every replica must call it.

        Not differentiable, as accelerate's. In a check of the loss the tensor itself.
        """
        if self._rows is None:
            return self._alone(tensor)
        self.has_gathered = True
        rows = torch.tensor([self._rows], device=self._replica_device)
        rows_of_replicas = replica_of_step().all_gather(rows, 0).tolist()
        return tree_map(lambda leaf: _gathered(leaf, rows_of_replicas), tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As ``gather``: no row is there twice."""
        return self.gather(input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum, or mean weighted by rows, of all replicas' tensors. Every replica must call it."""
        if self._rows is None:
            return self._alone(tensor)
        self.has_gathered = True
        context, share = replica_of_step(), float(self._rows if reduction == "mean" else self._rows > 0)
        total = context.all_reduce("sum", share) if reduction == "mean" else 1.0
        return tree_map(lambda leaf: context.all_reduce("sum", leaf.detach() * (share * scale / total)), tensor)

    def _alone(self, tensor: Any) -> Any:
        self.has_gathered = True
        if not self.offset:
            return tensor
        return tree_map(lambda leaf: leaf + self.offset if isinstance(leaf, Tensor) else leaf, tensor)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pads tensors to the longest of all replicas in dimension ``dim``. Every replica must call it."""
        if self._rows is None:
            return tensor
        self.has_gathered = True
        context = replica_of_step()
        return tree_map(lambda leaf: _padded(context, leaf, dim, pad_index, pad_first), tensor)


def _gathered(leaf: Any, rows: Sequence[int]) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    context, plain = replica_of_step(), leaf.detach()
    if plain.ndim == 0:
        present = [index for index, count in enumerate(rows) if count]
        values = context.all_gather(plain[None], 0)[present]
        return GatheredNumbers.of(values, [rows[index] for index in present])
    # A replica without rows computes another's, so that all meet here; they count once.
    return context.all_gather(plain[: len(plain) if rows[context.replica_id_in_sync_group] else 0], 0)


def _padded(context: ReplicaContext, leaf: Any, dim: int, pad_index: int, pad_first: bool) -> Any:
    if not isinstance(leaf, Tensor) or dim >= leaf.ndim:
        return leaf
    length = int(context.all_gather(torch.tensor([leaf.shape[dim]], device=leaf.device), 0).max())
    shape = list(leaf.shape)
    shape[dim] = length - shape[dim]
    filler = leaf.new_full(shape, pad_index)
    return torch.cat([filler, leaf] if pad_first else [leaf, filler], dim=dim)


def other_modules(trainer: transformers.Trainer) -> dict[str, Any]:
    """Attributes of a Trainer that are modules beside its model, or lists and dicts of them."""
    return {
        name: value
        for name, value in trainer.__dict__.items()
        if name not in _DATA
        and not isinstance(value, MirroredModule)
        and any(module is not trainer.model for module in modules_in(value))
    }


def modules_in(value: Any) -> list[nn.Module]:
    """The modules that a Trainer's attribute is, or that are in its list, tuple or dict."""
    if isinstance(value, nn.Module):
        return [value]
    values = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    return [part for part in values if isinstance(part, nn.Module)]


class TrainerViews:
    """The views of a Trainer for one run: one for each local replica.

    Args:
        trainer: the Trainer, outside replicas.
        copies: its model's copies.
        modules: by attribute, the mirrored modules of its other modules, in their lists and dicts.
        rows: of the local replicas' shards; None for checks, in which nothing is gathered and nothing remains.
    """

    def __init__(
        self,
        trainer: T,
        copies: Sequence[nn.Module],
        modules: Mapping[str, Any],
        devices: Sequence[torch.device],
        rows: Sequence[int] | None,
    ) -> None:
        self._trainer = trainer
        self._rows = rows
        self.views: list[T] = []
        self._begun: list[dict[str, Any]] = []
        for replica, device in enumerate(devices):
            view = object.__new__(type(trainer))
            first = replica == 0 and rows is not None
            attributes = {
                name: value if first or name in _DATA else _copied(value) for name, value in trainer.__dict__.items()
            }
            attributes |= {name: _copies_in(value, replica) for name, value in modules.items()}
            attributes["model"] = attributes["model_wrapped"] = copies[replica]
            attributes["args"] = _arguments_on(device, trainer.args)
            count = None if rows is None else rows[replica]
            attributes["accelerator"] = ReplicaAccelerator(trainer.accelerator, device, count)
            view.__dict__.update(attributes)
            self.views.append(view)
            self._begun.append(attributes)

    @property
    def have_gathered(self) -> bool:
        """Whether a replica has gathered anything."""
        return any(view.accelerator.has_gathered for view in self.views)

    def bring_back(self) -> None:
        """Gives the Trainer what the run has left in the views. Outside replicas."""
        if self._rows is None:
            return
        first, begun = self.views[0].__dict__, self._begun[0]
        for name, value in first.items():
            is_changed = name not in begun or begun[name] is not value
            values_of_others = [view.__dict__.get(name) for view in self.views[1:]]
            if is_changed or (isinstance(value, _CONTAINERS) and name not in _DATA):
                merged = _merged([value, *values_of_others], self._rows)
                if is_changed or merged is not value:
                    self._trainer.__dict__[name] = merged


def _arguments_on(device: torch.device, args: Any) -> Any:
    result = copy.copy(args)
    result._n_gpu = 1
    result.__dict__["_setup_devices"] = device
    return result


def _copied(value: Any, depth: int = 4) -> Any:
    """A copy of containers and the small tensors in them; anything else as it is."""
    if isinstance(value, Tensor) and type(value) is Tensor and not value.requires_grad and value.numel() <= _LARGE:
        return value.clone()
    if not isinstance(value, _CONTAINERS) or not depth:
        return value
    duplicate = copy.copy(value)
    if isinstance(duplicate, dict):
        for key, item in duplicate.items():
            duplicate[key] = _copied(item, depth - 1)
    elif isinstance(duplicate, (list, deque)):
        for index, item in enumerate(duplicate):
            if isinstance(item, (*_CONTAINERS, Tensor)):
                duplicate[index] = _copied(item, depth - 1)
    return duplicate


def _copies_in(value: Any, replica: int) -> Any:
    if isinstance(value, MirroredModule):
        return value.copies[replica]
    if isinstance(value, dict):
        return {key: _copies_in(item, replica) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copies_in(item, replica) for item in value)
    return value


def _merged(values: Sequence[Any], rows: Sequence[int]) -> Any:
    """Replica 0's value, in which floats that differ between replicas are means; containers are changed in place."""
    first, *further = values
    if all(other is first for other in further) or any(type(other) is not type(first) for other in further):
        return first
    if isinstance(first, float) or (isinstance(first, Tensor) and first.is_floating_point()):
        return _mean(values, rows)
    if isinstance(first, dict):
        for key in first:
            if all(key in other for other in further):
                first[key] = _merged([first[key], *(other[key] for other in further)], rows)
    elif isinstance(first, (list, deque)) and all(len(other) == len(first) for other in further):
        if all(all(map(is_, first, other)) for other in further):  # 20 ms of a million items, 50 in the loop below
            return first
        for index, column in enumerate(zip(*values, strict=True)):
            if any(item is not column[0] for item in column):
                first[index] = _merged(column, rows)
    return first


def _mean(values: Sequence[Any], rows: Sequence[int]) -> Any:
    shares = [(value, count) for value, count in zip(values, rows, strict=True) if count]
    first = values[0]
    if isinstance(first, Tensor):
        tensors = [value.to(first.device) for value, _ in shares]
        if any(tensor.shape != first.shape or tensor.requires_grad for tensor in tensors):
            return first
        if not tensors or all(torch.equal(tensor, tensors[0]) for tensor in tensors):
            return tensors[0] if tensors else first
    elif not shares or all(value == shares[0][0] for value, _ in shares):
        return shares[0][0] if shares else first
    total = sum(count for _, count in shares)
    if isinstance(first, Tensor):
        weighed = [value.to(first.device) * (count / total) for value, count in shares]
        return torch.stack(weighed).sum(dim=0).to(first.dtype)
    return sum(value * (count / total) for value, count in shares)


def mirrored_modules(value: Any) -> list[MirroredModule]:
    """The mirrored modules in a module, or in lists and dicts of them."""
    if isinstance(value, MirroredModule):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [module for part in parts for module in mirrored_modules(part)]


def bind_forwards(mirrored: MirroredModule) -> None:
    """Binds functions that were set on the user's module to each copy.

    TRL sets ``model.forward`` to a method whose closure holds the user's module's former forward. deepcopy binds the
    method to the copy, and leaves its closure.
    """
    originals = {id(part): name for name, part in mirrored.module.named_modules()}
    for duplicate in mirrored.copies[1:]:
        parts = dict(duplicate.named_modules())
        for part in parts.values():
            for name, value in vars(part).items():
                if isinstance(value, MethodType) and (bound := _bound(value.__func__, originals, parts)):
                    part.__dict__[name] = MethodType(bound, value.__self__)


def _bound(function: Any, originals: Mapping[int, str], parts: Mapping[str, nn.Module]) -> FunctionType | None:
    """The function with copies' methods in its closure, or None if it has none of the originals'."""
    cells = getattr(function, "__closure__", None) or ()
    is_changed = False
    bound_cells = []
    for cell in cells:
        value = cell.cell_contents
        if isinstance(value, MethodType) and id(value.__self__) in originals:
            owner, is_changed = parts[originals[id(value.__self__)]], True
            cell = CellType(MethodType(value.__func__, owner))
        bound_cells.append(cell)
    if not is_changed:
        return None
    code, defaults = function.__code__, function.__defaults__
    bound = FunctionType(code, function.__globals__, function.__name__, defaults, tuple(bound_cells))
    bound.__kwdefaults__ = function.__kwdefaults__
    bound.__dict__.update(function.__dict__)
    return bound
