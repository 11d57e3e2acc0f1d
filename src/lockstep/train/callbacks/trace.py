"""StepTrace: a trace of some steps of fit by torch.profiler, with a track for each replica.

    fit -> batch 10 begins: profiler on -> ... -> batch 12 is done: off -> LOG_DIR/worker-0.12.pt.trace.json

Replicas are threads, whose work the profiler of the calling thread records on tracks of their own. The file opens in
https://ui.perfetto.dev, chrome://tracing, and TensorBoard with the plugin torch-tb-profiler.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from lockstep.atomic_files import atomic_file
from lockstep.errors import ConfigError
from lockstep.train.callbacks.base import Callback, Logs

_OF_TRACKS = ("thread_name", "thread_sort_index")
ProfileBatch = int | tuple[int, int]


def profiled_batches(profile_batch: Any, argument: str) -> tuple[int, int] | None:
    """The first and the last batch of a ``profile_batch`` as Keras has it, counted from 1; None for 0."""
    pair = (profile_batch, profile_batch) if type(profile_batch) is int else profile_batch
    if pair == (0, 0):
        return None
    is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2 and all(type(batch) is int for batch in pair)
    if not is_pair or not 1 <= pair[0] <= pair[1]:
        raise ConfigError(
            f"{argument}={profile_batch!r}; give a global batch, counted from 1 over all epochs, or the first and the "
            "last one, such as (10, 12); 0 profiles nothing"
        )
    return pair[0], pair[1]


class StepTrace(Callback):
    """Writes a trace of some steps, a file for each worker. ``TensorBoard(profile_batch=...)`` makes it.

    Args:
        folder: where the file goes, as ``worker-0.12.pt.trace.json`` with the number of the last batch.
        batches: the first and the last global batch, counted from 1 over all epochs.
    """

    writes_files = True

    def __init__(self, folder: Path, batches: tuple[int, int]) -> None:
        super().__init__()
        self.folder = folder
        self._first, self._last = batches
        self._profile: Any = None
        self._step = ExitStack()  # the range of the present step, by the name that torch-tb-profiler looks for

    def wants_batch_logs(self) -> bool:
        return False

    def on_train_batch_begin(self, batch: int, logs: Logs) -> None:
        step = self.model.training_state.position.step + 1
        if step == self._first:
            on_gpu = self.model.strategy.devices[0].torch_device.type == "cuda"
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
            self._profile = profile(activities=activities)
            self._profile.start()
        if self._profile is not None:
            self._step.enter_context(record_function(f"ProfilerStep#{step}"))

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        step = self.model.training_state.position.step
        if self._profile is not None:
            self._step.close()
            if step == self._last:
                self._write(step)

    def on_train_end(self, logs: Logs) -> None:
        if self._profile is not None:  # the training was shorter
            self._write(self.model.training_state.position.step)

    def close(self) -> None:
        self._step.close()
        profiler, self._profile = self._profile, None
        if profiler is not None:
            profiler.stop()

    def _write(self, step: int) -> None:
        profiler, self._profile = self._profile, None
        profiler.stop()
        path = self.folder / f"worker-{self.model.strategy.workers.processes.index}.{step}.pt.trace.json"
        try:
            with atomic_file(path) as partial:
                profiler.export_chrome_trace(str(partial))
                trace = json.loads(partial.read_text(encoding="utf-8"))
                partial.write_text(json.dumps(self._with_replicas(trace)), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"TensorBoard(log_dir) cannot be written to: {error}; choose another folder") from error

    def _with_replicas(self, trace: dict[str, Any]) -> dict[str, Any]:
        """The trace with the name and device of its replica for each track.

        The profiler itself names a thread once a process, by an address that a later thread may have again: of a second
        strategy in one process it names few threads, and others by what ran at their address before.
        """
        strategy, events = self.model.strategy, trace["traceEvents"]
        working = {event["tid"] for event in events if event.get("ph") == "X"}
        tracks: dict[Any, tuple[int, str]] = {}
        for local, (thread, device) in enumerate(zip(strategy.thread_ids, strategy.devices, strict=False)):
            if thread in working:
                replica = strategy.workers.first_replica + local
                tracks[thread] = replica, f"replica {replica} ({device.name})"
        named = [event for event in events if event.get("name") not in _OF_TRACKS or event["tid"] not in tracks]
        for thread, (replica, name) in tracks.items():
            track = {"ph": "M", "ts": 0, "pid": os.getpid(), "tid": thread}
            named.append({**track, "name": "thread_name", "args": {"name": name}})
            named.append({**track, "name": "thread_sort_index", "args": {"sort_index": replica}})
        return {**trace, "traceEvents": named}
