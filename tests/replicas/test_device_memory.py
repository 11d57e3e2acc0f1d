"""The errors beyond a limit of memory."""

from __future__ import annotations

import pytest

from lockstep.replicas.device.memory import MB, out_of_memory, over_limit


def test_the_message_names_device_limit_peak_and_the_batch_that_fits():
    # 20 MB of weights and 10 MB a row: (100 - 20) / 10 rows fit.
    error = over_limit("gpu:1", limit=100 * MB, top=180 * MB, static=20 * MB, rows=16)

    assert str(error) == (
        "gpu:1 has a memory_limit of 100 MB, but the step took 180 MB; "
        "the largest per-replica batch expected to fit is 8 (this one had 16)"
    )


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

    said = str(error)
    assert said.startswith("gpu:1 got no more memory from its GPU: its tensors took 60 MB of a memory_limit of 100 MB")
    assert "of the GPU's 8192 MB 5 MB are free; use a smaller per-replica batch than the 16 examples" in said
