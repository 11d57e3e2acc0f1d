import pytest

from lockstep.mirroring.gradients.bucketed_all_reduce import FIRST_BUCKET_BYTES, LAST_BUCKET_BYTES, plan_buckets

MB = 2**20


def test_parameters_go_in_reverse_order_and_every_one_once():
    plan = plan_buckets([MB] * 19, ["float32"] * 19, 3 * MB)
    assert plan[:4] == ((18,), (17, 16, 15), (14, 13, 12), (11, 10, 9))


def test_the_first_bucket_is_small():
    (first, second, *_) = plan_buckets([FIRST_BUCKET_BYTES // 2] * 40, ["float32"] * 40, 25 * MB)
    assert first == (39, 38)
    assert len(second) == 19  # half of the 38 that are left


def test_little_is_left_for_the_last_bucket():
    sizes = [MB // 8] * 80
    plan = plan_buckets(sizes, ["float32"] * 80, 25 * MB)
    assert [len(members) for members in plan] == [8, 36, 18, 9, 4, 2, 2, 1]
    assert len(plan[-1]) * MB // 8 <= LAST_BUCKET_BYTES


def test_no_bucket_is_larger_than_asked():
    plan = plan_buckets([MB] * 300, ["float32"] * 300, 25 * MB)
    assert max(len(members) for members in plan) == 25


def test_a_parameter_larger_than_a_bucket_is_alone():
    assert plan_buckets([1, 100, 1], ["float32"] * 3, 10) == ((2,), (1,), (0,))


def test_what_has_no_gradients_is_in_no_bucket_and_makes_none_larger():
    sizes, kinds = [9 * MB, MB, 9 * MB, MB, MB], ["float32"] * 5
    assert plan_buckets(sizes, kinds, 25 * MB, {1, 3, 4}) == ((4,), (3,), (1,))
    assert plan_buckets(sizes, kinds, 25 * MB, set()) == ()


def test_dtypes_do_not_mix():
    assert plan_buckets([1, 1, 1], ["float32", "float64", "float64"], 10) == ((2, 1), (0,))


@pytest.mark.parametrize("sizes", [[], [5], [3, 1, 4, 1, 5, 9, 2, 6]])
def test_each_parameter_has_one_bucket(sizes: list[int]):
    plan = plan_buckets(sizes, ["float32"] * len(sizes), 7)
    assert sorted(index for members in plan for index in members) == list(range(len(sizes)))
    assert [index for members in plan for index in members] == list(reversed(range(len(sizes))))
