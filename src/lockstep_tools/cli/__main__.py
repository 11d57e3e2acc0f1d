"""``python -m lockstep_tools.cli``: the command where its script is not on the path."""

from __future__ import annotations

import sys

from lockstep_tools.cli import main

sys.exit(main())
