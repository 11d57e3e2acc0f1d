"""Observes a run: records what each replica did, and stops the program after enough updates.

    run_begins -> [replica: module calls, backward, update_begins, update_ended] -> run_begins ... -> finish
         '-- outside replicas: sends the completed updates, then stops the program if there are enough

Each replica writes its own trace; what all replicas have in common is recorded where all of them meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lockstep._torch_compat import DisableTorchFunction
from lockstep.config import LogicalDevice
from lockstep.mirroring.module.module import MirroredModule
from lockstep.replicas.context import get_replica_context
from lockstep.replicas.watcher import Differentiation, Run, Totals, Watcher, watching
from lockstep.strategies.base import Strategy
from lockstep_tools.verify.config import RunConfig
from lockstep_tools.verify.interventions import active_dropouts, intervene_before_first_step, local_batch_norms
from lockstep_tools.verify.trace import EndRecord, Message, ReplicaTrace, StartRecord, UpdateRecord, tensors_with_rows


class Weights:
    """The parameters and buffers of a strategy's mirrored modules by name, and the parameters' last recorded values.

    A lone module's names are its own. With several modules, the class and the number of each stand before its names.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._modules: dict[str, MirroredModule] = {}
        self._names: list[dict[int, str]] = [{} for _ in strategy.devices]
        self._last: dict[str, Tensor] = {}
        self.find_modules()

    @property
    def unit(self) -> float:
        """Machine epsilon of the coarsest dtype among the parameters."""
        dtypes = {parameter.dtype for parameter in self.all().values() if parameter.is_floating_point()}
        return max((torch.finfo(dtype).eps for dtype in dtypes), default=torch.finfo(torch.float32).eps)

    def names(self, replica: int, parameters: Sequence[nn.Parameter]) -> list[str]:
        names = self._names[replica]
        return [
            names.get(id(parameter), f"parameter {number} of the optimizer")
            for number, parameter in enumerate(parameters)
        ]

    def name_of(self, module: MirroredModule) -> str:
        prefix = next((prefix for prefix, mirrored in self._modules.items() if mirrored is module), "")
        return prefix.removesuffix(".") or type(module.module).__name__

    def all(self) -> dict[str, nn.Parameter]:
        """Replica 0's parameters of all modules."""
        return {
            f"{prefix}{name}": parameter
            for prefix, module in self._modules.items()
            for name, parameter in module.module.named_parameters()
        }

    def record(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of these parameters; later changes are measured from them."""
        copies = {name: parameter.detach().to("cpu", copy=True) for name, parameter in parameters.items()}
        self._last.update(copies)
        return copies

    def record_changed(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of those of these parameters that differ from their last recorded values."""
        current = {name: parameter.detach().cpu() for name, parameter in parameters.items() if name in self._last}
        return self.record({name: value for name, value in current.items() if not torch.equal(value, self._last[name])})

    @torch.no_grad()
    def restore(self) -> None:
        """Sets all replicas' parameters to their last recorded values."""
        for prefix, module in self._modules.items():
            for duplicate in module.copies:
                for name, parameter in duplicate.named_parameters():
                    if f"{prefix}{name}" in self._last:
                        parameter.copy_(self._last[f"{prefix}{name}"])

    def buffers(self) -> dict[str, Tensor]:
        """Copies of all buffers, averaged over the replicas. A collective: every worker calls it, outside replicas."""
        for module in self._modules.values():
            module.exchange_buffers()
        return {
            f"{prefix}{name}": buffer.detach().to("cpu", copy=True)
            for prefix, module in self._modules.items()
            for name, buffer in module.named_buffers()
        }

    def find_modules(self) -> None:
        """Adds the modules that were mirrored since. Called outside replicas."""
        modules = list(self._modules.values())
        modules += [
            module for module in self._strategy.mirrored_modules if not any(module is listed for listed in modules)
        ]
        prefixes = [f"{type(module.module).__name__}{number}." for number, module in enumerate(modules, 1)]
        self._modules = dict(zip(prefixes if len(modules) > 1 else [""], modules, strict=True))
        for replica, names in enumerate(self._names):
            for prefix, module in self._modules.items():
                named = module.copies[replica].named_parameters()
                names.update({id(parameter): f"{prefix}{name}" for name, parameter in named})


class EnoughRecordedError(BaseException):
    """Stops the program once all updates are recorded. Not an ``Exception``, so that user code does not catch it."""


class Recorder(Watcher):
    """Records the first strategy for which the program chose several devices; ``send`` gets each message, in order."""

    def __init__(self, run: RunConfig, *, steps: int, send: Callable[[Message], None]) -> None:
        self._run = run
        self._steps = steps
        self._send = send
        self._strategies = 0
        self._single = 0
        self._devices: tuple[LogicalDevice, ...] | None = None
        self._other_updates = 0
        self._weights: Weights | None = None
        self._traces: list[ReplicaTrace] = []
        self._updates_sent = 0
        self._runs = 0
        self._unit = torch.finfo(torch.float64).eps

    # Called by strategies.

    def devices_chosen(self, devices: tuple[LogicalDevice, ...]) -> tuple[LogicalDevice, ...]:
        """Counts the strategies, and takes the first device only where one replica is asked for."""
        if len(devices) == 1:
            self._single += 1
            return devices
        self._strategies += 1
        replica_devices = devices if self._run.all_replicas else devices[:1]
        if self._devices is None:
            self._devices = replica_devices
        return replica_devices

    def run_begins(self, run: Run) -> None:
        """Sends the completed updates; stops the program if they are enough; else records the batch of this run."""
        strategy = run.strategy
        if strategy.devices is not self._devices:
            if self._devices is None and self._other_updates >= self._steps:
                raise EnoughRecordedError
            return
        # The hooks stand below the strategies, and call the strategy by what they use of it.
        weights = self._weights or self._start(cast("Strategy", strategy))
        weights.find_modules()
        self._send_completed(weights)
        if self._updates_sent >= self._steps:
            raise EnoughRecordedError
        if not torch.is_grad_enabled():
            return
        self._runs += 1
        for trace, (args, kwargs) in zip(self._traces, run.views, strict=True):
            named = {f"args{path}": leaf for path, leaf in tensors_with_rows(args)}
            named |= {f"kwargs{path}": leaf for path, leaf in tensors_with_rows(kwargs)}
            trace.begin_run(self._runs, named)

    def update_begins(self, replica: int, parameters: Sequence[nn.Parameter], totals: Totals) -> None:
        """Records this replica's gradients, and once for all replicas the parameters that changed before."""
        context, weights, trace = get_replica_context(), self._weights, self._trace()
        if context is None or weights is None or trace is None:
            self._other_updates += replica == 0
            return
        if len(trace.updates) >= self._steps:  # several updates in one run; all replicas must have recorded the last
            context.meet("end of verify's run", None, lambda _: None)
            raise EnoughRecordedError
        names = weights.names(replica, parameters)
        trace.record_gradients(names, parameters, totals)
        named = dict(zip(names, parameters, strict=True))
        trace.current.changed_before.update(
            # Replicas share the weights: recorded by each, another replica could be changing them meanwhile. ``meet``
            # runs the function while all wait.
            context.meet("start of verify's update", named, lambda of: weights.record_changed(of[0]))
        )

    def sums_applied(self, replica: int, parameters: Sequence[nn.Parameter]) -> None:
        """Records the sums that are applied, clipped for example, in place of each replica's part."""
        weights, trace = self._weights, self._trace()
        if weights is not None and trace is not None:
            # Parts cannot be told from a clipped sum, and the sum is what the optimizer applies.
            trace.current.gradients.clear()
            trace.record_sums(weights.names(replica, parameters), parameters)

    def update_ended(self, replica: int, parameters: Sequence[nn.Parameter]) -> None:
        """Records the parameters, once for all replicas and while all of them wait."""
        context, weights, trace = get_replica_context(), self._weights, self._trace()
        if context is None or weights is None or trace is None:
            return
        named = dict(zip(weights.names(replica, parameters), parameters, strict=True))
        trace.current.parameters = context.meet("end of verify's update", named, lambda of: weights.record(of[0]))
        trace.close_update()

    def differentiates(self, replica: int, differentiation: Differentiation) -> None:
        """Adds the losses that this replica back-propagates."""
        trace = self._trace()
        if trace is not None and not differentiation.returns:
            roots = [root for root in differentiation.roots if isinstance(root, Tensor) and root.numel() == 1]
            with DisableTorchFunction():  # the program's function modes do not see it
                trace.current.loss += sum(float(root.detach()) for root in roots)

    # Called by the hooks on torch; see ``recording``.

    def module_called(self, module: MirroredModule, inputs: Any, outputs: Any) -> None:
        """A mirrored module returned, in a replica or elsewhere."""
        trace = self._trace()
        if trace is not None and self._weights is not None and torch.is_grad_enabled():
            trace.record_call(self._weights.name_of(module), inputs, outputs)

    def module_is_called(self) -> None:
        """A mirrored module is about to run, in a replica or elsewhere."""
        trace = self._trace()
        if trace is not None:
            trace.record_draws()

    def finish(self) -> EndRecord:
        """Sends the completed updates, and returns how the run ended as far as known here. Called outside replicas."""
        if self._weights is not None:
            self._send_completed(self._weights)
        coarse = max([self._unit, *(trace.unit for trace in self._traces)])
        return EndRecord(strategies=self._strategies, single=self._single, unit=self._unit, coarse=coarse)

    def _trace(self) -> ReplicaTrace | None:
        """The calling replica's trace; None outside replicas and for other strategies."""
        context = get_replica_context()
        if context is None or self._weights is None or context.strategy.devices is not self._devices:
            return None
        return self._traces[context.local_replica]

    def _start(self, strategy: Strategy) -> Weights:
        self._weights = weights = Weights(strategy)
        self._traces = [ReplicaTrace() for _ in strategy.devices]
        self._unit = weights.unit
        modules = strategy.mirrored_modules
        self._send(
            StartRecord(
                devices=tuple(device.name for device in strategy.devices),
                parameters=weights.record(weights.all()),
                batch_norms=tuple(local_batch_norms(modules)),
                dropouts=tuple(active_dropouts(modules)),
            )
        )
        intervene_before_first_step(modules, self._run.interventions)
        weights.record(weights.all())
        return weights

    def _send_completed(self, weights: Weights) -> None:
        if self._run.interventions.hold_weights:
            weights.restore()
        # What changed outside the optimizer belongs to the last completed update, or before any to the next one.
        changed = weights.record_changed(weights.all())
        completed = len(self._traces[0].updates)
        for trace in self._traces:
            update = trace.updates[-1] if len(trace.updates) > self._updates_sent else None
            (trace.current.changed_before if update is None else update.changed_after).update(changed)
        buffers = weights.buffers() if completed > self._updates_sent else {}
        for step in range(self._updates_sent, completed):
            traces = tuple(trace.take_update(step) for trace in self._traces)
            self._send(UpdateRecord(step=step + 1, replicas=traces, buffers=buffers))
        self._updates_sent = completed


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Inside the block, ``recorder`` sees the strategies and the calls of mirrored modules of this process."""

    def before(module: nn.Module, args: Any) -> None:
        if isinstance(module, MirroredModule):
            recorder.module_is_called()

    def after(module: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any) -> None:
        if isinstance(module, MirroredModule):
            # The program's function modes would see the recorder's own operations, and a FlopCounterMode would count
            # them.
            with DisableTorchFunction():
                recorder.module_called(module, (args, kwargs), outputs)

    with ExitStack() as stack:
        stack.callback(register_module_forward_pre_hook(before).remove)
        stack.callback(register_module_forward_hook(after, with_kwargs=True).remove)
        stack.enter_context(watching(recorder))
        yield
