"""Loading a model or tokenizer with transformers, by folder or by Hugging Face name.

A folder is never looked up on the network. A name is first looked up in the local Hugging Face cache, so that a machine
without a network finds at once what it has.
"""

from __future__ import annotations

import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError
from lockstep.extras import require

_HUB_TIMEOUT_S = 10.0


def load_named(name: str, kind: Any, *, extra: str, **settings: Any) -> Any:
    """Returns ``kind.from_pretrained(name)``, from this machine if it is there, else from the network.

    ``name`` is a folder or a Hugging Face name, ``kind`` a class of transformers, ``extra`` the extra that installs it.

    Raises:
        ConfigError: the name was not found or cannot be read.
    """
    failures = (OSError, ValueError, KeyError, RuntimeError, require("safetensors", extra).SafetensorError)
    try:
        try:
            return kind.from_pretrained(name, local_files_only=True, **settings)
        except failures:
            # A name on Hugging Face has at most one slash, inside; everything else can only be a path.
            if Path(name).exists() or name.count("/") > 1 or name.startswith(("/", ".", "~")):
                raise
        _check_network(name, extra)
        return kind.from_pretrained(name, **settings)
    except ConfigError:
        raise
    except failures as error:
        reason = " ".join(str(error).split())[:160]
        raise ConfigError(
            f"pretrained={name!r} could not be loaded ({type(error).__name__}: {reason}); expected a folder written by"
            " save_pretrained, or a Hugging Face name; check the path, or the name and the network"
        ) from error


def _check_network(name: str, extra: str) -> None:
    """Sends the hub one request: its own client would retry for half a minute and log each attempt."""
    hub: str = require("huggingface_hub.constants", extra).ENDPOINT
    try:
        urllib.request.urlopen(urllib.request.Request(hub, method="HEAD"), timeout=_HUB_TIMEOUT_S).close()
    except urllib.error.HTTPError:  # the hub answered
        return
    except OSError as error:
        raise ConfigError(
            f"pretrained={name!r} is neither a folder nor in the local Hugging Face cache, and {hub} cannot be reached"
            f" ({error}); give a folder written by save_pretrained, or connect to the network once"
        ) from error


def check_model_type(name: str, config: Any, *, expected: str, example: str) -> None:
    """Checks the model type, as transformers calls it; the message names ``example`` as a model of the right type."""
    if config.model_type != expected:
        raise ConfigError(
            f"pretrained={name!r} is a model of type {config.model_type!r}, expected {expected!r}; give the folder or"
            f" name of such a model, for example {example!r}"
        )


def check_embeddings(name: str, embeddings: int, tokens: int) -> None:
    """Checks that a model has an embedding for each token of its tokenizer."""
    if tokens > embeddings:
        raise ConfigError(
            f"pretrained={name!r} has {embeddings} embeddings for a tokenizer of {tokens} tokens; expected an embedding"
            " for each; give weights and a tokenizer that belong together"
        )


def label_names(classes: Sequence[str]) -> dict[str, Any]:
    """Returns the names of the classes as arguments of a config of transformers."""
    return {"id2label": dict(enumerate(classes)), "label2id": {name: n for n, name in enumerate(classes)}}


def warn_of_ignored(config: Any, names: Sequence[str]) -> None:
    """Warns of settings that were changed and have no effect, since the pretrained model has its own."""
    ignored = [name for name in names if getattr(config, name) != type(config).__dataclass_fields__[name].default]
    if ignored:
        verb = "has" if len(ignored) == 1 else "have"
        warnings.warn(
            f"{', '.join(ignored)} {verb} no effect with pretrained={config.pretrained!r}, which has its own",
            stacklevel=3,
        )


@contextmanager
def quiet_transformers(*, extra: str) -> Iterator[None]:
    """Lets transformers log errors only, and draw no progress bars, inside the block.

    It would report what the recipes do on purpose, such as a new head on pretrained weights.
    """
    logging = require("transformers.utils.logging", extra)
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
