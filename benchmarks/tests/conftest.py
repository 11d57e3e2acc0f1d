"""Samples, contenders and conditions for the tests of the benchmark's pure parts."""

from __future__ import annotations

import pytest
from tests.conftest import _leaks_nothing, forks, fresh_devices, make_strategy, nothing_compiled, python, split_cpu  # noqa: F401 - fixtures

from benchmarks.harness import Memory, Sample
from benchmarks.loops import train_ddp
from benchmarks.processes import SpawnedBody
from benchmarks.results import Figures
from benchmarks.trial import Conditions, Contender, Layout, Role
from lockstep.scaling.machine import Machine


class Make:
    """Values with the parts filled in that a test does not care about."""

    def contender(
        self,
        name: str,
        *,
        role: Role = "rival",
        shares: int = 1,
        processes: int = 1,
        layout: Layout = "contiguous",
    ) -> Contender:
        settings = f"settings of {name}"
        return Contender(
            name=name,
            settings=settings,
            launcher=SpawnedBody(body=train_ddp),
            shares=shares,
            processes=processes,
            layout=layout,
            role=role,
            peer=name.partition("-")[0] if role == "peer" else "",
        )

    def memory(self, peak_mb: float) -> Memory:
        return Memory(peak_mb=peak_mb, rss_mb=peak_mb - 1, pss_mb=peak_mb - 2)

    def sample(self, name: str, *step_ms: float, round_: int = 0, exchange_ms: tuple[float, ...] = ()) -> Sample:
        return Sample(
            workload="mlm",
            contender=name,
            round=round_,
            step_ms=step_ms,
            cpu_ms=2 * step_ms[0],
            exchange_ms=exchange_ms,
            first_step_s=3.0 + round_,
            loss=1.5,
            trained=1000,
            memory=self.memory(100.0 + round_),
        )

    def figures(
        self,
        who: Contender,
        *,
        ratio: float = 1.0,
        median_ms: float = 10.0,
        peak_mb: float = 100.0,
        first_step_s: float = 2.0,
        share: float | None = None,
        trained: int = 1000,
    ) -> Figures:
        return Figures(
            contender=who,
            median_ms=median_ms,
            p10_ms=median_ms - 1,
            p90_ms=median_ms + 2,
            cpu_ms=2 * median_ms,
            ratio=ratio,
            exchange_share=share,
            first_step_s=first_step_s,
            memory=self.memory(peak_mb),
            loss=1.5,
            trained=trained,
        )

    def conditions(self) -> Conditions:
        machine = Machine(
            processor="A processor",
            cores=2,
            memory_gb=24.0,
            system="Linux 6",
            python="3.11.7",
            torch="2.13.0",
            transformers="5.0",
            commit="abc",
            load=0.25,
        )
        return Conditions(
            date="2026-01-31", machine=machine, command="python -m benchmarks", warm_up=3, steps=10, rounds=2
        )


@pytest.fixture
def make() -> Make:
    """Builders of values for these tests."""
    return Make()
