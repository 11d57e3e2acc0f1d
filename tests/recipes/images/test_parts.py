from __future__ import annotations

from collections import Counter

from lockstep_tools.recipes.images.dataset import ImageFile, complete_splits, hold_out


def pictures(*counts: int) -> tuple[ImageFile, ...]:
    return tuple(
        ImageFile(name=f"{label}/{n}.png", label=label) for label, count in enumerate(counts) for n in range(count)
    )


def test_every_class_gives_its_share_and_none_is_lost():
    kept, held = hold_out(pictures(100, 40, 11), 0.1)
    assert Counter(picture.label for picture in held) == {0: 10, 1: 4, 2: 1}
    assert sorted(p.name for p in (*kept, *held)) == sorted(p.name for p in pictures(100, 40, 11))
    assert [picture.name for picture in kept] == [p.name for p in pictures(100, 40, 11) if p in kept]


def test_a_class_keeps_one_and_gives_one_where_it_can():
    kept, held = hold_out(pictures(1, 2, 3), 0.01)
    assert Counter(picture.label for picture in kept) == {0: 1, 1: 1, 2: 2}
    assert Counter(picture.label for picture in held) == {1: 1, 2: 1}
    assert hold_out(pictures(5, 5), 0.0) == (pictures(5, 5), ())


def test_names_alone_decide_so_a_new_picture_hardly_moves_others():
    before = {picture.name for picture in hold_out(pictures(100), 0.2)[1]}
    after = {picture.name for picture in hold_out(pictures(101), 0.2)[1]}
    assert len(before ^ after) <= 2


def test_what_is_missing_is_held_out_of_the_training_part():
    train, valid, test = pictures(20, 20), pictures(2, 2), pictures(3, 3)
    both = complete_splits({"train": train}, valid_fraction=0.1, test_fraction=0.2)
    given = complete_splits({"train": train, "valid": valid, "test": test}, valid_fraction=0.1, test_fraction=0.2)
    without = complete_splits({"train": train, "test": test}, valid_fraction=0.0, test_fraction=0.2)
    assert (len(both["train"]), len(both["valid"]), len(both["test"])) == (28, 4, 8)
    assert not {p.name for p in both["valid"]} & {p.name for p in both["test"]}
    assert (given["train"], given["valid"], given["test"]) == (train, valid, test)
    assert (without["train"], without["valid"], without["test"]) == (train, (), test)
