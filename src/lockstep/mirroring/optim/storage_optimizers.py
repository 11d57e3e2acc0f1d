"""The plain optimizers under a mirrored one: one for each storage of the weights.

``StorageOptimizers`` has the user's optimizer and its copies. ``AmpAdapter`` shows all storages to
torch.amp.GradScaler as one optimizer.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.errors import UsageError
from lockstep.mirroring.gradients.local_sum import Copies
from lockstep.mirroring.optim.misuse import IN_LOCKSTEP, refusing_steps_over
from lockstep.mirroring.optim.step_hooks import StepHookWarnings, around_step
from lockstep.mirroring.zero1 import ShardedOptimizer, ShardingGroup

FUSED: tuple[type[Optimizer], ...] = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad,
    torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD, torch.optim.Rprop,
)  # fmt: skip
_ATTRIBUTES_OF_TORCH = frozenset(
    [
        *("defaults", "state", "param_groups", "step", "_opt_called", "_step_count", "_zero_grad_profile_name"),
        *("_warned_capturable_if_run_uncaptured", "_cuda_graph_capture_health_check"),
    ]
)
_SETTINGS = (bool, int, float, str, type(None))


def on_device(skip: bool | torch.Tensor) -> torch.Tensor | None:
    """The tensor by which the device decides to skip; None if the host has decided."""
    return skip if isinstance(skip, torch.Tensor) else None


def _why_not_fused(optimizer: Optimizer) -> str | None:
    """Why fused kernels cannot be used although the user has not chosen others; None if they can."""
    kind = type(optimizer)
    if kind not in FUSED:
        return f"torch has no fused {kind.__name__}"
    for group in optimizer.param_groups:
        if group.get("fused") is False or group.get("foreach") or group.get("differentiable"):
            return f"the {kind.__name__} was made with fused=False, foreach=True or differentiable=True"
        if group.get("momentum") and group.get("dampening"):
            return "with dampening, SGD's first update differs from the others, and it may be one that is skipped"
    return None


def _prepare_momentum(optimizer: Optimizer) -> None:
    """Makes the momentum for the first update of SGD: torch makes it in that update, which the device may skip.

    From zeros, without dampening, the first update has the same numbers.
    """
    if type(optimizer) is not torch.optim.SGD:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)


@dataclass(frozen=True, kw_only=True, eq=False)
class StatePart:
    """The part of the optimizer's state for one parameter that a worker holds."""

    parameter: nn.Parameter  # the whole
    start: int  # the first of its elements, in row-major order, that the state is about
    part: nn.Parameter  # of those elements; the parameter itself if the state is about all
    values: Mapping[str, Any]  # by name; those of the shape of ``part`` have one for each element


class StorageOptimizers:
    """The user's optimizer, over replica 0's parameters, and its copies for the other storages of the weights.

    If there is one storage, its state may be sharded among workers. On GPUs it uses torch's fused kernels, if the
    optimizer has them and the user has not chosen others.

    Attributes:
        others_are_whole: whether gradients that the mirrored optimizer does not hold are those of one device in this
            update: of the only replica, and not to be divided.
        divisible: whether parameters can be updated in slices, as of the last ``align``: torch's elementwise
            optimizers, with nothing around the step.
        rates: tensors that fused kernels read each group's learning rate from, while a CUDA graph is captured.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[Copies],
        leaders: Sequence[int],
        sharing: ShardingGroup | None = None,
        *,
        on_gpus: bool = False,
        holds: str = "",
        find_other_parameters: Callable[[], Iterable[Copies]] = tuple,
    ) -> None:
        self.plain = optimizer
        self._warnings = StepHookWarnings(optimizer, holds)
        self._find_other_parameters = find_other_parameters
        self.others_are_whole = False
        self._copies_are_stale = False
        self._on_gpus = on_gpus and all(_is_plain(copies[0]) for copies in parameters)
        self._without_gradient = list(parameters)
        self._has_sparse = False
        self._fused = False
        self.rates: Sequence[torch.Tensor] | None = None
        self._parameters = parameters
        self._ids = {id(copies[0]) for copies in parameters}
        self._leaders = tuple(leaders)
        self._sharded = None if sharing is None else ShardedOptimizer([copies[0] for copies in parameters], sharing)
        around = around_step(optimizer)
        self.divisible = self._is_divisible(around)
        self.reset()
        self._warnings.look(around)

    def _is_divisible(self, around: Sequence[Any]) -> bool:
        """Whether parameters can be updated in slices, given what is around the step."""
        return type(self.plain) in ELEMENTWISE and not around

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The user's optimizer, and its copies for the other storages."""
        return tuple(self._by_leader.values())

    @property
    def not_fused(self) -> str | None:
        """Why updates are not made by fused kernels, which a device can tell to skip one; None if they are."""
        if not self._on_gpus:
            return "the weights are no plain floating-point tensors on GPUs"
        if not self._is_divisible(around_step(self.plain)):
            return f"{type(self.plain).__name__} has hooks on its step, another step, or is not torch's own"
        unseen, self._without_gradient = self._without_gradient, []
        for copies in unseen:  # whether a gradient is sparse is looked at once
            gradients = [copy.grad for copy in copies if copy.grad is not None]
            self._has_sparse |= any(gradient.is_sparse for gradient in gradients)
            if not gradients:
                self._without_gradient.append(copies)
        return _why_not_fused(self.plain) or ("they take no sparse gradients" if self._has_sparse else None)

    def reset(self) -> None:
        """Makes the copies again, with the state that the user's optimizer has now (after load_state_dict)."""
        if self._sharded is not None:
            self._sharded.cut(self.plain.state)
        self._state, self._copies_are_stale = self.plain.state, False
        self._by_leader: dict[int, Optimizer] = {self._leaders[0]: self.plain}
        for leader in self._leaders[1:]:
            memo: dict[int, Any] = {id(copies[0]): copies[leader] for copies in self._parameters}
            duplicate = copy.deepcopy(self.plain, memo)
            for name, value in _own_attributes(self.plain):  # which torch's copy of an optimizer leaves out
                duplicate.__dict__[name] = copy.deepcopy(value, memo)
            for copies in self._parameters:
                state = duplicate.state.get(copies[leader], {})
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) and value.device == copies[0].device and value.ndim:
                        state[name] = value.to(copies[leader].device)
            self._by_leader[leader] = duplicate
        self._choose_kernels(anew=True)

    def _choose_kernels(self, *, anew: bool = False) -> None:
        fused = self.not_fused is None
        if fused and (anew or not self._fused):  # fused kernels count steps on the device, others on the host
            for optimizer in self.optimizers:
                for parameter, state in optimizer.state.items():
                    if isinstance(state.get("step"), torch.Tensor):
                        state["step"] = state["step"].to(parameter.device, torch.float32)
        self._fused = fused

    def align(self) -> None:
        """Gives the copies the user's hyperparameters, and tells schedulers that a step was taken.

        Raises UsageError if the user's optimizer has parameters that the mirrored one does not know.
        """
        parameters = [parameter for group in self.plain.param_groups for parameter in group["params"]]
        if len(parameters) != len(self._parameters):
            raise UsageError(
                f"the optimizer has {len(parameters)} parameters, but had {len(self._parameters)} when it was "
                "mirrored; add groups with add_param_group of the mirrored optimizer"
            )
        fresh = [parameter for parameter in parameters if id(parameter) not in self._ids]
        if fresh:
            raise UsageError(
                f"the optimizer's groups got {len(fresh)} parameters (the first of shape {tuple(fresh[0].shape)}); "
                "make a new optimizer over the module's parameters, and hand it to strategy.mirror or compile"
            )
        around = around_step(self.plain)  # looked at once an update: it is asked for by every replica, and at the end
        self.divisible = self._is_divisible(around)
        if around or "zero_grad" in vars(self.plain):
            self._warnings.look(around)
        # The user may have loaded a state_dict into the plain optimizer.
        if self.plain.state is not self._state or (self._copies_are_stale and not around):
            self.reset()
        elif self._on_gpus:
            self._choose_kernels()
        for duplicate in list(self._by_leader.values())[1:]:
            for group, original in zip(duplicate.param_groups, self.plain.param_groups, strict=True):
                group.update({name: value for name, value in original.items() if name != "params"})
            settings = ((name, value) for name, value in _own_attributes(self.plain) if isinstance(value, _SETTINGS))
            duplicate.__dict__.update(settings)
        self.plain._opt_called = True  # type: ignore[attr-defined]  # what LRScheduler looks for

    @contextmanager
    def whole_state(self) -> Iterator[None]:
        """Inside the block the user's optimizer has the state of all parameters. A collective, if it is sharded."""
        if self._sharded is None:
            yield
            return
        local_state = self.plain.state
        self.plain.state = defaultdict(dict, self._sharded.whole(local_state))
        try:
            yield
        finally:
            self.plain.state = local_state

    def state_parts(self) -> list[StatePart]:
        """The state of the user's optimizer that this worker holds."""
        return [
            StatePart(parameter=whole, start=start, part=part, values=dict(self.plain.state.get(part, {})))
            for whole in (copies[0] for copies in self._parameters)
            for start, part in ([(0, whole)] if self._sharded is None else self._sharded.pieces_of(whole))
        ]

    def set_state_parts(self, parts: Iterable[StatePart]) -> None:
        """Sets the state of the user's optimizer to that of ``parts``."""
        self.plain.state = defaultdict(dict, {entry.part: dict(entry.values) for entry in parts if entry.values})
        self.reset()

    def join(self) -> None:
        """Undoes the sharding of the state, before another one. All workers must call it."""
        if self._sharded is not None:
            self.plain.state = defaultdict(dict, self._sharded.whole(self.plain.state))
            self._sharded = None

    def step(self, leader: int) -> None:
        """Updates all parameters of the leader's storage; of sharded ones, this worker's pieces."""
        optimizer = self._by_leader[leader]
        if leader != self._leaders[0] and around_step(self.plain):
            self._copy_weights(leader)
            return
        groups = [] if self._sharded is None else optimizer.param_groups
        wholes = [group["params"] for group in groups]
        with self._pieces_ready([parameter for whole in wholes for parameter in whole]):
            try:
                for group in groups:
                    group["params"] = self._stepped(group["params"])
                with refusing_steps_over(self._partial_others()):
                    optimizer.step()
            except UsageError:
                raise
            except Exception as error:
                name = type(optimizer).__name__
                error.add_note(
                    f"{name}.step is called once for all replicas and gets no closure; step an optimizer that "
                    "evaluates one itself, as SAM does, between runs by its own methods, first_step and second_step"
                )
                raise
            finally:
                for group, whole in zip(groups, wholes, strict=True):
                    group["params"] = whole

    def _partial_others(self) -> list[nn.Parameter]:
        """The weights that are not updated here and whose gradients are not those of one device, if any may be seen."""
        around = () if self.others_are_whole else around_step(self.plain)
        weights = [copy for copies in self._find_other_parameters() for copy in copies] if around else []
        with_gradient = [weight for weight in weights if weight.grad is not None]
        if with_gradient:
            self._warnings.look_at_partial(around, with_gradient)
        return weights

    @torch.no_grad()
    def _copy_weights(self, leader: int) -> None:
        """In place of a step: hooks are called once an update, and what they change reaches all storages so."""
        self._copies_are_stale = True
        for copies in self._parameters:
            copies[leader].copy_(copies[self._leaders[0]])

    def finish(self) -> None:
        """Takes the weights that other workers have updated, if they share the state. All of them must call it."""
        if self._sharded is not None:
            self._sharded.take_weights()

    def step_slice(self, leader: int, parameters: Sequence[nn.Parameter], skip: torch.Tensor | None = None) -> None:
        """Updates only ``parameters``, some of the leader's storage; disjoint slices may be updated at the same time.

        The device skips the update if ``skip``, which only fused kernels read, is 1.0.
        """
        optimizer = self._by_leader[leader]
        ids = set(map(id, parameters))
        # Has the same state. Not copy.copy, whose __setstate__ walks through the state of all parameters while other
        # threads still make theirs: NAdam then found one half made.
        part = object.__new__(type(optimizer))
        part.__dict__.update(optimizer.__dict__)
        part.__dict__[IN_LOCKSTEP] = True
        part.param_groups = []
        for group in optimizer.param_groups:
            sliced = [parameter for parameter in group["params"] if id(parameter) in ids]
            part.param_groups.append({**group, "params": sliced if self._sharded is None else self._stepped(sliced)})
        with self._pieces_ready(parameters):
            if self._fused:
                part.param_groups = [{**group, "fused": True} for group in part.param_groups]
                _prepare_momentum(part)
            if self.rates is not None:  # torch asks for capturable, though fused kernels count on the device anyway
                for group, rate in zip(part.param_groups, self.rates, strict=True):
                    group.update(lr=rate, capturable=True)
            if skip is not None:
                part.__dict__["found_inf"] = skip
            type(optimizer).step(part)

    def _pieces_ready(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        return nullcontext() if self._sharded is None else self._sharded.ready(parameters)

    def _stepped(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters; of sharded ones, this worker's pieces."""
        if self._sharded is None:
            return list(parameters)
        return [piece for parameter in parameters for piece in self._sharded.local_pieces(parameter)]


def _own_attributes(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Attributes that a user's class has given the optimizer, and not torch's ``Optimizer``."""
    for name, value in vars(optimizer).items():
        if name not in _ATTRIBUTES_OF_TORCH and not name.startswith("_optimizer_"):
            yield name, value


def _is_plain(parameter: torch.Tensor) -> bool:
    """Whether it is neither divided among workers (a DTensor), nor quantised, nor complex."""
    return issubclass(type(parameter), nn.Parameter) and torch.is_floating_point(parameter)


class AmpAdapter(Optimizer):
    """The parameters of every storage, stepped together or not at all. ``skipped``: no weight was changed.

    If ``skip``, which was decided before, is a tensor, the host does not read what the scaler finds either.
    """

    found_inf: torch.Tensor

    def __init__(
        self,
        optimizers: StorageOptimizers,
        parameters: Sequence[Copies],
        leaders: Sequence[int],
        skip: bool | torch.Tensor,
    ) -> None:
        self._of_leader = {leader: [copies[leader] for copies in parameters] for leader in leaders}
        super().__init__([parameter for parameters in self._of_leader.values() for parameter in parameters], {})
        self._optimizers = optimizers
        self._skip = on_device(skip)
        # Torch's scaler then reads nothing: it leaves here, in "found_inf", what it has found, and steps.
        self._step_supports_amp_scaling = self._skip is not None
        self.skipped: bool | torch.Tensor = True  # unless the scaler steps

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.skipped = False
        if self._skip is not None:
            # Above 1 if several devices have found an overflow.
            overflow = self.found_inf.to(self._skip.device, non_blocking=True).clamp(max=1.0)
            self.skipped = skip = torch.maximum(self._skip, overflow)
        for leader, parameters in self._of_leader.items():
            if self._skip is None:
                self._optimizers.step(leader)
            else:
                self._optimizers.step_slice(leader, parameters, skip)
