"""Follows the rows of a replica's shard through its step, and finds losses that are no sum over rows.

Replicas compute with their shards, so N replicas equal one device only if no row's part of the loss depends on another
row. The rows of a shard are divided into two groups, A and B. Beside each call of a torch function whose arguments
depend on rows, the function is called four more times, without gradients, on copies of which three have other rows of
the same shard as A, as B, or as both, in the same places and of the same shapes:

    loss(A, B) + loss(A', B') - loss(A', B) - loss(A, B')  is 0 if, and only if, the loss is f(A) + g(B)

Only torch's own functions are called again, on plain tensors, and no code of the user. Random functions draw the same
numbers in all calls; those whose number of draws depends on their arguments are not followed. The result of the step is
not compared with the copies, since a call with gradients may take another kernel; the four copies take the same one, so
that a row's result has the same bits whatever the other rows are.

A tensor that is made out of sight, by NumPy or a collective, is the same constant in all four copies, and a constant
cannot make a sum over rows look like something else. The watch ends for this step where the program reads integers that
depend on rows (a list of lengths, how many rows a mask selects), because it may use them together with rows, which
differ in the copies; and where a call fails on the copies, such as one that needs sorted lengths. Batch norms may take
statistics of a shard: the copies are normalised by the statistics of the shard itself.

Three things are no sum over rows although their values may be. A detached value of all rows may only be added; so the
copies get each other's, and loss / loss.detach(), which is 1 for any rows, is found. Gradients of rows are rows, but
those of a mean are larger the fewer rows there are. A sum over rows that passes a kink (a clamp, an absolute value) may
be on one side in all shards and on the other side in the batch; such calls are noted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType, MappingProxyType, MethodType
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep._torch_compat import (
    DisableTorchFunction,
    functorch_interpreter,
    sample_dirichlet,
    standard_gamma,
    tree_leaves,
)
from lockstep.collectives.communicator import call_site
from lockstep.introspection import is_kind
from lockstep.replicas.context import get_replica_context
from lockstep.replicas.rng.function_mode import ReplicaRng, is_random
from lockstep.replicas.watcher import BACKWARDS, Differentiation, as_sequence
from lockstep.watch.calls_on_copies import CONTAINERS, Call, Followed, items_of, leaves_of
from lockstep.watch.numbers_from_rows import ReadNumbers

SUSPECT = 100
"""Larger relative differences than so many roundings of the least exact dtype get a warning."""
CERTAIN = 4096
"""Larger differences than so many roundings are no rounding."""

MIXING_ADVICE = (
    "where one device has all rows of the batch; compare the rows with those of all replicas, ls.gather_rows(value), "
    'or take means and variances from sums, all_reduce("sum", value.sum(0)). Rows are dimension 0 of what '
    "strategy.run is given; where that is time, as torch's recurrent and attention layers have it without "
    "batch_first=True, give batches [rows, time]"
)
"""What to do about it in a loop of one's own."""

_GRADIENTS = frozenset([torch.autograd.grad, Tensor.grad.__get__])  # type: ignore[union-attr]
_KINKS = frozenset(
    [
        *(
            torch.abs,
            torch.clamp,
            torch.clamp_min,
            torch.clamp_max,
            torch.clip,
            torch.relu,
            torch.maximum,
            torch.minimum,
        ),
        *(
            torch.max,
            torch.min,
            Tensor.abs,
            Tensor.__abs__,
            Tensor.clamp,
            Tensor.clamp_min,
            Tensor.clamp_max,
            Tensor.clip,
        ),
        *(Tensor.relu, Tensor.maximum, Tensor.minimum, Tensor.max, Tensor.min, F.relu, F.hardtanh, F.leaky_relu),
    ]
)
"""Functions that are linear on both sides of a kink, on which the sums of shards and of the batch may differ."""
_SHUFFLES = frozenset([torch.randperm, torch.multinomial, Tensor.multinomial])
_UNFOLLOWED = frozenset([Tensor.requires_grad_, Tensor.retain_grad, Tensor.register_hook])
_READS = frozenset(
    [
        *(Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__int__, Tensor.__float__),
        Tensor.__index__,
    ]
)
_SIZES = frozenset([Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.__len__, Tensor.nelement])  # type: ignore[attr-defined]
_DRAWS_BY_VALUE = frozenset([torch.poisson, torch.binomial, standard_gamma, sample_dirichlet])
"""Random functions that draw more often for some values: from the same state, other rows get other numbers."""
_PLAIN_TENSORS = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
_OF_TORCH = ("torch", "builtins")
_OPERATORS = ("torch._ops", "torch.ops", "torch._library")
"""Where operators are that are called by name, also those of the program: which of them draw is not known here."""
_KEPT = 4096  # entries of an attribute that may have been kept from an earlier step
_SAMPLED = 8  # entries along each dimension in which origins are looked for
_NAMED = 3  # origins that a message names, at most


@dataclass(frozen=True, slots=True)
class Mixing:
    """A loss that is no sum over the rows of its shard.

    Attributes:
        origins: the calls that combined rows first, such as "roll (train.py:12 in step)".
        difference: by how much the loss is off, relative to its terms.
        is_certain: whether no rounding can explain that.
        is_random: whether the step draws a random order of rows, as mixup does.
    """

    origins: tuple[str, ...]
    difference: float
    is_certain: bool
    is_random: bool

    @property
    def is_mean(self) -> bool:
        """Whether only means and sums combined rows, as where a mask leaves the rows of a mean."""
        return all(origin.split()[0] in ("mean", "sum") for origin in self.origins)

    def __str__(self) -> str:
        return ", ".join(self.origins[:_NAMED]) or "an operation on all rows"


RowOutputs = dict[int, set[int]]
"""By the number of a mirrored module's call in a step: which leaves of its outputs have rows."""


@dataclass(frozen=True, slots=True)
class _Result:
    """What a call has given, of what, and where."""

    followed: Followed
    inputs: Sequence[Followed]
    call: str


_watch: ContextVar[RowWatch | None] = ContextVar("lockstep_row_watch", default=None)


def current_row_watch() -> RowWatch | None:
    """The watch of the replica whose step this thread runs; None in most steps."""
    return _watch.get()


@contextmanager
def rows_not_followed() -> Iterator[None]:
    """A block of calls that are no part of the step, such as those of another check."""
    watch = _watch.get()
    if watch is None:
        yield
        return
    with watch.paused():
        yield


class RowWatch:
    """Follows the rows of one replica's shard in one run.

    Args:
        rng: the replica's function mode, through which all calls of torch functions come.
        rows: the number of rows of the shard, at least 2.
        row_outputs: which outputs have rows, of each call of a mirrored module, as found so far.
        through_modules: whether to follow rows through mirrored modules, and to find ``row_outputs``. Otherwise the
            rows of such outputs are exchanged as those of the inputs are.
        module_state: what modules have kept from the step before that depended on all its rows, by name.
        has_read: whether an earlier step has read numbers from rows.
        is_mean: whether a loss is a mean over the rows of the shard.

    Attributes:
        mixings: what was found, one for each loss.
        numbers: the numbers that the step computed with after it had read some from rows; None before the run.
        has_read: whether this or an earlier step has read numbers from rows.
        kinks: calls that bend a sum over rows on its way to a loss, and that the comparison of sums need not show.
        saw_zero, compared: whether a loss has been compared that is 0, and one that is not.
    """

    def __init__(
        self,
        rng: ReplicaRng,
        rows: int,
        *,
        through_modules: bool,
        row_outputs: RowOutputs | None = None,
        module_state: Mapping[str, Tensor] = MappingProxyType({}),
        has_read: bool = False,
        is_mean: Callable[[Any], bool] = lambda _: False,
    ) -> None:
        self.mixings: list[Mixing] = []
        self.kinks: list[str] = []
        self._row_outputs: RowOutputs = {} if row_outputs is None else row_outputs
        self._calls = 0  # of mirrored modules so far, those in others left out
        self.saw_zero = self.compared = False
        self.through_modules = through_modules
        self._rng, self._rows = rng, rows
        self._is_mean = is_mean
        self._followed: dict[int, Followed] = {}
        self._half = _first_group(rows)
        self._orders = _orders(rows, self._half)
        self._modules = 0  # mirrored modules that are running, through which nothing is followed
        self._rounding = torch.finfo(torch.float32).eps
        self._shuffles = False
        self._names_mixed: tuple[str, ...] | None = None
        self._results: list[_Result] = []  # whose origins are looked for if a loss is found
        self.numbers: ReadNumbers | None = None
        self._module_state = module_state
        self.has_read = has_read or bool(module_state)

    @contextmanager
    def watching(self, batch: Sequence[Any], buffers: Sequence[Tensor] = ()) -> Iterator[None]:
        """A block around the step, in the replica, whose mode is looked at by ``call``.

        ``batch`` are the leaves of the replica's shard, and ``buffers`` those of its modules.
        """
        token = _watch.set(self)
        self.numbers = ReadNumbers(self._rows, [*batch, *buffers], self._module_state)
        try:
            self.follow_rows(batch)
            yield
        finally:
            self._followed.clear()
            self._results.clear()
            _watch.reset(token)

    def paused(self) -> AbstractContextManager[None]:
        """A block in which nothing is followed."""
        return self._rng.looked_at_by(())

    def follow_rows(self, leaves: Sequence[Any], *, of_a_mean: bool = False) -> None:
        """Follows tensors whose dimension 0 are the rows of the shard.

        Gradients ``of_a_mean`` are smaller the more rows there are: one copy is as if there were half as many.
        """
        with torch.no_grad(), self._rng.aside(), DisableTorchFunction():  # the program's modes do not see it
            for leaf in leaves:
                # A nested tensor of the strided layout has no shape: reading it raises.
                if type(leaf) is Tensor and _is_plain(leaf) and leaf.ndim and leaf.shape[0] == self._rows:
                    copies = [leaf.detach().index_select(0, order.to(leaf.device)) for order in self._orders]
                    # Now no sum over the groups any more, so that the loss is found: with fewer rows each gradient of a
                    # mean would be larger.
                    if of_a_mean:
                        copies[-1] = copies[-1] * 2
                    self._add(leaf, Followed(ref(leaf), tuple(copies)))

    def state_in(self, module: nn.Module) -> dict[str, Tensor]:
        """The attributes of a module and its parts that depend on rows of both groups, by a name for messages."""
        attributes = {}
        with torch.no_grad(), self._rng.aside(), DisableTorchFunction():
            for part in module.modules():
                for name, value in vars(part).items():
                    followed = self._get(value) if type(value) is Tensor and value.numel() <= _KEPT else None
                    if followed is not None and _depends_on_both([_sample(copy) for copy in followed.copies]):
                        attributes[f"{name!r} of {type(part).__name__}, kept from an earlier step,"] = value
        return attributes

    def check_total(self, total: Any) -> None:
        """Compares a total over rows that no backward pass begins at, as an evaluation's."""
        followed = self._get(total)
        if followed is not None and total.is_floating_point():
            with torch.no_grad(), self._rng.aside():
                self._compare(total, None, followed)

    def check_outputs(self, outputs: Any) -> None:
        """Compares outputs: those of the rows of one group must be the same beside any other rows."""
        with torch.no_grad(), self._rng.aside():
            for leaf in tree_leaves(outputs):
                followed = self._get(leaf) if is_kind(leaf, Tensor) and leaf.ndim else None
                if followed is not None and leaf.shape[0] == self._rows and leaf.is_floating_point():
                    self._compare_rows(followed)

    def _compare_rows(self, followed: Followed) -> None:
        unchanged, a, b, _ = (copy.double() for copy in followed.copies)
        if any(copy.shape != unchanged.shape for copy in (a, b)) or not unchanged.numel():
            return
        self.compared = True
        half = self._half
        off = torch.stack([(unchanged - b)[:half].abs().max(), (unchanged - a)[half:].abs().max()]).max()
        difference = float(off / unchanged.abs().max().clamp(min=1e-30))
        suspect, certain = bounds(self._rounding)
        if difference > suspect:
            self.mixings.append(Mixing(followed.origins, difference, difference > certain, self._shuffles))

    def module_begins(self) -> None:
        """A mirrored module is called."""
        self._modules += 1

    def module_ends(self, outputs: Any) -> None:
        """A mirrored module has returned."""
        self._modules -= 1
        if self._modules:
            return
        call, leaves = self._calls, tree_leaves(outputs)
        self._calls += 1
        if self.through_modules:
            self._row_outputs.setdefault(call, set()).update(
                number for number, leaf in enumerate(leaves) if self._has_rows(leaf)
            )
        else:
            self.follow_rows([leaf for number, leaf in enumerate(leaves) if number in self._row_outputs.get(call, ())])

    def _has_rows(self, leaf: Any) -> bool:
        """Whether dimension 0 of an output are the rows: none changes with the rows of the other group alone."""
        followed = self._get(leaf) if is_kind(leaf, Tensor) and leaf.ndim and leaf.shape[0] == self._rows else None
        if followed is None or any(copy.shape != leaf.shape for copy in followed.copies):
            return False
        unchanged, a, b, _ = followed.copies
        half = self._half
        with torch.no_grad(), self._rng.aside(), DisableTorchFunction():
            rows_alone = torch.equal(unchanged[:half], b[:half]) and torch.equal(unchanged[half:], a[half:])
            return rows_alone and not torch.equal(unchanged, a)

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes a call of a torch function, beside it those on the copies, and returns its result."""
        has_read = self.has_read  # before this call: what it reads itself comes into later ones
        result = self._call(func, args, kwargs)
        if has_read and self.numbers is not None and not self._is_out_of_sight():
            with torch.no_grad(), self._rng.aside(), DisableTorchFunction():
                self.numbers.note(func, args, kwargs, result, in_module=self._modules > 0)
        return result

    def _is_out_of_sight(self) -> bool:
        """Whether a call is of a module that is not followed, or outside the replica's own part.

        Without a context it is a collective's part for all replicas: what it gives is a constant here.
        """
        in_module = self._modules and not self.through_modules
        return bool(in_module) or get_replica_context() is None or functorch_interpreter() is not None

    def _call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._shuffles = self._shuffles or func in _SHUFFLES
        if self._is_out_of_sight():
            return self._rng.unwatched(func, args, kwargs)
        if not self._concerns(args) and not (kwargs and self._concerns(kwargs.values())):
            return self._rng.unwatched(func, args, kwargs)
        leaves = list(leaves_of((args, kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._note_reading(func, args)
        if not _is_torchs(func, leaves):
            return self._rng.unwatched(func, args, kwargs)
        inputs = [followed for leaf in tensors if (followed := self._get(leaf)) is not None]
        if inputs and func in BACKWARDS:
            self._differentiated(func, args, kwargs)
        if inputs and func in _GRADIENTS:
            return self._with_gradients_of_rows(func, args, kwargs)
        if not inputs or func in BACKWARDS or func in _UNFOLLOWED:
            return self._rng.unwatched(func, args, kwargs)
        versions = [_version(leaf) for leaf in tensors]
        with self._redrawing(func, tensors, leaves) as again:
            result = self._rng.unwatched(func, args, kwargs)
            written = [leaf for leaf, old in zip(tensors, versions, strict=True) if _version(leaf) != old]
            if written or any(isinstance(leaf, Tensor) for leaf in leaves_of(result)):
                constants = [leaf for leaf in written if self._get(leaf) is None]
                with torch.no_grad(), self._rng.aside():
                    self._follow(Call(func, args, kwargs, leaves, constants, again), result, inputs)
        return result

    def _note_reading(self, func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Ends the watch for this step where the program reads integers or sizes that are others in the copies."""
        self.has_read = self.has_read or (func in _READS and self._get(args[0]) is not None)
        if (func in _READS and self._tells_rows_apart(args[0])) or (func in _SIZES and self._has_other_sizes(args[0])):
            self._followed.clear()

    def _with_gradients_of_rows(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes a call that gives gradients, and follows those of rows: each depends on its row, as the row does."""
        result = self._rng.unwatched(func, args, kwargs)
        if func is torch.autograd.grad:
            grad = Differentiation.of(func, args, kwargs)
            rows = [gradient for leaf, gradient in zip(grad.inputs or (), result, strict=False) if self._get(leaf)]
            self.follow_rows(rows, of_a_mean=self._is_mean(grad.roots))
        else:
            self.follow_rows([result])
        return result

    def _tells_rows_apart(self, tensor: Any) -> bool:
        """Whether whole numbers that the program reads are others in the copies."""
        followed = self._get(tensor)
        if followed is None or tensor.is_floating_point() or tensor.dtype is torch.bool:
            return False
        first, *rest = followed.copies
        with torch.no_grad(), self._rng.aside():
            return any(first.shape != other.shape or not torch.equal(first, other) for other in rest)

    def _has_other_sizes(self, tensor: Any) -> bool:
        """Whether the program reads a size of what is larger or smaller in the copies."""
        followed = self._get(tensor)
        return followed is not None and any(copy.shape != tensor.shape for copy in followed.copies)

    def _concerns(self, arguments: Iterable[Any]) -> bool:
        """Whether an argument, or an item of one, may depend on rows; most calls are of weights and shapes."""
        return any(
            id(argument) in self._followed or (isinstance(argument, CONTAINERS) and self._concerns(items_of(argument)))
            for argument in arguments
        )

    def _follow(self, call: Call, result: Any, inputs: Sequence[Followed]) -> None:
        """Calls the function on the copies, and follows its results."""
        try:
            with self._rng if is_random(call.func) else nullcontext():
                results, written = call.on_copies(self._get)
        except Exception:  # noqa: BLE001  such as of lengths that must be sorted
            self._followed.clear()  # what was followed so far must not meet a result that is the shard's own
            return
        flat = [list(leaves_of(result_of_copy)) for result_of_copy in results]
        leaves = list(leaves_of(result))
        for target, copies in zip(call.written, zip(*written, strict=True), strict=True):
            self._note(call, target, copies, inputs)
        if any(len(leaves_of_copy) != len(leaves) for leaves_of_copy in flat):
            self._followed.clear()
            return
        for leaf, copies in zip(leaves, zip(*flat, strict=True), strict=True):
            if all(isinstance(value, Tensor) for value in (leaf, *copies)) and self._get(leaf) is None:
                self._note(call, leaf, copies, inputs)

    def _note(self, call: Call, target: Tensor, copies: Sequence[Tensor], inputs: Sequence[Followed]) -> None:
        # Of other shapes where a mask selects. A number of which the program reads ends the watch.
        if any(copy.shape != target.shape for copy in copies) or not _is_plain(target):
            self._add(target, Followed(ref(target), tuple(copies)))
            return
        if _is_constant(target, inputs) and _depends_on_both([_sample(copy) for copy in copies]):
            # Gradients do not pass through it, so it may only be added. The copies get each other's: where it
            # multiplies rows, as in loss / loss.detach(), whose value is 1 for any rows, they no longer cancel.
            copies = tuple(reversed(copies))
        if target.is_floating_point():
            self._rounding = max(self._rounding, torch.finfo(target.dtype).eps)
        is_number = target.numel() == 1 and target.is_floating_point()
        magnitude = call.magnitude(target, self._get) if is_number else None
        kink = next((argument.kink for argument in inputs if argument.kink), "")
        if is_number and call.func in _KINKS and any(map(_is_number_of_both, inputs)):
            kink = _described(call.func)
        followed = Followed(ref(target), tuple(copies), magnitude=magnitude, kink=kink)
        self._add(target, followed)
        result = _Result(followed, inputs, _described(call.func))
        if self.through_modules:  # at once: the copies of all layers would fill the memory
            self._find_origins(result)
        else:
            self._results.append(result)

    def _find_origins(self, result: _Result) -> None:
        """Notes which calls combined rows first, of what a call has given."""
        origins = tuple(dict.fromkeys(name for argument in result.inputs for name in argument.origins))
        if self._names_mixed is None:
            samples = [_sample(copy.detach()) for copy in result.followed.copies]
            if not origins and _depends_on_both(samples):
                origins = (result.call,)
            if origins and self._is_mixed(samples):
                self._names_mixed = origins
        result.followed.origins = origins

    def _is_mixed(self, samples: Sequence[Tensor]) -> bool:
        """Whether a value of (A, B), given with those of the copies, is no sum over the groups."""
        if not samples[0].is_floating_point() or not samples[0].numel():
            return False
        unchanged, a, b, both = (sample.double() for sample in samples)
        off = (unchanged + both - a - b).abs()
        size = torch.stack([sample.abs().max() for sample in (unchanged, a, b, both)]).max()
        return bool((off > size * (self._rounding * SUSPECT)).any())

    def _differentiated(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A backward pass is about to begin: is its loss a sum over the two groups of rows?"""
        roots = Differentiation.of(func, args, kwargs).roots
        weights = args[1] if len(args) > 1 and func is not torch.autograd.grad else None
        weights = kwargs.get("gradient", kwargs.get("grad_tensors", kwargs.get("grad_outputs", weights)))
        with torch.no_grad(), self._rng.aside():
            for root, weight in zip(
                roots, [None] * len(roots) if weights is None else as_sequence(weights), strict=False
            ):
                followed = self._get(root) if isinstance(root, Tensor) else None
                if followed is not None and root.is_floating_point():
                    self._compare(root, weight, followed)

    def _compare(self, root: Tensor, weight: Any, followed: Followed) -> None:
        if any(copy.shape != root.shape for copy in followed.copies):
            return
        factor = weight.detach() if isinstance(weight, Tensor) and weight.shape == root.shape else 1.0
        # In float64, or the additions of this check would round more than those that it judges.
        unchanged, a, b, both = totals = [float((copy.double() * factor).sum()) for copy in followed.copies]
        sizes = [*map(abs, totals), *([] if followed.magnitude is None else [float(followed.magnitude)])]
        if not all(map(math.isfinite, sizes)) or not max(sizes):
            self.saw_zero = True
            return
        self.compared = True
        off = abs(unchanged + both - a - b) / max(sizes)
        suspect, certain = bounds(self._rounding)
        if off > suspect:
            for result in self._results:
                self._find_origins(result)
            origins = self._names_mixed or followed.origins
            self.mixings.append(Mixing(origins, off, off > certain, self._shuffles))
        elif followed.kink:
            self.kinks.append(followed.kink)

    @contextmanager
    def _redrawing(
        self, func: Callable[..., Any], tensors: Sequence[Tensor], leaves: Sequence[Any]
    ) -> Iterator[Callable[[], None]]:
        """A block around the calls of a function. What it yields has the next call draw the numbers of the first."""
        generators = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
        if not generators and not is_random(func):
            yield lambda: None
            return
        generators.append(self._rng.default_generator())
        on_device = next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)
        before = [generator.get_state() for generator in generators]
        device_before = None if on_device is None else torch.cuda.get_rng_state(on_device)
        after: list[Tensor] = []

        def again() -> None:
            if not after:
                after.extend(generator.get_state() for generator in generators)
                if on_device is not None:
                    after.append(torch.cuda.get_rng_state(on_device))
            self._set_states(generators, before)
            if on_device is not None and device_before is not None:
                torch.cuda.set_rng_state(device_before, on_device)

        try:
            yield again
        finally:
            if after:
                self._set_states(generators, after)
                if on_device is not None:
                    torch.cuda.set_rng_state(after[-1], on_device)

    @staticmethod
    def _set_states(generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
        for generator, state in zip(generators, states, strict=False):
            generator.set_state(state)

    def _add(self, tensor: Tensor, followed: Followed) -> None:
        tensors = self._followed

        # By id and weakly: the copies of a tensor that the step has dropped must go, and another tensor may get its id.
        def forget(_: object, key: int = id(tensor)) -> None:
            if key in tensors and tensors[key].tensor() is None:
                del tensors[key]

        followed.tensor = ref(tensor, forget)
        tensors[id(tensor)] = followed

    def _get(self, tensor: Any) -> Followed | None:
        followed = self._followed.get(id(tensor))
        return followed if followed is not None and followed.tensor() is tensor else None


def bounds(rounding: float) -> tuple[float, float]:
    """The relative differences above which a difference is suspect, and certainly no rounding."""
    # One rounding of bfloat16 is 0.8%: 100 of them would hide a difference of 78%.
    return (rounding * 4, rounding * 16) if rounding > 1e-4 else (rounding * SUSPECT, rounding * CERTAIN)


def _first_group(rows: int) -> int:
    """The number of rows in A. Pairs of neighbours, which shards may leave whole, are left whole here too."""
    half = rows // 2
    return half - half % 2 if rows > 3 else half


def _orders(rows: int, half: int) -> tuple[Tensor, ...]:
    """The rows of (A, B), (A', B), (A, B') and (A', B')."""
    # Rolled, not drawn: another random order would give other numbers in each run.
    plain = torch.arange(rows)
    moved = plain.roll(-half)
    return (
        plain,
        torch.cat([moved[:half], plain[half:]]),
        torch.cat([plain[:half], moved[half:]]),
        moved,
    )


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _sample(tensor: Tensor) -> Tensor:
    """A few entries along each dimension, the first and the last half of each among them."""
    return tensor[tuple(slice(None, None, max(1, -(-size // _SAMPLED))) for size in tensor.shape)]


def _depends_on_both(samples: Sequence[Tensor]) -> bool:
    """Whether some entry depends on rows of A and on rows of B; the copies differ from each other in one of them."""
    _, of_a, of_b, both = samples
    if not of_a.numel():
        return False
    return bool(((of_a != both) & (of_b != both)).any())


def _is_constant(target: Tensor, inputs: Sequence[Followed]) -> bool:
    """Whether it was computed from what has gradients, and has none: by detach(), or without gradients."""
    tensors = [followed.tensor() for followed in inputs]
    return not target.requires_grad and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _is_number_of_both(followed: Followed) -> bool:
    """Whether it is one number that depends on rows of both groups, such as a sum over the rows."""
    return all(copy.numel() == 1 for copy in followed.copies) and _depends_on_both(followed.copies)


def _described(func: Any) -> str:
    name, line = getattr(func, "__name__", str(func)), call_site()
    return f"{name.strip('_')} ({line})" if line else name.strip("_")


def _is_torchs(func: Any, leaves: Sequence[Any]) -> bool:
    """Whether a call is of a function of torch's own, on plain tensors, that calls nothing of the program's."""
    # Methods of Tensor are written in C and have no __module__.
    home = getattr(func, "__module__", None) or "torch"
    if home.startswith(_OPERATORS) or not home.startswith(_OF_TORCH) or func in _DRAWS_BY_VALUE:
        return False
    return all(type(leaf) in _PLAIN_TENSORS if isinstance(leaf, Tensor) else not _is_function(leaf) for leaf in leaves)


def _is_function(leaf: Any) -> bool:
    return isinstance(leaf, (FunctionType, MethodType, torch.nn.Module))
