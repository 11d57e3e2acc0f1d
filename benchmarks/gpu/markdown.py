"""The GPU's table as Markdown. Pure: values in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.gpu.figures import GpuResult, GpuTarget, Row
from benchmarks.gpu.floors import DeviceFacts
from benchmarks.gpu.setting import DeviceType, Pace
from benchmarks.gpu.suite import SuiteOutcome
from benchmarks.gpu.work import precision_of
from lockstep.report import markdown_table
from lockstep.scaling.machine import Machine

_HEADINGS = (
    "contender", "step ms", "lowest", "highest", "/ best loop", "/ floor", "ready s", "torch's MB",
    "on the GPU MB", "loss", "parameters", "rounds",
)  # fmt: skip
_LEGEND = """\
## What the columns mean

- Every contender trains the same modules, written in torch alone after transformers' (a test compares them), from the
  same weights, on the same batches in pinned memory, with Adam, `fused=True`. TF32 is allowed to all in fp32, and cuDNN
  looks for its fastest algorithms for all.
- step ms: the median lap, by its number of steps. At the end of a lap the device is waited for, with all its streams,
  and never between. lowest, highest: of all laps of all rounds.
- / best loop: to the fastest hand-written loop of one process: the median over the rounds of the quotient of the two's
  median laps in the same round. Below 1 is faster.
- / floor: to the larger of the two floors above the table. That of the FLOPs is one for every program on this device.
  That of the bytes is the eager step's: each operator's inputs and outputs, as if no cache helped; fused operators move
  fewer, so compiled programs and graphs of them may go below it.
- ready: from the start of the processes to the end of the warm-up: CUDA, model, torch.compile, graph capture and the
  choice of kernels. torch and this package are imported already: each trial is forked, fresh, from a process that has
  done nothing else. It is no part of the step. Compiled code that an earlier run has left in torch's cache shortens it.
- torch's: what torch's allocator has taken by the last step, of all processes; it keeps what it has once taken. on the
  GPU: what the driver says that all processes have inside the last step, contexts and libraries included, less what
  was taken before the run.
- said: what the package logged, such as why whole steps were not recorded as a CUDA graph; a row of ours on a GPU that
  said nothing of graphs has recorded them.
- loss: the mean over all steps. Dropout masks, and batch statistics of each replica or process, differ.
- FLOPs are counted by torch.utils.flop_counter on the meta device: matrix products and convolutions, forward and
  backward, attention as its plain products. The rates are those of products of 8192 x 8192 matrices and of copies of
  1 GiB within the device, the best of three tries, in this run."""


@dataclass(frozen=True, kw_only=True)
class GpuConditions:
    """How a run was made.

    Args:
        date: YYYY-MM-DD.
        machine: where.
        device: what kind of device it was run on.
        facts: what the device is.
        command: what was typed.
        pace: of every trial.
        budget: in a line.
        spent_s: on everything.
        suite: what came of the tests; None where they were not asked for.
    """

    date: str
    machine: Machine
    device: DeviceType
    facts: DeviceFacts
    command: str
    pace: Pace
    budget: str
    spent_s: float
    suite: SuiteOutcome | None


def render_gpu(conditions: GpuConditions, results: Sequence[GpuResult]) -> str:
    """The whole report."""
    parts = [
        _head(conditions),
        _failures(conditions.suite),
        _targets(results) if conditions.device == "cuda" else "",
        *(_section(result, conditions.facts) for result in results),
        _LEGEND,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(conditions: GpuConditions) -> str:
    machine, facts, pace = conditions.machine, conditions.facts, conditions.pace
    title = f"# GPU benchmark, {conditions.date}: {facts.name}"
    if conditions.device == "cpu":
        title = f"# The GPU benchmark's programs tried on a CPU, {conditions.date}: no figure of a GPU"
    where = f"{machine.processor}, {machine.cores} cores, {machine.memory_gb:.0f} GB, {machine.system}"
    capability = f", compute capability {facts.capability}" if facts.capability else ""
    trial = f"{pace.warm_up} steps of warm-up, then {pace.laps} laps of {pace.lap_steps} steps"
    lines = (
        f"device: {facts.name}, {facts.memory_mb:.0f} MB{capability}; {facts.used_mb:.0f} MB were taken before the run",
        f"its rates: {_rates(facts)}",
        f"machine: {where}; load average before the run {machine.load:.2f}",
        f"versions: Python {machine.python}, torch {machine.torch}, transformers {machine.transformers}",
        f"commit: {machine.commit}",
        f"command: `{conditions.command}`",
        f"tests that need a GPU: {'not asked for' if conditions.suite is None else conditions.suite.text}",
        f"{conditions.budget}; spent {conditions.spent_s:.0f}",
        f"the contenders in turn, each in fresh processes; in each trial {trial}",
    )
    return "\n".join([title, "", *(f"- {line}" for line in lines)])


def _rates(facts: DeviceFacts) -> str:
    rates = ", ".join(f"{precision} {rate / 1e12:.1f} TFLOP/s" for precision, rate in facts.matmul_flops.items())
    measured = f"matrix products {rates}; copies {facts.copy_bytes_s / 1e9:.0f} GB/s read and written"
    return "; ".join([*([measured] if rates else ["not measured"]), *([facts.trouble] if facts.trouble else [])])


def _failures(suite: SuiteOutcome | None) -> str:
    if suite is None or not suite.failed:
        return ""
    return "\n".join(["**Tests that failed**:", "", *(f"- {name}" for name in suite.failed)])


def _targets(results: Sequence[GpuResult]) -> str:
    rows = [
        [f"{result.workload.name}: {target.text}", _limit(target), _value(target), target.verdict]
        for result in results
        for target in result.targets
    ]
    return "## Targets\n\n" + markdown_table(("target", "limit", "measured", "reached"), rows) if rows else ""


def _limit(target: GpuTarget) -> str:
    return f"{'below' if target.below else 'at most'} {target.limit:.2f}{target.unit}"


def _value(target: GpuTarget) -> str:
    return "" if target.value is None else f"{target.value:.3f}{target.unit}"


def _section(result: GpuResult, facts: DeviceFacts) -> str:
    empty = [[absence.contender, "not run", *[""] * (len(_HEADINGS) - 2)] for absence in result.absences]
    blocks = [
        f"## {result.workload.title}",
        _floor_text(result, facts),
        markdown_table(_HEADINGS, [*(_row(row) for row in result.rows), *empty]),
        "\n".join(
            [
                *(f"- {row.contender.name}: {row.contender.settings}" for row in result.rows),
                *(f"- {row.contender.name} said: {note}" for row in result.rows for note in row.notes),
                *(f"- {absence.contender}: not run: {absence.reason}" for absence in result.absences),
            ]
        ),
    ]
    return "\n\n".join(block for block in blocks if block)


def _floor_text(result: GpuResult, facts: DeviceFacts) -> str:
    if result.floor is None:
        return ""
    cost = facts.costs[result.workload.name]
    rate = facts.matmul_flops[precision_of(result.workload)]
    return (
        f"The floor of a step: {cost.flops / 1e9:.1f} GFLOP at {rate / 1e12:.1f} TFLOP/s are "
        f"{result.floor.compute_ms:.2f} ms; the eager step's {cost.traffic_bytes / 1e9:.2f} GB at "
        f"{facts.copy_bytes_s / 1e9:.0f} GB/s are {result.floor.traffic_ms:.2f} ms."
    )


def _row(row: Row) -> list[str]:
    return [
        row.contender.name,
        *(f"{value:.2f}" for value in (row.median_ms, row.low_ms, row.high_ms)),
        *("" if value is None else f"{value:.3f}" for value in (row.over_best, row.over_floor)),
        f"{row.ready_s:.1f}",
        *(f"{value:.0f}" for value in (row.reserved_mb, row.used_mb)),
        f"{row.loss:.4f}",
        f"{row.trained:,}",
        str(row.rounds),
    ]
