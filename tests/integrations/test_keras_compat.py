"""The functions of Keras that are replaced, and the probes that refuse a Keras with other ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

keras = pytest.importorskip("keras")

from lockstep.errors import ConfigError  # noqa: E402
from lockstep.integrations.keras.keras_compat import (  # noqa: E402
    REPLACEMENTS,
    Replacement,
    probe_loss_ids,
    replace_functions,
)


def replacement(owner: Any, **settings: Any) -> Replacement:
    settings = {"name": "mean", "parameters": ("values",), "wrap": lambda original: original, **settings}
    return Replacement(owner=owner, **settings)


@pytest.mark.parametrize("entry", REPLACEMENTS, ids=lambda entry: f"{entry.owner.__name__}.{entry.name}")
def test_each_function_of_keras_is_replaced_and_keeps_its_signature(entry: Replacement):
    function = getattr(entry.owner, entry.name)
    assert function.__wrapped__.__module__.startswith(("keras.", "lockstep.integrations.keras."))
    assert function.__globals__["__name__"].startswith("lockstep.integrations.keras.")
    assert entry.probe()


def test_a_function_with_other_parameters_is_refused_with_the_version_of_keras():
    owner = SimpleNamespace(__name__="keras.losses", mean=lambda values, weights: values)
    with pytest.raises(ConfigError, match=rf"Keras {keras.__version__} .*keras.losses.mean has .*\(values, weights\)"):
        replacement(owner).probe()


def test_a_missing_function_is_refused_unless_a_keras_without_it_needs_no_replacement():
    owner = SimpleNamespace(__name__="keras.losses")
    with pytest.raises(ConfigError, match=r"keras.losses.mean is missing, expected \(values\)"):
        replacement(owner).probe()
    assert not replacement(owner, is_optional=True).probe()


def test_nothing_is_replaced_if_one_function_does_not_fit():
    original = len
    fitting = SimpleNamespace(__name__="fitting", mean=original)
    other = SimpleNamespace(__name__="other", mean=lambda weights: weights)
    replacements = [
        replacement(fitting, parameters=("obj",), wrap=lambda _: None),
        replacement(other),
    ]

    with pytest.raises(ConfigError, match=r"other\.mean"):
        replace_functions(replacements)
    assert fitting.mean is original


def test_layers_that_keep_the_ids_of_their_losses_elsewhere_are_refused():
    class Layer:
        def __init__(self) -> None:
            self._losses_by_id: dict[int, Any] = {}

    with pytest.raises(ConfigError, match=r"Layer\._loss_ids is missing"):
        probe_loss_ids(Layer)
