"""``Model.fit`` on replicas, for the suite ``steps``: all steps are in one call."""

from __future__ import annotations

from program import start_timer, take_job
from steps_replicas import strategy_of
from steps_work import make_work, trained_by

import lockstep as ls
from benchmarks.small_steps import fused_adam


def main() -> None:
    """Trains on logical CPU devices."""
    job = take_job()
    module, batches = make_work(job)
    strategy = strategy_of(job)
    with strategy.scope():
        model = ls.Model(module)
        model.compile(optimizer=fused_adam(module), loss="mse")
    timer = start_timer(job, trained=trained_by(module))
    record = ls.LambdaCallback(on_train_batch_end=lambda _, logs: timer.record_step(lambda: logs["loss"]))
    model.fit(batches, verbose=0, callbacks=[record])
    strategy.close()


if __name__ == "__main__":
    main()
