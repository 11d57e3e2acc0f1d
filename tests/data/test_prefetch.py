from __future__ import annotations

import contextvars
import gc
import itertools
import signal
import subprocess
import sys
import threading
import traceback

import pytest
import torch

from lockstep.data import prefetch
from lockstep.data.prefetch import ReadAhead, checked_depth
from lockstep.errors import ConfigError, DataError

LIMIT_S = 20
# How long to look for something that must not happen.
NEVER_S = 0.2


def readers():
    return [thread for thread in threading.enumerate() if thread.name == "lockstep-prefetch"]


@pytest.mark.parametrize("depth", [0, 1, 2, 7])
def test_all_items_come_in_order(depth):
    iterator = ReadAhead(iter(range(5)), depth)
    assert list(iterator) == [0, 1, 2, 3, 4]
    assert readers() == []
    assert next(iterator, "end") == "end"


@pytest.mark.parametrize("depth", [0, 2])
def test_an_empty_source_has_no_items_and_no_thread(depth):
    assert list(ReadAhead(iter([]), depth)) == []
    assert readers() == []


@pytest.mark.parametrize("depth", [-1, 1.5, True, None])
def test_a_depth_is_a_number_of_batches(depth):
    with pytest.raises(ConfigError, match=r"prefetch=.* was given, expected .*at least 0"):
        checked_depth(depth)


@pytest.mark.parametrize("depth", [0, 2])
def test_at_most_depth_items_are_read_ahead(depth):
    begun = [threading.Event() for _ in range(9)]

    def source():
        for item, event in enumerate(begun):
            event.set()
            yield item

    iterator = ReadAhead(source(), depth)
    assert not begun[0].is_set()
    for taken in range(5):
        assert next(iterator) == taken
        assert begun[taken + depth].wait(LIMIT_S)
        assert not begun[taken + depth + 1].wait(NEVER_S)
    iterator.close()


def test_the_first_item_is_read_by_the_consumer_and_the_others_by_the_thread():
    names = list(ReadAhead((threading.current_thread().name for _ in range(3)), 2))
    assert names == [threading.current_thread().name, "lockstep-prefetch", "lockstep-prefetch"]


def test_an_abandoned_iterator_ends_its_thread():
    iterator = ReadAhead(itertools.count(), 2)
    next(iterator), next(iterator)
    assert len(readers()) == 1
    del iterator
    gc.collect()
    assert readers() == []


def test_a_closed_iterator_ends_its_thread_its_items_and_its_source():
    ended = threading.Event()

    def source():
        try:
            yield from itertools.count()
        finally:
            ended.set()

    iterator = ReadAhead(source(), 2)
    assert next(iterator) == 0
    iterator.close()
    assert ended.is_set()
    assert readers() == []
    assert list(iterator) == []
    iterator.close()


def test_closing_before_the_first_item_drops_the_source():
    begun = []
    iterator = ReadAhead((begun.append(item) for item in range(3)), 2)
    iterator.close()
    assert list(iterator) == begun == []


def broken_source(after):
    yield from range(after)
    raise KeyError("no such row")


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("after", [0, 1, 4])
def test_an_error_of_the_source_is_raised_after_the_items_before_it(depth, after):
    iterator = ReadAhead(broken_source(after), depth)
    assert [next(iterator) for _ in range(after)] == list(range(after))
    with pytest.raises(KeyError, match="no such row") as info:
        next(iterator)
    assert "broken_source" in [frame.name for frame in traceback.extract_tb(info.tb)]
    assert readers() == []
    assert list(iterator) == []


def test_even_an_exit_of_the_source_reaches_the_consumer():
    def source():
        yield 1
        raise SystemExit(3)

    iterator = ReadAhead(source(), 2)
    next(iterator)
    with pytest.raises(SystemExit):
        next(iterator)


def test_a_source_that_draws_is_refused_and_takes_no_numbers_from_the_loop():
    torch.manual_seed(7)
    torch.rand(2)
    expected = torch.rand(1)
    torch.manual_seed(7)
    iterator = ReadAhead((torch.rand(2) for _ in range(4)), 2)
    next(iterator)
    with pytest.raises(DataError, match=r"draws from torch's default generator, which is the loop's; .* prefetch=0"):
        list(iterator)
    assert torch.equal(torch.rand(1), expected)


@pytest.fixture
def interrupted():
    """Set once Ctrl-C has reached a consumer that waits for an item; it is ignored anywhere else."""
    reached = threading.Event()

    def interrupt(_, frame):
        if any(where.name == "take" for where in traceback.extract_stack(frame)):
            reached.set()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    yield reached
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_in_the_consumer_ends_the_thread(monkeypatch, interrupted):
    monkeypatch.setattr(prefetch, "_END_LIMIT_S", 0.01)
    go_on = threading.Event()

    def source():
        yield 0
        while not interrupted.wait(0.01):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        go_on.wait(LIMIT_S)
        yield from itertools.count()

    iterator = ReadAhead(source(), 1)
    next(iterator)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    (thread,) = readers()
    go_on.set()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert list(iterator) == []


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_an_iterator_dropped_inside_the_reading_thread_ends_it():
    held = []

    def source():
        yield 0
        yield 1
        held.clear()  # the last reference: the finalizer runs here
        yield from itertools.count()

    held.append(ReadAhead(source(), 1))
    next(held[0])
    (thread,) = readers()
    next(held[0])
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_the_thread_sees_the_consumers_context():
    variable = contextvars.ContextVar("variable", default="outside")
    token = variable.set("inside")
    try:
        assert list(ReadAhead((variable.get() for _ in range(3)), 1)) == ["inside"] * 3
    finally:
        variable.reset(token)


def test_an_iterator_left_at_the_end_of_the_program_does_not_hold_it_up():
    script = (
        "import itertools\n"
        "from lockstep.data.prefetch import ReadAhead\n"
        "iterator = ReadAhead(itertools.count(), 2)\n"
        "next(iterator), next(iterator)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
