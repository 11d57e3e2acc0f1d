"""The mirrored optimizer: a ``torch.optim.Optimizer`` whose step updates all replicas.

Its groups, state and ``state_dict`` are the plain optimizer's, so schedulers and checkpoints work on it as on the plain
one. ``step`` runs one update.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep._torch_compat import not_compiled
from lockstep.errors import ConfigError, UsageError
from lockstep.mirroring.gradients.local_sum import Copies
from lockstep.mirroring.gradients.parameter_hooks import ParameterHooks
from lockstep.mirroring.gradients.state import GradientHome, GradientState
from lockstep.mirroring.optim.gradient_sums import MakeSums, run_in_replicas
from lockstep.mirroring.optim.misuse import guard_groups, plain_settings
from lockstep.mirroring.optim.step_hooks import replaced_step
from lockstep.mirroring.optim.storage_optimizers import StorageOptimizers
from lockstep.mirroring.optim.update import LockstepUpdate, StepResult, UpdateTimes
from lockstep.mirroring.partition import PartitionPolicy
from lockstep.replicas.context import ReplicaContext, get_replica_context, own_context, refuse_in_replica
from lockstep.replicas.owner import Owner
from lockstep.replicas.watcher import Totals

_SCALER = "torch.amp.grad_scaler"


class MirroredOptimizer(Optimizer):
    """An optimizer whose ``step`` updates all replicas. Made by ``strategy.mirror(optimizer)``.

    Attributes:
        plain: the user's own optimizer, whose attributes and hooks this one's are.
        parameters: for each parameter its copies, one for each local replica.
        gradient_sums: sums the gradients, for a program that looks at them.
        gradients: where the gradients are. Its ``sums_after_runs`` says whether those that a run leaves are summed
            after it, so that a program outside replicas sees those of one device. ``Model`` does not need it.
        hooks: those on the parameters, which updates call for ``Model``.
    """

    _step_supports_amp_scaling = False  # a scaler unscales; the plain optimizer may do that by itself

    def __init__(
        self,
        owner: Owner,
        optimizer: Optimizer,
        find_copies: Callable[[], Mapping[int, Copies]],
        make_sums: MakeSums,
        partition: PartitionPolicy,
    ) -> None:
        # Optimizer.__init__ is not called: all that it would set up is the plain optimizer's.
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError("LBFGS evaluates its closure many times a step; choose a first-order optimizer")
        self._owner = owner
        self.plain = optimizer
        self._find_copies = find_copies
        self._make_sums, self._partition = make_sums, partition
        self.parameters: list[Copies] = []
        self._prepare()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The plain optimizer's groups. In a replica they are read-only, and a GradScaler must not use them."""
        if get_replica_context() is not None and len(self._owner.devices) > 1 and _asked_by(_SCALER):
            raise UsageError(
                "a GradScaler must unscale and step once for all replicas, and not in each; in the step keep "
                "scaler.scale(loss).backward() and call optimizer.sum_gradients(), and after strategy.run "
                "scaler.step(optimizer), scaler.update() and optimizer.zero_grad()"
            )
        return self.plain.param_groups

    @property
    def times(self) -> tuple[UpdateTimes | None, ...]:
        """The times of the last update, one item for each replica; None if it was skipped."""
        return self._update.times

    @not_compiled  # dynamo cannot follow the wait for other threads: test_a_step_may_call_a_compiled_update
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Sums the gradients over all replicas and updates all copies of the weights. Every replica must call it.

        Afterwards replica 0's parameters have the summed gradients and the other replicas' have none, so that without
        ``zero_grad`` further gradients are added as on one device. Outside replicas every worker must call it; it then
        uses the gradients that ``sum_gradients`` left on the user's module, or sums them first.

        Args:
            closure: called in each replica first; its result is returned. Only in a replica.
        """
        context = own_context(self._owner, "optimizer")
        if context is None:
            return self._step_outside(closure)
        gradients = self.gradients
        gradients.check_not_lost()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # The sums are not added up again where all have them: among workers that is an exchange, and in bfloat16 (with
        # compression) rounds once more.
        has_sums = gradients.all_have_sums(context)
        gradients.take_back(context.local_replica, all_but_first=has_sums)
        if has_sums or gradients.home is GradientHome.FINAL_SUM:
            if not has_sums:
                gradients.check_final(context.local_replica)
            self._update.apply(context)
        elif self._update.is_of_one_device(context):
            self._update.run_plain(context)
        else:  # the counts add up to 1: the replicas back-propagated parts of one loss, summed and not averaged
            self._update.run(context, Totals(0.0, float(context.replica_id_in_sync_group == 0)))
        gradients.home = GradientHome.REPLICAS
        return loss

    def sum_gradients(self) -> None:
        """Sums the gradients over all replicas, for a program that reads, clips or changes them before ``step()``.

        Afterwards the parameters of the user's module have the summed gradients, on every worker. Use them outside
        replicas, in the same way on all workers, and then call ``step()`` or ``zero_grad()`` there. In a replica every
        replica must call it; outside replicas, every worker.

        Example:
            >>> import torch, lockstep as ls
            >>> strategy = ls.MirroredStrategy()
            >>> mirrored = strategy.mirror(torch.nn.Linear(2, 1))
            >>> optimizer = strategy.mirror(torch.optim.SGD(mirrored.parameters(), 0.1))
            >>> def backward(x):
            ...     mirrored(x).sum().backward()
            ...     optimizer.sum_gradients()
            >>> for x in strategy.distribute_dataset([torch.ones(4, 2)]):
            ...     strategy.run(backward, (x,))
            ...     norm = torch.nn.utils.clip_grad_norm_(mirrored.parameters(), 1.0)
            ...     optimizer.step()
            >>> round(float(norm), 4)  # of (4, 4) for the weights and 4 for the bias
            6.9282
        """
        self.gradient_sums.sum_gradients()

    def clip_sums(self, clip_norm: float) -> torch.Tensor:
        """Clips the sums to a global norm and returns the norm before. Every worker must call it, outside replicas."""
        refuse_in_replica("clip_sums")
        norms = run_in_replicas(self._owner, self._update.clip, clip_norm)
        norm: torch.Tensor = self._owner.local_results(norms)[0]
        return norm

    def update(
        self,
        context: ReplicaContext,
        *,
        totals: Totals,
        clip_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> StepResult:
        """A step that divides the summed gradients by the summed count. Every replica must call it.

        All gradients are None afterwards. A summed count of 0 skips the update. On GPUs the host reads nothing if torch
        has a fused kernel for the optimizer. The numbers of the result are then tensors, and an update with a
        non-finite total is skipped, and all later ones until ``reset_nonfinite``.

        Args:
            context: the context of the calling replica.
            totals: this replica's sums since the last update.
            clip_norm: the largest global norm of the divided gradients; None does not clip, and ``math.inf`` only
                computes the norm.
            scaler: the scaler of the losses (fp16); it decides whether to skip.

        Raises:
            NonFiniteLossError: the summed loss is a number that is NaN or infinite; no weight has changed.
        """
        own_context(self._owner, "optimizer")
        if "step" in self.__dict__ and replaced_step(self) is not None:
            raise UsageError(
                "the step of a mirrored optimizer was replaced on the object, and fit updates without calling it; "
                "replace that of the plain optimizer (optimizer.plain.step), which is called once an update"
            )
        self.gradients.check_not_lost()
        self.gradients.take_back(context.local_replica)
        result = self._update.run(context, totals, clip_norm, scaler)
        self.zero_grad()
        return result

    def reset_nonfinite(self) -> None:
        """Lets updates happen again on GPUs after one whose total was not finite. Outside replicas only."""
        self._update.skips.reset_nonfinite()

    @property
    def storages(self) -> StorageOptimizers:
        """The plain optimizer and its copies for other storages of the weights."""
        return self._update.optimizers

    @contextmanager
    def hooks_at_updates(self, refused: str) -> Iterator[None]:
        """A block of runs whose updates call the hooks on parameters, and whose backward passes do not.

        Raises UsageError if there are hooks, and ``refused`` says why they would not be those of one device.
        """
        self.hooks.at_updates = True
        try:
            self.hooks.take_all()
            if refused and self.hooks.any:
                raise UsageError(
                    f"parameters have hooks, and {refused}, so that they would not see the gradient of one update; "
                    "remove them, and use clip_norm= or optimizer.register_step_pre_hook"
                )
            yield
        finally:
            self.hooks.at_updates = False

    @not_compiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the current replica; outside replicas, of all."""
        context = get_replica_context()
        self.gradients.clear(None if context is None else context.local_replica, set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The plain optimizer's state. With ZeRO-1 it is gathered, and all workers must call it."""
        with self.storages.whole_state():
            return self.plain.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state into the plain optimizer and its copies. Outside replicas only."""
        refuse_in_replica("load_state_dict")
        self.plain.load_state_dict(dict(state_dict))
        self.storages.reset()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters of a mirrored module to the plain optimizer."""
        self.storages.join()  # shards are cut anew, of the new parameters too
        self.plain.add_param_group(param_group)
        try:
            self._prepare()
        except UsageError:  # the program may go on with the groups that it had
            del self.plain.param_groups[-1]
            self._prepare()
            raise

    def __getattr__(self, name: str) -> Any:
        """Attributes of the plain optimizer: its state, its hooks, and methods, which affect all storages."""
        plain = self.__dict__.get("plain")
        if plain is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(plain, name)
        return self._of_all_storages(value) if isinstance(value, MethodType) and value.__self__ is plain else value

    def _of_all_storages(self, method: MethodType) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            replicas = len(self._owner.devices)
            if get_replica_context() is not None and replicas > 1:
                raise UsageError(
                    f"{method.__qualname__} changes what all {replicas} replicas train, and the step of each of them "
                    "would call it; call it outside strategy.run, between runs"
                )
            result = method(*args, **kwargs)
            if len(self.storages.optimizers) > 1:
                self.storages.reset()
            return result

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets attributes that only the plain optimizer has on it."""
        is_new = "_update" in self.__dict__ and name not in self.__dict__ and not hasattr(type(self), name)
        if is_new and name in vars(self.plain):
            setattr(self.plain, name, value)
        else:
            object.__setattr__(self, name, value)

    def __getstate__(self) -> NoReturn:
        raise UsageError(
            "a mirrored optimizer belongs to its strategy and cannot be pickled; save its state_dict() instead"
        )

    def __repr__(self) -> str:
        return f"MirroredOptimizer({self.plain!r})"

    def _prepare(self) -> None:
        guard_groups(self.plain)
        # Parameters of a layer that the user has replaced stay, as they do in a plain optimizer.
        mirrored = {id(copies[0]): copies for copies in self.parameters} | dict(self._find_copies())
        parameters = [parameter for group in self.plain.param_groups for parameter in group["params"]]
        for parameter in parameters:
            if id(parameter) not in mirrored:
                raise UsageError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} whose module is not mirrored; "
                    "call module = strategy.mirror(module) first, and give the optimizer that module's parameters"
                )
        self.parameters = [mirrored[id(parameter)] for parameter in parameters]
        self.gradient_sums = self._make_sums(self.parameters, functools.partial(plain_settings, self.plain))
        former: GradientState | None = self.__dict__.get("gradients")
        self.gradients = self.gradient_sums.state
        if former is not None:
            self.gradients.continue_from(former)
        self.hooks = ParameterHooks(self.parameters, self._partition)
        on_gpus = all(device.kind == "GPU" for device in self._owner.devices)
        self._update = LockstepUpdate(
            self.plain,
            self.parameters,
            self.gradient_sums.groups,
            self.gradient_sums.exchange,
            hooks=self.hooks,
            on_gpus=on_gpus,
            # No method of this object: in a cycle, an optimizer that the program has dropped would hold its gradients,
            # beside those of the next one over the same weights, until the garbage collector runs.
            find_other_parameters=functools.partial(
                _other_parameters, self.parameters, self._find_copies, self._partition
            ),
        )

    def _step_outside(self, closure: Callable[[], Any] | None) -> None:
        if closure is not None:
            raise UsageError(
                "step(closure) evaluates the closure in every replica; call it inside the function that strategy.run "
                "runs, or call step() outside without a closure"
            )
        gradients = self.gradients
        gradients.check_not_lost()
        if self.parameters and all(gradients.has_sums):
            gradients.home = GradientHome.FINAL_SUM
            for replica in range(len(self._owner.devices)):
                gradients.take_back(replica, all_but_first=True)
        if gradients.home is GradientHome.FINAL_SUM:
            gradients.check_final(None)
        else:
            self.sum_gradients()
        run_in_replicas(self._owner, self._update.apply)
        gradients.home = GradientHome.REPLICAS


def _other_parameters(
    parameters: Sequence[Copies], find_copies: Callable[[], Mapping[int, Copies]], partition: PartitionPolicy
) -> list[Copies]:
    """The parameters of mirrored modules that are none of ``parameters``, and what they were made of."""
    ids = {id(copies[0]) for copies in parameters}
    foreign = (copies for first, copies in find_copies().items() if first not in ids)
    return [(*copies, *_unless_same(partition.source_of(copies[0]), copies[0])) for copies in foreign]


def _unless_same(source: nn.Parameter, parameter: nn.Parameter) -> tuple[nn.Parameter, ...]:
    return () if source is parameter else (source,)


def _asked_by(module: str) -> bool:
    """Whether the calling function was called from a module of this name."""
    # A GradScaler gives no sign but that it reads the groups of what it unscales (torch 2.13, _unscale_grads_).
    return bool(sys._getframe(2).f_globals.get("__name__") == module)
