"""Exchanges between real processes over gloo: every dtype, every shape, and what is refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import lockstep as ls
from lockstep.collectives.communicator import ControlFlags, all_gather_object, check_agreement, run_on_chief
from lockstep.collectives.distributed import DistributedCommunicator, as_bytes, chunks, from_bytes
from lockstep.errors import CheckpointError, ClusterError, CollectiveError

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.complex64,
]  # fmt: skip
WORKERS = 3


def conversation() -> dict[str, Any]:
    strategy = ls.MultiWorkerMirroredStrategy(["cpu:0"], communication=ls.CommunicationOptions(lost_after_s=60))
    workers = strategy.workers
    index = workers.index
    own = torch.tensor([[1, 2], [3, 4]]) + index
    found: dict[str, Any] = {
        "names": workers.names,
        "exchange": workers.all_gather_numbers("numbers", [index, -0.5]),
        "bytes": workers.all_gather_bytes("bytes", b"x" * index),
        "no bytes": workers.all_gather_bytes("no bytes", b""),
        "sums": {str(dtype): workers.all_reduce(str(dtype), [[own.to(dtype)]])[0] for dtype in DTYPES},
        "several": workers.all_reduce("several", [[own, torch.ones(()), torch.zeros(0, 3)]]),
        "strided": workers.all_reduce("strided", [[own.t()]])[0],
        "uneven": workers.all_gather("uneven", torch.full((2, index), index), 1),
        "none": workers.all_gather("none", torch.zeros(0, 2), 0),
        "last": workers.all_gather("last", own, -1),
        "values": all_gather_object(workers, "values", {"a": own, "b": [index, "text", None]}),
        "chief": run_on_chief(workers, "act", lambda: index + 40),
    }
    written = [torch.full((3,), float(index)), torch.tensor(index), torch.tensor(index > 0)]
    workers.broadcast("written", written)
    found["broadcast"] = workers.all_gather("the last one's", written[0], 0)[-1], written
    workers.set_flags(ControlFlags.LOGS if index == 1 else ControlFlags(0))
    before = workers.agreed_flags
    workers.all_gather_numbers("wishes")
    workers.all_gather_numbers("later")
    found["wishes"] = before, workers.agreed_flags
    workers.clear_flags(ControlFlags.LOGS)
    found["settled"] = workers.agreed_flags
    workers.add_digest(7)
    workers.all_gather_numbers("alike")
    found["failed act"] = refused(workers, index)
    found["disagreement"] = disagreement(workers, index)
    everyones = workers.all_gather_bytes("failed act", found["failed act"].encode())
    found["failed act of worker 1"] = everyones[1].decode()
    strategy.close()
    return found


def refused(workers: Any, index: int) -> str:
    def act() -> None:
        raise CheckpointError("the disk is full")

    try:
        run_on_chief(workers, "save", act)
    except (CheckpointError, ClusterError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def disagreement(workers: Any, index: int) -> str:
    try:
        check_agreement(workers, "the weather", ["sun", "wind" if index == 2 else "rain"])
    except ClusterError as error:
        return str(error)
    return "nothing was raised"


@cache
def found() -> dict[str, Any]:
    return ls.launch(conversation, workers=WORKERS, timeout_s=250)


pytestmark = pytest.mark.workers


def test_numbers_come_in_worker_order():
    assert found()["exchange"] == [(0.0, -0.5), (1.0, -0.5), (2.0, -0.5)]


def test_bytes_of_different_lengths_come_whole():
    assert found()["bytes"] == [b"", b"x", b"xx"]
    assert found()["no bytes"] == [b"", b"", b""]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_summed_in_its_own(dtype: torch.dtype):
    total = found()["sums"][str(dtype)]
    assert total.dtype == dtype
    torch.testing.assert_close(total, (torch.tensor([[1, 2], [3, 4]]) * 3 + 3).to(dtype))


def test_shapes_are_kept():
    whole, scalar, empty = found()["several"]
    assert whole.tolist() == [[6, 9], [12, 15]]
    assert scalar.tolist() == 3.0
    assert empty.shape == (0, 3)
    assert found()["strided"].tolist() == [[6, 12], [9, 15]]


def test_gathered_lengths_may_differ_along_the_axis():
    assert [part.shape for part in found()["uneven"]] == [(2, 0), (2, 1), (2, 2)]
    assert found()["uneven"][2].tolist() == [[2, 2], [2, 2]]
    assert [part.shape for part in found()["none"]] == [(0, 2)] * 3
    assert torch.cat(found()["last"], 1).tolist() == [[1, 2, 2, 3, 3, 4], [3, 4, 4, 5, 5, 6]]


def test_structures_travel():
    for index, value in enumerate(found()["values"]):
        assert value["a"].tolist() == [[1 + index, 2 + index], [3 + index, 4 + index]]
        assert value["b"] == [index, "text", None]


def test_the_chief_s_values_are_written():
    last, written = found()["broadcast"]
    assert last.tolist() == [0.0] * 3
    assert [tensor.tolist() for tensor in written] == [[0.0] * 3, 0, False]


def test_wishes_reach_all_and_stay_until_they_are_settled():
    assert found()["wishes"] == (ControlFlags(0), ControlFlags.LOGS)
    assert found()["settled"] == ControlFlags(0)


def test_what_the_chief_cannot_do_all_learn():
    assert found()["chief"] == 40
    assert found()["failed act"] == "CheckpointError: the disk is full"
    assert found()["failed act of worker 1"] == (
        f"ClusterError: {found()['names'][0]}, the chief, failed in 'save' with CheckpointError: the disk is full"
    )


def test_the_first_difference_is_named():
    names = found()["names"]
    assert found()["disagreement"].startswith(
        f"the workers disagree about the weather: {names[0]} has rain, {names[2]} has wind; run the same program"
    )


def other_calls(kind: str) -> str:
    strategy = ls.MultiWorkerMirroredStrategy(["cpu:0"], communication=ls.CommunicationOptions(lost_after_s=60))
    workers = strategy.workers
    assert isinstance(workers, DistributedCommunicator)
    try:
        if kind == "name" and workers.index == 0:
            workers.all_gather_numbers("first")
        elif kind == "shape":
            workers.all_reduce("sum", [[torch.zeros(2 + workers.index)]])
        elif kind == "digest":
            workers.add_digest(workers.index)
            workers.all_gather_numbers("first")
        else:
            workers.all_gather_numbers("second")
    except CollectiveError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("name", "is at 'first' (test_distributed.py:"),
        ("shape", "is at 'sum of float32 (3,)' (test_distributed.py:"),
        ("digest", "was handed other data, or has other weights"),
    ],
)
def test_workers_that_do_not_meet_are_told_who_is_where(kind: str, message: str):
    assert message in ls.launch(other_calls, workers=2, args=(kind,), timeout_s=100)


def test_bytes_go_to_and_fro():
    tensor = torch.arange(6, dtype=torch.int16).reshape(2, 3).t()
    assert torch.equal(from_bytes(as_bytes(tensor), torch.int16, (3, 2)), tensor)


def test_chunks_keep_the_order_and_the_limit():
    tensors = [torch.zeros(n, dtype=torch.uint8) for n in (3, 3, 9, 1, 2)]
    assert [[len(tensor) for tensor in chunk] for chunk in chunks(tensors, 6)] == [[3, 3], [9], [1, 2]]
