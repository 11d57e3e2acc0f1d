"""Published runs of training programs, with how they were trained: models, devices, layouts, and what was measured.

Every figure was read in the source that its table names. Settings that a source does not give are said where they are
assumed.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from lockstep.parallel.pipeline_config import ScheduleName
from lockstep_tools.plan.assumptions import PRECISIONS, Precision, Software
from lockstep_tools.plan.division import Division
from lockstep_tools.plan.hardware import LINKS, DeviceKind, Network, device_kind
from lockstep_tools.plan.model_shape import ModelShape, SavedActivations
from lockstep_tools.plan.shapes import KNOWN_SHAPES

Unit = Literal["hardware TFLOP/s", "model TFLOP/s", "seconds", "tokens/s"]


@dataclass(frozen=True, kw_only=True)
class Published:
    """One published row.

    Args:
        shape: the model.
        layout: how it was trained.
        value: what was published.
        unit: TFLOP/s of a device, with recomputation counted or not; seconds of a step; or tokens/s of a device.
        device: the device.
        between: name of each device's link to other hosts; by default as usual for the device.
        software: how the program works.
        selective: about half of each layer is computed again in the backward pass. The prediction is the mean of those
            without activation checkpointing and with all of it.
        note: what else tells the row from others.
    """

    shape: ModelShape
    division: Division
    value: float
    unit: Unit
    device: DeviceKind
    between: str = ""
    software: Software
    selective: bool = False
    note: str = ""

    @property
    def network(self) -> Network:
        between = LINKS[self.between or self.device.between]
        return Network(inside=LINKS[self.device.inside], between=between, per_host=8)


@dataclass(frozen=True, kw_only=True)
class PublishedTable:
    """A table of one source.

    Args:
        title: what is shown above it.
        source: where it was read.
        rows: its rows.
        fitted: constants of the planner were fitted to these rows; all others are for validation alone.
    """

    title: str
    source: str
    rows: tuple[Published, ...]
    fitted: bool = False


_A100, _H100 = device_kind("a100-80gb"), device_kind("h100-sxm")
# Weights and gradients in 16 bits, and gradients that are added or sent in 16 or in 32 bits.
_BF16 = Precision(name="mixed", format="bf16", weight=2, gradient=2, optimizer=12, activation=2)
_BF16_SUMS_IN_FP32 = replace(_BF16, gradient=4)
# Scores of attention in memory; sends that are divided by the tensor ranks.
_megatron = partial(Software, fused_attention=False, split_sends=True, static_buffers=False)


# Narayanan et al. 2021 (arXiv 2104.04473); Korthikanti et al. 2022 (arXiv 2205.05198). Megatron-LM on Selene: DGX A100,
# NVLink 3 inside a host, a port of 200 Gb/s InfiniBand for each device; sequence 2048, vocabulary 51,200, fp16. Layouts
# of table 1 are those of the scripts by which its authors made it, Megatron-LM's examples/sc21/run_table_1.sh. Weights
# and gradients in fp16 and in float32, and Adam's moments: 20 bytes a parameter (arXiv 2201.11990, section 2.1).
MEGATRON_PRECISION = replace(PRECISIONS["mixed"], optimizer=16)


def _megatron_row(
    model: str, degrees: tuple[int, int, int], batch: int, rows: int, chunks: int, value: float, unit: Unit
) -> Published:
    data, pipeline, tensor = degrees
    schedule: ScheduleName = "interleaved" if chunks > 1 else "1f1b"
    return Published(
        shape=KNOWN_SHAPES[model],
        division=Division(
            data=data,
            pipeline=pipeline,
            tensor=tensor,
            microbatch_size=rows,
            microbatches=batch // data // rows,
            schedule=schedule,
            stages_per_worker=chunks,
            activation_checkpointing="full",
        ),
        value=value,
        unit=unit,
        device=_A100,
        # run_table_1.sh: DDP=torch, which exchanges gradients during the backward pass, up to 18 billion parameters;
        # DDP=local from 39 billion.
        software=_megatron(precision=MEGATRON_PRECISION, overlap_data=unit == "hardware TFLOP/s" and pipeline == 1),
    )


WEAK_SCALING = PublishedTable(
    title="Megatron-LM 2021, table 1",
    source="arXiv 2104.04473",
    rows=tuple(
        _megatron_row(*row, "hardware TFLOP/s")
        # model, (data, pipeline, tensor), global batch, sequences in a microbatch, stages of a worker, TFLOP/s of a GPU
        for row in (
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
    ),
)
# The paper's table gives the product of tensor and pipeline size; 8 within a host leaves 12 and 35. Whether the
# schedule was interleaved is not said; it is taken as not.
FIXED_BATCH = PublishedTable(
    title="Megatron-LM 2021, table 2, PTD parallelism",
    source="arXiv 2104.04473",
    rows=tuple(
        _megatron_row(model, degrees, batch, 1, 1, tflops, "hardware TFLOP/s")
        for model, degrees, batch, tflops in (
            ("gpt-3", (4, 12, 8), 1536, 153),
            ("gpt-3", (8, 12, 8), 1536, 149),
            ("gpt-3", (16, 12, 8), 1536, 141),
            ("megatron-530b", (2, 35, 8), 2240, 171),
            ("megatron-530b", (4, 35, 8), 2240, 167),
            ("megatron-530b", (8, 35, 8), 2240, 159),
        )
    ),
)
RECOMPUTATION = PublishedTable(
    title="Megatron-LM 2022, table 5, full recomputation",
    source="arXiv 2205.05198",
    rows=tuple(
        _megatron_row(*row, "seconds")
        for row in (
            ("megatron-22b", (1, 1, 8), 4, 4, 1, 1.42),
            ("gpt-3", (1, 8, 8), 64, 1, 3, 18.13),
            ("megatron-530b", (1, 35, 8), 280, 1, 3, 49.05),
            ("megatron-1t", (1, 64, 8), 512, 1, 1, 94.42),
        )
    ),
)

# Megatron-Turing NLG 530B (arXiv 2201.11990, section 2.4): 280, 350 and 420 DGX A100, batch 1920, bf16, gradients added
# in float32. Microbatches of one sequence are assumed.
TURING_NLG = PublishedTable(
    title="Megatron-Turing NLG 530B",
    source="<https://github.com/cli99/llm-analysis/blob/main/examples/megatron-turing-nlg/README.md>",
    rows=tuple(
        Published(
            shape=KNOWN_SHAPES["megatron-530b"],
            division=Division(
                data=data, pipeline=35, tensor=8, microbatches=1920 // data, activation_checkpointing="full"
            ),
            value=seconds,
            unit="seconds",
            device=_A100,
            software=_megatron(precision=_BF16_SUMS_IN_FP32, overlap_data=False),
        )
        for data, seconds in ((8, 60.1), (10, 50.2), (12, 44.4))
    ),
)

# All trials of 28 February 2022 on Jean Zay that fitted, the first in BLOOM's final program: bf16, gradients added in
# float32 (earlier ones in fp16), embeddings that count as layers where stages are made, all layers computed again, ZeRO
# stage 1. 48 hosts of eight A100-80GB, four Omni-Path ports of 100 Gb/s each; vocabulary 250,880, sequence 2048, ALiBi,
# batch 2048.
_BLOOM_ROWS = (
    # layers, hidden, heads, (data, pipeline, tensor), sequences in a microbatch, seconds
    (106, 12288, 64, (8, 12, 4), 2, 116.54),
    (106, 12288, 96, (8, 12, 4), 2, 118.79),
    (106, 12288, 128, (8, 12, 4), 2, 121.42),
    (106, 12288, 96, (8, 12, 4), 4, 120.34),
    (100, 12288, 64, (8, 6, 8), 2, 139.72),
    (100, 12288, 64, (8, 6, 8), 4, 120.96),
    (82, 13312, 64, (4, 12, 8), 4, 111.79),
    (82, 13312, 64, (8, 12, 4), 2, 104.45),
    (82, 13312, 104, (8, 12, 4), 2, 123.71),
    (82, 13312, 128, (8, 12, 4), 2, 108.78),
    (82, 13312, 64, (8, 12, 4), 4, 104.82),
    (94, 13312, 128, (8, 12, 4), 2, 124.10),
    (70, 14336, 64, (4, 12, 8), 2, 121.63),
    (70, 14336, 64, (8, 12, 4), 2, 102.03),
    (70, 14336, 112, (8, 12, 4), 2, 104.50),
    (70, 14336, 128, (8, 12, 4), 2, 105.89),
    (70, 14336, 64, (8, 12, 4), 4, 102.27),
)
BLOOM = PublishedTable(
    title="BLOOM 176B, trials of layouts",
    source="<https://github.com/bigscience-workshop/bigscience/blob/master/train/tr11-176B-ml/chronicles-prequel.md>",
    rows=tuple(
        Published(
            shape=ModelShape(
                name=f"{layers} x {hidden:,}, {heads} heads",
                layers=layers,
                hidden=hidden,
                heads=heads,
                vocabulary=250880,
                sequence=2048,
                embedding_rows=0,
            ),
            division=Division(
                data=degrees[0],
                pipeline=degrees[1],
                tensor=degrees[2],
                microbatch_size=rows,
                microbatches=2048 // degrees[0] // rows,
                activation_checkpointing="full",
                shard_optimizer=True,
            ),
            value=seconds,
            unit="seconds",
            device=_A100,
            between="edr-half",
            software=_megatron(precision=_BF16_SUMS_IN_FP32, overlap_data=False),
        )
        for layers, hidden, heads, degrees, rows, seconds in _BLOOM_ROWS
    ),
)

# MegaScale's authors ran Megatron-LM (commit 285068c8) on the same GPUs (arXiv 2402.15627, tables 1 and 2): 96 layers,
# 128 heads, vocabulary 64,000, tensor 8, pipeline 8, six stages on each worker. Assumed: A100-80GB ("Ampere", with the
# peak rate of one), microbatches of one sequence, sequence parallelism and a sharded optimizer, which that commit has,
# bf16, gradients added in float32, scores of attention in memory, nothing computed again (Megatron-LM recomputes the
# scores alone, which is a small part). MegaScale itself overlaps the exchanges between tensor ranks and changes the
# model, which is not modelled.
MEGASCALE = PublishedTable(
    title="Megatron-LM of MegaScale's authors, 256 to 12,288 A100",
    source="arXiv 2402.15627, table 2",
    rows=tuple(
        Published(
            shape=ModelShape(
                name="96 x 12,288, 128 heads", layers=96, hidden=12288, heads=128, vocabulary=64000, sequence=2048
            ),
            division=Division(
                data=gpus // 64,
                pipeline=8,
                tensor=8,
                microbatches=batch // (gpus // 64),
                schedule="interleaved",
                stages_per_worker=6,
                shard_optimizer=True,
                sequence_parallel=True,
            ),
            value=seconds,
            unit="seconds",
            device=_A100,
            software=_megatron(precision=_BF16_SUMS_IN_FP32, overlap_data=False),
        )
        for gpus, batch, seconds in (
            (256, 768, 40.0), (512, 768, 21.2), (768, 768, 15.2), (1024, 768, 11.9),
            (3072, 6144, 29.02), (6144, 6144, 14.78), (8192, 6144, 12.24), (12288, 6144, 8.57),
        )
    ),
)  # fmt: skip

# torchtitan: FSDP2 with gathers in bf16 and sums in float32. Its norms and rotary positions convert to float32 in eager
# mode, which moves 97 bytes for each value of a hidden vector, counted in its code; compiled, 12.
_EAGER = SavedActivations(norms=24, inner=4, masks=0)
_COMPILED = SavedActivations(norms=3, inner=3, masks=0)
# Meta's H100 have 96 GB of HBM2e of 2.4 TB/s and a limit of 500 W.
_H100_HBM2E = replace(_H100, name="h100-96gb", memory_gib=96, bandwidth_gb_s=2400)


def _titan(
    model: str,
    device: DeviceKind,
    degrees: tuple[int, int],
    rows: int,
    checkpointing: Literal["none", "selective", "full"],
    tokens: float,
    note: str = "",
) -> Published:
    data, tensor = degrees
    return Published(
        shape=replace(KNOWN_SHAPES[model], saved=_COMPILED if "compile" in note else _EAGER),
        division=Division(
            data=data,
            tensor=tensor,
            microbatch_size=rows,
            activation_checkpointing="full" if checkpointing == "full" else "none",
            shard_parameters=True,
            sequence_parallel=tensor > 1,
        ),
        value=tokens,
        unit="tokens/s",
        device=device,
        software=Software(precision=_BF16_SUMS_IN_FP32),
        selective=checkpointing == "selective",
        note=note,
    )


TITAN_A100 = PublishedTable(
    title="torchtitan, 64 A100, April 2024",
    source="<https://github.com/pytorch/torchtitan/blob/1ea476e9f/docs/performance.md>",
    rows=(
        _titan("llama-3-8b", _A100, (64, 1), 1, "selective", 2904, "every second layer"),
        _titan("llama-3-8b", _A100, (64, 1), 1, "selective", 2973, "every second product"),
        _titan("llama-3-70b", _A100, (64, 1), 1, "full", 331),
        _titan("llama-2-13b", _A100, (64, 1), 2, "none", 2162),
        _titan("llama-2-13b", _A100, (64, 1), 2, "selective", 1914, "every second layer"),
        _titan("llama-2-13b", _A100, (64, 1), 2, "selective", 1904, "every second product"),
        _titan("llama-2-70b", _A100, (64, 1), 1, "selective", 355, "every second product"),
        _titan("llama-2-70b", _A100, (64, 1), 2, "full", 353),
    ),
)
TITAN_H100 = PublishedTable(
    title="torchtitan, 8 to 256 H100 in bf16, 2024 and 2025",
    source="<https://github.com/pytorch/torchtitan/tree/main/benchmarks> (December 2024; June 2025 without asynchronous"
    " tensor parallelism) and, for 405B, <https://github.com/pytorch/torchtitan/blob/3faaa1a0d/docs/performance.md>",
    rows=(
        _titan("llama-3-8b", _H100_HBM2E, (8, 1), 2, "selective", 5762),
        _titan("llama-3-8b", _H100_HBM2E, (8, 1), 2, "selective", 6667, "compiled"),
        _titan("llama-3-8b", _H100_HBM2E, (128, 1), 2, "selective", 5605),
        _titan("llama-3-8b", _H100_HBM2E, (128, 1), 2, "selective", 6514, "compiled"),
        _titan("llama-3-8b", _H100_HBM2E, (8, 8), 12, "selective", 4378, "compiled"),
        _titan("llama-3-70b", _H100_HBM2E, (32, 8), 16, "full", 597.3, "compiled"),
        _titan("llama-3-405b", _H100_HBM2E, (16, 8), 2, "full", 109, "compiled"),
    ),
)

# Llama 3 405B on 16 million tokens a step. The source gives tensor and pipeline degrees, tokens and TFLOP/s. Assumed:
# microbatches of one sequence of 8,192 tokens, nothing computed again, an interleaved schedule with as many stages as
# layers allow, a sharded optimizer.
LLAMA_3 = PublishedTable(
    title="Llama 3 405B, 8,192 and 16,384 H100",
    source="<https://glennklockwood.com/garden/llama-3.1>, of arXiv 2407.21783",
    rows=tuple(
        Published(
            shape=replace(KNOWN_SHAPES["llama-3-405b"], saved=_COMPILED),
            division=Division(
                data=data,
                pipeline=16,
                tensor=8,
                microbatches=2048 // data,
                schedule="interleaved",
                stages_per_worker=7,
                shard_optimizer=True,
                sequence_parallel=True,
            ),
            value=tflops,
            unit="model TFLOP/s",
            device=_H100,
            software=Software(precision=_BF16_SUMS_IN_FP32, split_sends=True),
        )
        for data, tflops in ((64, 430), (128, 400))
    ),
)

# MosaicML's MPT, FSDP, FlashAttention 1: 25% to 40% of an A100's peak (arXiv 2307.08691); on the H100 0.18, fitted.
_MPT_SIZES = {
    "mpt-125m": (768, 12, 12),
    "mpt-350m": (1024, 16, 24),
    "mpt-760m": (1536, 12, 24),
    "mpt-1b": (2048, 16, 24),
    "mpt-3b": (2560, 20, 32),
    "mpt-7b": (4096, 32, 32),
    "mpt-13b": (5120, 40, 40),
    "mpt-30b": (7168, 56, 48),
    "mpt-70b": (8192, 64, 80),
}
_FLASH_ATTENTION_1 = {"a100-40gb": 0.32, "a100-80gb": 0.32, "h100-sxm": 0.18}


def _mosaic_row(row: dict[str, str]) -> Published:
    hidden, heads, layers = _MPT_SIZES[row["model"]]
    shape = ModelShape(
        name=row["model"],
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocabulary=50368,
        sequence=int(row["sequence"]),
    )
    if shape.parameters != int(row["parameters"]):
        raise ValueError(f"{row} was published, expected {shape.parameters} parameters")
    return Published(
        shape=shape,
        division=Division(
            data=int(row["gpus"]),
            microbatch_size=int(row["microbatch"]),
            microbatches=int(row["microbatches"]),
            activation_checkpointing="full" if row["checkpointing"] == "full" else "none",
            shard_parameters=True,
        ),
        value=float(row["tokens/s/GPU"]),
        unit="tokens/s",
        device=replace(device_kind(row["device"]), attention=_FLASH_ATTENTION_1[row["device"]]),
        software=Software(precision=_BF16 if row["reduced in"] == "bf16" else _BF16_SUMS_IN_FP32),
    )


with (Path(__file__).parent / "mosaicml.csv").open(newline="") as _file:
    _MOSAIC = tuple(map(_mosaic_row, csv.DictReader(_file)))
_MOSAIC_SOURCE = "<https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md>"


def _mosaic(title: str, device: str, *, hosts: Literal["one", "several"], fitted: bool = False) -> PublishedTable:
    rows = tuple(
        row for row in _MOSAIC if row.device.name == device and (row.division.devices > 8) == (hosts == "several")
    )
    return PublishedTable(title=f"MosaicML, {title}", source=_MOSAIC_SOURCE, rows=rows, fitted=fitted)


TABLES = (
    WEAK_SCALING,
    FIXED_BATCH,
    RECOMPUTATION,
    TURING_NLG,
    BLOOM,
    MEGASCALE,
    TITAN_A100,
    _mosaic("8 A100-80GB", "a100-80gb", hosts="one"),
    _mosaic("32 and 64 A100-80GB", "a100-80gb", hosts="several"),
    _mosaic("8 A100-40GB", "a100-40gb", hosts="one"),
    _mosaic("16 to 128 A100-40GB", "a100-40gb", hosts="several"),
    _mosaic("8 H100", "h100-sxm", hosts="one", fitted=True),
    _mosaic("16 to 512 H100", "h100-sxm", hosts="several"),
    TITAN_H100,
    LLAMA_3,
)
