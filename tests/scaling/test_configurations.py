from __future__ import annotations

import pytest

from lockstep.errors import ConfigError
from lockstep_tools.scaling.configurations import Hardware, ScalingSettings, plan


def test_the_rows_of_workload_b_in_order(make):
    rows = [(row.name, row.replicas, row.batch_size, row.cores, row.hardware) for row in make.plan(1, 2, 4, cores=8)]

    assert rows == [
        ("1 device", 1, 64, 2, 1.0),
        ("1 device, 8 cores", 1, 64, 8, 4.0),
        ("2 replicas, same total", 2, 64, 4, 2.0),
        ("2 replicas, 2 times the total", 2, 128, 4, 2.0),
        ("4 replicas, same total", 4, 64, 8, 4.0),
        ("4 replicas, 4 times the total", 4, 256, 8, 4.0),
    ]


def test_replicas_that_share_cores_have_no_more_hardware_than_there_is(make):
    two, four = (row for row in make.plan(2, 4, cores=2) if row.layout == "same total")
    assert (two.cores, two.hardware, two.resource) == (2, 2.0, "2 cores")
    assert (four.cores, four.hardware, four.resource) == (2, 2.0, "2 cores")


def test_a_single_core_has_no_row_of_all_cores(make):
    assert [row.layout for row in make.plan(2, cores=1, devices=2)] == ["one device", "same total", "N times the total"]


def test_gpus_are_counted_and_have_no_row_of_cores(make):
    hardware = Hardware(devices=make.devices(4, kind="GPU", physical=2), cores=8)
    rows = plan(ScalingSettings(batch_size=8, replicas=(2, 4)), hardware)
    assert [(row.layout, row.cores, row.hardware, row.resource) for row in rows[:2]] == [
        ("one device", None, 1.0, "1 GPU"),
        ("same total", None, 2.0, "2 GPUs"),
    ]
    assert rows[-1].hardware == 2.0  # four shares of two GPUs


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        ((2, 8), "8 replicas were asked for, but --devices gives 4 logical devices; choose at most 4"),
        ((1,), "--replicas names only 1, expected a number above 1"),
    ],
)
def test_replicas_that_cannot_be_are_refused(make, replicas: tuple[int, ...], message: str):
    with pytest.raises(ConfigError, match=message):
        make.plan(*replicas)


def test_one_device_or_two_kinds_cannot_be_compared(make):
    with pytest.raises(ConfigError, match="--devices gives 1 logical device, expected at least 2"):
        Hardware(devices=make.devices(1), cores=2)
    with pytest.raises(ConfigError, match="CPU and GPU do not scale together"):
        Hardware(devices=(*make.devices(1), *make.devices(1, kind="GPU")), cores=2)
