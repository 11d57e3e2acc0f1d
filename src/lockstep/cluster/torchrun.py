"""torchrun's variables, which every PyTorch launcher sets, ``lockstep run`` and Kubeflow's trainer among them. Pure.

    RANK=1 WORLD_SIZE=4 MASTER_ADDR=hosta MASTER_PORT=29500

Only the chief's address is in them. The elastic agent adds who serves the store there
(``TORCHELASTIC_USE_AGENT_STORE``), the job's id (``TORCHELASTIC_RUN_ID``) and how often it started the workers again
(``TORCHELASTIC_RESTART_COUNT``).
"""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.cluster.spec import ClusterSpec, check_job_id, given_job_id
from lockstep.cluster.variables import LAST_PORT, chief_at, require_variables, whole_number

_SOURCE = "torchrun"
_PLACE = ("RANK", "WORLD_SIZE")
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
_REMEDY = (
    "start the program with `lockstep run` or torchrun, which set them all, or set the rest, for example "
    "RANK=0 WORLD_SIZE=2 MASTER_ADDR=hosta MASTER_PORT=29500"
)
# What torchrun calls a run that was given no --rdzv-id: no name at all, since every such run has it.
_NO_ID = "none"


def parse_torchrun(environment: Mapping[str, str]) -> ClusterSpec | None:
    """The cluster that torchrun's variables declare; None where neither RANK nor WORLD_SIZE is set.

    Raises:
        ClusterError: some are missing, no numbers, or out of range.
    """
    if not any(environment.get(name) for name in _PLACE):
        return None
    require_variables(environment, _PLACE, _SOURCE, _REMEDY)
    size = whole_number(environment, "WORLD_SIZE", _SOURCE, least=1)
    return ClusterSpec(
        workers=(_chief(environment, size), *[""] * (size - 1)),
        index=whole_number(environment, "RANK", _SOURCE, least=0, most=size - 1),
        job_id=given_job_id(environment) or _run_id(environment),
        source=_SOURCE,
        attempt=_attempt(environment),
        store_is_served=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _chief(environment: Mapping[str, str], size: int) -> str:
    """The chief's address; a single worker that names none needs none."""
    if size == 1 and not any(environment.get(name) for name in _ADDRESS):
        return ""
    require_variables(environment, (*_PLACE, *_ADDRESS), _SOURCE, _REMEDY)
    port = whole_number(environment, "MASTER_PORT", _SOURCE, least=1, most=LAST_PORT)
    return chief_at(environment["MASTER_ADDR"], port, "MASTER_ADDR", _SOURCE)


def _run_id(environment: Mapping[str, str]) -> str:
    run_id = environment.get("TORCHELASTIC_RUN_ID", "")
    check_job_id(run_id, f"{_SOURCE}: TORCHELASTIC_RUN_ID")
    return "" if run_id == _NO_ID else run_id


def _attempt(environment: Mapping[str, str]) -> int:
    if not environment.get("TORCHELASTIC_RESTART_COUNT"):
        return 0
    return whole_number(environment, "TORCHELASTIC_RESTART_COUNT", _SOURCE, least=0)
