from __future__ import annotations

import threading

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lockstep.data.prefetch import read_ahead

LIMIT_S = 20


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(7)


def cropped(items, done=None):
    """A dataset that draws for every item, as a random crop does."""
    for item in range(items):
        yield item, torch.rand(2).tolist()
    if done is not None:
        done.set()


def test_a_source_that_draws_gives_what_a_plain_loop_gives_epoch_after_epoch():
    plain = [list(cropped(4)) for _ in range(3)]
    torch.manual_seed(7)
    assert [list(read_ahead(cropped(4), 2)) for _ in range(3)] == plain


def test_after_the_last_item_the_default_generator_has_come_as_far_as_in_a_plain_loop():
    list(cropped(4))
    state = torch.get_rng_state()
    torch.manual_seed(7)
    list(read_ahead(cropped(4), 2))
    assert torch.equal(torch.get_rng_state(), state)


def test_what_is_read_ahead_takes_no_numbers_from_the_consumer():
    torch.rand(2)
    expected = torch.rand(1)
    torch.manual_seed(7)
    done = threading.Event()
    iterator = read_ahead(cropped(4, done), 4)
    next(iterator)
    assert done.wait(LIMIT_S)
    assert torch.equal(torch.rand(1), expected)
    iterator.close()


@pytest.mark.filterwarnings("ignore:both the data and the loop")
def test_a_consumer_that_draws_changes_nothing_for_the_source_and_keeps_its_own_place():
    plain = list(cropped(4))
    torch.manual_seed(7)
    found = []
    for item in read_ahead(cropped(4), 1):
        found.append(item)
        torch.rand(3)
    assert found == plain
    state = torch.get_rng_state()
    torch.manual_seed(7)
    torch.rand(2)
    for _ in range(4):
        torch.rand(3)
    assert torch.equal(state, torch.get_rng_state())


def test_an_abandoned_source_gives_nothing_back():
    torch.rand(2)
    state = torch.get_rng_state()
    torch.manual_seed(7)
    done = threading.Event()
    iterator = read_ahead(cropped(4, done), 4)
    next(iterator)
    assert done.wait(LIMIT_S)
    iterator.close()
    assert next(iterator, None) is None
    assert torch.equal(torch.get_rng_state(), state)


class Noise(IterableDataset):
    def __iter__(self):
        for _ in range(6):
            yield torch.randn(2)


@pytest.mark.parametrize(
    "loader", [DataLoader(Noise(), batch_size=2), DataLoader(range(6), batch_size=2, shuffle=True)]
)
def test_a_loader_gives_what_a_plain_loop_gives(loader):
    plain = [torch.cat(list(loader)).tolist() for _ in range(2)]
    torch.manual_seed(7)
    assert [torch.cat(list(read_ahead(iter(loader), 2))).tolist() for _ in range(2)] == plain
