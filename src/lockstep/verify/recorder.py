"""The observer inside a run: it writes down what each replica did, and ends the run after enough updates.

    run_begins -> [replica: module calls, backward, update_begins, update_ended] -> run_begins ... -> finish
         '-- outside replicas: sends the updates that are complete, then stops if there are enough

Each replica writes to a page of its own; what belongs to all is written where all of them meet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lockstep.config import LogicalDevice
from lockstep.mirroring.module import MirroredModule
from lockstep.mirroring.update import Totals
from lockstep.replicas.context import ReplicaContext, get_replica_context
from lockstep.replicas.hooks import Observer, observing
from lockstep.strategies.base import Strategy
from lockstep.verify.config import Side
from lockstep.verify.interventions import ModuleSwitches
from lockstep.verify.trace import (
    EndRecord,
    Message,
    Page,
    StartRecord,
    UpdatePage,
    UpdateRecord,
    batch_record,
    fingerprints,
    output_records,
    tensors_with_rows,
)


class Weights:
    """Names are the module's own; with several mirrored modules, the module's class stands before them.

    Args:
        strategy: whose modules they are; those that it mirrors later are found too.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._modules: list[MirroredModule] = []
        self._labels: list[str] = []
        self._names: list[dict[int, str]] = [{} for _ in strategy.devices]
        self._last: dict[str, Tensor] = {}
        self.find_modules()

    @property
    def unit(self) -> float:
        """The relative rounding error of the coarsest type among the parameters."""
        types = {parameter.dtype for parameter in self.all().values() if parameter.is_floating_point()}
        return max((torch.finfo(kind).eps for kind in types), default=torch.finfo(torch.float32).eps)

    def names(self, context: ReplicaContext, parameters: Sequence[nn.Parameter]) -> list[str]:
        """What a replica's parameters are called."""
        known = self._names[context.replica_id_in_sync_group]
        return [
            known.get(id(parameter), f"parameter {number} of the optimizer")
            for number, parameter in enumerate(parameters)
        ]

    def name_of(self, module: MirroredModule) -> str:
        """What a mirrored module is called."""
        labels = [label for label, each in zip(self._labels, self._modules, strict=True) if each is module]
        return "".join(labels).removesuffix(".") or type(module.module).__name__

    def all(self) -> dict[str, nn.Parameter]:
        """Replica 0's parameters of all modules."""
        return {
            f"{label}{name}": parameter
            for label, module in zip(self._labels, self._modules, strict=True)
            for name, parameter in module.module.named_parameters()
        }

    def take_all(self) -> dict[str, Tensor]:
        """Copies of all parameters; they are what later changes are measured from."""
        return self.take(self.all())

    def take(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of these parameters; they are what later changes are measured from."""
        taken = {name: parameter.detach().to("cpu", copy=True) for name, parameter in parameters.items()}
        self._last.update(taken)
        return taken

    def changed(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those that are not what they were when looked at last, as they are now."""
        fresh = {
            name: parameter.detach().cpu()
            for name, parameter in parameters.items()
            if name in self._last and not torch.equal(parameter.detach().cpu(), self._last[name])
        }
        return self.take(fresh)

    @torch.no_grad()
    def put_back(self) -> None:
        """Gives all replicas' parameters the values of the last look."""
        for label, module in zip(self._labels, self._modules, strict=True):
            for duplicate in module.copies:
                for name, parameter in duplicate.named_parameters():
                    if f"{label}{name}" in self._last:
                        parameter.copy_(self._last[f"{label}{name}"])

    def buffers(self) -> dict[str, Tensor]:
        """All modules' buffers, averaged over the replicas. Outside replicas; every worker must call it."""
        for module in self._modules:
            module.exchange_buffers()
        return {
            f"{label}{name}": buffer.detach().to("cpu", copy=True)
            for label, module in zip(self._labels, self._modules, strict=True)
            for name, buffer in module.named_buffers()
        }

    def find_modules(self) -> None:
        """Looks for modules that were mirrored since. Outside replicas."""
        known = {id(module) for module in self._modules}
        self._modules += [module for module in self._strategy.mirrored_modules if id(module) not in known]
        self._labels = _labels([type(module.module).__name__ for module in self._modules])
        for replica, names in enumerate(self._names):
            for label, module in zip(self._labels, self._modules, strict=True):
                named = module.copies[replica].named_parameters()
                names.update({id(parameter): f"{label}{name}" for name, parameter in named})


def _labels(classes: Sequence[str]) -> list[str]:
    """What stands before a module's names: nothing for a lone module; a class that is there again gets a number."""
    if len(classes) == 1:
        return [""]
    total, seen = Counter(classes), Counter[str]()
    labels = []
    for each in classes:
        seen[each] += 1
        labels.append(f"{each}{seen[each]}." if total[each] > 1 else f"{each}.")
    return labels


class EnoughSeenError(BaseException):
    """Ends the program when all that was asked for is recorded. Not an ``Exception``: user code does not swallow it."""


class Recorder(Observer):
    """Records the first strategy for which the program chose several devices.

    Args:
        side: on how many replicas, and what to change in the mirrored modules.
        steps: updates to record.
        send: gets the messages, in order.
    """

    def __init__(self, side: Side, *, steps: int, send: Callable[[Message], None]) -> None:
        self._side = side
        self._steps = steps
        self._send = send
        self._switches = ModuleSwitches(side.switches)
        self._chosen: list[tuple[LogicalDevice, ...]] = []
        self._devices: tuple[LogicalDevice, ...] | None = None
        self._single = 0
        self._other_updates = 0
        self._weights: Weights | None = None
        self._pages: list[Page] = []
        self._sent = 0
        self._runs = 0
        self._unit = torch.finfo(torch.float64).eps

    # What strategies tell.

    def devices_chosen(self, devices: tuple[LogicalDevice, ...]) -> tuple[LogicalDevice, ...]:
        """Counts the strategies, and cuts those of several devices to one where one replica is asked for."""
        if len(devices) == 1:
            self._single += 1
            return devices
        self._chosen.append(devices)
        taken = devices if self._side.all_replicas else devices[:1]
        if self._devices is None:
            self._devices = taken
        return taken

    def run_begins(self, strategy: Strategy, views: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
        """Sends what is complete; stops the program if that is enough; else notes the batch of this run."""
        if not self._is_observed(strategy):
            self._stop_if_never_observed()
            return
        weights = self._weights or self._start(strategy)
        weights.find_modules()
        self._note_changes(weights)
        self._send_complete(weights)
        if self._sent >= self._steps:
            raise EnoughSeenError
        if not torch.is_grad_enabled():
            return
        self._switches.before_run(strategy.mirrored_modules)
        self._runs += 1
        leaves = [_leaves(*view) for view in views]
        for replica, page in enumerate(self._pages):
            page.begin_run(self._runs, {name: fingerprints(leaf) for name, leaf in leaves[replica].items()})

    def update_begins(self, context: ReplicaContext, parameters: Sequence[nn.Parameter], totals: Totals) -> None:
        """Notes this replica's gradients."""
        if not self._is_observed(context.strategy) or self._weights is None:
            self._other_updates += context.replica_id_in_sync_group == 0
            return
        page = self._page(context)
        if len(page.updates) >= self._steps:  # in one run; all replicas have recorded the update before
            context.meet("end of verify's run", None, lambda _: None)
            raise EnoughSeenError
        weights = self._weights
        names = weights.names(context, parameters)
        page.note_gradients(names, parameters, totals)
        named = dict(zip(names, parameters, strict=True))
        page.current.moved.update(context.meet("start of verify's update", named, lambda of: weights.changed(of[0])))

    def update_ended(self, context: ReplicaContext, parameters: Sequence[nn.Parameter]) -> None:
        """Notes the parameters, once for all replicas and while all of them wait."""
        if not self._is_observed(context.strategy) or self._weights is None:
            return
        weights, page = self._weights, self._page(context)
        named = dict(zip(weights.names(context, parameters), parameters, strict=True))
        page.current.parameters = context.meet("end of verify's update", named, lambda of: weights.take(of[0]))
        page.close_update()

    # What the hooks on torch tell; see ``watching``.

    def module_called(self, module: MirroredModule, inputs: Any, outputs: Any) -> None:
        """A mirrored module returned, inside a replica or elsewhere."""
        context = get_replica_context()
        if context is None or self._weights is None or not self._is_observed(context.strategy):
            return
        if torch.is_grad_enabled():
            self._page(context).note_call(self._weights.name_of(module), inputs, outputs)

    def back_propagated(self, total: float) -> None:
        """Something was back-propagated, inside a replica or elsewhere."""
        context = get_replica_context()
        if context is not None and self._weights is not None and self._is_observed(context.strategy):
            self._page(context).current.loss += total

    def drawing_begins(self) -> None:
        """A mirrored module is about to be called: the replica's random numbers as they are now."""
        context = get_replica_context()
        if context is not None and self._weights is not None and self._is_observed(context.strategy):
            self._page(context).note_generator()

    # What the program's end tells.

    def finish(self) -> EndRecord:
        """Sends what is complete and says how it ended, as far as this observer knows. Outside replicas."""
        if self._weights is not None:
            self._note_changes(self._weights)
            self._send_complete(self._weights)
        coarse = max([self._unit, *(page.unit for page in self._pages)])
        return EndRecord(strategies=len(self._chosen), single=self._single, unit=self._unit, coarse=coarse)

    def _is_observed(self, strategy: Strategy) -> bool:
        return strategy.devices is self._devices

    def _stop_if_never_observed(self) -> None:
        if self._devices is None and self._other_updates >= self._steps:
            raise EnoughSeenError

    def _start(self, strategy: Strategy) -> Weights:
        weights = Weights(strategy)
        self._pages = [Page() for _ in strategy.devices]
        self._unit = weights.unit
        modules = strategy.mirrored_modules
        self._send(
            StartRecord(
                devices=tuple(device.name for device in strategy.devices),
                chosen=tuple(device.name for device in self._chosen[0]),
                parameters=weights.take_all(),
                batch_norms=tuple(self._switches.batch_norms(modules)),
                dropouts=tuple(self._switches.dropouts(modules)),
            )
        )
        self._switches.before_first_step(modules)
        weights.take_all()
        self._weights = weights
        return weights

    def _page(self, context: ReplicaContext) -> Page:
        return self._pages[context.replica_id_in_sync_group]

    def _note_changes(self, weights: Weights) -> None:
        """Parameters that changed since they were looked at last: after the last update, or before the next."""
        if self._switches.hold_weights:
            weights.put_back()
        changed = weights.changed(weights.all())
        for page in self._pages:
            done = page.updates[-1] if len(page.updates) > self._sent else None
            (page.current.moved if done is None else done.settled).update(changed)

    def _send_complete(self, weights: Weights) -> None:
        complete = len(self._pages[0].updates)
        buffers = weights.buffers() if complete > self._sent else {}
        for step in range(self._sent, complete):
            pages = [page.take_update(step) for page in self._pages]
            told = pages if self._side.only is None else [pages[self._side.only]]
            self._send(_update_record(step + 1, told, buffers))
        self._sent = complete


def _leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
    named = {f"args{place}": leaf for place, leaf in tensors_with_rows(args)}
    return {**named, **{f"kwargs{place}": leaf for place, leaf in tensors_with_rows(kwargs)}}


def _update_record(step: int, pages: Sequence[UpdatePage], buffers: dict[str, torch.Tensor]) -> UpdateRecord:
    first = pages[0]
    return UpdateRecord(
        step=step,
        batches=batch_record(pages),
        moved=first.moved,
        outputs=output_records(pages),
        losses=tuple(page.loss for page in pages),
        totals=tuple(page.total for page in pages),
        counts=tuple(page.count for page in pages),
        gradients=tuple(page.gradients for page in pages),
        parameters=first.parameters,
        settled=first.settled,
        buffers=buffers,
        draws=any(page.draws for page in pages),
    )


@contextmanager
def watching(recorder: Recorder) -> Iterator[None]:
    """Lets ``recorder`` hear strategies, mirrored modules and backward passes inside the block; process-wide."""
    original = torch.autograd.backward

    def before(module: nn.Module, args: Any) -> None:
        if isinstance(module, MirroredModule):
            recorder.drawing_begins()

    def after(module: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any) -> None:
        if isinstance(module, MirroredModule):
            with torch._C.DisableTorchFunction():
                recorder.module_called(module, (args, kwargs), outputs)

    with ExitStack() as stack:
        for handle in (
            register_module_forward_pre_hook(before),
            register_module_forward_hook(after, with_kwargs=True),
        ):
            stack.callback(handle.remove)
        # Tensor.backward calls it too.
        stack.enter_context(patch.object(torch.autograd, "backward", _told(original, recorder)))
        stack.enter_context(observing(recorder))
        yield


def _told(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        scalars = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        recorder.back_propagated(sum(float(each.detach()) for each in scalars if each.numel() == 1))
        return original(tensors, *args, **kwargs)

    return backward
