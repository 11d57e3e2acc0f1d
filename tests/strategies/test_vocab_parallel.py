"""Scores of words that are divided among tensor ranks: any use of them gives what it gives of the whole tensor.

One job of four workers computes each use twice: of the whole scores, and of parts of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep as ls
from lockstep.errors import UsageError

pytestmark = [pytest.mark.workers, pytest.mark.slow, pytest.mark.usefixtures("one_core")]

LIMIT_S = 250
WORDS = {"uneven": 10, "some without": 5}  # among four: 3, 3, 3, 1 and 2, 2, 1, 0
ROWS, TOKENS = 3, 4


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        ctx.save_for_backward(scores)
        return scores.exp().sum(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (scores,) = ctx.saved_tensors
        return gradient.unsqueeze(-1) * scores.exp()


def changed(scores: Tensor, targets: Tensor) -> Tensor:
    scores = scores.clone()
    scores[..., 0] = -30.0
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none")


def hooked(scores: Tensor, targets: Tensor) -> Tensor:
    scores = scores.clone()
    scores.register_hook(lambda gradient: gradient * 2)
    return F.cross_entropy(scores.transpose(1, 2), targets, reduction="none")


def changed_then_given(scores: Tensor, targets: Tensor) -> Tensor:
    scores = scores.clone()
    scores[..., 0] = -30.0
    return Squares.apply(scores)


def hooked_itself(scores: Tensor, targets: Tensor) -> Tensor:
    scores.register_hook(lambda gradient: gradient * 2)
    return F.cross_entropy(scores.transpose(1, 2), targets, reduction="none")


def weight_of(scores: Tensor) -> Tensor:
    return torch.linspace(0.5, 2.0, scores.shape[-1], dtype=scores.dtype)


# What a user may write; those of the first group gather nothing.
Use = Callable[[Tensor, Tensor], Tensor]
ON_PARTS: dict[str, Use] = {
    "each token": lambda s, t: F.cross_entropy(s.flatten(0, 1), t.flatten(), reduction="none"),
    "transposed": lambda s, t: F.cross_entropy(s.transpose(1, 2), t, reduction="none"),
    "permuted": lambda s, t: F.cross_entropy(s.permute(0, 2, 1), t, reduction="sum"),
    "mean of some": lambda s, t: F.cross_entropy(s.view(-1, s.size(-1)), t.where(t != 1, -100).view(-1)),
    "one ignored": lambda s, t: F.cross_entropy(s.reshape(-1, s.shape[-1]), t.reshape(-1), ignore_index=1),
    "none counts": lambda s, t: F.cross_entropy(s.transpose(1, 2), torch.full_like(t, -100), reduction="none"),
    "weighted": lambda s, t: F.cross_entropy(s.transpose(1, 2), t, weight_of(s)),
    "weighted each": lambda s, t: F.cross_entropy(s.transpose(1, 2), t, weight_of(s), reduction="none"),
    "module": lambda s, t: nn.CrossEntropyLoss(reduction="none")(s.float().flatten(0, 1), t.flatten()),
    "next word": lambda s, t: F.cross_entropy(s[:, :-1].contiguous().view(-1, s.shape[-1]), t[:, 1:].reshape(-1)),
    "next word, dots": lambda s, t: F.cross_entropy(s[..., 1:, :].transpose(1, 2), t[..., :-1]),
    "masked": lambda s, t: F.cross_entropy(s[t > 1], t[t > 1], reduction="none"),
    "numbered": lambda s, t: F.cross_entropy(s[torch.tensor([0, 2]), torch.tensor([1, 1])], t[[0, 2], [1, 1]]),
    "one token": lambda s, t: F.cross_entropy(s[0, 0], t[0, 0]),
    "squeezed": lambda s, t: F.cross_entropy(s[:1].squeeze(0), t[0]),
    "no rows": lambda s, t: F.cross_entropy(s[:0].flatten(0, 1), t[:0].flatten(), reduction="sum"),
    "likeliest": lambda s, t: s.argmax(-1) + t,
    "likeliest of rows": lambda s, t: s.detach().flatten(0, 1).argmax(dim=1, keepdim=True),
}
GATHERED: dict[str, Use] = {
    "smoothed": lambda s, t: F.cross_entropy(s.transpose(1, 2), t, label_smoothing=0.1),
    "softmax": lambda s, t: s.softmax(-1).square(),
    "sum": lambda s, t: s.sum(),
    "probabilities": lambda s, t: F.cross_entropy(s.flatten(0, 1), s.detach().flatten(0, 1).softmax(-1)),
    "weighted and smoothed": lambda s, t: F.cross_entropy(s.transpose(1, 2), t, weight_of(s), label_smoothing=0.1),
    "of two": lambda s, t: torch.cat([s, s * 2], 1).logsumexp(-1),
    "one word": lambda s, t: s[..., 0] * s[:, :, -1],
    "beside the words": lambda s, t: s.unsqueeze(-1).square().sum((-1, -2)),
    "largest": lambda s, t: s.max(-1).values,
    "changed": changed,
    "changed, then given": changed_then_given,
    "hooked": hooked,
    "function": lambda s, t: Squares.apply(s),
    "function of rows": lambda s, t: Squares.apply(s.flatten(0, 1)),
    "after": lambda s, t: s.sum((1, 2)) + F.cross_entropy(s.transpose(1, 2), t, reduction="none").sum(1),
}
REFUSED: dict[str, Use] = {
    "no word": lambda s, t: F.cross_entropy(s.transpose(1, 2), t + s.shape[-1]),
    "changed in a view": lambda s, t: s.flatten(0, 1).zero_(),
    "hooked itself": hooked_itself,
    "changed under a view": lambda s, t: (s.flatten(0, 1), s.mul_(2))[1],
}


# What the workers run.


def use(index: int, path: str) -> None:
    from lockstep.parallel.vocab_parallel import VocabShard, keep_logits_sharded, vocab_parallel_logits

    torch.set_num_threads(1)
    strategy = ls.ParallelStrategy(tensor=4, seed=1)
    mesh = strategy._mesh.mesh["tensor"]
    found: dict[Any, Any] = {}
    for size, words in WORDS.items():
        vocabulary = VocabShard(size=words, rank=mesh.get_local_rank(), ranks=4, group=mesh.get_group())
        for name, of in {**ON_PARTS, **GATHERED, **REFUSED}.items():
            whole, targets = example(words)
            part = vocabulary.cut(whole.detach(), 2).clone().requires_grad_()
            with keep_logits_sharded(), gathers() as count:
                result = looked_at(of, vocab_parallel_logits(part, vocabulary), targets)
            gradient = torch.zeros_like(part) if part.grad is None else part.grad
            found[name, size] = (*result, vocabulary.gather(gradient, 2), count[0])
    found["by default"] = type(vocab_parallel_logits(part, vocabulary)) is Tensor
    strategy.close()
    if index == 0:
        torch.save(found, path)


def example(words: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(words)
    scores = torch.randn(ROWS, TOKENS, words, generator=random, dtype=torch.float64) * 5
    scores[0, 0, 1] = scores[0, 0, 4] = 99.0  # two are the largest
    return scores.requires_grad_(), torch.randint(words, (ROWS, TOKENS), generator=random)


def looked_at(of: Use, scores: Tensor, targets: Tensor) -> tuple[Tensor | None, str]:
    """What a use gives, or the error that it raises; the gradients are left with the leaf."""
    try:
        result = of(scores, targets)
    except (IndexError, UsageError) as error:
        return None, f"{type(error).__name__}: {error}"
    if result.requires_grad:
        weights = torch.linspace(1.0, 2.0, result.numel(), dtype=result.dtype).reshape(result.shape)
        (result * weights).sum().backward()
    return result.detach(), ""


@contextmanager
def gathers() -> Iterator[list[int]]:
    """How often scores are gathered in the block."""
    from lockstep.parallel.vocab_parallel import VocabShard

    original, count = VocabShard.gather, [0]

    def counted(*args: Any) -> Tensor:
        count[0] += 1
        return original(*args)

    VocabShard.gather = counted  # type: ignore[method-assign]
    try:
        yield count
    finally:
        VocabShard.gather = original  # type: ignore[method-assign]


# What the tests see of them.


@pytest.fixture(scope="module")
def found(start_module_job: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    path: Path = tmp_path_factory.mktemp("scores") / "found.pt"
    job = start_module_job(use, "index", str(path), workers=4)
    assert [worker.end(limit_s=LIMIT_S) for worker in job] == [0] * 4, job[0].errors
    result: dict[Any, Any] = torch.load(path, weights_only=False)
    return result


@pytest.mark.parametrize("size", WORDS)
@pytest.mark.parametrize("name", {**ON_PARTS, **GATHERED})
def test_a_use_of_divided_scores_gives_what_it_gives_of_whole_ones(found: dict[Any, Any], name: str, size: str):
    scores, targets = example(WORDS[size])
    expected, _ = looked_at({**ON_PARTS, **GATHERED}[name], scores, targets)
    result, error, gradient, _ = found[name, size]
    assert error == ""
    torch.testing.assert_close(result, expected, rtol=1e-6 if name == "module" else 1e-12, atol=1e-12, equal_nan=True)
    zero = torch.zeros_like(scores)
    torch.testing.assert_close(gradient, zero if scores.grad is None else scores.grad, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", ON_PARTS)
def test_losses_and_likeliest_words_gather_nothing(found: dict[Any, Any], name: str):
    assert [found[name, size][3] for size in WORDS] == [0, 0]


def test_what_cannot_be_is_refused(found: dict[Any, Any]):
    assert re.fullmatch(r"IndexError: Target 1\d is out of bounds\.", found["no word", "uneven"][1])
    for name in ("changed in a view", "changed under a view", "hooked itself"):
        assert found[name, "uneven"][1].startswith("UsageError: logits that are divided among workers were changed")


def test_who_does_not_ask_for_parts_gets_whole_scores(found: dict[Any, Any]):
    assert found["by default"]
