from __future__ import annotations

import pytest

from lockstep.errors import DeviceMemoryError
from lockstep.replicas.cuda import MB, check_share


def test_a_peak_within_the_share_is_fine():
    check_share("gpu:1", 100, 100 * MB, static=0, rows=8)
    check_share("gpu:1", None, 10**15, static=0, rows=8)


def test_the_message_names_device_limit_peak_and_the_batch_that_fits():
    # 20 MB of weights and 10 MB a row: (100 - 20) / 10 rows fit.
    with pytest.raises(
        DeviceMemoryError,
        match=r"gpu:1 has a memory_limit of 100 MB, but the step took 180 MB; "
        r"the largest per-replica batch expected to fit is 8 \(this one had 16\)",
    ):
        check_share("gpu:1", 100, 180 * MB, static=20 * MB, rows=16)


@pytest.mark.parametrize(
    ("static", "rows", "message"),
    [
        (150 * MB, 4, "not even one example fits beside the 150 MB of weights"),
        (0, None, "use a smaller batch or a larger memory_limit"),
        (0, 0, "use a smaller batch or a larger memory_limit"),
        (180 * MB, 4, "use a smaller batch or a larger memory_limit"),
    ],
)
def test_where_no_batch_can_be_named(static: int, rows: int | None, message: str):
    with pytest.raises(DeviceMemoryError, match=message):
        check_share("gpu:1", 100, 180 * MB, static=static, rows=rows)
