"""The workers as torch's DeviceMesh: its process groups, which are broken when the job ends early.

torch's collectives cannot be interrupted: a worker waits in gloo for a lost one until its time limit. So the groups'
connections are tracked, and shut down when the membership says that the job is over; every wait then ends with an error
at once. Workers with GPUs have NCCL's groups beside these, whose kernels are aborted then.
"""

from __future__ import annotations

import atexit
import itertools
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lockstep._torch_compat import (
    Store,
    backend_of,
    forget_groups,
    register_group,
    unregister_group,
    use_own_dtensor_rng,
)
from lockstep.collectives import process_group
from lockstep.collectives.communicator import Communicator
from lockstep.collectives.distributed import DistributedCommunicator
from lockstep.errors import ClusterError, ConfigError
from lockstep.membership.membership import Membership
from lockstep.parallel.mesh_layout import AXES, MeshLayout

_numbers = itertools.count()
# Of meshes beside a default group that is not theirs: the names of their groups, by device, shape and axis.
_group_names: defaultdict[tuple[str, tuple[int, ...], str], set[str]] = defaultdict(set)


class WorkerMesh:
    """torch's process groups over all workers of a job, and ``mesh``, the DeviceMesh of a layout.

    Every worker must make one. An operation waits ``timeout_s`` for a worker that is alive and does not come. A GPU
    becomes the current one. A default group that the program, or the engine that runs it, has made stays as it is: the
    mesh has groups beside it.
    """

    def __init__(self, membership: Membership, layout: MeshLayout, *, timeout_s: float, device: torch.device) -> None:
        self._membership = membership
        self._timeout = timedelta(seconds=timeout_s)
        self._device = device
        self._connections: list[process_group.GroupConnections] = []
        self._backends: list[Any] = []
        self._on_gpus: list[Any] = []
        self._earlier_names: list[str] = []
        self._broken_off = False
        # Ray Train and Accelerate make one (docs/how-to/ray.md), and end it themselves.
        self._has_default_group = not dist.is_initialized()
        # A new name, since torch keeps what makes the groups of a backend under it and cannot take it back.
        self._name = f"lockstep_{next(_numbers)}"
        config = backends_for(device.type, self._name, nccl=dist.is_nccl_available())
        self._make_current()
        store = membership.store("mesh")
        self.mesh: DeviceMesh = membership.run_with_watchdog(
            lambda: self._make(store, layout, config), "the making of the mesh"
        )
        membership.subscribe(lambda _: self.break_off())
        # Registered after the membership, so called before it ends: gloo's threads would otherwise wait for workers
        # that are gone, and may abort the interpreter at its end.
        atexit.register(self.close)

    def explain(self, error: RuntimeError, doing: str) -> ClusterError | None:
        """The error to raise in place of one that a broken connection raised; None for any other."""
        # gloo raises plain RuntimeErrors, whose texts begin with the path of gloo's source that raised them.
        if any(isinstance(cause, dist.DistError) or "gloo/" in str(cause) for cause in _causes(error)):
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
        """Ends the groups, and every wait in them. Their threads and sockets end with the last holder. Idempotent."""
        atexit.unregister(self.close)
        backends, self._backends = self._backends, []
        for connections in self._connections:
            # A group that ends waits for its operations in flight, whose other side may never come.
            connections.shut_down()
        if backends and dist.is_initialized():
            if not self._on_gpus:
                self._destroy()
            # Groups that were aborted are left to the end of the process (tests/collectives/test_nccl.py).
            elif not self._broken_off:
                process_group.ends_in_time(self._destroy)
            # Caches of DTensor hold the meshes that they have seen, and those their groups, with threads and sockets
            # (tests/strategies/test_parallel.py: test_a_closed_strategy_leaves_no_thread).
            forget_groups(self.mesh)
        for backend in backends:
            process_group.release(backend)
        for connections in self._connections:
            connections.forget()

    def _make(self, store: Store, layout: MeshLayout, config: str) -> DeviceMesh:
        self._make_current()
        # Registered for the life of the process: a strong reference would keep groups, threads and sockets as long.
        dist.Backend.register_backend(self._name, partial(_make_group_of, ref(self)), devices=["cpu"])
        rank, size = self._membership.spec.index, self._membership.spec.num_workers
        if self._has_default_group:
            dist.init_process_group(config, store=store, rank=rank, world_size=size, timeout=self._timeout)
            mesh = DeviceMesh(self._device.type, torch.arange(size).reshape(layout.shape), mesh_dim_names=AXES)
        else:
            mesh = init_device_mesh(
                self._device.type,
                layout.shape,
                mesh_dim_names=AXES,
                backend_override=dict.fromkeys(AXES, config),
            )
            self._answer_to_earlier_names(mesh)
        if self._device.type == "cuda":
            self._connect(mesh)
        return mesh

    def _answer_to_earlier_names(self, mesh: DeviceMesh) -> None:
        """Has the groups found by the names of those of closed meshes that are equal to this one, but for the names.

        DTensor's caches hold these, and torch gives the groups of each mesh new names, unless the default group ends
        with them (test_the_group_says_who_this_is_and_where_the_others_are trains twice).
        """
        for axis in AXES:
            group = mesh.get_group(axis)
            names = _group_names[self._device.type, tuple(mesh.shape), axis]
            for name in sorted(names - {group.group_name}):
                register_group(name, group)
                self._earlier_names.append(name)
            names.add(group.group_name)

    def _destroy(self) -> None:
        """Ends the groups that were made here."""
        while self._earlier_names:
            unregister_group(self._earlier_names.pop())
        if self._has_default_group:
            dist.destroy_process_group()
            return
        for group in self.mesh.get_all_groups():
            dist.destroy_process_group(group)

    def _make_current(self) -> None:
        """Sets the calling thread's GPU: DeviceMesh goes by LOCAL_RANK, and "cuda" is the first GPU by default."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def _connect(self, mesh: DeviceMesh) -> None:
        """Connects the members of all groups, axis after axis, before a model depends on it."""
        # By default torch gives all workers the chief's random state at the first random operator on a DTensor: stages
        # and replicas would draw alike, and workers without such an operator would be waited for.
        use_own_dtensor_rng(mesh)
        for axis, size in zip(AXES, mesh.shape, strict=True):
            if size > 1:
                # With our own timeout: torch gives each axis ten minutes.
                group = backend_of(mesh.get_group(axis), self._device, self._timeout + process_group.EXTRA_TIMEOUT)
                group.eager_connect_single_device(self._device)
                self._on_gpus.append(group)

    def make_group(self, store: Store, rank: int, size: int) -> Any:
        """A gloo group of the mesh. Called by torch."""
        # With our own timeout: torch gives each axis half an hour.
        group, connections = process_group.connect_gloo(self._membership, store, rank, size, timeout=self._timeout)
        self._connections.append(connections)
        process_group.keep_alive(group)
        self._backends.append(group)
        return group


def _make_group_of(mesh: ReferenceType[WorkerMesh], store: Store, rank: int, size: int, _: timedelta) -> Any:
    worker_mesh = mesh()
    assert worker_mesh is not None  # it is what has torch make groups
    return worker_mesh.make_group(store, rank, size)


def make_mesh(
    workers: Communicator, layout: MeshLayout, *, timeout_s: float, device: torch.device
) -> WorkerMesh | None:
    """The mesh of a job's workers; None where there is one. Every worker must call it."""
    if not isinstance(workers, DistributedCommunicator):
        return None
    return WorkerMesh(workers.membership, layout, timeout_s=timeout_s, device=device)


def backends_for(kind: str, host: str, *, nccl: bool) -> str:
    """Torch's name for the backends: ``host``, our gloo, for the host's tensors, and NCCL for those of GPUs."""
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
