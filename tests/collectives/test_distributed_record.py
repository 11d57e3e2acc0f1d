import math

import pytest

from lockstep.collectives.distributed import MOST_NUMBERS, RECORD_BYTES, TEXT_BYTES, CallRecord, check_same_call
from lockstep.errors import CollectiveError, ConfigError

NAMES = ("worker 0 (a:1)", "worker 1 (b:2)", "worker 2 (c:3)")


def test_a_record_survives_the_way():
    record = CallRecord(
        name="optimizer update",
        where="train.py:30 in step",
        sequence=2**40,
        numbers=(1.5, -math.inf, 3.0),
        length=77,
        flags=5,
        digest=2**64 - 1,
    )

    assert len(record.pack()) == RECORD_BYTES
    assert CallRecord.unpack(record.pack()) == record


def test_a_long_text_loses_its_end_only():
    unpacked = CallRecord.unpack(CallRecord(name="ü" * TEXT_BYTES, where="x").pack())
    assert unpacked.name == "ü" * (TEXT_BYTES // 2)
    assert unpacked.where == ""


def test_more_numbers_than_fit_are_refused():
    with pytest.raises(ConfigError, match=f"at most {MOST_NUMBERS} numbers, got {MOST_NUMBERS + 1}"):
        CallRecord(name="a", numbers=(0.0,) * (MOST_NUMBERS + 1)).pack()


def test_workers_at_one_call_have_met():
    check_same_call([CallRecord(name="a", where="x"), CallRecord(name="a", where="y"), CallRecord(name="a")], NAMES)


@pytest.mark.parametrize(
    "other", [CallRecord(name="reduce(sum)", where="t.py:9 in f"), CallRecord(name="optimizer update", numbers=(1.0,))]
)
def test_workers_at_different_calls_are_named_with_their_places(other: CallRecord):
    records = [CallRecord(name="optimizer update", where="t.py:5 in step"), other, CallRecord(name="optimizer update")]
    with pytest.raises(CollectiveError) as caught:
        check_same_call(records, NAMES)
    message = str(caught.value)
    assert "worker 0 (a:1) is at 'optimizer update' (t.py:5 in step), its collective 0" in message
    assert f"worker 1 (b:2) is at {other.name!r}" in message


def test_a_worker_that_is_an_exchange_behind_is_found():
    with pytest.raises(CollectiveError, match=r"worker 1 .* its collective 4"):
        check_same_call([CallRecord(name="a", sequence=5), CallRecord(name="a", sequence=4)], NAMES[:2])


def test_the_odd_one_out_is_named_for_other_data():
    records = [CallRecord(name="a", digest=7), CallRecord(name="a", digest=7), CallRecord(name="a", digest=8)]
    with pytest.raises(CollectiveError, match=r"^worker 2 \(c:3\) was handed other data"):
        check_same_call(records, NAMES)


def test_of_two_the_second_is_named_for_other_data():
    with pytest.raises(CollectiveError, match=r"^worker 1 \(b:2\) .* than worker 0 \(a:1\) before 'a'"):
        check_same_call([CallRecord(name="a", digest=7), CallRecord(name="a", digest=8)], NAMES[:2])
