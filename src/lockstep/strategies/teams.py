"""The workers of a grid as one of them sees them: all, and those with whom it shares something."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep.collectives.communicator import Workers
from lockstep.collectives.mesh_communicator import GridWorkers
from lockstep.parallel.mesh_layout import Grid, Place
from lockstep.strategies.job import Job


@dataclass(frozen=True, kw_only=True)
class Teams:
    """The workers.

    Args:
        grid: how they are arranged.
        place: where this one is.
        job: all of them.
        peers: those that hold the same parts, one per replica.
        replica: those that hold this replica together.
        line: those of all stages, of this replica and tensor rank, in the order of the stages; None without a pipeline.
        twin: this one and that of the other end of the line; None in its middle, and without a pipeline.
    """

    grid: Grid
    place: Place
    job: Workers
    peers: Workers
    replica: Workers
    line: Workers | None = None
    twin: Workers | None = None

    def replicas(self, last: int, ends_with: Sequence[Callable[[], None]]) -> GridWorkers:
        """The replicas, each seen as one worker.

        Args:
            last: the place in the line of the worker that has the outputs.
            ends_with: what ends before the teams, and these before the job.
        """
        return GridWorkers(
            self.job,
            replica=self.place.replica,
            speakers=self.grid.speakers(last),
            chief=self.job.is_chief,
            layout="" if self.job.alone else str(self.grid),
            ends_with=[*ends_with, self._close],
        )

    def _close(self) -> None:
        for team in (self.peers, self.replica, self.line, self.twin):
            if team is not None:
                team.close()


def make_teams(job: Job, grid: Grid) -> Teams:
    """This worker's teams, made in an order in which none waits for another in a circle. Every worker must call it.

    Args:
        job: which all have joined.
        grid: of as many workers.
    """
    index = job.workers.index
    place, line = grid.place(index), grid.line(index)
    ends = (line[0], line[-1])
    return Teams(
        grid=grid,
        place=place,
        job=job.workers,
        peers=job.team("peers", grid.peers(index)),
        replica=job.team("replica", grid.members(place.replica)),
        line=job.team("line", line) if grid.pipeline > 1 else None,
        twin=job.team("twin", ends) if grid.pipeline > 1 and index in ends else None,
    )
