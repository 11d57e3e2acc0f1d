"""What the bits of a training depend on, over all workers: saved with each checkpoint, and compared on resuming."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from lockstep.replicas.conditions import Conditions, changes, conditions_of, joined
from lockstep.strategies.base import Strategy

_LOG = logging.getLogger("lockstep")
_REPLICAS, _LAYOUT, _SEED = "replicas", "replicas of each worker", "seed"


def all_conditions(strategy: Strategy, settings: Mapping[str, str]) -> Conditions:
    """The conditions of all workers, with ``settings`` of the training. Every worker must call it."""
    workers = strategy.workers
    local = conditions_of(strategy.devices, strategy.threads_per_replica)
    gathered = workers.processes.all_gather_bytes("what the bits depend on", json.dumps(local).encode())
    machines = [json.loads(payload) for payload in gathered]
    names = dict.fromkeys(name for machine in machines for name in machine)
    conditions = {name: joined(machine[name] for machine in machines if name in machine) for name in names}
    conditions |= {**settings, _SEED: str(strategy.seed), _REPLICAS: str(workers.num_replicas)}
    if not workers.any_layout:
        conditions[_LAYOUT] = workers.layout or " + ".join(map(str, workers.replicas))
    return conditions


def warn_of_changes(source: Path, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Logs one line if a training goes on under other conditions than those it was saved under. For the chief.

    The seed may differ: the random numbers that were saved go on.
    """
    differences = changes({name: was for name, was in before.items() if name != _SEED}, now)
    if not differences:
        return
    exact = (
        "its results are those of one device to rounding"
        if before.get(_REPLICAS) != now.get(_REPLICAS)
        else ("its last bits may differ from those of a training that was not interrupted")
    )
    _LOG.warning("the training goes on from %s, but %s: %s", source, "; ".join(differences), exact)
