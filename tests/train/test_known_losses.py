"""Losses that give one scalar: torch's own, however they are called, and masked means, beside a plain loop.

The labels that do not count are spread unevenly over the replicas, and one global batch has all of replica 0's rows, or
of the last replica's, without any. Float64, so that what is left of a difference is the order of additions.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.oracle import assert_close, sgd, train
from tests.train.conftest import MakeStrategy, compiled
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.errors import ConfigError

SIZES = (7, 6, 5, 1)
Batch = tuple[Any, Any]


@dataclass(frozen=True)
class Case:
    loss: Callable[[Any, Any], Any]
    targets: Callable[[int, torch.Generator], Any]
    head: Callable[[Tensor], Any] = torch.clone


class Net(nn.Module):
    def __init__(self, head: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
        self.head = head

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x))


class Tokens(nn.Module):
    """Scores [rows, 6 tokens, 4 words]."""

    def __init__(self) -> None:
        super().__init__()
        self.spread = nn.Linear(5, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.spread(x).unflatten(1, (6, 4))


def labels(rows: int, random: torch.Generator) -> Tensor:
    return torch.randint(4, (rows,), generator=random)


def with_ignored(rows: int, random: torch.Generator) -> Tensor:
    """In 7 rows all of the first of two or three shards are ignored, in 6 all of the last; the others have some."""
    found = labels(rows, random)
    if rows == 7:
        found[:4] = -100
    elif rows == 6:
        found[3:] = -100
    elif rows > 1:
        found[1] = -100
    return found


def with_one_in_three_ignored(rows: int, random: torch.Generator) -> Tensor:
    found = labels(rows, random)
    found[1::3] = -100
    return found


def token_labels(rows: int, random: torch.Generator) -> Tensor:
    found = torch.randint(4, (rows, 6), generator=random)
    lengths = torch.randint(1, 7, (rows, 1), generator=random)
    found[torch.arange(6) >= lengths] = -100
    if rows == 7:
        found[:4] = -100
    return found


def probabilities(rows: int, random: torch.Generator) -> Tensor:
    return torch.rand(rows, 4, generator=random, dtype=torch.float64).softmax(1)


def numbers(rows: int, random: torch.Generator) -> Tensor:
    return torch.randn(rows, 4, generator=random, dtype=torch.float64)


def bits(rows: int, random: torch.Generator) -> Tensor:
    return torch.randint(2, (rows, 4), generator=random).double()


def signs(rows: int, random: torch.Generator) -> Tensor:
    return bits(rows, random) * 2 - 1


def one_sign(rows: int, random: torch.Generator) -> Tensor:
    return signs(rows, random)[:, 0]


def counts(rows: int, random: torch.Generator) -> Tensor:
    return torch.randint(5, (rows, 4), generator=random).double()


def label_sets(rows: int, random: torch.Generator) -> Tensor:
    found = torch.stack([torch.randperm(4, generator=random) for _ in range(rows)])
    found[:, 2:] = -1
    return found


def nothing(rows: int, random: torch.Generator) -> Tensor:
    return torch.zeros(rows)


def columns(scores: Tensor) -> tuple[Tensor, ...]:
    return scores[:, :1], scores[:, 1:2], scores[:, 2:3]


WEIGHT = torch.tensor([0.2, 3.0, 1.0, 0.5], dtype=torch.float64)


class Scaled(nn.CrossEntropyLoss):
    """A subclass with a forward of its own, which hands on what the loss below gives."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input * 2, target)


class Halved(nn.CrossEntropyLoss):
    """Known by name only: it divides by half the rows, and half the labels that are not ignored."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        losses = F.cross_entropy(input, target, reduction="none")
        return losses.sum() * 2 / (len(target) + (target != -100).sum())


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(WEIGHT)

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return self.criterion(scores.flatten(0, 1), target.flatten())


def masked_division_of_at_least_one(scores: Tensor, target: Tensor) -> Tensor:
    mask = (target != -100).double()
    losses = F.cross_entropy(scores.transpose(1, 2), target, reduction="none") * mask
    return torch.neg(input=-torch.sum(input=losses) / mask.sum().clamp(min=1)) * 1.0


def half_of_masked_squares(scores: Tensor, target: Tensor) -> Tensor:
    mask = (target != -100).double()[..., None]
    squares, sizes = ((scores - 1).square() * mask).sum(), (scores.abs() * mask).sum()
    return (0.5 * squares + sizes) / mask.sum()


def changed_in_place(scores: Tensor, target: Tensor) -> Tensor:
    loss = F.cross_entropy(scores, target)
    loss += 0.1 * scores.square().mean()
    loss *= 2
    return loss


def cast(scores: Tensor, target: Tensor) -> Tensor:
    loss = F.cross_entropy(scores.float(), target, WEIGHT.float()).double().mean()
    return loss.squeeze() if loss.requires_grad else loss.clone()


def tokenwise(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.transpose(1, 2), target, reduction="none")


def recomputed(scores: Tensor, target: Tensor) -> Tensor:
    return checkpoint(F.cross_entropy, scores, target, use_reentrant=False)


def sum_of_chosen(scores: Tensor, target: Tensor) -> Tensor:
    chosen = F.cross_entropy(scores.transpose(1, 2), target, reduction="none")[target != -100]
    return chosen.sum() / max(len(chosen), 1)


def lines(scores: Tensor, target: Tensor) -> Tensor:
    words = scores.transpose(0, 1).log_softmax(2)
    rows = len(target)
    lengths = (target != -100).sum(1).clamp(max=2, min=1)
    return F.ctc_loss(words, target.clamp(min=1)[:, :2], torch.full((rows,), 6), lengths, zero_infinity=True)


CASES = {
    "cross-entropy": Case(nn.CrossEntropyLoss(), labels),
    "ignored labels": Case(nn.CrossEntropyLoss(), with_ignored),
    "class weights": Case(nn.CrossEntropyLoss(WEIGHT), labels),
    "class weights and ignored labels": Case(nn.CrossEntropyLoss(WEIGHT), with_ignored),
    "another ignored label": Case(partial(F.cross_entropy, ignore_index=1), labels),
    "smoothed": Case(nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1), with_ignored),
    "probabilities": Case(nn.CrossEntropyLoss(WEIGHT), probabilities),
    "functional": Case(F.cross_entropy, with_ignored),
    "partial": Case(partial(F.cross_entropy, weight=WEIGHT), with_ignored),
    "function": Case(lambda scores, target: F.cross_entropy(scores, target, WEIGHT), with_ignored),
    "subclass": Case(Scaled(), with_ignored),
    "subclass with another count": Case(Halved(), with_one_in_three_ignored),
    "nll": Case(nn.NLLLoss(WEIGHT), with_ignored, lambda scores: scores.log_softmax(1)),
    "bce": Case(nn.BCELoss(), bits, torch.sigmoid),
    "bce with logits": Case(nn.BCEWithLogitsLoss(pos_weight=WEIGHT), bits),
    "mse": Case(nn.MSELoss(), numbers),
    "l1": Case(nn.L1Loss(), numbers),
    "l1, weighted": Case(lambda scores, y: F.l1_loss(scores, y, weight=y.square() + 0.5), numbers),
    "mse, weighted": Case(lambda scores, y: F.mse_loss(scores, y, weight=y.square() + 0.5), numbers),
    "smooth l1": Case(nn.SmoothL1Loss(), numbers),
    "huber": Case(nn.HuberLoss(delta=0.5), numbers),
    "kl": Case(nn.KLDivLoss(reduction="mean"), probabilities, lambda scores: scores.log_softmax(1)),
    "kl by rows": Case(nn.KLDivLoss(reduction="batchmean"), probabilities, lambda scores: scores.log_softmax(1)),
    "poisson": Case(nn.PoissonNLLLoss(full=True), counts),
    "gaussian": Case(lambda scores, y: F.gaussian_nll_loss(scores, y, scores.exp()), numbers),
    "hinge": Case(nn.HingeEmbeddingLoss(), signs),
    "soft margin": Case(nn.SoftMarginLoss(), signs),
    "multi margin": Case(nn.MultiMarginLoss(weight=WEIGHT), labels),
    "multi-label margin": Case(nn.MultiLabelMarginLoss(), label_sets),
    "multi-label soft margin": Case(nn.MultiLabelSoftMarginLoss(WEIGHT), bits),
    "cosine": Case(lambda scores, y: F.cosine_embedding_loss(scores, scores.flip(1), y), one_sign),
    "ranking": Case(lambda pair, y: F.margin_ranking_loss(pair[0], pair[1], y[:, None]), one_sign, columns),
    "triplet": Case(lambda three, _: F.triplet_margin_loss(*three), nothing, columns),
    "triplet by distance": Case(lambda three, _: F.triplet_margin_with_distance_loss(*three), nothing, columns),
    "of tokens": Case(Wrapper(), token_labels),
    "of tokens, classes second": Case(lambda s, y: F.cross_entropy(s.transpose(1, 2), y), token_labels),
    "masked by division": Case(lambda s, y: (tokenwise(s, y) * (y != -100)).sum() / (y != -100).sum(), token_labels),
    "masked by division, at least 1": Case(masked_division_of_at_least_one, token_labels),
    "masked by index": Case(lambda s, y: tokenwise(s, y)[y != -100].mean(), token_labels),
    "masked sum": Case(
        lambda s, y: F.cross_entropy(s[y >= 0], y[y >= 0], reduction="sum") / max(int((y >= 0).sum()), 1), token_labels
    ),
    "masked sum by a number": Case(
        lambda s, y: (tokenwise(s, y) * (y >= 0)).sum() / max((y >= 0).sum().item(), 1), token_labels
    ),
    "sum of chosen": Case(sum_of_chosen, token_labels),
    "half of masked squares": Case(half_of_masked_squares, token_labels),
    "sum over the rows": Case(lambda scores, y: (scores - y).square().sum() / len(y), numbers),
    "torch's sum over the rows": Case(lambda s, y: F.mse_loss(s, y, reduction="sum") / s.shape[0], numbers),
    "sum over the values": Case(lambda s, y: 0.5 * F.mse_loss(s, y, reduction="sum") / float(y.numel()), numbers),
    "scaled": Case(lambda scores, y: -0.5 * -F.cross_entropy(scores, y, WEIGHT) * 3 / 2, with_ignored),
    "sum of one dimension": Case(lambda s, y: tokenwise(s, y).flatten().sum(0) / (y != -100).sum(), token_labels),
    "sum of means": Case(lambda s, y: torch.stack([F.cross_entropy(s, y), s.square().mean()]).sum(), labels),
    "of each row": Case(lambda s, y: torch.func.vmap(F.cross_entropy)(s, y).mean(), probabilities),
    "recomputed": Case(recomputed, labels),
    "changed in place": Case(changed_in_place, labels),
    "cast": Case(cast, with_ignored),
    "ctc": Case(lines, token_labels),
    "by hand": Case(lambda s, y: (s - y).square().mean() + 0.1 * s.abs().mean(1).mean(0), numbers),
    "mixed": Case(lambda s, y: 0.5 * F.cross_entropy(s, y) + 0.1 * F.mse_loss(s, s.detach() + 1), labels),
    "values of every row": Case(nn.CrossEntropyLoss(reduction="none"), labels),
}


def module_of(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return (Tokens() if case.targets is token_labels else Net(case.head)).double()


def batches_of(case: Case, sizes: Sequence[int] = SIZES) -> list[Batch]:
    random = torch.Generator().manual_seed(3)
    return [(torch.randn(rows, 5, generator=random, dtype=torch.float64), case.targets(rows, random)) for rows in sizes]


@pytest.mark.filterwarnings("ignore:reduction. 'mean':UserWarning")
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_replicas_train_as_the_plain_loop(name: str, replicas: int, make_strategy: MakeStrategy):
    case = CASES[name]
    module, alone, batches = module_of(case), module_of(case), batches_of(case)
    model = compiled(module, make_strategy(replicas), sgd, case.loss)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        before = [model.evaluate([batch], verbose=0)["loss"] for batch in batches]
        expected = [float(case.loss(alone(x), y).mean()) for x, y in batches]
        train(alone, batches, loss=case.loss)
        model.fit(batches, verbose=0)

    assert not [warning for warning in warned if "is taken as" in str(warning.message)]
    tolerance = 1e-5 if name == "cast" else 1e-9
    assert_close(before, expected, tolerance)
    assert_close(module, alone, tolerance)


class Summed(nn.MSELoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return (input - target).square().sum()


def by_dimensions(scores: Tensor, target: Tensor) -> Tensor:
    return (scores - target).square().sum((0, 1))


def changed_sum(scores: Tensor, target: Tensor) -> Tensor:
    total = F.cross_entropy(scores, target, reduction="sum")
    total += 3
    return total / (target != -100).sum()


def steep(scores: Tensor, target: Tensor) -> Tensor:
    """With a penalty on its gradients."""
    if not scores.requires_grad:  # by which the plain loop evaluates
        scores = scores.detach().requires_grad_()
    with torch.enable_grad():
        loss = F.cross_entropy(scores, target)
        (gradient,) = torch.autograd.grad(loss, scores, create_graph=True)
        return loss + gradient.square().sum(1).mean()


def without_nan(scores: Tensor, target: Tensor) -> Tensor:
    losses = F.cross_entropy(scores, target.clamp(min=0), reduction="none")
    return torch.nanmean(losses.where(target >= 0, torch.nan))


def flat(rows: int, random: torch.Generator) -> Tensor:
    return numbers(rows, random)[:, 0]


REFUSED = {
    "sum": Case(nn.MSELoss(reduction="sum"), numbers),
    "sum of a function": Case(partial(F.cross_entropy, reduction="sum"), labels),
    "sum of columns' means": Case(lambda s, y: (s - y).square().mean(0).sum() / torch.tensor(3.0), numbers),
    "sum by hand": Case(lambda scores, y: (scores - y).square().sum(), numbers),
    "sum of a subclass": Case(Summed(), numbers),
    "sum over a number": Case(lambda scores, y: (scores - y).square().sum() / 7, numbers),
    "torch's sum over a number": Case(lambda s, y: F.mse_loss(s, y, reduction="sum") / 16, numbers),
    "sum by dimensions": Case(by_dimensions, numbers),
    "two sums": Case(  # as of variational autoencoders
        lambda s, y: F.binary_cross_entropy_with_logits(s, y, reduction="sum") + s.square().sum() / 2, bits
    ),
    "contrastive": Case(lambda s, y: F.cross_entropy(s @ s.T, torch.arange(len(s))), labels),
    "contrastive, a value per row": Case(
        lambda s, y: F.cross_entropy(s @ s.T, torch.arange(len(s)), reduction="none"), labels
    ),
    "root": Case(lambda s, y: F.mse_loss(s, y).sqrt(), numbers),
    "over a root": Case(
        lambda s, y: F.cross_entropy(s, y, reduction="sum") / (y >= 0).sum().sqrt(), with_one_in_three_ignored
    ),
    "sum changed in place": Case(changed_sum, with_one_in_three_ignored),
    "over at most 1": Case(lambda s, y: F.cross_entropy(s, y, reduction="sum") / (y >= 0).sum().clamp(max=1), labels),
    "penalty on gradients": Case(steep, labels),
    "mean of what is a number": Case(without_nan, with_one_in_three_ignored),
    "product": Case(
        lambda s, y: tokenwise(s, y).flatten() @ (y != -100).flatten().double() / (y != -100).sum(), token_labels
    ),
    "times the inverse of a count": Case(
        lambda s, y: F.cross_entropy(s, y, reduction="sum") * (1 / (y >= 0).sum()), with_one_in_three_ignored
    ),
    "deviation": Case(lambda s, y: F.mse_loss(s, y) + 0.1 * s.std(0).mean(), numbers),
    "two means as a pair": Case(lambda s, y: (F.cross_entropy(s, y), s.square().mean()), labels),
    "ignored labels in a mixture": Case(lambda s, y: F.cross_entropy(s, y) + 0.1 * s.square().mean(), with_ignored),
    "weights in a mixture": Case(lambda s, y: F.cross_entropy(s, y, WEIGHT) + s.mean(), labels),
    "columns beside rows": Case(F.mse_loss, flat, lambda scores: scores[:, :1]),
    "columns beside rows, values": Case(lambda s, y: (s - y).square(), flat, lambda scores: scores[:, :1]),
}


@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_mean_over_rows_is_refused_at_once(name: str, replicas: int, make_strategy: MakeStrategy):
    case = REFUSED[name]
    module = module_of(case)
    before = copy.deepcopy(module.state_dict())
    model, batches = compiled(module, make_strategy(replicas), sgd, case.loss), batches_of(case)
    for call in (model.fit, model.evaluate):
        with pytest.raises(
            ConfigError, match=r"the loss '.*(one value per row|pair \(total, count\)|combines the rows)"
        ):
            call(batches, verbose=0)
    assert_close(module, before, 0)


def test_deprecated_arguments_of_torch_are_refused(make_strategy: MakeStrategy):
    model = compiled(module_of(CASES["mse"]), make_strategy(2), None, partial(F.mse_loss, size_average=False))
    with pytest.raises(ConfigError, match="size_average= or reduce=, which are deprecated"):
        model.evaluate(batches_of(CASES["mse"]), verbose=0)


def test_ignored_labels_in_a_checkpoint_are_refused(make_strategy: MakeStrategy):
    """Which runs once more in the backward pass, where nobody looks at what is counted; evaluate needs none."""
    case = Case(recomputed, with_one_in_three_ignored)
    module, batches = module_of(case), batches_of(case)[:1]
    model = compiled(module, make_strategy(2), sgd, case.loss)
    with torch.no_grad():
        expected = float(case.loss(module(batches[0][0]), batches[0][1]))
    assert model.evaluate(batches, verbose=0)["loss"] == pytest.approx(expected, rel=1e-9)
    with pytest.raises(ConfigError, match=r"'recomputed' computes with a mean over labels that do not count alike"):
        model.fit(batches, verbose=0)


@pytest.mark.parametrize("rows", [2, 3])
def test_a_sum_is_refused_where_every_replica_has_one_row(rows: int, make_strategy: MakeStrategy):
    case = REFUSED["sum by dimensions"]
    model = compiled(module_of(case), make_strategy(rows), sgd, case.loss)
    with pytest.raises(ConfigError, match="'by_dimensions' returns the sum over the rows"):
        model.fit(batches_of(case, [rows]), verbose=0)


@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
@pytest.mark.parametrize("name", [name for name in REFUSED if name != "two means as a pair"])
def test_one_replica_takes_whatever_the_plain_loop_takes(name: str, make_strategy: MakeStrategy):
    case = REFUSED[name]
    module, batches = module_of(case), batches_of(case, [7, 6])
    compiled(module, make_strategy(1), sgd, case.loss).fit(batches, verbose=0)
    assert_close(module, train(module_of(case), batches, loss=lambda s, y: case.loss(s, y).mean()).module)


class Telling(nn.Module):
    """Gives its loss with its scores, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scores = self.body(x)
        return {"scores": scores, "loss": scores.square().mean()}


UNCHECKED = {
    "of the module": lambda outputs, y: outputs["loss"],
    "random": lambda outputs, y: (outputs["scores"] * torch.rand(())).square().mean(),
}


class Guessing(nn.Module):
    """Scores of the chosen tokens alone, which are no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 4)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        return self.body(x)[chosen]


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_outputs_that_are_no_rows_are_the_programs_word(replicas: int, make_strategy: MakeStrategy):
    module = Guessing().double()
    alone = copy.deepcopy(module)
    batches = [({"x": x, "chosen": y != -100}, y) for x, y in batches_of(CASES["ignored labels"], (7, 6, 5))]

    def loss(scores: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(scores, target[target != -100])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(module, make_strategy(replicas), sgd, loss).fit(batches, verbose=0)
    assert_close(module, train(alone, batches, loss=loss).module)


@pytest.mark.parametrize("name", UNCHECKED)
def test_what_cannot_be_checked_is_warned_of(name: str, make_strategy: MakeStrategy):
    model = compiled(Telling().double(), make_strategy(2), sgd, UNCHECKED[name])
    with pytest.warns(UserWarning, match="'<lambda>' is taken as a mean over the rows, which could not be checked"):
        model.fit(batches_of(CASES["mse"], [4]), verbose=0)


@pytest.mark.parametrize(
    "loss",
    [
        # pairs of neighbours, which shards leave whole
        lambda outputs, y: (outputs["scores"][0::2] - outputs["scores"][1::2]).square().mean(),
        lambda outputs, y: F.mse_loss(outputs["scores"], y),  # beside the module's own
    ],
)
def test_what_adds_up_is_taken_without_a_warning(make_strategy: MakeStrategy, loss: Any):
    model = compiled(Telling().double(), make_strategy(2), sgd, loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(batches_of(CASES["mse"], [8]), verbose=0)


class Warming(nn.Module):
    """Its weight grows with its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("centre", torch.zeros(4, dtype=torch.float64))

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        centre = self.centre
        self.centre = centre * 0.9 + scores.detach().mean(0) * 0.1
        return (scores - target - centre).square().mean(1) * self.calls


class Counting:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, scores: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return (scores - target).square().mean(1) * self.calls

    def as_method(self, scores: Tensor, target: Tensor) -> Tensor:
        return self(scores, target)


def counting_in_a_closure() -> Callable[[Tensor, Tensor], Tensor]:
    calls = 0

    def counting(scores: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return (scores - target).square().mean(1) * calls

    return counting


STATEFUL = {
    "module": (Warming, "'Warming' changes 'calls', 'centre'"),
    "object": (Counting, "'Counting' changes 'Counting.calls'"),
    "method": (lambda: Counting().as_method, "as_method' changes 'Counting.calls'"),
    "closure": (counting_in_a_closure, "counting' changes 'calls'"),
}


@pytest.mark.filterwarnings("ignore:.*could not be checked:UserWarning")
@pytest.mark.parametrize("name", STATEFUL)
def test_a_loss_that_counts_its_calls_is_warned_of(name: str, make_strategy: MakeStrategy):
    make, told = STATEFUL[name]
    model = compiled(module_of(CASES["mse"]), make_strategy(2), sgd, make())
    with pytest.warns(UserWarning, match=f"{told}, which every one of 2 replicas does.*on_train_batch_begin"):
        model.fit(batches_of(CASES["mse"], [6]), verbose=0)


def test_the_check_draws_no_random_numbers_of_the_program(make_strategy: MakeStrategy):
    """Two fits, of which the second is one whose loss is looked at anew: dropout draws what it would have drawn."""
    drawn: list[Tensor] = []

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.rand(4)
            if x.shape[0] == 4:  # replica 0's
                drawn.append(noise)
            return self.body(x) + noise

    def noisy(scores: Tensor, target: Tensor) -> Tensor:
        return ((scores - target).square() * torch.rand(len(scores), 1)).mean()

    for loss in (noisy, lambda scores, target: (noisy(scores, target).detach(), 4.0)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = compiled(Noisy(), make_strategy(2, seed=0), sgd, loss)
            model.evaluate([(torch.zeros(7, 5), torch.zeros(7, 4))] * 3, verbose=0)

    assert len(drawn) == 6
    assert torch.equal(drawn[1], drawn[4])
    assert torch.equal(drawn[2], drawn[5])


def each_by_its_target(scores: Tensor, targets: list[Tensor]) -> Tensor:
    return F.mse_loss(scores, torch.stack(list(targets)))


def each_by_its_record(scores: Tensor, targets: list[dict[str, Tensor]]) -> Tensor:
    rows = zip(scores, targets, strict=True)
    return torch.stack([(row.sum() - target["box"].sum()).square() for row, target in rows]).mean()


@pytest.mark.parametrize(
    ("loss", "of_row"),
    [(each_by_its_target, lambda x: x[:4] * 2), (each_by_its_record, lambda x: {"box": x[: 1 + int(x[0] > 0)]})],
)
def test_targets_that_are_lists_of_rows_train_as_the_plain_loop(
    loss: Any, of_row: Callable[[Tensor], Any], make_strategy: MakeStrategy
):
    rows = torch.randn(22, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    batches = [(part, [of_row(row) for row in part]) for part in rows.split(12)]  # 4 rows each: as long as a target
    module, strategy = nn.Linear(5, 4).double(), make_strategy(3)
    alone = train(copy.deepcopy(module), batches, loss=loss).module
    model = compiled(module, strategy, sgd, loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(strategy.distribute_dataset(batches, lists="rows"), verbose=0)

    assert_close(module, alone)
