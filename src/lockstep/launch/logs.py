"""Where the output of the workers goes that torch's agent starts: into the pipes of ``Streams``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from lockstep.launch.places import error_path, record_path
from lockstep.launch.streams import Streams


class PipedLogs(LogsSpecs):
    """Makes the pipes of every worker, at every attempt, before the agent starts it.

    Args:
        streams: reads them.
        folder: the run's private folder.
        opened_by_agent: the agent opens them for the worker; else the worker does.
    """

    def __init__(self, streams: Streams, folder: Path, *, opened_by_agent: bool) -> None:
        super().__init__()
        self._streams, self._folder, self._opened_by_agent = streams, folder, opened_by_agent

    @property
    def root_log_dir(self) -> str:
        """The run's private folder."""
        return str(self._folder)

    def reify(self, envs: Mapping[int, Mapping[str, str]]) -> LogsDest:
        """The pipes of the workers that are about to start, by local number; forgets how earlier attempts failed."""
        outs, errs = {}, {}
        for local, variables in envs.items():
            channel = self._streams.open(int(variables["RANK"]), int(variables["TORCHELASTIC_RESTART_COUNT"]))
            outs[local] = str(channel.out) if self._opened_by_agent else ""
            errs[local] = str(channel.err) if self._opened_by_agent else ""
            for path in (record_path(self._folder, local), error_path(self._folder, local)):
                path.unlink(missing_ok=True)
        return LogsDest(outs, errs, {}, {}, dict.fromkeys(envs, ""), "", "")
