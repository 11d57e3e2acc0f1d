"""The workers as torch's DeviceMesh: its process groups, made for a grid, and broken when the job ends before its time.

torch's collectives cannot be interrupted: a worker that waits for a lost one waits in gloo for its time limit. So the
groups' connections are kept in sight, and shut down when the membership says that the job is over; every wait in them
then ends with an error at once, and its cause is the membership's. Workers with GPUs have NCCL's groups beside these,
whose kernels are aborted then.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lockstep._torch_compat import Store, backend_of, forget_groups, gloo_group, use_own_dtensor_rng
from lockstep.collectives import process_group
from lockstep.collectives.communicator import Communicator
from lockstep.collectives.distributed import DistributedCommunicator
from lockstep.collectives.process_group import SHARE_UNANSWERED, GroupConnections
from lockstep.errors import ClusterError, ConfigError, UsageError
from lockstep.membership.membership import Membership
from lockstep.parallel.mesh_layout import AXES, MeshLayout

_numbers = itertools.count()


class WorkerMesh:
    """torch's process groups over all workers of a job, and the DeviceMesh of a grid. Every worker must make one.

    Args:
        membership: the job.
        grid: the degrees.
        timeout_s: how many seconds an operation waits for a worker that is alive and does not come.
        device: of this worker's part of the model; a GPU becomes the current one of this process.

    Attributes:
        mesh: with the axes "pipeline", "data" and "tensor".

    Raises:
        UsageError: the program has initialised torch's process groups already.
        ConfigError: a GPU, and a torch without NCCL.
        ClusterError: a worker was lost meanwhile.
    """

    def __init__(self, membership: Membership, grid: MeshLayout, *, timeout_s: float, device: torch.device) -> None:
        if dist.is_initialized():
            raise UsageError(
                "torch's process group is initialised already, and ParallelStrategy makes it over the workers of its "
                "own job; leave out torch.distributed.init_process_group"
            )
        self._membership = membership
        self._timeout = timedelta(seconds=timeout_s)
        self._device = device
        self._connections: list[GroupConnections] = []
        self._backends: list[Any] = []
        self._on_gpus: list[Any] = []
        self._broken_off = False
        # Of its own: torch keeps what makes the groups of a backend under this name, and has no way to take it back.
        self._name = f"lockstep_{next(_numbers)}"
        config = backends_for(device.type, self._name, nccl=dist.is_nccl_available())
        self._make_current()
        store = membership.store("mesh")
        self.mesh: DeviceMesh = membership.run_with_watchdog(
            lambda: self._make(store, grid, config), "the making of the mesh"
        )
        membership.subscribe(lambda _: self.break_off())
        atexit.register(self.close)  # before the membership's own end; else gloo's threads may abort the interpreter's

    def explain(self, error: RuntimeError, doing: str) -> ClusterError | None:
        """The error to raise in place of one that a broken connection raised; None for any other."""
        if any(isinstance(each, dist.DistError) or "gloo/" in str(each) for each in _causes(error)):
            return self._membership.explain_broken(error, doing)
        return None

    def break_off(self) -> None:
        """Ends every wait in the groups, now and from now on, with an error. From any thread."""
        self._broken_off = True
        for connections in self._connections:
            connections.shut_down()
        if self._on_gpus:
            process_group.abort(self._on_gpus)

    def close(self) -> None:
        """Ends the groups: what waits in them is told so now. Idempotent.

        Their threads and sockets end too, with the last part of a model that holds a group.
        """
        atexit.unregister(self.close)
        backends, self._backends = self._backends, []
        for connections in self._connections:
            connections.shut_down()  # else the end of a group would wait for an operation that is under way
        if backends and dist.is_initialized():
            self._destroy()
            forget_groups(self.mesh)
        for backend in backends:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(backend))
        for connections in self._connections:
            connections.forget()

    def _destroy(self) -> None:
        if not self._on_gpus:
            dist.destroy_process_group()
        elif not self._broken_off:  # else the end of the process does it
            process_group.ends_in_time(dist.destroy_process_group)

    def _make(self, store: Store, grid: MeshLayout, config: str) -> DeviceMesh:
        self._make_current()
        # For the life of the process, so it must not keep this mesh as long, and with it groups, threads and sockets.
        dist.Backend.register_backend(self._name, partial(_make_group_of, ref(self)), devices=["cpu"])
        rank, size = self._membership.spec.index, self._membership.spec.num_workers
        dist.init_process_group(config, store=store, rank=rank, world_size=size, timeout=self._timeout)
        mesh = DeviceMesh(self._device.type, torch.arange(size).reshape(grid.shape), mesh_dim_names=AXES)
        if self._device.type == "cuda":
            self._connect(mesh)
        return mesh

    def _make_current(self) -> None:
        """For the calling thread, whose tensors on "cuda" are else on the first GPU; DeviceMesh goes by LOCAL_RANK."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def _connect(self, mesh: DeviceMesh) -> None:
        """Brings the members of all groups together, axis after axis, before a model depends on it."""
        # By itself torch gives all workers the chief's numbers when the first DTensor is drawn for, wherever that is:
        # stages and replicas would draw alike, and those that draw for none would be waited for.
        use_own_dtensor_rng(mesh)
        for axis, size in zip(AXES, mesh.shape, strict=True):
            if size > 1:
                # With our own timeout: torch gives each axis ten minutes.
                group = backend_of(mesh.get_group(axis), self._device, self._timeout + process_group.EXTRA_TIMEOUT)
                group.eager_connect_single_device(self._device)
                self._on_gpus.append(group)

    def make_group(self, store: Store, rank: int, size: int) -> Any:
        """One of its groups over gloo. Called by torch."""
        # With our own timeout: torch gives each axis half an hour.
        made = gloo_group(store, rank, size, address=self._membership.address, timeout=self._timeout)
        seconds = self._membership.lost_after_s * SHARE_UNANSWERED
        self._connections.append(GroupConnections(store, rank, size, seconds))
        # Its destructor would wait for an operation that is still under way; nothing deletes it before ``close``.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
        self._backends.append(made)
        return made


def _make_group_of(mesh: ReferenceType[WorkerMesh], store: Store, rank: int, size: int, _: timedelta) -> Any:
    held = mesh()
    assert held is not None  # it is what has torch make groups
    return held.make_group(store, rank, size)


def make_mesh(workers: Communicator, grid: MeshLayout, *, timeout_s: float, device: torch.device) -> WorkerMesh | None:
    """The mesh of a job's workers; None where there is one. Every worker must call it."""
    if not isinstance(workers, DistributedCommunicator):
        return None
    return WorkerMesh(workers.membership, grid, timeout_s=timeout_s, device=device)


def backends_for(kind: str, host: str, *, nccl: bool) -> str:
    """What moves tensors, as torch writes it: gloo those of the host, NCCL those of GPUs. Pure.

    Args:
        kind: of this worker's device: "cpu" or "cuda".
        host: the name of the backend that makes our groups of gloo.
        nccl: whether this torch has NCCL.

    Raises:
        ConfigError: a GPU, and it has not.

    Example:
        >>> backends_for("cuda", "lockstep_0", nccl=True)
        'cpu:lockstep_0,cuda:nccl'
    """
    if kind != "cuda":
        return host
    if not nccl:
        raise ConfigError(
            "ParallelStrategy divides models among GPUs over NCCL, which this torch was built without; install one "
            'that has it, or choose device="cpu:0" on every worker'
        )
    return f"cpu:{host},cuda:nccl"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it was raised from: torch's pipelining raises its own from any other."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
