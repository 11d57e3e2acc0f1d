"""Sequences that tensor ranks divide between them, instead of each holding them whole (Korthikanti et al. 2022).

    first layer:  whole -> own tokens
    a layer:      own tokens -> norm, dropout, residual -> gather -> own heads, own part of the inner layer
                             own tokens <- reduce-scatter <- row linears <-
    last layer:   own tokens -> whole

As much is sent as without it: gathers and reduce-scatters replace the all-reduces. Before the first layer of a stage
and after its last one sequences are whole, so that masks, positions and what stages send each other do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lockstep.errors import DataError, UsageError
from lockstep.parallel.forward_inputs import ForwardArguments

TOKENS = 1
"""The dim of the sequence in hidden states."""


class SequenceSharding:
    """Has the first layer of each stage divide the sequences among the ranks of ``mesh``, and the last one gather them.

    It takes all ``layers`` of the model, before any is cut off.
    """

    def __init__(self, mesh: DeviceMesh, model: nn.Module, layers: Iterable[nn.Module]) -> None:
        self._mesh = mesh
        self._layers = WeakSet(layers)
        self._first: set[int] = set()
        self._last: set[int] = set()
        model.register_forward_pre_hook(_refuse_hidden_states, with_kwargs=True)
        for layer in self._layers:
            self._wrap(layer)

    def set_stages(self, stages: Iterable[Iterable[nn.Module]]) -> None:
        """Sets this worker's stages, each as modules of the model, its layers among them in order."""
        runs = [run for parts in stages if (run := [part for part in parts if part in self._layers])]
        self._first, self._last = {id(run[0]) for run in runs}, {id(run[-1]) for run in runs}

    def _wrap(self, layer: nn.Module) -> None:
        forward: Callable[..., Any] = layer.forward

        def wrapped(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if id(layer) in self._first:
                hidden_states = self._divide(hidden_states)
            output = forward(hidden_states, *args, **kwargs)
            return self._gather(output) if id(layer) in self._last else output

        layer.forward = wrapped

    def _divide(self, hidden: Tensor) -> Tensor:
        ranks, tokens = self._mesh.size(), hidden.shape[TOKENS]
        if tokens % ranks:
            raise DataError(
                f"sequences of {tokens} tokens cannot be divided evenly among tensor={ranks} workers, as "
                f"sequence_parallel=True wants; pad them to a multiple of {ranks}, or leave it out"
            )
        return self._redistributed(hidden, Replicate(), Shard(TOKENS))

    def _gather(self, output: Any) -> Any:
        if isinstance(output, tuple):
            return (self._gather(output[0]), *output[1:])
        return self._redistributed(output, Shard(TOKENS), Replicate())

    def _redistributed(self, hidden: Tensor, before: Any, after: Any) -> Tensor:
        placed = DTensor.from_local(hidden, self._mesh, [before], run_check=False)
        return placed.redistribute(placements=[after]).to_local()


def _refuse_hidden_states(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
    named = ForwardArguments(model.forward).named(args, kwargs)
    if named.get("output_hidden_states") or model.config.output_hidden_states:
        raise UsageError(
            "output_hidden_states asks for what sequence_parallel=True divides among workers; leave one of them out"
        )
