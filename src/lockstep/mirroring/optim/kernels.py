"""The plain optimizers under a mirrored one: one for each storage of the weights.

``StorageOptimizers`` has the user's optimizer and its copies. It updates slices of the parameters on several threads
where the optimizer is elementwise, and uses torch's fused kernels on GPUs. ``AmpAdapter`` shows all storages to
torch.amp.GradScaler as one optimizer.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep._torch_compat import optimizer_post_hooks, optimizer_pre_hooks
from lockstep.errors import UsageError
from lockstep.mirroring.gradients.local import Copies
from lockstep.mirroring.optim.misuse import IN_LOCKSTEP, refuse_plain_step
from lockstep.mirroring.optim.nonfinite import on_device, skipped_too
from lockstep.mirroring.zero1 import ShardedOptimizer, ShardingGroup

# Adagrad's kernel for CUDA was looked up in torch 2.13; the others have had theirs for long.
FUSED: tuple[type[Optimizer], ...] = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW,
    *((torch.optim.Adagrad,) if torch.__version__ >= (2, 13) else ()),  # type: ignore[operator]
)  # fmt: skip


def why_not_fused(optimizer: Optimizer) -> str | None:
    """Why its fused kernels cannot be taken without being asked for; None where they can."""
    kind = type(optimizer)
    if kind not in FUSED:
        return f"torch has no fused {kind.__name__}"
    for group in optimizer.param_groups:
        if group.get("fused") is False or group.get("foreach") or group.get("differentiable"):
            return f"the {kind.__name__} was made with fused=False, foreach=True or differentiable=True"
        if group.get("momentum") and group.get("dampening"):
            return "with dampening, SGD's first update differs from the others, and it may be one that is skipped"
    return None


def fused_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """The group for a fused step."""
    return {**group, "fused": True}


def prepare_state(optimizer: Optimizer) -> None:
    """Makes the momentum of those that come to their first update.

    torch makes it in that update, and where the device skips that one it would stay what the memory held before. From
    zeros, without dampening, the first update has the same numbers.
    """
    if type(optimizer) is not torch.optim.SGD:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)


def count_on_device(optimizer: Optimizer) -> None:
    """Moves the numbers of steps, which other kernels count on the host, to where fused ones count them."""
    for parameter, state in optimizer.state.items():
        step = state.get("step")
        if isinstance(step, torch.Tensor):
            state["step"] = step.to(parameter.device, torch.float32)


class DenseGradients:
    """Watches for sparse gradients, which fused kernels do not take.

    Args:
        parameters: per parameter its copies, one per replica.
    """

    def __init__(self, parameters: Sequence[Sequence[nn.Parameter]]) -> None:
        self._unseen = list(parameters)
        self._sparse = False

    @property
    def all_dense(self) -> bool:
        """Whether no parameter has had a sparse gradient yet. Looks only at those that had none before."""
        if self._unseen:
            seen = [copies for copies in self._unseen if any(copy.grad is not None for copy in copies)]
            self._sparse |= any(copy.grad is not None and copy.grad.is_sparse for each in seen for copy in each)
            if seen:
                known = {id(copies) for copies in seen}
                self._unseen = [copies for copies in self._unseen if id(copies) not in known]
        return not self._sparse


ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad,
    torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD, torch.optim.Rprop,
)  # fmt: skip

_OF_TORCH = frozenset(
    [
        *("defaults", "state", "param_groups", "step", "_opt_called", "_step_count", "_zero_grad_profile_name"),
        *("_warned_capturable_if_run_uncaptured", "_cuda_graph_capture_health_check"),
    ]
)
_SETTINGS = (bool, int, float, str, type(None))


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldState:
    """What a worker keeps of the optimizer's state for one parameter.

    Args:
        parameter: which one.
        start: the first of its elements, in row-major order, that it is about.
        part: those elements; the parameter itself where it is about all.
        values: by name; those of the shape of ``part`` have one for each of its elements. Empty before the first step.
    """

    parameter: nn.Parameter
    start: int
    part: nn.Parameter
    values: Mapping[str, Any]


class StorageOptimizers:
    """The user's optimizer and its copies for the other storages.

    Args:
        optimizer: the user's, over the first leader's parameters.
        parameters: per parameter its copies, one per replica.
        leaders: the replicas that lead a storage group, replica 0 first.
        sharing: the workers among whom the state is divided, where there is one leader; None keeps all of it here.
        on_gpus: take torch's fused kernels, where the optimizer has them and the user has not chosen others.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[Sequence[nn.Parameter]],
        leaders: Sequence[int],
        sharing: ShardingGroup | None = None,
        *,
        on_gpus: bool = False,
    ) -> None:
        self.plain = optimizer
        self._on_gpus = on_gpus and all(_is_plain(copies[0]) for copies in parameters)
        self._gradients = DenseGradients(parameters)
        self._fused = False
        self._parameters = parameters
        self._known = {id(copies[0]) for copies in parameters}
        self._leaders = tuple(leaders)
        self._shared = None if sharing is None else ShardedOptimizer([copies[0] for copies in parameters], sharing)
        self.reset()

    @property
    def divisible(self) -> bool:
        """Whether parameters can be updated in slices: torch's elementwise optimizers, without hooks on the step."""
        hooks = (
            # An optimizer around another one may have none: it need not call Optimizer.__init__.
            vars(self.plain).get("_optimizer_step_pre_hooks", {}),
            vars(self.plain).get("_optimizer_step_post_hooks", {}),
            [hook for hook in optimizer_pre_hooks.values() if hook is not refuse_plain_step],
            optimizer_post_hooks,
        )
        return type(self.plain) in ELEMENTWISE and not any(hooks)

    @property
    def of_storages(self) -> tuple[Optimizer, ...]:
        """The user's optimizer, and its copies for the other storages."""
        return tuple(self._by_leader.values())

    @property
    def not_fused(self) -> str | None:
        """Why updates are not made by fused kernels, which a device can tell to skip one; None where they are."""
        if not self._on_gpus:
            return "the weights are no plain floating-point tensors on GPUs"
        if not self.divisible:
            return f"{type(self.plain).__name__} has hooks on its step, or is not torch's own"
        return why_not_fused(self.plain) or (None if self._gradients.all_dense else "they take no sparse gradients")

    def reset(self) -> None:
        """Makes the copies anew, with the state that the user's optimizer has now (after load_state_dict)."""
        if self._shared is not None:
            self._shared.cut(self.plain.state)
        self._state = self.plain.state
        self._by_leader: dict[int, Optimizer] = {self._leaders[0]: self.plain}
        for leader in self._leaders[1:]:
            memo: dict[int, Any] = {id(copies[0]): copies[leader] for copies in self._parameters}
            duplicate = copy.deepcopy(self.plain, memo)
            for name, value in _own_attributes(self.plain):  # which torch's copy of an optimizer leaves out
                duplicate.__dict__[name] = copy.deepcopy(value, memo)
            for copies in self._parameters:
                for name, value in duplicate.state.get(copies[leader], {}).items():
                    if isinstance(value, torch.Tensor) and value.device == copies[0].device and value.ndim:
                        duplicate.state[copies[leader]][name] = value.to(copies[leader].device)
            self._by_leader[leader] = duplicate
        self._choose_kernels(anew=True)

    def _choose_kernels(self, *, anew: bool = False) -> None:
        fused = self.not_fused is None
        if fused and (anew or not self._fused):
            for optimizer in self.of_storages:
                count_on_device(optimizer)
        self._fused = fused

    def align(self) -> None:
        """Gives the copies the user's hyperparameters, and notes for schedulers that a step has been taken.

        Raises:
            UsageError: the user's optimizer has parameters that the mirrored one does not know.
        """
        known = sum(len(group["params"]) for group in self.plain.param_groups)
        if known != len(self._parameters):
            raise UsageError(
                f"the optimizer has {known} parameters, but had {len(self._parameters)} when it was mirrored; "
                "add groups with add_param_group of the mirrored optimizer"
            )
        fresh = [each for group in self.plain.param_groups for each in group["params"] if id(each) not in self._known]
        if fresh:
            raise UsageError(
                f"the optimizer's groups have {len(fresh)} parameters (the first of shape {tuple(fresh[0].shape)}) "
                "that were not in them when it was mirrored; make a new optimizer over the module's parameters, and "
                "hand it to strategy.mirror or compile"
            )
        if self.plain.state is not self._state:  # the user loaded a state_dict into the plain optimizer
            self.reset()
        elif self._on_gpus:
            self._choose_kernels()
        for duplicate in list(self._by_leader.values())[1:]:
            for theirs, ours in zip(duplicate.param_groups, self.plain.param_groups, strict=True):
                theirs.update({name: value for name, value in ours.items() if name != "params"})
            settings = ((name, value) for name, value in _own_attributes(self.plain) if isinstance(value, _SETTINGS))
            duplicate.__dict__.update(settings)
        self.plain._opt_called = True  # type: ignore[attr-defined]  # what LRScheduler looks for

    @contextmanager
    def whole_state(self) -> Iterator[None]:
        """Inside the block the user's optimizer has the state of all its parameters.

        Where it is divided among workers, all of them must call it.
        """
        if self._shared is None:
            yield
            return
        own = self.plain.state
        self.plain.state = defaultdict(dict, self._shared.whole(own))
        try:
            yield
        finally:
            self.plain.state = own

    def held(self) -> list[HeldState]:
        """What this worker keeps of the state of the user's optimizer."""
        found = []
        for whole in (copies[0] for copies in self._parameters):
            pieces = [(0, whole)] if self._shared is None else self._shared.pieces_of(whole)
            for start, part in pieces:
                values = dict(self.plain.state.get(part, {}))
                found.append(HeldState(parameter=whole, start=start, part=part, values=values))
        return found

    def take_held(self, held: Iterable[HeldState]) -> None:
        """Sets the state of the user's optimizer to values for what ``held`` gave."""
        self.plain.state = defaultdict(dict, {each.part: dict(each.values) for each in held if each.values})
        self.reset()

    def join(self) -> None:
        """Undoes the division of the state among workers, for another one. All of them must call it."""
        if self._shared is not None:
            self.plain.state = defaultdict(dict, self._shared.whole(self.plain.state))
            self._shared = None

    def step(self, leader: int) -> None:
        """Updates all parameters of the leader's storage; of those that workers share, this one's."""
        optimizer = self._by_leader[leader]
        if self._shared is None:
            with _told_of_closures(optimizer):
                optimizer.step()
            return
        wholes = [group["params"] for group in optimizer.param_groups]
        with self._shared.ready([parameter for group in wholes for parameter in group]):
            try:
                for group in optimizer.param_groups:
                    group["params"] = self._stepped(group["params"])
                optimizer.step()
            finally:
                for group, whole in zip(optimizer.param_groups, wholes, strict=True):
                    group["params"] = whole

    def finish(self) -> None:
        """Takes, where workers share the state, the weights that the others have updated. All of them must call it."""
        if self._shared is not None:
            self._shared.take_weights()

    def step_slice(self, leader: int, chosen: Sequence[nn.Parameter], skip: torch.Tensor | None = None) -> None:
        """Updates only ``chosen`` of the leader's storage; disjoint slices may be updated at the same time.

        Of what workers share, each updates its own.

        Args:
            leader: of the storage.
            chosen: parameters of it.
            skip: 1.0, on a device, where this update is to change nothing; only where ``not_fused`` is None.
        """
        optimizer = self._by_leader[leader]
        wanted = {id(parameter) for parameter in chosen}
        # Shares the state. Not copy.copy, whose __setstate__ walks through the state of all parameters while other
        # threads are still making theirs: NAdam then found one half made.
        part = object.__new__(type(optimizer))
        part.__dict__.update(optimizer.__dict__)
        part.__dict__[IN_LOCKSTEP] = True
        part.param_groups = [
            {**group, "params": self._stepped(each for each in group["params"] if id(each) in wanted)}
            for group in optimizer.param_groups
        ]
        if self._fused:
            part.param_groups = [fused_group(group) for group in part.param_groups]
        with nullcontext() if self._shared is None else self._shared.ready(chosen):
            if self._fused:
                prepare_state(part)
            if skip is not None:
                part.__dict__["found_inf"] = skip
            type(optimizer).step(part)

    def _stepped(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """What is to be stepped here of parameters."""
        if self._shared is None:
            return list(parameters)
        return [piece for parameter in parameters for piece in self._shared.own(parameter)]


def _own_attributes(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Attributes that the user's class of optimizers has given it, and not torch's ``Optimizer``."""
    for name, value in vars(optimizer).items():
        if name not in _OF_TORCH and not name.startswith("_optimizer_"):
            yield name, value


@contextmanager
def _told_of_closures(optimizer: Optimizer) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        name = type(optimizer).__name__
        error.add_note(
            f"{name}.step is called once for all replicas and gets no closure; an optimizer that evaluates one itself, "
            "as SAM does, is stepped between runs by its own methods: strategy.run(backward, ...), "
            "optimizer.first_step(), optimizer.zero_grad(), strategy.run(backward, ...), optimizer.second_step()"
        )
        raise


def _is_plain(parameter: torch.Tensor) -> bool:
    """Whether it is neither divided among workers (a DTensor), nor quantised, nor complex."""
    return issubclass(type(parameter), nn.Parameter) and torch.is_floating_point(parameter)


class AmpAdapter(Optimizer):
    """The parameters of every storage, stepped together or not at all.

    Args:
        updaters: those of the storages.
        parameters: per parameter its copies, one per replica.
        leaders: the replicas that lead a storage.
        skip: what was decided before the scaler looks: a tensor where the scaler's finding is not to be read either.

    Attributes:
        skipped: whether no weight was touched.
    """

    found_inf: torch.Tensor

    def __init__(
        self,
        updaters: StorageOptimizers,
        parameters: Sequence[Copies],
        leaders: Sequence[int],
        skip: bool | torch.Tensor,
    ) -> None:
        self._of_leader = {leader: [copies[leader] for copies in parameters] for leader in leaders}
        super().__init__([each for own in self._of_leader.values() for each in own], {})
        self._updaters = updaters
        self._skip = on_device(skip)
        # Torch's scaler then reads nothing: it leaves here, in "found_inf", what it has found, and steps.
        self._step_supports_amp_scaling = self._skip is not None
        self.skipped: bool | torch.Tensor = True  # unless the scaler steps

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.skipped = False
        if self._skip is not None:
            self.skipped = skip = skipped_too(self._skip, self.found_inf)
        for leader, own in self._of_leader.items():
            if self._skip is None:
                self._updaters.step(leader)
            else:
                self._updaters.step_slice(leader, own, skip)
