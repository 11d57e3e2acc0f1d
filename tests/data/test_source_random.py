"""What a source that is read ahead draws."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from lockstep.data.prefetch import ReadAhead
from lockstep.errors import DataError


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


def test_a_loader_that_shuffles_gives_what_a_plain_loop_gives():
    loader = DataLoader(range(6), batch_size=2, shuffle=True)
    torch.manual_seed(7)
    plain = [torch.cat(list(loader)).tolist() for _ in range(2)]
    torch.manual_seed(7)

    assert [torch.cat(list(ReadAhead(iter(loader), 2))).tolist() for _ in range(2)] == plain
