"""The errors beyond a limit of memory."""

from __future__ import annotations

import re

import pytest

from lockstep.replicas.device.memory import MB, out_of_memory, over_limit


def test_the_message_names_device_limit_peak_and_the_batch_that_fits():
    # 20 MB of weights and 10 MB a row: (100 - 20) / 10 rows fit.
    error = over_limit("gpu:1", limit=100 * MB, top=180 * MB, static=20 * MB, rows=16)
    assert re.search(r"gpu:1 .*100 MB.*180 MB.* fit is 8 \(.* 16\)", str(error))


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
    assert message in str(over_limit("gpu:1", limit=100 * MB, top=180 * MB, static=static_mb * MB, rows=rows))


def test_a_gpu_without_more_is_told_in_the_share_s_name():
    error = out_of_memory("gpu:1", limit=100 * MB, in_use=60 * MB, free=5 * MB, total=8192 * MB, rows=16)
    assert all(part in str(error) for part in ("gpu:1", "60 MB", "100 MB", "8192 MB", "5 MB", "16 examples"))
