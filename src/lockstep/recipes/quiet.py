"""transformers without its own words: bars and warnings that are for nobody here. What fails still fails."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.extras import require


@contextmanager
def quiet_transformers(*, extra: str) -> Iterator[None]:
    """Inside, transformers logs errors alone and draws no bars; afterwards as before.

    Among what is meant to happen: a table of weights that are left over or new, and advice about padding.

    Args:
        extra: which of ours to install where transformers is missing.
    """
    logging = require("transformers.utils.logging", extra)
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of its own names that will change, which peft calls
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
