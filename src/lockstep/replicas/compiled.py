"""Code that torch.compile makes for replicas on a CPU: with the replica's own random numbers, and faster products.

    what the module calls   what inductor makes of it             what replicas run
    dropout, torch.rand     a seed, and numbers made from it      the seed is drawn by the replica's own generator
    uniform_, normal_       the same operators                    the same, from a seed of that kind
    linear layers           products of matrices                  oneDNN, where it is faster
    all else                kernels that hold Python's lock       the same kernels without it

Inductor would draw the seeds from torch's default generator, which all replicas share. Compiled code gives the same
numbers in every run, but not those of the module as it is. On a GPU a replica's slot swaps the default generator.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from lockstep._torch_compat import compile_backward_at_once, graph_pass, inductor, release_gil_in_kernels
from lockstep.errors import ConfigError
from lockstep.replicas.cpu.linear import is_worth_onednn, matrix_product, onednn_is_faster
from lockstep.replicas.rng.default_generator import own_generator
from lockstep.replicas.rng.ops import draws

COMPILE_LIMIT_S = 1800.0
"""How many seconds a replica waits for another that compiles."""
_SEEDS, _PRODUCTS = "lockstep-replica-seeds-5", "lockstep-products-1"
"""What torch's cache of compiled code knows the changes of graphs by; a new number for each change of one."""


@torch.library.custom_op(
    "lockstep::replica_seeds",
    mutates_args=(),
    schema="(int number, int call) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)
def _replica_seeds(number: int, call: int) -> torch.Tensor:
    """Seeds [number] int64. ``call`` differs between the calls in a graph: torch would merge equal ones to one."""
    get_generator = own_generator.get()
    generator = None if get_generator is None else get_generator()
    limits = torch.iinfo(torch.int64)
    return torch.randint(limits.min, limits.max, (number,), dtype=torch.int64, generator=generator)


@_replica_seeds.register_fake
def _(number: int, call: int) -> torch.Tensor:
    return torch.empty((number,), dtype=torch.int64)


@torch.library.custom_op("lockstep::random", mutates_args=(), schema="(SymInt[] size, Tensor seed, str mode) -> Tensor")
def _random(size: list[int], seed: torch.Tensor, mode: str) -> torch.Tensor:
    """Random float32 numbers of this size from a seed [] int64: uniform for mode "rand", normal for "randn".

    Inductor's own kernels compute each number by itself, and take 8 times as long on one core. No uniform number is 0,
    of which the code of ``exponential_`` would make inf: one in 2**24 would be.
    """
    generator = torch.Generator().manual_seed(int(seed))
    numbers = torch.empty(size, dtype=torch.float32)
    if mode == "rand":
        return numbers.uniform_(2.0**-26, 1.0, generator=generator)
    return numbers.normal_(generator=generator)


@_random.register_fake
def _(size: list[int], seed: torch.Tensor, mode: str) -> torch.Tensor:
    return seed.new_empty(size, dtype=torch.float32)


@torch.library.custom_op("lockstep::random_like", mutates_args=())
def _random_like(like: torch.Tensor, method: str, limits: list[float], seed: torch.Tensor) -> torch.Tensor:
    """Random numbers in a new tensor, by a method of tensors such as "uniform_", from a seed [1] int64."""
    draw = getattr(torch.empty_like(like), method)
    numbers: torch.Tensor = draw(*limits, generator=torch.Generator().manual_seed(int(seed)))
    return numbers


@_random_like.register_fake
def _(like: torch.Tensor, method: str, limits: list[float], seed: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(like)


def compile_for_replicas(graph: torch.nn.Module, inputs: list[Any], options: dict[str, Any]) -> Any:
    """Compiles a graph by inductor, for replicas that draw their own random numbers.

    Args:
        graph: a graph, or a module that can be called with tensors that have no values.
        inputs: what it is called with.
        options: settings of inductor.

    Returns:
        The code, which takes as many arguments as the graph.

    Raises:
        ConfigError: the graph draws in a way that has no seed, such as ``torch.multinomial``. torch.compile hides it in
            an error of its own.
    """
    options = {"joint_custom_post_pass": graph_pass(_draw_seeds_of_replica, _SEEDS), **options}
    if onednn_is_faster():
        # After the graph is divided into forward and backward, so that the division still knows the products.
        options["post_grad_custom_post_pass"] = graph_pass(_multiply_by_onednn, _PRODUCTS)
    release_gil_in_kernels()  # before code is read from the cache too
    with compile_backward_at_once():
        return inductor().compile(graph, inputs, options=options)


def _draw_seeds_of_replica(graph: torch.fx.Graph) -> None:
    """Replaces the operators of a graph that draw random numbers on a CPU."""
    calls = itertools.count()
    prims, lockstep_ops, aten = inductor().inductor_prims, torch.ops.lockstep, torch.ops.aten
    methods = {  # operators that inductor has no code for; the first is that of dropout in place
        aten.bernoulli.p: "bernoulli_",
        aten.uniform.default: "uniform_",
        aten.normal_functional.default: "normal_",
    }
    for node in list(graph.nodes):
        if node.op != "call_function" or not _is_on_cpu(node):
            continue
        with graph.inserting_before(node):
            if node.target is prims.seeds:
                _replace(node, graph.call_function(lockstep_ops.replica_seeds.default, (node.args[0], next(calls))))
            elif node.target is prims.random:
                _replace(node, graph.call_function(lockstep_ops.random.default, node.args))
            elif node.target in methods and not node.kwargs:
                like, *limits = node.args
                seed = graph.call_function(lockstep_ops.replica_seeds.default, (1, next(calls)))
                seed.meta["val"] = like.meta["val"].new_empty(1, dtype=torch.int64)
                _replace(
                    node,
                    graph.call_function(lockstep_ops.random_like.default, (like, methods[node.target], limits, seed)),
                )
            elif draws(node.target, node.args, node.kwargs):
                raise ConfigError(
                    f"the compiled code draws random numbers by {node.target} on a CPU, which cannot draw from the "
                    "replica's own generator there; draw them outside of what is compiled, or leave out compiling"
                )


def _replace(node: torch.fx.Node, other: torch.fx.Node) -> None:
    other.meta.update(node.meta)
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


@torch.library.custom_op("lockstep::product", mutates_args=())
def _product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return matrix_product(a, b, bias)


@_product.register_fake
def _(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def _multiply_by_onednn(graph: torch.fx.Graph) -> None:
    """Replaces large products of float32 matrices on a CPU: those of linear layers, in both passes."""
    aten = torch.ops.aten
    for node in list(graph.nodes):
        if node.op != "call_function" or node.kwargs or node.target not in (aten.mm.default, aten.addmm.default):
            continue
        *added, a, b = node.args
        if not is_worth_onednn(*(matrix.meta["val"] for matrix in (a, b, *added))):
            continue
        bias = [term for term in added if term.meta["val"].ndim == 1]
        with graph.inserting_before(node):
            product = graph.call_function(torch.ops.lockstep.product.default, (a, b, *(bias or [None])))
            for other in added if not bias else ():  # such as the gradient that tied weights have from elsewhere
                product.meta.update(node.meta)
                product = graph.call_function(aten.add.Tensor, (product, other))
        _replace(node, product)


def _is_on_cpu(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    first = next(iter(value), None) if isinstance(value, (tuple, list)) else value
    return isinstance(first, torch.Tensor) and first.device.type == "cpu"
