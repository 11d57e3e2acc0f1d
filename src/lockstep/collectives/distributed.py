"""The workers of a job joined by ``torch.distributed``: gloo in host memory, NCCL between GPUs.

    exchange            a record of every worker to all: same call? same data? -> numbers, wishes
    sum, gather, ...    an exchange first, then the tensors
    start_all_reduce           tensors alone, while the program goes on: the gradient buckets

One exchange costs a message to every worker and back. What is summed comes out with the same bits on all workers, and
in every run of the same layout: the ring in which gloo adds does not depend on who comes first.
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

MOST_NUMBERS = 16
TEXT_BYTES = 336
_LAYOUT = struct.Struct(f"<QQQIII{MOST_NUMBERS}d{TEXT_BYTES}s")
RECORD_BYTES = _LAYOUT.size
_BETWEEN = "\n"


@dataclass(frozen=True, kw_only=True)
class CallRecord:
    """One worker's side of an exchange.

    Args:
        name: the call; equal on all workers.
        where: the line of the program that made it, for messages.
        sequence: how many exchanges there were before.
        numbers: values for all.
        length: of the payload that follows, in bytes.
        wishes: bits of ``ControlFlags``.
        digest: of what must be equal on all workers, 64 bits.
    """

    name: str
    where: str = ""
    sequence: int = 0
    numbers: tuple[float, ...] = ()
    length: int = 0
    wishes: int = 0
    digest: int = 0

    def pack(self) -> bytes:
        """The record as ``RECORD_BYTES`` bytes; a long text loses its end, and a long name that of ``where`` too.

        Raises:
            ConfigError: more than ``MOST_NUMBERS`` numbers.
        """
        if len(self.numbers) > MOST_NUMBERS:
            raise ConfigError(f"an exchange carries at most {MOST_NUMBERS} numbers, got {len(self.numbers)}")
        text = f"{self.name}{_BETWEEN}{self.where}".encode()[:TEXT_BYTES]
        numbers = (*self.numbers, *[0.0] * (MOST_NUMBERS - len(self.numbers)))
        return _LAYOUT.pack(self.sequence, self.digest, self.length, self.wishes, len(self.numbers), 0, *numbers, text)

    @classmethod
    def unpack(cls, data: bytes) -> CallRecord:
        """The record that was packed."""
        sequence, digest, length, wishes, count, _, *numbers, text = _LAYOUT.unpack(data)
        name, _, where = text.rstrip(b"\0").decode(errors="replace").partition(_BETWEEN)
        return cls(
            name=name,
            where=where,
            sequence=sequence,
            numbers=tuple(numbers[:count]),
            length=length,
            wishes=wishes,
            digest=digest,
        )


def check_same_call(records: Sequence[CallRecord], workers: Sequence[str]) -> None:
    """Checks that all workers came to the same call, with the same data behind them.

    Args:
        records: one per worker, in worker order.
        workers: how they are called in messages.

    Raises:
        CollectiveError: they did not; it says which worker is where.
    """
    calls = {(record.name, record.sequence, len(record.numbers)) for record in records}
    if len(calls) > 1:
        places = "; ".join(f"{worker} is at {_place(record)}" for worker, record in zip(workers, records, strict=True))
        raise CollectiveError(
            f"the workers did not meet at the same call: {places}. Every worker must run the same program on data of "
            "the same length, and none may leave out a call that others make"
        )
    odd = _odd_one([record.digest for record in records])
    if odd is not None:
        reference = 0 if odd else 1
        raise CollectiveError(
            f"{workers[odd]} was handed other data, or has other weights, optimizer settings or frozen parameters, "
            f"than {workers[reference]} before {_place(records[odd])}; give every worker the same data in the same "
            'order (seed what shuffles it), or distribute it with shard="file" or "off" where each worker has its '
            "own, and change weights and settings on every worker alike"
        )


def _place(record: CallRecord) -> str:
    where = f" ({record.where})" if record.where else ""
    return f"{record.name!r}{where}, its exchange {record.sequence}"


def _odd_one(values: Sequence[int]) -> int | None:
    """The first of the values that differs from the most frequent one; from the first one where none is."""
    if len(set(values)) == 1:
        return None
    usual = max(values, key=lambda value: (values.count(value), value == values[0]))
    return next(index for index, value in enumerate(values) if value != usual)


_CHUNK_BYTES = 25 * 2**20
_DIGEST_BITS = 2**64 - 1
_DIGEST_FACTOR = 0x100000001B3


class DistributedCommunicator(Communicator):
    """This worker among the others. Calls are serialised by the caller: one at a time, in program order.

    Args:
        membership: the job, which all workers have joined.
        replicas: how many local replicas each worker runs, in worker order.
        nccl: whether sums of tensors on GPUs go through NCCL.
        timeout_s: how many seconds a worker waits in a call for one that is alive and does not come.
        members: the numbers of the workers that this is about, ascending, where not all; this worker is among them.
        team: what they are called; no worker is in two teams of one name.
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
    ) -> None:
        everyone = range(membership.spec.num_workers)
        self._members = tuple(everyone if members is None else members)
        names = [membership.names[member] for member in self._members]
        super().__init__(self._members.index(membership.spec.index), replicas, names)
        self._owns_membership = members is None
        # The team's first worker tells it from others of the same name.
        self._prefix = f"{team} {self._members[0]}/" if team else ""
        self.membership = membership
        self._nccl = nccl
        self._timeout_s = timeout_s
        self._groups: dict[str, ProcessGroup] = {}
        self._control = self._group("control")
        self._sequence = 0
        self._digest = 0
        self._one_call = threading.Lock()

    def all_gather_numbers(self, name: str, numbers: Sequence[float] = ()) -> list[tuple[float, ...]]:
        with self._one_call:
            return [record.numbers for record in self._exchange(name, numbers)]

    def all_gather_bytes(self, name: str, payload: bytes) -> list[bytes]:
        with self._one_call:
            lengths = [record.length for record in self._exchange(name, length=len(payload))]
            room = torch.zeros(max(*lengths, 1), dtype=torch.uint8)
            if payload:
                room[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            gathered = self._gather(room, name)
        return [bytes(each[:length].numpy().tobytes()) for each, length in zip(gathered, lengths, strict=True)]

    def broadcast_bytes(self, name: str, payload: bytes) -> bytes:
        return self.all_gather_bytes(name, payload if self.is_chief else b"")[0]

    def all_reduce(self, name: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with self._one_call:
            self._exchange(f"{name} of {described(tensors)}")
            return [self._sum(tensor, name) for tensor in tensors]

    def all_gather(self, name: str, tensor: torch.Tensor, axis: int) -> list[torch.Tensor]:
        axis %= tensor.ndim
        rest = [str(length) for dim, length in enumerate(tensor.shape) if dim != axis]
        with self._one_call:
            met = self._exchange(f"{name} of {tensor.dtype} ({', '.join(rest)}) and axis {axis}", (tensor.shape[axis],))
            lengths = [int(record.numbers[0]) for record in met]
            flat = as_bytes(tensor)
            longest = flat.numel() // max(1, tensor.shape[axis]) * max(lengths) if flat.numel() else None
            room = torch.zeros(self._longest(flat, longest, name), dtype=torch.uint8)
            room[: flat.numel()] = flat
            gathered = self._gather(room, name)
        shapes = [(*tensor.shape[:axis], length, *tensor.shape[axis + 1 :]) for length in lengths]
        return [
            from_bytes(each, tensor.dtype, shape).to(tensor.device)
            for each, shape in zip(gathered, shapes, strict=True)
        ]

    def broadcast(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        with self._one_call, torch.no_grad():
            self._exchange(f"{name} of {described(tensors)}")
            for chunk in chunks(tensors, _CHUNK_BYTES):
                flat = torch.cat([as_bytes(tensor) for tensor in chunk])
                self._control.wait(self._control.start_broadcast(flat), name)
                sizes = [tensor.numel() * tensor.element_size() for tensor in chunk]
                for tensor, part in zip(chunk, flat.split(sizes), strict=True):  # type: ignore[no-untyped-call]
                    tensor.copy_(from_bytes(part, tensor.dtype, tuple(tensor.shape)))

    def new_group(self, name: str, device: torch.device) -> ProcessGroup:
        """A group of its own, for sums that run beside everything else. Every worker must ask for it."""
        self.all_gather_numbers(f"stream {name}")
        return self._group(name, self._gpu(device))

    def add_digest(self, digest: int) -> None:
        self._digest = ((self._digest ^ (digest & _DIGEST_BITS)) * _DIGEST_FACTOR + 1) & _DIGEST_BITS

    def set_status(self, text: str) -> None:
        self.membership.set_status(text)

    def close(self) -> None:
        """Ends the connections and, where this is about all workers, tells the others that this one has ended.

        Idempotent.
        """
        for group in self._groups.values():
            group.close()
        self._groups.clear()
        if self._owns_membership:
            self.membership.close()

    def _exchange(self, name: str, numbers: Sequence[float] = (), *, length: int = 0) -> list[CallRecord]:
        self.membership.check()
        wishes = self._wishes
        mine = CallRecord(
            name=name,
            where=call_site(),
            sequence=self._sequence,
            numbers=tuple(map(float, numbers)),
            length=length,
            wishes=int(wishes),
            digest=self._digest,
        )
        self.membership.set_status(f"{name} ({mine.where})" if mine.where else name)
        packed = torch.frombuffer(bytearray(mine.pack()), dtype=torch.uint8)
        gathered = self._gather(packed, name)
        records = [CallRecord.unpack(each.numpy().tobytes()) for each in gathered]
        check_same_call(records, self.names)
        self._sequence += 1
        self._digest = 0
        self._grant(reduce(or_, (ControlFlags(record.wishes) for record in records)), sent=wishes)
        return records

    def _gather(self, tensor: torch.Tensor, name: str) -> list[torch.Tensor]:
        into = [torch.empty_like(tensor) for _ in self.replicas]
        self._control.wait(self._control.start_all_gather(tensor, into), name)
        return into

    def _longest(self, flat: torch.Tensor, longest: int | None, name: str) -> int:
        """The bytes of the longest part; a worker whose part is empty cannot tell from its own, and asks."""
        asked = torch.tensor([flat.numel() if longest is None else longest])
        return max(1, *(int(each) for each in self._gather(asked, name)))

    def _sum(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        gpu = self._gpu(tensor.device)
        group = self._control if gpu is None else self._group("nccl", gpu)
        whole = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        flat = whole.detach().contiguous()
        flat = flat.to("cpu", copy=True) if gpu is None else flat.clone()
        summed = flat.int() if flat.dtype in (torch.int16, torch.bool) else flat
        group.wait(group.start_all_reduce(summed), name)
        back = summed.to(tensor.device, whole.dtype if whole.dtype != torch.bool else None)
        return torch.view_as_complex(back) if tensor.is_complex() else back

    def _gpu(self, device: torch.device) -> torch.device | None:
        """The GPU between which and the others' tensors go by NCCL; None where they go through host memory."""
        return device if self._nccl and device.type == "cuda" else None

    def _group(self, name: str, gpu: torch.device | None = None) -> ProcessGroup:
        if name not in self._groups:
            self._groups[name] = ProcessGroup(
                self.membership, self._prefix + name, gpu=gpu, timeout_s=self._timeout_s, members=self._members
            )
        return self._groups[name]


def described(tensors: Sequence[torch.Tensor]) -> str:
    """What must be equal on all workers, for the name of a call: dtypes and shapes, in short."""
    if len(tensors) == 1:
        return f"{tensors[0].dtype} {tuple(tensors[0].shape)}".replace("torch.", "")
    numbers = sum(tensor.numel() for tensor in tensors)
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
    return f"{len(tensors)} tensors of {numbers} numbers, {', '.join(dtypes)}"


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The values in row-major order as bytes in host memory, [bytes], uint8."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def from_bytes(flat: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor of ``shape`` of the first bytes of ``flat``."""
    numbers = torch.Size(shape).numel()
    return flat[: numbers * dtype.itemsize].clone().view(dtype).reshape(tuple(shape))


def chunks(tensors: Sequence[torch.Tensor], most_bytes: int) -> list[list[torch.Tensor]]:
    """The tensors in order, cut into runs of at most ``most_bytes`` bytes, or of one tensor."""
    runs: list[list[torch.Tensor]] = []
    room = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if not runs or size > room:
            runs.append([])
            room = most_bytes
        runs[-1].append(tensor)
        room -= size
    return runs
