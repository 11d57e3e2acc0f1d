"""``lockstep train images WORDS`` that sends itself a signal.

    python interrupted.py SIGKILL 9 WORDS...        after the ninth batch that this process trains
    python interrupted.py SIGKILL report WORDS...   before it reports what the training came to
    python interrupted.py SIGKILL never WORDS...

Each worker leaves its numbers, to the last digit, in a file: result-0.json, result-1.json.
"""

import json
import os
import signal
import sys
from itertools import count
from pathlib import Path
from typing import Any

import lockstep as ls
from lockstep_tools.cli import main
from lockstep_tools.recipes.images import train as images_recipe

_, kind, moment, *words = sys.argv
train, batches = images_recipe.train_images, count(1)


def reached(place: str) -> None:
    if place == moment:
        os.kill(os.getpid(), signal.Signals[kind])


def train_and_tell(config: Any, strategy: ls.Strategy, *, callbacks: list[ls.Callback], **settings: Any) -> Any:
    tell = ls.LambdaCallback(on_train_batch_end=lambda batch, logs: reached(str(next(batches))))
    result = train(config, strategy, callbacks=[*callbacks, tell], **settings)
    numbers = {"history": result.history.history, "test": result.test_metrics}
    done = [timing.steps for timing in result.history.timing]
    told = json.dumps({"numbers": numbers, "done": done})
    Path(f"result-{strategy.workers.index}.json").write_text(told)
    reached("report")
    return result


images_recipe.train_images = train_and_tell
sys.exit(main(["train", "images", *words]))
