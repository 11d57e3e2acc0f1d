"""The roofline: FLOPs against the formula by hand, bytes against sizes by hand, rates over which they are laid."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu import roofline as roofline_module
from benchmarks.gpu.loops import DeviceType
from benchmarks.gpu.roofline import DeviceFacts, StepCost, count_flops, count_traffic, look_at_device
from benchmarks.gpu.workloads import FULL, TINY, gpu_workloads
from benchmarks.trial import Workload


def test_bert_tiny_s_flops_are_those_of_the_formula():
    """A product of [m, k] and [k, n] is 2 m k n; the backward pass does each of them twice."""
    shape, texts, tokens, masked = FULL.shape, 128, 512, 77
    rows = texts * tokens
    projections = 4 * 2 * rows * shape.hidden**2
    feed_forward = 2 * 2 * rows * shape.hidden * shape.feed_forward
    attention = 2 * 2 * texts * tokens**2 * shape.hidden
    head = 2 * texts * masked * shape.hidden * (shape.hidden + shape.vocabulary)
    by_hand = 3 * (shape.layers * (projections + feed_forward + attention) + head)

    assert count_flops(gpu_workloads(FULL)["mlm-fp32"]) == by_hand


def test_mobilenet_s_flops_are_three_times_its_published_products_or_nearly():
    """0.3 G multiply-adds a image of 224 pixels forward; the first convolution needs no gradient of the images."""
    few = replace(FULL, images=2)
    a_image = count_flops(gpu_workloads(few)["mobilenetv2-bf16"]) / few.images

    assert a_image == pytest.approx(3 * 2 * 0.3e9, rel=0.05)


def test_bytes_are_what_operators_read_and_write():
    square = torch.zeros(100, 100)
    wide = torch.zeros(1, 100).expand(100, 100)

    def step() -> None:
        (square + wide).view(-1)  # 40,000 read, 400 of the repeated row, 40,000 written; views move nothing
        square.add_(1.0)  # 40,000 read, 40,000 written
        torch.empty(1000)

    assert count_traffic(step) == 80_400 + 80_000


def test_a_fused_update_reads_and_writes_weights_and_state():
    weight = torch.nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.Adam([weight], fused=True)
    weight.grad = torch.ones(1000)
    optimizer.step()

    # Adam changes the weight and its two moments, and reads the gradient; torch lists the gradient as written too.
    assert count_traffic(optimizer.step) == pytest.approx(8 * 4000, rel=0.01)


def test_a_roofline_is_work_over_rate():
    facts = DeviceFacts(
        name="",
        memory_mb=0,
        used_mb=0,
        capability="",
        matmul_flops={"bf16": 4e12, "fp32": 1e12},
        copy_bytes_s=1e12,
        costs={"mlm-bf16": StepCost(flops=2e10, traffic_bytes=8e9)},
    )
    roofline = facts.roofline("mlm-bf16")

    assert roofline is not None
    assert facts.roofline("mlm-fp32") is None  # whose cost is not known
    assert (roofline.compute_ms, roofline.traffic_ms, roofline.ms) == (5.0, 8.0, 8.0)


def test_a_step_that_does_not_fit_is_named_and_the_others_are_counted(monkeypatch: pytest.MonkeyPatch):
    usual = roofline_module._traffic

    def full_for_images(workload: Workload, device: DeviceType) -> int:
        if workload.name == "mobilenetv2-fp32":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return usual(workload, device)

    monkeypatch.setattr(roofline_module, "_traffic", full_for_images)
    facts = look_at_device("cpu", TINY)

    assert facts.trouble == "the eager step does not fit the device: mobilenetv2-fp32"
    assert set(facts.costs) == set(gpu_workloads(TINY)) - {"mobilenetv2-fp32"}
    assert min(*facts.matmul_flops.values(), facts.copy_bytes_s) > 0
    for cost in facts.costs.values():
        assert min(cost.flops, cost.traffic_bytes) > 0
