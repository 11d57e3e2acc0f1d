"""The one error that derives from a class of torch's; asking ``lockstep.errors`` for it is what imports torch."""

from __future__ import annotations

import torch

from lockstep.errors import LockstepError


class DeviceMemoryError(LockstepError, torch.OutOfMemoryError):
    """A step took more memory than its logical device's share allows."""

    __module__ = "lockstep.errors"  # where it is asked for, in another process too
