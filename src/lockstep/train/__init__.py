"""Training: Model with fit, evaluate and predict, its callbacks, and the record that fit returns."""

from __future__ import annotations

from lockstep.train.logs import EpochTiming, History
from lockstep.train.model import Model

__all__ = ["EpochTiming", "History", "Model"]
