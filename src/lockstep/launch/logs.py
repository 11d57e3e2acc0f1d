"""Where the output of the workers goes that torch's agent starts, and what each of them gets of the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from lockstep.launch.streams import Streams


class PipedLogs(LogsSpecs):
    """Opens pipes for every worker, at every attempt, just before the agent starts it.

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

    @property
    def root_log_dir(self) -> str:
        """The folder of the run."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Opens the pipes of the workers that are about to start, by local number, and adds to their variables.

        torch's own class adds a variable in this place too; the agent offers no other.
        """
        outs, errs = {}, {}
        for local, variables in envs.items():
            worker, attempt = int(variables["RANK"]), int(variables["TORCHELASTIC_RESTART_COUNT"])
            channel = self._streams.open(worker, attempt, named=not self._opened_by_agent)
            outs[local], errs[local] = (channel.out, channel.err) if self._opened_by_agent else ("", "")
            variables.update(self._shares[local])
        return LogsDest(outs, errs, {}, {}, dict.fromkeys(envs, ""), "", "")
