"""What the workers of a host are started with: pipes for their output, their share of the host, what ends them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from lockstep.launch.places import LIFELINE
from lockstep.launch.streams import Streams
from lockstep.lifeline import Lifeline


class PipedLogs(LogsSpecs):
    """Opens pipes for every worker, at every attempt, just before the agent starts it. The agent calls ``end_all``.

    Args:
        streams: reads them.
        shares: variables for each worker of this host beside the agent's: its share of the cores and GPUs.
        folder: of the run.
        opened_by_agent: the agent opens the pipes for the worker; else the worker does, by their names.
    """

    def __init__(
        self, streams: Streams, *, shares: Sequence[Mapping[str, str]], folder: Path, opened_by_agent: bool
    ) -> None:
        super().__init__()
        self._streams, self._shares, self._folder, self._opened_by_agent = streams, shares, folder, opened_by_agent
        self._lifeline: Lifeline | None = None

    @property
    def root_log_dir(self) -> str:
        """The folder of the run."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Opens the pipes of the workers that are about to start, by local number, and adds to their variables.

        torch's own class adds a variable in this place too; the agent offers no other.
        """
        self._lifeline = Lifeline()
        outs, errs = {}, {}
        for local, variables in envs.items():
            worker, attempt = int(variables["RANK"]), int(variables["TORCHELASTIC_RESTART_COUNT"])
            channel = self._streams.open(worker, attempt, named=not self._opened_by_agent)
            outs[local], errs[local] = (channel.out, channel.err) if self._opened_by_agent else ("", "")
            variables.update({**self._shares[local], LIFELINE: self._lifeline.path})
        return LogsDest(outs, errs, {}, {}, dict.fromkeys(envs, ""), "", "")

    def end_all(self) -> None:
        """Ends, at once, what is left of the workers of the last attempt and of the processes that they started."""
        if self._lifeline is not None:
            self._lifeline.cut()
