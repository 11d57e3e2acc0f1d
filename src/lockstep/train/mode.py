"""Training or evaluation mode for the length of a pass, on every replica's copy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.mirroring.module import MirroredModule


@contextmanager
def module_mode(mirrored: MirroredModule, *, training: bool) -> Iterator[None]:
    """Sets the mode of all copies, and puts the flags back as the user left them, submodule by submodule.

    Putting back the user's module is enough: each run gives the other copies its flags.
    """
    before = {name: part.training for name, part in mirrored.module.named_modules()}
    mirrored.train(training)
    if not training:
        mirrored.sync_buffers()
    try:
        yield
    finally:
        for name, part in mirrored.module.named_modules():
            part.training = before.get(name, part.training)
