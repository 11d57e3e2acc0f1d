from __future__ import annotations

import pytest

from lockstep.errors import DeviceMemoryError
from lockstep.replicas.device.driver import PoolUse
from lockstep.replicas.device.memory import MB, MemoryAccount, out_of_memory


def account(limit_mb: int | None = 100, static_mb: int = 0) -> MemoryAccount:
    made = MemoryAccount("gpu:1", limit_mb)
    made.static = static_mb * MB
    return made


def test_a_peak_within_the_share_is_fine():
    account().check(100 * MB, rows=8)
    account(limit_mb=None).check(10**15, rows=8)


def test_the_message_names_device_limit_peak_and_the_batch_that_fits():
    # 20 MB of weights and 10 MB a row: (100 - 20) / 10 rows fit.
    with pytest.raises(
        DeviceMemoryError,
        match=r"gpu:1 has a memory_limit of 100 MB, but the step took 180 MB; "
        r"the largest per-replica batch expected to fit is 8 \(this one had 16\)",
    ):
        account(static_mb=20).check(180 * MB, rows=16)


@pytest.mark.parametrize(
    ("static_mb", "rows", "message"),
    [
        (150, 4, "not even one example fits beside the 150 MB of weights"),
        (0, None, "use a smaller batch or a larger memory_limit"),
        (0, 0, "use a smaller batch or a larger memory_limit"),
        (180, 4, "use a smaller batch or a larger memory_limit"),
    ],
)
def test_where_no_batch_can_be_named(static_mb: int, rows: int | None, message: str):
    with pytest.raises(DeviceMemoryError, match=message):
        account(static_mb=static_mb).check(180 * MB, rows=rows)


def test_the_account_keeps_the_peak_and_knows_when_to_look_again():
    share = account()
    assert share.outdated(0)

    share.enter(PoolUse(in_use=80 * MB, reserved=120 * MB), resizes=3)
    assert share.overdrawn
    assert not share.outdated(3)
    assert share.outdated(4)

    share.enter(PoolUse(in_use=80 * MB, reserved=90 * MB), resizes=4)
    assert not share.overdrawn
    assert (share.reserved, share.peak) == (90 * MB, 120 * MB)


def test_what_a_share_holds_before_a_run_is_noted_when_its_pool_has_moved():
    share = account()
    assert share.moved
    share.begin(PoolUse(in_use=30 * MB, reserved=40 * MB))
    assert (share.moved, share.static) == (False, 30 * MB)

    share.enter(PoolUse(in_use=80 * MB, reserved=90 * MB), resizes=1)
    assert (share.moved, share.static) == (True, 30 * MB)


def test_a_gpu_without_more_is_told_in_the_share_s_name():
    said = out_of_memory(account(), PoolUse(in_use=60 * MB, reserved=70 * MB), free=5 * MB, total=8192 * MB, rows=16)

    assert said.startswith("gpu:1 got no more memory from its GPU: its tensors took 60 MB of a memory_limit of 100 MB")
    assert "of the GPU's 8192 MB 5 MB are free; use a smaller per-replica batch than the 16 examples" in said
