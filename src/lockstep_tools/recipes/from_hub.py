"""Loading a model or tokenizer with transformers, by folder or by Hugging Face name."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

from lockstep.errors import ConfigError
from lockstep.extras import require


def load_named(name: str, kind: Any, **settings: Any) -> Any:
    """Returns ``kind.from_pretrained(name)``, from this machine if it is there, else from the network.

    ``name`` is a folder or a Hugging Face name. Raises a ConfigError if it was not found or cannot be read.
    """
    # What ``from_pretrained`` raises for a missing, torn or foreign file depends on the format and on the version of
    # transformers.
    failures = (OSError, ValueError, KeyError, RuntimeError, require("safetensors", "text").SafetensorError)
    try:
        try:
            return kind.from_pretrained(name, local_files_only=True, **settings)
        except failures:
            if Path(name).exists() or not may_be_on_hub(name):
                raise
        return kind.from_pretrained(name, **settings)
    except failures as error:
        reason = shorten(str(error), 200, placeholder=" ...")
        raise ConfigError(
            f"pretrained={name!r} could not be loaded ({type(error).__name__}: {reason}); expected a folder written by"
            " save_pretrained, or a Hugging Face name; check the path, or the name and the network"
        ) from error


def may_be_on_hub(name: str) -> bool:
    """Whether a name may be one on Hugging Face, which has at most one slash, inside; others can only be paths."""
    return name.count("/") <= 1 and not name.startswith(("/", ".", "~"))


def check_embeddings(name: str, embeddings: int, tokens: int) -> None:
    """Checks that a model has an embedding for each token of its tokenizer."""
    if tokens > embeddings:
        raise ConfigError(
            f"pretrained={name!r} has {embeddings} embeddings for a tokenizer of {tokens} tokens; give weights and a"
            " tokenizer that belong together"
        )


def label_names(classes: Sequence[str]) -> dict[str, Any]:
    """Returns the names of the classes as arguments of a config of transformers."""
    return {"id2label": dict(enumerate(classes)), "label2id": {name: n for n, name in enumerate(classes)}}


def warn_of_ignored(config: Any, names: Sequence[str]) -> None:
    """Warns of settings that were changed and have no effect, since the pretrained model has its own."""
    ignored = [name for name in names if getattr(config, name) != type(config).__dataclass_fields__[name].default]
    if ignored:
        warnings.warn(f"without effect, since pretrained={config.pretrained!r}: {', '.join(ignored)}", stacklevel=3)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """In the block transformers draws no progress bars and logs only errors: recipes do on purpose what it warns of."""
    logging = require("transformers.utils.logging", "text")
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft uses names that transformers will rename
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
