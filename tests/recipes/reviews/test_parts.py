from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from lockstep.errors import DataError
from lockstep_tools.recipes.reviews.config import ReviewsConfig
from lockstep_tools.recipes.reviews.dataset import Review, ReviewSplits, ReviewTable, split_reviews

HOW = ReviewsConfig()


def table(*reviews: Review) -> ReviewTable:
    return ReviewTable(reviews=reviews, empty=0, source="'hotel.csv'")


def many(label: int, number: int) -> list[Review]:
    return [Review(text=f"{label}/{n}", label=label) for n in range(number)]


def all_of(parts: ReviewSplits) -> list[Review]:
    return [review for part in (parts.train, parts.valid, parts.test) for review in part]


def test_each_class_is_divided_by_the_shares_and_every_review_is_in_one_part():
    reviews = [*many(0, 100), *many(1, 50)]
    parts = split_reviews(table(*reviews), HOW)
    sizes = [Counter(review.label for review in part) for part in (parts.train, parts.valid, parts.test)]
    assert sizes == [{0: 80, 1: 40}, {0: 10, 1: 5}, {0: 10, 1: 5}]
    assert sorted(all_of(parts), key=reviews.index) == reviews
    assert parts.labels == (0, 1)


def test_the_parts_depend_on_the_seed_alone_and_not_on_the_order():
    reviews = [*many(0, 100), *many(1, 50)]
    one, other = split_reviews(table(*reviews), HOW), split_reviews(table(*reviews[::-1]), HOW)
    assert set(one.test) == set(other.test)
    assert set(one.test) != set(split_reviews(table(*reviews), replace(HOW, seed=1)).test)


def test_the_same_review_twice_is_kept_once():
    reviews = [*many(0, 20), *many(1, 20)]
    parts = split_reviews(table(*reviews, *reviews, reviews[3]), HOW)
    assert len(all_of(parts)) == 40
    assert parts.repeated == 41


def test_reviews_that_differ_in_the_spaces_around_them_are_the_same():
    reviews = [*many(0, 20), *many(1, 20)]
    spaced = [Review(text=f" {review.text}\u3000", label=review.label) for review in reviews]
    parts, alone = (split_reviews(table(*rows), HOW) for rows in ([*spaced, *reviews], reviews))
    assert parts.repeated == 40
    assert set(all_of(parts)) == set(spaced)
    assert {review.words for review in parts.test} == {review.text for review in alone.test}


def test_a_text_with_two_labels_is_in_one_part():
    reviews = [*many(0, 30), *many(1, 30)]
    turned = [Review(text=review.text, label=1 - review.label) for review in reviews[:5]]
    parts = split_reviews(table(*reviews, *turned, *turned), HOW)
    assert parts.ambiguous == 5
    assert split_reviews(table(*reviews, *reviews), HOW).ambiguous == 0
    assert len(all_of(parts)) == 65
    texts = [{review.text for review in part} for part in (parts.train, parts.valid, parts.test)]
    assert sum(len(part) for part in texts) == len(set.union(*texts)) == 60


def test_a_limit_draws_from_the_whole_table():
    reviews = [*many(0, 500), *many(1, 500)]
    chosen = all_of(split_reviews(table(*reviews), replace(HOW, limit=100)))
    assert len(chosen) == 100
    assert 35 < Counter(review.label for review in chosen)[0] < 65
    assert len(all_of(split_reviews(table(*reviews), replace(HOW, limit=5000)))) == 1000


def test_three_reviews_of_each_class_are_enough_and_two_are_not():
    parts = split_reviews(table(*many(0, 3), *many(4, 3)), HOW)
    assert [len(part) for part in (parts.train, parts.valid, parts.test)] == [2, 2, 2]
    with pytest.raises(DataError, match=r"'hotel\.csv' has 2 different reviews with the label 4, expected at least 3"):
        split_reviews(table(*many(0, 3), *many(4, 2)), HOW)


def test_one_class_and_too_many_are_refused():
    with pytest.raises(DataError, match=r"'hotel\.csv' has 1 different labels, from 1 to 1; expected 2 to 20 classes"):
        split_reviews(table(*many(1, 5)), HOW)
    with pytest.raises(DataError, match="has 30 different labels, from 0 to 29; expected 2 to 20 classes"):
        split_reviews(table(*(review for label in range(30) for review in many(label, 3))), HOW)
