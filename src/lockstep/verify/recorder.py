"""The observer inside a run: it writes down what each replica did, and ends the run after enough updates.

    run_begins -> [replica: module calls, backward, update_begins, update_ended] -> run_begins ... -> finish
         '-- outside replicas: sends the updates that are complete, then stops if there are enough

Each replica writes to a page of its own; what belongs to all is written where all of them meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.config import LogicalDevice
from lockstep.mirroring.module import MirroredModule
from lockstep.mirroring.update import Totals
from lockstep.replicas.context import ReplicaContext, get_replica_context
from lockstep.replicas.hooks import Observer
from lockstep.strategies.base import Strategy
from lockstep.verify.config import Side
from lockstep.verify.page import Page, UpdatePage, batch_record, output_records
from lockstep.verify.record import EndRecord, Message, StartRecord, UpdateRecord
from lockstep.verify.rows import fingerprints, tensors_with_rows
from lockstep.verify.switches import ModuleSwitches
from lockstep.verify.weights import Weights


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
