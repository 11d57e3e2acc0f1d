"""What the libraries of tests/clients need before anything imports them."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # and no telemetry, whose thread would outlive a test

# torchvision 0.28.0 for CUDA beside torch 2.13 for CPUs does not import: "operator torchvision::nms does not exist".
# transformers looks whether it is installed, and then fails as well, and trl and sentence-transformers with it.
with suppress(ImportError, RuntimeError):
    import torchvision  # noqa: F401
if "torchvision" not in sys.modules:
    sys.modules["torchvision"] = None  # type: ignore[assignment]
