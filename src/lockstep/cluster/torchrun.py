"""torchrun's variables, which every PyTorch launcher sets, ``lockstep run`` and Kubeflow's trainer among them. Pure.

    RANK=1 WORLD_SIZE=4 MASTER_ADDR=hosta MASTER_PORT=29500

They only name the chief's address. torch's elastic agent adds who serves the store there
(``TORCHELASTIC_USE_AGENT_STORE``), the job's id (``TORCHELASTIC_RUN_ID``) and how often it restarted the workers
(``TORCHELASTIC_RESTART_COUNT``).
"""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.cluster.spec import ClusterSpec, check_job_id
from lockstep.cluster.variables import chief_address, count, given_job_id, port_number, require_variables, whole_number

_SOURCE = "torchrun"
_PLACE = ("RANK", "WORLD_SIZE")
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
_REMEDY = (
    "start the program with `lockstep run` or torchrun, which set them all, or set the rest, for example "
    "RANK=0 WORLD_SIZE=2 MASTER_ADDR=hosta MASTER_PORT=29500"
)
_NO_ID = "none"  # torchrun's id for every run without --rdzv-id


def parse_torchrun(environment: Mapping[str, str]) -> ClusterSpec | None:
    """The cluster that torchrun's variables declare; None if neither RANK nor WORLD_SIZE is set.

    Raises:
        ClusterError: some are missing, not numbers, or out of range.
    """
    if not any(environment.get(name) for name in _PLACE):
        return None
    require_variables(environment, _PLACE, _SOURCE, _REMEDY)
    size = whole_number(environment, "WORLD_SIZE", _SOURCE, least=1)
    chief = ""  # a single worker needs no address
    if size > 1 or any(environment.get(name) for name in _ADDRESS):
        require_variables(environment, (*_PLACE, *_ADDRESS), _SOURCE, _REMEDY)
        port = port_number(environment, "MASTER_PORT", _SOURCE)
        chief = chief_address(environment["MASTER_ADDR"], port, "MASTER_ADDR", _SOURCE)
    run_id = environment.get("TORCHELASTIC_RUN_ID", "")
    check_job_id(run_id, f"{_SOURCE}: TORCHELASTIC_RUN_ID")
    return ClusterSpec(
        workers=(chief, *[""] * (size - 1)),
        index=whole_number(environment, "RANK", _SOURCE, least=0, most=size - 1),
        job_id=given_job_id(environment) or ("" if run_id == _NO_ID else run_id),
        source=_SOURCE,
        attempt=count(environment, "TORCHELASTIC_RESTART_COUNT", _SOURCE),
        store_is_served=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )
