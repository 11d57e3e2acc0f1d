"""The table of ``Model.summary``: a line for each layer, and the sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from lockstep import console
from lockstep._torch_compat import tree_leaves
from lockstep.checks import check_number

_LEAST_NAME = 12
"""Columns that the names of layers keep in the narrowest terminal."""
_MIB = 2**20


def summary_table(module: nn.Module, shapes: Mapping[str, str], *, depth: int | None, width: int | None) -> str:
    """The table as text of at most ``width`` columns, if that is enough for the numbers.

    Args:
        module: the module.
        shapes: the output shape of each layer, by name; empty without an example input.
        depth: modules that are nested deeper count in the one that holds them.
        width: columns to fit into; None for any number.
    """
    headings = ["layer", "output shape", "parameters", "trained"]
    rows = [
        [f"{name} ({type(layer).__name__})", shapes.get(name, ""), f"{count:,}", f"{trained:,}"]
        for name, layer, count, trained in _layers(module, depth)
    ]
    if not shapes:
        headings, rows = [headings[0], *headings[2:]], [[row[0], *row[2:]] for row in rows]
    if width is not None:
        _, *columns = zip(headings, *rows, strict=True)
        longest = max(width - sum(max(map(len, column)) + len(console.GAP) for column in columns), _LEAST_NAME)
        rows = [[name if len(name) <= longest else name[: longest - 1] + "…", *numbers] for name, *numbers in rows]
    return "\n".join([console.text_table(headings, rows), "", *_sums(module)])


@contextmanager
def noting_shapes(module: nn.Module) -> Iterator[dict[str, str]]:
    """A block that runs the module once; the dict gets the shape of each submodule's outputs, by name."""
    shapes: dict[str, str] = {}

    def noting(name: str) -> Callable[..., None]:
        def note(_: nn.Module, __: Any, outputs: Any) -> None:
            sizes = [tuple(leaf.shape) for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
            shapes[name] = str(sizes[0]) + (f" and {len(sizes) - 1} more" if len(sizes) > 1 else "") if sizes else ""

        return note

    with ExitStack() as stack:
        for name, part in module.named_modules():
            # The hooks go with the block, also after an error of the forward pass.
            stack.callback(part.register_forward_hook(noting(name)).remove)
        yield shapes


def _layers(module: nn.Module, depth: int | None) -> Iterator[tuple[str, nn.Module, int, int]]:
    """Name, module, and numbers of parameters and of trained ones.

    Layers are modules without children, with parameters of their own, or at ``depth``. A parameter that two of them
    share counts in the first.
    """
    check_number("depth", depth, least=0, whole=True)
    counted: set[int] = set()
    for name, part in module.named_modules():
        level = name.count(".") + 1 if name else 0
        if depth is not None and level > depth:
            continue
        is_last = depth is not None and level == depth
        parameters = [parameter for parameter in part.parameters(recurse=is_last) if id(parameter) not in counted]
        counted.update(map(id, parameters))
        if is_last or parameters or not any(part.children()):
            yield name or "(itself)", part, *_counts(parameters)


def _counts(parameters: Sequence[nn.Parameter]) -> tuple[int, int]:
    """How many numbers the parameters hold, and how many of these are trained."""
    trained = (parameter.numel() for parameter in parameters if parameter.requires_grad)
    return sum(parameter.numel() for parameter in parameters), sum(trained)


def _sums(module: nn.Module) -> Iterator[str]:
    parameters = list(module.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    memory = sum(tensor.nbytes for tensor in [*parameters, *module.buffers()]) / _MIB
    gradients = sum(parameter.nbytes for parameter in trained) / _MIB
    count, trained_count = _counts(parameters)
    yield f"parameters: {count:,}, {trained_count:,} trained"
    yield f"memory of each replica: {memory:,.1f} MiB of weights, {gradients:,.1f} MiB of gradients"
