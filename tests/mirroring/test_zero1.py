import pytest

from lockstep.mirroring.zero1 import CUT_AT, Piece, Shares, divide_state, window


def pieces(shares: Shares) -> list[list[tuple[int, int, int]]]:
    return [[(piece.parameter, piece.start, piece.stop) for piece in own] for own in shares]


def test_every_element_has_one_owner():
    sizes = [1, 5000, 64, 0, 777, 20000, 3]
    shares = divide_state(sizes, 3)
    every = sorted(piece for own in pieces(shares) for piece in own)
    for number, size in enumerate(sizes):
        ends = [0, *(stop for parameter, _, stop in every if parameter == number)]
        starts = [start for parameter, start, _ in every if parameter == number]
        assert starts == ends[:-1]
        assert ends[-1] == size


@pytest.mark.parametrize("owners", [1, 2, 3, 4, 7])
def test_shares_are_of_equal_size(owners: int):
    sizes = [30000, 64, 12, 500, 9000, 1]
    shares = divide_state(sizes, owners)
    even = sum(sizes) / owners
    assert all(abs(sum(piece.size for piece in own) - even) <= 2 * CUT_AT for own in shares)


def test_a_parameter_is_cut_where_vectors_end():
    (first, second) = pieces(divide_state([1000], 2))
    assert first == [(0, 0, 512)]
    assert second == [(0, 512, 1000)]


def test_what_cannot_be_cut_is_one_owner_s():
    shares = divide_state([100, 1000, 100], 3, uncut=[1])
    assert sorted(piece for own in pieces(shares) for piece in own if piece[0] == 1) == [(1, 0, 1000)]


def test_parameters_of_a_kind_are_cut_as_they_are_without_the_others():
    alone = pieces(divide_state([640, 6400], 2))
    beside = pieces(divide_state([640, 99, 6400, 5000], 2, kinds=["tied", "own", "tied", "own"]))
    renamed = {0: 0, 1: 2}
    for own, others in zip(alone, beside, strict=True):
        assert [(renamed[number], start, stop) for number, start, stop in own] == [
            each for each in others if each[0] in (0, 2)
        ]


def test_more_owners_than_elements_leave_some_without():
    assert sorted(map(len, divide_state([1], 3))) == [0, 0, 1]


def test_a_window_is_of_pieces_one_behind_the_other():
    own = [Piece(parameter=0, start=10, stop=20), Piece(parameter=3, start=0, stop=5)]
    assert list(window(own, 8, 12)) == [Piece(parameter=0, start=18, stop=20), Piece(parameter=3, start=0, stop=2)]
    assert list(window(own, 12, 99)) == [Piece(parameter=3, start=2, stop=5)]
    assert list(window(own, 15, 20)) == []
