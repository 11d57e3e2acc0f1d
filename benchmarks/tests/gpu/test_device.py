"""The device's rates, and FLOPs against the formula by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.device import DeviceFacts, count_flops, look_at_device
from benchmarks.gpu.workloads import FULL, gpu_workloads


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
    """0.3 G multiply-adds an image of 224 pixels forward; the first convolution needs no gradient of the images."""
    few = replace(FULL, images=2)
    an_image = count_flops(gpu_workloads(few)["mobilenetv2-bf16"]) / few.images

    assert an_image == pytest.approx(3 * 2 * 0.3e9, rel=0.05)


def test_a_step_takes_at_least_its_flops_over_the_rate():
    facts = DeviceFacts(name="a GPU", memory_mb=80, used_mb=1, matmul_flops={"bf16": 4e12})

    assert facts.least_ms("mlm-bf16", 2e10) == 5.0
    assert facts.least_ms("mlm-fp32", 2e10) is None  # whose rate is not known
    assert facts.text == "a GPU, 80 MB, of which 1 were taken before the run; large matrix products at bf16 4.0 TFLOP/s"


def test_the_rates_of_a_cpu_are_measured():
    switches = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    try:
        facts = look_at_device("cpu")
    finally:
        torch.set_float32_matmul_precision(switches[0])
        torch.backends.cudnn.benchmark = switches[1]

    assert min(facts.matmul_flops.values()) > 0
