"""Published results of real runs, as numbers: against these the predictions are held. Tables only; nothing is computed.

Sources: Narayanan et al. 2021, arXiv 2104.04473 ("PTD"), tables 1 and 2; layouts of table 1 are those of the scripts by
which its authors made it, Megatron-LM's examples/sc21/run_table_1.sh: rows in a microbatch, layers in an interleaved
part, and which of its two data-parallel wrappers ran. Korthikanti et al. 2022, arXiv 2205.05198, tables 3 and 5. All on
A100-80GB of Selene (DGX A100: NVLink 3 inside a host, a port of 200 Gb/s InfiniBand for each device), sequence 2048,
vocabulary 51,200, fp16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lockstep.plan.layout import Layout, RecomputeName


@dataclass(frozen=True, kw_only=True)
class Published:
    """One published row.

    Args:
        model: a name in ``KNOWN_SHAPES``.
        layout: how it was trained.
        value: what was published.
        unit: of the value: TFLOP/s of a device, recomputation counted, or seconds of a step.
        overlap_data: the wrapper exchanged gradients during the backward pass (PyTorch's; Megatron's own did not).
        overlap_tensor: exchanges between tensor ranks ran beside weight gradients (Megatron-LM since 2022).
    """

    model: str
    layout: Layout
    value: float
    unit: Literal["tflops", "seconds"]
    overlap_data: bool = False
    overlap_tensor: bool = False


@dataclass(frozen=True, kw_only=True)
class PublishedTable:
    """A table of one paper.

    Args:
        title: what is shown above it.
        rows: its rows.
    """

    title: str
    rows: tuple[Published, ...]


def _layout(
    degrees: tuple[int, int, int],
    batch: int,
    rows: int,
    chunks: int,
    recompute: RecomputeName = "full",
    along: bool = False,
) -> Layout:
    data, pipeline, tensor = degrees
    return Layout(
        data=data,
        pipeline=pipeline,
        tensor=tensor,
        rows=rows,
        microbatches=batch // data // rows,
        schedule="interleaved" if chunks > 1 else "1f1b",
        chunks=chunks,
        recompute=recompute,
        sequence_parallel=along,
    )


# model, (data, pipeline, tensor), global batch, rows in a microbatch, parts of a stage, TFLOP/s of a GPU
_WEAK_SCALING = (
    ("megatron-1.7b", (32, 1, 1), 512, 16, 1, 137),
    ("megatron-3.6b", (32, 1, 2), 512, 16, 1, 138),
    ("megatron-7.5b", (32, 1, 4), 512, 16, 1, 142),
    ("megatron-18b", (32, 1, 8), 1024, 8, 1, 135),
    ("megatron-39b", (32, 2, 8), 1536, 4, 1, 138),
    ("megatron-76b", (32, 4, 8), 1792, 2, 3, 140),
    ("megatron-145b", (24, 8, 8), 2304, 2, 2, 148),
    ("megatron-310b", (15, 16, 8), 2160, 1, 2, 155),
    ("megatron-530b", (9, 35, 8), 2520, 1, 3, 163),
    ("megatron-1t", (6, 64, 8), 3072, 1, 1, 163),
)
WEAK_SCALING = PublishedTable(
    title="Narayanan et al. 2021, table 1 (TFLOP/s of a GPU)",
    rows=tuple(
        Published(
            model=model,
            layout=_layout(degrees, batch, rows, chunks),
            value=tflops,
            unit="tflops",
            # run_table_1.sh: DDP=torch up to 18 billion parameters, DDP=local from 39 billion.
            overlap_data=degrees[1] == 1,
        )
        for model, degrees, batch, rows, chunks, tflops in _WEAK_SCALING
    ),
)

# The paper's table gives the product of tensor and pipeline size; 8 within a host leaves 12 and 35. Whether the
# schedule was interleaved is not said; it is taken as not.
_FIXED_BATCH = (
    ("gpt-3", (4, 12, 8), 1536, 153),
    ("gpt-3", (8, 12, 8), 1536, 149),
    ("gpt-3", (16, 12, 8), 1536, 141),
    ("megatron-530b", (2, 35, 8), 2240, 171),
    ("megatron-530b", (4, 35, 8), 2240, 167),
    ("megatron-530b", (8, 35, 8), 2240, 159),
)
FIXED_BATCH = PublishedTable(
    title="Narayanan et al. 2021, table 2, PTD parallelism (TFLOP/s of a GPU)",
    rows=tuple(
        Published(model=model, layout=_layout(degrees, batch, 1, 1), value=tflops, unit="tflops")
        for model, degrees, batch, tflops in _FIXED_BATCH
    ),
)

# model, (data, pipeline, tensor), batch, rows, parts; seconds of a step with full recomputation, and with sequence
# parallelism and selective recomputation
_RECOMPUTATION = (
    ("megatron-22b", (1, 1, 8), 4, 4, 1, (1.42, 1.10)),
    ("gpt-3", (1, 8, 8), 64, 1, 3, (18.13, 13.75)),
    ("megatron-530b", (1, 35, 8), 280, 1, 3, (49.05, 37.83)),
    ("megatron-1t", (1, 64, 8), 512, 1, 1, (94.42, 71.49)),
)
_RECOMPUTED: tuple[RecomputeName, ...] = ("full", "selective")
RECOMPUTATION = PublishedTable(
    title="Korthikanti et al. 2022, table 5 (seconds of a step)",
    rows=tuple(
        Published(
            model=model,
            layout=_layout(degrees, batch, rows, chunks, recompute, recompute == "selective"),
            value=value,
            unit="seconds",
            overlap_tensor=True,
        )
        for model, degrees, batch, rows, chunks, seconds in _RECOMPUTATION
        for recompute, value in zip(_RECOMPUTED, seconds, strict=True)
    ),
)

TABLES = (WEAK_SCALING, FIXED_BATCH, RECOMPUTATION)
