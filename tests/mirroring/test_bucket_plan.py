import pytest

from lockstep.mirroring.bucket_plan import FIRST_BUCKET_BYTES, plan_buckets

MB = 2**20


def test_parameters_go_in_reverse_order_and_every_one_once():
    plan = plan_buckets([MB] * 7, ["float32"] * 7, 3 * MB)

    assert plan.buckets == ((6,), (5, 4, 3), (2, 1, 0))


def test_the_first_bucket_is_small():
    assert plan_buckets([FIRST_BUCKET_BYTES // 2] * 5, ["float32"] * 5, 25 * MB).buckets == ((4, 3), (2, 1, 0))


def test_a_parameter_larger_than_a_bucket_is_alone():
    assert plan_buckets([1, 100, 1], ["float32"] * 3, 10).buckets == ((2,), (1,), (0,))


def test_dtypes_do_not_mix():
    assert plan_buckets([1, 1, 1], ["float32", "float64", "float64"], 10).buckets == ((2, 1), (0,))


@pytest.mark.parametrize("sizes", [[], [5], [3, 1, 4, 1, 5, 9, 2, 6]])
def test_each_parameter_has_one_bucket(sizes: list[int]):
    plan = plan_buckets(sizes, ["float32"] * len(sizes), 7)

    assert sorted(plan.of_parameter()) == list(range(len(sizes)))
    assert [index for members in plan.buckets for index in members] == list(reversed(range(len(sizes))))
