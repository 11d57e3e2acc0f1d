"""transformers without its own words: bars and warnings that are for nobody here. What fails still fails."""

from __future__ import annotations

import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError
from lockstep.extras import require

_HUB_TIMEOUT_S = 10.0


def load_named(name: str, kind: Any, *, extra: str, **settings: Any) -> Any:
    """``kind.from_pretrained(name)``, from this machine if it is there, else over the network.

    Args:
        name: folder written by ``save_pretrained`` or by a recipe, or a Hugging Face name.
        kind: a class of transformers.
        extra: the extra of this package that brings transformers and safetensors.
        settings: given to ``from_pretrained``.

    Raises:
        ConfigError: not found, or unreadable.
    """
    safetensors = require("safetensors", extra)
    failures = (OSError, ValueError, KeyError, RuntimeError, safetensors.SafetensorError)
    try:
        return kind.from_pretrained(name, local_files_only=True, **settings)
    except failures as error:
        if Path(name).exists() or _is_path(name):
            raise _unusable(name, error) from error
    _check_network(name, extra)
    try:
        return kind.from_pretrained(name, **settings)
    except failures as error:
        raise _unusable(name, error) from error


def check_kind(name: str, config: Any, *, kind: str, example: str) -> None:
    """Refuses a model of another type than ``kind``, transformers' name for it.

    Raises:
        ConfigError: it is another; ``example`` is named as one that would do.
    """
    if config.model_type != kind:
        raise ConfigError(
            f"pretrained={name!r} is a model of type {config.model_type!r}, expected {kind!r}; give the folder or name"
            f" of such a model, for example {example!r}"
        )


def _check_network(name: str, extra: str) -> None:
    """Asks the hub for nothing, once: its own client would try for half a minute and write a line for each attempt."""
    hub: str = require("huggingface_hub.constants", extra).ENDPOINT
    try:
        urllib.request.urlopen(urllib.request.Request(hub, method="HEAD"), timeout=_HUB_TIMEOUT_S).close()
    except urllib.error.HTTPError:  # it answered
        return
    except OSError as error:
        raise ConfigError(
            f"pretrained={name!r} is neither a folder nor in the local Hugging Face cache, and {hub} cannot be reached"
            f" ({error}); give a folder written by save_pretrained, or connect to the network once"
        ) from error


def _is_path(name: str) -> bool:
    """Whether a name can only mean a place on this machine: Hugging Face's have at most one slash, inside."""
    return name.count("/") > 1 or name.startswith(("/", ".", "~"))


def _unusable(name: str, error: Exception) -> ConfigError:
    reason = " ".join(str(error).split())[:160]
    return ConfigError(
        f"pretrained={name!r} could not be loaded ({type(error).__name__}: {reason}); expected a folder written by"
        " save_pretrained, or a Hugging Face name; check the path, or the name and the network"
    )


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
