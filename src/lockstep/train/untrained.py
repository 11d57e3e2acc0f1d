"""The loop over batches of a pass that trains nothing: an evaluation, or a prediction."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any, Literal

import torch

from lockstep.train.callbacks.base import Logs
from lockstep.train.callbacks.callback_list import CallbackList
from lockstep.train.feed import Feed
from lockstep.train.timing import StepClock


def run_batches(
    kind: Literal["test", "predict"],
    feed: Feed,
    run: Callable[[Any], tuple[int, Logs]],
    *,
    callbacks: CallbackList,
    clock: StepClock,
) -> None:
    """Runs every batch without gradients, tells the callbacks of each, and takes the time of reading and running.

    Args:
        kind: of the hooks.
        feed: the batches.
        run: gives the rows of a batch, and the numbers that the callbacks hear.
        callbacks: hear the hooks of the batches.
        clock: stands still in the hooks.
    """
    clock.start()
    with torch.no_grad(), closing(feed.epoch(0)) as batches:
        for step, batch in enumerate(batches):
            clock.pause()
            callbacks.call(f"on_{kind}_batch_begin", step)
            clock.start()
            rows, logs = run(batch)
            clock.stop(rows=rows)
            callbacks.call(f"on_{kind}_batch_end", step, logs=logs)
            clock.start()
