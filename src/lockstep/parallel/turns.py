"""Several stages of a pipeline in one worker, on one module with its plain names: each works in its turn.

A part of the model that belongs to one of the worker's stages lets the others' hidden states through.
"""

from __future__ import annotations

from typing import Any

from torch import nn


class Turn:
    """Whose turn it is.

    Attributes:
        stage: the number of the stage that computes now.
    """

    def __init__(self) -> None:
        self.stage = -1

    def give(self, part: nn.Module, stage: int, otherwise: nn.Module) -> None:
        """Has a part of the model work for one stage only.

        Args:
            part: some module; its ``forward`` is replaced, and its names are not.
            stage: whose it is.
            otherwise: what works in its place in the turns of others.
        """
        own, others = part.forward, otherwise.forward

        def in_turn(*args: Any, **kwargs: Any) -> Any:
            return (own if self.stage == stage else others)(*args, **kwargs)

        part.forward = in_turn
