"""One prediction: the loop over its batches, outside the replicas."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import torch

from lockstep.mirroring.module import MirroredModule
from lockstep.strategies.base import Strategy
from lockstep.train.callbacks.callback_list import CallbackList
from lockstep.train.feed import Feed
from lockstep.train.mode import module_mode
from lockstep.train.outputs import CollectedOutputs
from lockstep.train.precision import Precision
from lockstep.train.step import predict_step
from lockstep.train.timing import StepClock


def run_prediction(
    strategy: Strategy,
    module: MirroredModule,
    precision: Precision,
    feed: Feed,
    *,
    callbacks: CallbackList,
    clock: StepClock,
) -> Any:
    """The module's outputs for all rows, in the order of the data, on the CPU. Every worker must call it."""
    collected = CollectedOutputs()
    with module_mode(module, training=False):
        callbacks.call("on_predict_begin")
        clock.start()
        with torch.no_grad(), closing(feed.epoch(0)) as batches:
            for step, batch in enumerate(batches):
                clock.pause()
                callbacks.call("on_predict_batch_begin", step)
                clock.start()
                shards = strategy.local_results(strategy.run(predict_step, (module, precision, batch)))
                collected.begin_batch()
                for shard in shards:
                    if shard.rows:
                        collected.add(shard.rows, shard.outputs)
                clock.stop(rows=sum(shard.rows for shard in shards))
                callbacks.call("on_predict_batch_end", step)
                clock.start()
        callbacks.call("on_predict_end")
        return collected.joined(strategy.workers)
