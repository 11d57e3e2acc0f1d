"""Runs ``lockstep`` until the first update of an optimizer, prints which packages are imported, and ends."""

from __future__ import annotations

import os
import sys

from torch.optim.optimizer import register_optimizer_step_post_hook

from lockstep_tools.cli import main


def end(*_: object) -> None:
    sys.stdout.write(f"IMPORTED {' '.join({name.partition('.')[0] for name in sys.modules})}\n")
    sys.stdout.flush()
    os._exit(0)


register_optimizer_step_post_hook(end)
sys.exit(main(sys.argv[1:]))
