"""Launchers and services that number processes in variables of their own: MPI's, jsrun, Flux, SkyPilot and others.

Each is a ``Launcher``, a row of a table. A description is followed where it is whole: the number of processes, the one
that this is, and the chief's address. That is given by MASTER_ADDR and MASTER_PORT, by variables of the launcher, or
follows from all processes being on one host, or is told by MPI through mpi4py, where that is installed. Otherwise it
is refused, with the line to write. A description of one process is a single worker.

    LAUNCHERS   start processes, often inside what the others describe: their numbers come first
    SERVICES    start one process on each host
    INTERFACES  what is left where no row above is recognised
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lockstep.checks import shown
from lockstep.cluster.launcher_process import launcher_process
from lockstep.cluster.mpi_address import MpiJob
from lockstep.cluster.spec import ClusterSpec
from lockstep.cluster.variables import Variables, job_port
from lockstep.errors import ClusterError

ALONE = "where this process is to train a model alone, set RANK=0 WORLD_SIZE=1 in it"
_LOOPBACK = "127.0.0.1"
_ELASTIC = ":"


@dataclass(frozen=True, kw_only=True)
class Place:
    """What the surroundings of a process say of it: how many processes there are, and which of them it is.

    Args:
        source: the variables that say so, for messages.
        workers: the number of processes; None if no variable has it.
        index: the number of this one; None if no variable has it.
    """

    source: str
    workers: int | None
    index: int | None


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """The names of the variables in which a launcher numbers the processes that it starts.

    Args:
        name: the launcher, for messages and as the source of a cluster.
        rank: the number of a process, from 0.
        size: the number of processes; empty if no variable has it.
        local_rank: the number of a process among those of its host.
        local_size: the number of processes of a host.
        hosts: the number of hosts.
        chief: those that name the host of process 0; the first that is set counts, and of a list the first host.
        port: those that give the port of the chief's store; the first that is set counts.
        job: those that together distinguish this job from all others, and are equal on all its processes.
        signs: those that must be set for the launcher to be recognised; ``rank`` if empty.
        alone: a variable and its value that show a process which no launcher has started.
        speaks_mpi: whether its processes can ask MPI where process 0 is.
        line: what to write so that all processes know the chief's address.
    """

    name: str
    rank: str
    size: str
    local_rank: str = ""
    local_size: str = ""
    hosts: str = ""
    chief: tuple[str, ...] = ("MASTER_ADDR",)
    port: tuple[str, ...] = ("MASTER_PORT",)
    job: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
    alone: tuple[str, str] = ("", "")
    speaks_mpi: bool = False
    line: str

    def is_recognised(self, environment: Mapping[str, str]) -> bool:
        """Whether the launcher has started the process with this environment."""
        name, value = self.alone
        is_alone = bool(name) and environment.get(name) == value
        return not is_alone and all(environment.get(sign) for sign in self.signs or (self.rank,))


def _by_shell(rank: str, starter: str = "") -> str:
    """A line that numbers processes for a launcher whose variables do not say all."""
    size = "WORLD_SIZE=4 MASTER_ADDR=hosta MASTER_PORT=29500"
    return f"{starter}sh -c 'RANK={rank} {size} exec python train.py'"


_MPIRUN = "mpirun -x MASTER_ADDR=hosta -x MASTER_PORT=29500 -n 4 python train.py"
_HYDRA = "mpirun -genv MASTER_ADDR hosta -genv MASTER_PORT 29500 -n 4 python train.py"
_EXPORT = "export MASTER_ADDR=hosta MASTER_PORT=29500"

LAUNCHERS = (
    Launcher(  # sets Open MPI's variables too
        name="jsrun",
        rank="JSM_NAMESPACE_RANK",
        speaks_mpi=True,
        size="JSM_NAMESPACE_SIZE",
        local_rank="JSM_NAMESPACE_LOCAL_RANK",
        local_size="JSM_NAMESPACE_LOCAL_SIZE",
        job=("LSB_JOBID", "PMIX_NAMESPACE"),
        line="jsrun -E MASTER_ADDR=hosta -E MASTER_PORT=29500 -n 4 python train.py",
    ),
    Launcher(
        name="Open MPI",
        rank="OMPI_COMM_WORLD_RANK",
        speaks_mpi=True,
        size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        # Azure Machine Learning starts the processes of a job of the MPI kind with mpirun, and names the first host.
        chief=("MASTER_ADDR", "AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE"),
        job=("PMIX_NAMESPACE", "OMPI_MCA_orte_precondition_transports"),
        line=_MPIRUN,
    ),
    Launcher(
        name="MVAPICH2",
        rank="MV2_COMM_WORLD_RANK",
        speaks_mpi=True,
        size="MV2_COMM_WORLD_SIZE",
        local_rank="MV2_COMM_WORLD_LOCAL_RANK",
        local_size="MV2_COMM_WORLD_LOCAL_SIZE",
        line="mpirun_rsh -np 4 hosta hostb MASTER_ADDR=hosta MASTER_PORT=29500 python train.py",
    ),
    Launcher(
        name="MVAPICH",
        rank="MVP_COMM_WORLD_RANK",
        speaks_mpi=True,
        size="MVP_COMM_WORLD_SIZE",
        local_rank="MVP_COMM_WORLD_LOCAL_RANK",
        local_size="MVP_COMM_WORLD_LOCAL_SIZE",
        line=_HYDRA,
    ),
    Launcher(  # Cray's and HPE's mpiexec
        name="PALS",
        rank="PALS_RANKID",
        speaks_mpi=True,
        size="PMI_SIZE",
        local_rank="PALS_LOCAL_RANKID",
        local_size="PALS_LOCAL_SIZE",
        job=("PALS_APID",),
        line="mpiexec --env MASTER_ADDR=hosta --env MASTER_PORT=29500 -n 4 python train.py",
    ),
    Launcher(
        name="Flux",
        rank="FLUX_TASK_RANK",
        size="FLUX_JOB_SIZE",
        local_rank="FLUX_TASK_LOCAL_ID",
        hosts="FLUX_JOB_NNODES",
        job=("FLUX_JOB_ID",),
        line="flux run --env=MASTER_ADDR=hosta --env=MASTER_PORT=29500 -n 4 python train.py",
    ),
    Launcher(
        name="Horovod",
        rank="HOROVOD_RANK",
        size="HOROVOD_SIZE",
        local_rank="HOROVOD_LOCAL_RANK",
        local_size="HOROVOD_LOCAL_SIZE",
        job=("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
        line=f"{_EXPORT}; horovodrun -np 4 -H hosta:2,hostb:2 python train.py",
    ),
    Launcher(  # Platform MPI, later IBM's
        name="Platform MPI",
        rank="MPI_RANKID",
        speaks_mpi=True,
        size="MPI_NRANKS",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
        line="mpirun -e MASTER_ADDR=hosta -e MASTER_PORT=29500 -np 4 python train.py",
    ),
    # MPICH and Intel MPI. SLURM's PMI has no MPI_LOCALRANKID, so a step of srun is not taken for them.
    Launcher(
        name="MPICH's or Intel MPI's Hydra",
        speaks_mpi=True,
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
        signs=("PMI_RANK", "MPI_LOCALRANKID"),
        line=_HYDRA,
    ),
)

INDEXED_JOB = Launcher(
    name="Kubernetes's Indexed Job",
    rank="JOB_COMPLETION_INDEX",
    size="WORLD_SIZE",
    signs=("JOB_COMPLETION_INDEX", "WORLD_SIZE"),
    line="env: [{name: MASTER_ADDR, value: hosta}, {name: MASTER_PORT, value: '29500'}] in the manifest",
)

SERVICES = (
    Launcher(  # for torchrun, which reads them where its arguments are left out
        name="Kubeflow Trainer",
        rank="PET_NODE_RANK",
        size="PET_NNODES",
        chief=("MASTER_ADDR", "PET_MASTER_ADDR"),
        port=("MASTER_PORT", "PET_MASTER_PORT"),
        signs=("PET_NNODES",),
        line="torchrun train.py",
    ),
    # Kubernetes numbers the pods of an Indexed Job, and those of a JobSet's jobs, which may be independent. The size is
    # in the manifest: who gives one means one training.
    INDEXED_JOB,
    Launcher(
        name="SkyPilot",
        rank="SKYPILOT_NODE_RANK",
        size="SKYPILOT_NUM_NODES",
        chief=("MASTER_ADDR", "SKYPILOT_NODE_IPS"),
        job=("SKYPILOT_TASK_ID",),
        line='export MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | head -n1) MASTER_PORT=29500',
    ),
    Launcher(
        name="dstack",
        rank="DSTACK_NODE_RANK",
        size="DSTACK_NODES_NUM",
        chief=("MASTER_ADDR", "DSTACK_MASTER_NODE_IP"),
        job=("DSTACK_RUN_NAME", "DSTACK_NODES_IPS"),
        line="export MASTER_ADDR=$DSTACK_MASTER_NODE_IP MASTER_PORT=29500",
    ),
    Launcher(  # names its leader where the job asks for leaderSelection
        name="Beaker",
        rank="BEAKER_REPLICA_RANK",
        size="BEAKER_REPLICA_COUNT",
        chief=("MASTER_ADDR", "BEAKER_LEADER_REPLICA_HOSTNAME"),
        job=("BEAKER_WORKLOAD_ID",),
        line="export MASTER_ADDR=$BEAKER_LEADER_REPLICA_HOSTNAME MASTER_PORT=29500",
    ),
    Launcher(
        name="Volcengine's ML platform",
        rank="MLP_ROLE_INDEX",
        size="MLP_WORKER_NUM",
        chief=("MASTER_ADDR", "MLP_WORKER_0_HOST"),
        port=("MASTER_PORT", "MLP_WORKER_0_PORT"),
        signs=("MLP_ROLE_INDEX", "MLP_WORKER_NUM"),
        line="export MASTER_ADDR=$MLP_WORKER_0_HOST MASTER_PORT=29500",
    ),
    Launcher(
        name="Metaflow",
        rank="MF_PARALLEL_NODE_INDEX",
        size="MF_PARALLEL_NUM_NODES",
        chief=("MASTER_ADDR", "MF_PARALLEL_MAIN_IP"),
        line="export MASTER_ADDR=$MF_PARALLEL_MAIN_IP MASTER_PORT=29500",
    ),
    Launcher(  # a multi-node parallel job; the variable with the main node's address is not set on the main node
        name="AWS Batch",
        rank="AWS_BATCH_JOB_NODE_INDEX",
        size="AWS_BATCH_JOB_NUM_NODES",
        line=("export MASTER_ADDR=${AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS:-$(hostname -i)} MASTER_PORT=29500"),
    ),
    Launcher(  # the parallel universe
        name="HTCondor",
        rank="_CONDOR_PROCNO",
        size="_CONDOR_NPROCS",
        line='environment = "MASTER_ADDR=hosta MASTER_PORT=29500" in the submit file',
    ),
    Launcher(  # numbers from 1, and does not say how many
        name="LSF's blaunch",
        rank="LSF_PM_TASKID",
        size="",
        line=_by_shell("$((LSF_PM_TASKID - 1))", "blaunch "),
    ),
)

INTERFACES = (
    Launcher(
        name="PMI",
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="PMI_LOCAL_RANK",
        local_size="PMI_LOCAL_SIZE",
        line=_EXPORT,
    ),
    Launcher(  # MVAPICH 1 and others of its time; SLURM's plugin for it sets them in steps too
        name="MVAPICH 1",
        rank="MPIRUN_RANK",
        size="MPIRUN_NPROCS",
        line="mpirun_rsh -np 4 hosta hostb MASTER_ADDR=hosta MASTER_PORT=29500 python train.py",
    ),
    Launcher(
        name="PMIx",
        rank="PMIX_RANK",
        size="",
        # A program that calls MPI_Init without mpirun, as mpi4py does, leaves its children a rank (Open MPI 4.1.4).
        alone=("OMPI_MCA_ess", "singleton"),
        line=_by_shell("$PMIX_RANK", "prterun -n 4 "),
    ),
    Launcher(name="ALPS", rank="ALPS_APP_PE", size="", line=_by_shell("$ALPS_APP_PE", "aprun -n 4 ")),
)


def find_launcher(environment: Mapping[str, str], rows: tuple[Launcher, ...]) -> Launcher | None:
    """The first row of a table that is recognised."""
    return next((row for row in rows if row.is_recognised(environment)), None)


def parse_launcher(
    environment: Mapping[str, str], launcher: Launcher, ask: Callable[[int, int], MpiJob | None] | None = None
) -> ClusterSpec:
    """The cluster that a launcher's variables declare. Raises ClusterError unless they are whole.

    ``ask`` asks MPI, given this process's number and that of all, where no variable names the host of process 0.
    """
    variables = Variables(environment, launcher.name, f"write `{launcher.line}`; {ALONE}")
    if not variables.get(launcher.size):
        number = f"{launcher.rank}={shown(variables.get(launcher.rank))}"
        line = _by_shell(f"${launcher.rank}") if launcher.size else launcher.line
        raise _refusal(launcher, f"{number} numbers this process, and no variable says of how many", line)
    size = _size(variables, launcher)
    if size == 1:
        return ClusterSpec(workers=("",), index=0, job_id=variables.job_id(), source=launcher.name)
    variables.require(launcher.rank, launcher.size)
    index = variables.number(launcher.rank, most=size - 1)
    local = _is_on_one_host(variables, launcher, size)
    names_host = local or _first(variables, launcher.chief)
    mpi_job = ask(index, size) if launcher.speaks_mpi and ask is not None and not names_host else None
    if mpi_job is not None:
        job_id = variables.job_id() or f"job-{mpi_job.job}"
        chief = (mpi_job.chief, *[""] * (size - 1))
        return ClusterSpec(workers=chief, index=index, job_id=job_id, source=launcher.name)
    # Without an id two jobs on one host would derive the same port; their processes have different ancestors.
    job = _job(variables, launcher) or (local and launcher_process(launcher.rank)) or ""
    digest = hashlib.sha256(job.encode()).hexdigest()[:16]
    return ClusterSpec(
        workers=(_chief(variables, launcher, (index, size), job, local=local), *[""] * (size - 1)),
        index=index,
        job_id=variables.job_id() or (f"job-{digest}" if job else ""),
        source=launcher.name,
    )


def launcher_place(environment: Mapping[str, str], launcher: Launcher) -> Place:
    """What a launcher's variables say of this process, whether or not they are whole."""
    variables = Variables(environment, launcher.name)
    size = variables.get(launcher.size)
    return Place(
        source=f"{launcher.name}'s {' and '.join(name for name in (launcher.rank, launcher.size) if name)}",
        workers=variables.number(launcher.size, least=1) if size and _ELASTIC not in size else None,
        index=variables.number(launcher.rank) if variables.get(launcher.rank) else None,
    )


def local_numbers(environment: Mapping[str, str], source: str) -> tuple[int, int] | None:
    """The rank of a process on its host and the number of processes there if ``source`` is a launcher that has both."""
    launcher = next((row for row in (*LAUNCHERS, *SERVICES, *INTERFACES) if row.name == source), None)
    if launcher is None or not (environment.get(launcher.local_rank) and environment.get(launcher.local_size)):
        return None
    variables = Variables(environment, source)
    size = variables.number(launcher.local_size, least=1)
    return variables.number(launcher.local_rank, most=size - 1), size


def _size(variables: Variables, launcher: Launcher) -> int:
    """The number of processes. Raises ClusterError for an elastic job, of which torchrun reads "least:most"."""
    text = variables.get(launcher.size)
    if _ELASTIC in text:
        raise ClusterError(
            f"{launcher.name}: {launcher.size}={shown(text)} declares an elastic job, and a strategy needs a fixed "
            "number of processes; for MultiWorkerMirroredStrategy or ParallelStrategy write "
            f"`{launcher.size}={text.rpartition(_ELASTIC)[2]}`, or start the program with `torchrun train.py`, which "
            f"numbers the processes of each round; {ALONE}"
        )
    return variables.number(launcher.size, least=1)


def _is_on_one_host(variables: Variables, launcher: Launcher, size: int) -> bool:
    """Whether all processes of a job are on this host; False where no variable says so."""
    return variables.count(launcher.local_size) == size or variables.count(launcher.hosts) == 1


def _job(variables: Variables, launcher: Launcher) -> str:
    """What distinguishes this job from all others by its variables; empty if they do not."""
    values = [f"{name}={variables.get(name)}" for name in launcher.job if variables.get(name)]
    return " ".join(values)


def _chief(variables: Variables, launcher: Launcher, place: tuple[int, int], job: str, *, local: bool) -> str:
    """The address of the chief's store."""
    index, size = place
    where = f"{launcher.rank}={index} and {launcher.size}={size} make this process {index} of {size}"
    name = _first(variables, ("MASTER_ADDR",) if local else launcher.chief)
    if not name and not local:
        hosts = "on several hosts" if launcher.local_size or launcher.hosts else "perhaps on several hosts"
        raise _refusal(launcher, f"{where} {hosts}, and no variable names the host of process 0")
    # Only where all processes are on this host: no other address is known, and none is needed.
    host = _first_host(variables.get(name)) if name else _LOOPBACK
    port = _first(variables, launcher.port)
    if not port and not job:
        raise _refusal(launcher, f"{where}, and no variable gives the port of process 0")
    return variables.address(host, variables.port(port) if port else job_port(job), name or "MASTER_ADDR")


def _first(variables: Variables, names: tuple[str, ...]) -> str:
    return next((name for name in names if variables.get(name)), "")


def _first_host(text: str) -> str:
    """The first host of "10.0.0.4", "10.0.0.4:6000", and of a list with commas or one host a line."""
    first = text.replace(",", " ").split()[0]
    return first.partition(":")[0] if first.count(":") == 1 else first


def _refusal(launcher: Launcher, what: str, line: str = "") -> ClusterError:
    return ClusterError(
        f"{launcher.name}: {what}; for MultiWorkerMirroredStrategy or ParallelStrategy write "
        f"`{line or launcher.line}`, with hosta for the host of process 0; {ALONE}"
    )
