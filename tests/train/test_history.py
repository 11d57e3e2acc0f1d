from __future__ import annotations

from lockstep.train.logs import EpochTiming, History


def test_history_is_a_dict_of_lists():
    history = History()
    history.add(0, {"loss": 2.0})
    history.add(1, {"loss": 1.0, "val_loss": 3.0})
    assert history.history == {"loss": [2.0, 1.0], "val_loss": [3.0]}
    assert history.epoch == [0, 1]
    assert repr(history) == "History(epochs=2, names=['loss', 'val_loss'])"


def test_timing_gives_examples_a_second():
    timing = EpochTiming(epoch=0, seconds=2.0, steps=4, examples=64, median_step_s=0.5)
    nothing = EpochTiming(epoch=0, seconds=0.0, steps=0, examples=0, median_step_s=0.0)
    assert (timing.examples_per_s, nothing.examples_per_s) == (32.0, 0.0)
