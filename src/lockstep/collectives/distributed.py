"""The communicator of a job over ``torch.distributed``: gloo in host memory, NCCL between GPUs.

Before each collective every worker sends a record, so that calls or data that differ are an error and not a hang. Sums
have the same bits on all workers; over gloo, in the order of ``sum_order``, on every layout.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

import torch

from lockstep.collectives.communicator import Communicator, ControlFlags, call_site
from lockstep.collectives.process_group import ProcessGroup
from lockstep.errors import CollectiveError, ConfigError
from lockstep.membership.membership import Membership

MOST_NUMBERS = 64
TEXT_BYTES = 336
_LAYOUT = struct.Struct(f"<QQQIII{MOST_NUMBERS}d{TEXT_BYTES}s")
RECORD_BYTES = _LAYOUT.size
_SEPARATOR = "\n"
# A broadcast copies tensors into one flat message; at most so many bytes of them twice in memory.
_CHUNK_BYTES = 25 * 2**20
_DIGEST_BITS = 2**64 - 1
# The prime of the FNV-1a hash of 64 bits. Digests are multiplied, so their order counts.
_DIGEST_FACTOR = 0x100000001B3


@dataclass(frozen=True, kw_only=True)
class CallRecord:
    """A record of fixed size that every worker sends before each collective, to find calls or data that differ.

    Name, sequence and digest must be equal on all workers; draws of random numbers should not.
    """

    name: str
    where: str = ""  # the line of the program that made the call
    sequence: int = 0  # how many collectives came before
    numbers: tuple[float, ...] = ()
    length: int = 0  # bytes of the payload that follows
    flags: int = 0
    digest: int = 0
    draws: int = 0  # 32 bits; 0 is none

    def pack(self) -> bytes:
        """The record as ``RECORD_BYTES`` bytes. A text that is too long is cut off."""
        if len(self.numbers) > MOST_NUMBERS:
            raise ConfigError(f"a collective carries at most {MOST_NUMBERS} numbers, got {len(self.numbers)}")
        # The name is first, so that only the place is lost where the text is too long: names are compared.
        text = f"{self.name}{_SEPARATOR}{self.where}".encode()[:TEXT_BYTES]
        numbers = (*self.numbers, *[0.0] * (MOST_NUMBERS - len(self.numbers)))
        return _LAYOUT.pack(
            self.sequence, self.digest, self.length, self.flags, len(self.numbers), self.draws, *numbers, text
        )

    @classmethod
    def unpack(cls, data: bytes) -> CallRecord:
        sequence, digest, length, flags, count, draws, *numbers, text = _LAYOUT.unpack(data)
        name, _, where = text.rstrip(b"\0").decode(errors="replace").partition(_SEPARATOR)
        return cls(
            name=name, where=where, sequence=sequence, numbers=tuple(numbers[:count]), length=length, flags=flags,
            digest=digest, draws=draws,
        )  # fmt: skip


def check_same_call(records: Sequence[CallRecord], workers: Sequence[str]) -> None:
    """Raises a CollectiveError that says which worker is where, unless all are at the same call with the same data."""
    calls = {(record.name, record.sequence, len(record.numbers)) for record in records}
    if len(calls) > 1:
        places = "; ".join(f"{worker} is at {_place(record)}" for worker, record in zip(workers, records, strict=True))
        raise CollectiveError(
            f"the workers did not meet at the same call: {places}. Every worker must run the same program on data of "
            "the same length"
        )
    odd = _odd_one([record.digest for record in records])
    if odd is not None:
        reference = 0 if odd else 1
        raise CollectiveError(
            f"{workers[odd]} was handed other data, or has other weights, optimizer settings or frozen parameters, "
            f"than {workers[reference]} before {_place(records[odd])}; give every worker the same data in the same "
            'order (or distribute it with shard="off"), and change weights and settings on all workers alike'
        )


class DistributedCommunicator(Communicator):
    """The communicator of a job that all workers have joined, or of some of them. Calls are made one at a time.

    Args:
        nccl: whether tensors on GPUs are summed with NCCL.
        timeout_s: how long a collective waits for a worker that is alive and does not come.
        members: the ranks of the workers that take part, ascending; None for all.
        team: a name for these members; no worker is in two groups of one name.
    """

    def __init__(
        self,
        membership: Membership,
        replicas: Sequence[int],
        *,
        nccl: bool = False,
        timeout_s: float = 1800.0,
        members: Sequence[int] | None = None,
        team: str = "",
        any_layout: bool = False,
    ) -> None:
        self._members = tuple(range(membership.spec.num_workers) if members is None else members)
        names = [membership.names[member] for member in self._members]
        super().__init__(self._members.index(membership.spec.index), replicas, names, any_layout=any_layout)
        self._owns_membership = members is None
        # Groups of one name, such as the replicas of a mesh, have different first members.
        self._prefix = f"{team} {self._members[0]}/" if team else ""
        self.membership = membership
        self._nccl = nccl
        self._timeout_s = timeout_s
        self._groups: dict[str, ProcessGroup] = {}
        self._control = self._group("control")
        self._sequence = 0
        self._digest = 0
        # A record and its payload are two messages, between which no other thread's call may come.
        self._one_call = threading.Lock()

    def all_gather_numbers(self, name: str, numbers: Sequence[float] = ()) -> list[tuple[float, ...]]:
        with self._one_call:
            return [record.numbers for record in self._exchange_records(name, numbers)]

    def all_gather_bytes(self, name: str, payload: bytes) -> list[bytes]:
        with self._one_call:
            records = self._exchange_records(name, length=len(payload))
            flat = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0)
            gathered = self._gather_padded(flat, records, name)
        return [part[: record.length].numpy().tobytes() for part, record in zip(gathered, records, strict=True)]

    def all_reduce(self, name: str, parts: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        with self._one_call:
            self._exchange_records(f"{name} of {described(parts[0])}")
            return [self._sum(tensors, name) for tensors in zip(*parts, strict=True)]

    def all_gather(self, name: str, tensor: torch.Tensor, axis: int) -> list[torch.Tensor]:
        axis %= tensor.ndim
        rest = [str(length) for dim, length in enumerate(tensor.shape) if dim != axis]
        call = f"{name} of {tensor.dtype} ({', '.join(rest)}) and axis {axis}"
        flat = as_bytes(tensor)
        with self._one_call:
            records = self._exchange_records(call, (tensor.shape[axis],), length=flat.numel())
            gathered = self._gather_padded(flat, records, name)
        shapes = [(*tensor.shape[:axis], int(record.numbers[0]), *tensor.shape[axis + 1 :]) for record in records]
        return [
            from_bytes(part, tensor.dtype, shape).to(tensor.device)
            for part, shape in zip(gathered, shapes, strict=True)
        ]

    def broadcast(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        with self._one_call, torch.no_grad():
            self._exchange_records(f"{name} of {described(tensors)}")
            for chunk in chunks(tensors, _CHUNK_BYTES):
                flat = torch.cat([as_bytes(tensor) for tensor in chunk])
                self._control.wait(self._control.start_broadcast(flat), name)
                sizes = [tensor.numel() * tensor.element_size() for tensor in chunk]
                for tensor, part in zip(chunk, flat.split(sizes), strict=True):  # type: ignore[no-untyped-call]
                    tensor.copy_(from_bytes(part, tensor.dtype, tuple(tensor.shape)))
                # Freed before the next flat copy is made.
                del flat, part

    def new_group(self, name: str, device: torch.device) -> ProcessGroup:
        """A process group for sums that run beside all other collectives. A collective."""
        self.all_gather_numbers(f"stream {name}")
        return self._group(name, self._nccl_device(device))

    def add_digest(self, digest: int) -> None:
        self._digest = ((self._digest ^ (digest & _DIGEST_BITS)) * _DIGEST_FACTOR + 1) & _DIGEST_BITS

    def set_status(self, text: str) -> None:
        self.membership.set_status(text)

    def close(self) -> None:
        for group in self._groups.values():
            group.close()
        self._groups.clear()
        if self._owns_membership:
            self.membership.close()

    def _exchange_records(self, name: str, numbers: Sequence[float] = (), *, length: int = 0) -> list[CallRecord]:
        self.membership.check()
        flags, (draws, when_same) = self._own_flags, self._draws
        call = CallRecord(
            name=name, where=call_site(), sequence=self._sequence, numbers=tuple(map(float, numbers)), length=length,
            flags=int(flags), digest=self._digest, draws=draws,
        )  # fmt: skip
        self.set_status(f"{name} ({call.where})" if call.where else name)
        packed = torch.frombuffer(bytearray(call.pack()), dtype=torch.uint8)
        records = [CallRecord.unpack(reply.numpy().tobytes()) for reply in self._gather(packed, name)]
        check_same_call(records, self.names)
        # Counted and cleared only now: after a disagreement the messages of all workers still have them.
        self._sequence += 1
        self._digest, self._draws = 0, (0, lambda: None)
        self._receive_flags(reduce(or_, (ControlFlags(record.flags) for record in records)), requests=flags)
        if draws and sum(record.draws == draws for record in records) > 1:
            when_same()
        return records

    def _gather_padded(self, flat: torch.Tensor, records: Sequence[CallRecord], name: str) -> list[torch.Tensor]:
        """Gathers uint8 tensors of the lengths in the records, each padded to the longest."""
        # gloo's all-gather takes tensors of one length on all workers.
        padded = torch.zeros(max(1, *(record.length for record in records)), dtype=torch.uint8)
        padded[: flat.numel()] = flat
        return self._gather(padded, name)

    def _gather(self, tensor: torch.Tensor, name: str) -> list[torch.Tensor]:
        into = [torch.empty_like(tensor) for _ in self.replicas]
        self._control.wait(self._control.start_all_gather(tensor, into), name)
        return into

    def _sum(self, parts: Sequence[torch.Tensor], name: str) -> torch.Tensor:
        first = parts[0]
        if not first.numel():
            return first.clone()
        gpu = self._nccl_device(first.device)
        group = self._control if gpu is None else self._group("nccl", gpu)
        home = first.device if gpu is not None else torch.device("cpu")
        # Copies, since a sum writes to its parts.
        flats = [part.detach().to(home, copy=True).reshape(-1) for part in parts]
        # NCCL has no complex numbers; sums of them are sums of their real and imaginary parts.
        if first.is_complex() and gpu is not None:
            group.sum([torch.view_as_real(flat).view(-1) for flat in flats], name)
        else:
            group.sum(flats, name)
        return flats[0].view(first.shape).to(first.device)

    def _nccl_device(self, device: torch.device) -> torch.device | None:
        """``device`` if NCCL sums its tensors; None if they are copied to host memory."""
        return device if self._nccl and device.type == "cuda" else None

    def _group(self, name: str, gpu: torch.device | None = None) -> ProcessGroup:
        if name not in self._groups:
            self._groups[name] = ProcessGroup(
                self.membership,
                self._prefix + name,
                gpu=gpu,
                timeout_s=self._timeout_s,
                members=self._members,
                nodes=self.nodes,
            )
        return self._groups[name]


def described(tensors: Sequence[torch.Tensor]) -> str:
    """The dtypes and shapes of tensors, in short: as part of a call's name, so that all workers must agree on them."""
    if len(tensors) == 1:
        return f"{tensors[0].dtype} {tuple(tensors[0].shape)}".replace("torch.", "")
    numbers = sum(tensor.numel() for tensor in tensors)
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
    return f"{len(tensors)} tensors of {numbers} numbers, {', '.join(dtypes)}"


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor in row-major order, as a uint8 tensor [bytes] in host memory."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def from_bytes(flat: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor of ``shape`` made of the first bytes of ``flat``."""
    numbers = torch.Size(shape).numel()
    return flat[: numbers * dtype.itemsize].clone().view(dtype).reshape(tuple(shape))


def chunks(tensors: Sequence[torch.Tensor], max_bytes: int) -> list[list[torch.Tensor]]:
    """Divides tensors, in order, into runs of at most ``max_bytes`` bytes; a larger tensor is a run by itself."""
    runs: list[list[torch.Tensor]] = []
    room = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if not runs or size > room:
            runs.append([])
            room = max_bytes
        runs[-1].append(tensor)
        room -= size
    return runs


def _place(record: CallRecord) -> str:
    where = f" ({record.where})" if record.where else ""
    return f"{record.name!r}{where}, its collective {record.sequence}"


def _odd_one(values: Sequence[int]) -> int | None:
    """The index of the first value that differs from the most frequent one; None if all are equal."""
    # Of two workers neither value is more frequent: the chief's counts as the usual one.
    usual = max(values, key=lambda value: (values.count(value), value == values[0]))
    return next((index for index, value in enumerate(values) if value != usual), None)
