"""Saving and loading: weights as one safetensors file."""

from __future__ import annotations

from lockstep.checkpoint.weights import check_fit, read_weights, write_weights

__all__ = ["check_fit", "read_weights", "write_weights"]
