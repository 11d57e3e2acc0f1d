"""The Transformers ``Trainer`` on the replicas of a strategy: the same arguments, the same numbers, N devices.

Importing this needs ``transformers`` and ``accelerate``: ``pip install 'torch-lockstep[transformers]'``.
"""

from lockstep.extras import require

require("transformers", "transformers")
require("accelerate", "transformers")

from lockstep.integrations.transformers.trainer import Trainer  # noqa: E402  what it needs is there now

__all__ = ["Trainer"]
