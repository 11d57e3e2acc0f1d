"""``lockstep train`` as its command runs it, for the suite ``start``; the clock is read when an optimizer's step ends.

The command's process is ended after the steps that the job asks for.
"""

from __future__ import annotations

import os
import sys
from threading import Lock

from program import start_timer, take_job

from lockstep_tools.cli import main as run_command


def main() -> None:
    """Runs the command until the last step."""
    job = take_job()
    timer, lock, ended = start_timer(job, trained=0), Lock(), 0

    def count(*_: object) -> None:
        """All replicas call it after their update; the last one ends the step."""
        nonlocal ended
        with lock:
            ended += 1
            if ended % job.replicas == 0:
                timer.record_step(float("nan"))
            if ended == timer.total * job.replicas:
                os._exit(0)

    from torch.optim.optimizer import register_optimizer_step_post_hook  # the command imports torch just as late

    register_optimizer_step_post_hook(count)
    recipe = job.workload.removeprefix("train-")
    sys.exit(run_command(["train", recipe, "--devices", f"cpu:{job.replicas}", "--output", f"{job.source}/output"]))


if __name__ == "__main__":
    main()
