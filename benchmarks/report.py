"""Writes a run's report: Markdown for people, and beside it JSON with every sample for those who count again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness import Sample
from benchmarks.markdown import Conditions, WorkloadResult, render
from lockstep.atomic_files import atomic_write


def write_report(
    folder: Path, conditions: Conditions, results: Sequence[WorkloadResult], samples: Sequence[Sample]
) -> Path:
    """Writes ``DATE-cpu-CORES.md`` and ``.json``, each whole or not at all; a run of the same day is replaced.

    Args:
        folder: where; made where it is missing.
        conditions: how the run was made.
        results: what is shown.
        samples: all of them, for the JSON.

    Returns:
        The path of the Markdown file.
    """
    record = json.dumps(_record(conditions, results, samples), indent=1) + "\n"
    table = render(conditions, results)
    base = folder / f"{conditions.date}-cpu-{conditions.machine.cores}"
    atomic_write(base.with_suffix(".json"), record)
    return atomic_write(base.with_suffix(".md"), table)


def _record(conditions: Conditions, results: Sequence[WorkloadResult], samples: Sequence[Sample]) -> dict[str, object]:
    targets = [
        {"workload": result.workload.name, **asdict(target), "reached": target.reached}
        for result in results
        for target in result.targets
    ]
    return {
        "conditions": asdict(conditions),
        "targets": targets,
        "efficiencies": [
            {"workload": result.workload.name, **asdict(efficiency)}
            for result in results
            for efficiency in result.efficiencies
        ],
        "absences": [asdict(absence) for result in results for absence in result.absences],
        "samples": [asdict(sample) for sample in samples],
    }
