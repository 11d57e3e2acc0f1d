from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lockstep_tools.recipes.mlm.batches import IGNORED_LABEL, NO_POSITION, MaskedRows, mask_tokens, masked_counts
from lockstep_tools.recipes.mlm.config import MlmConfig

MASK_ID = 4
ORDINARY = torch.arange(5, 1000)


def rows_of(lengths: list[int], width: int) -> tuple[Tensor, Tensor]:
    """Rows [CLS] tokens [SEP] padding, and what of them may be predicted."""
    lens = torch.tensor(lengths)[:, None]
    places = torch.arange(width).expand(len(lengths), width)
    eligible = (places > 0) & (places <= lens)
    tokens = torch.randint(5, 1000, (len(lengths), width), generator=torch.Generator().manual_seed(1))
    tokens = torch.where(eligible, tokens, torch.where(places == 0, 2, torch.where(places == lens + 1, 3, 0)))
    return tokens, eligible


def masked(tokens: Tensor, eligible: Tensor, *, config: MlmConfig | None = None, seed: int = 0) -> MaskedRows:
    return mask_tokens(
        tokens,
        eligible,
        config or MlmConfig(),
        mask_id=MASK_ID,
        ordinary_ids=ORDINARY,
        generator=torch.Generator().manual_seed(seed),
    )


def test_each_row_has_the_number_of_masked_tokens_that_bert_gives_it():
    lengths = list(range(1, 700))
    expected = [min(96, max(1, round(length * 0.15))) for length in lengths]
    tokens, eligible = rows_of(lengths, 701)
    assert masked_counts(torch.tensor(lengths), MlmConfig()).tolist() == expected
    assert (masked(tokens, eligible).positions != NO_POSITION).sum(dim=1).tolist() == expected


def test_the_number_is_capped_and_never_above_the_tokens_there_are():
    config = MlmConfig(mask_fraction=0.9, max_masked=5)
    assert masked_counts(torch.tensor([0, 1, 4, 100]), config).tolist() == [0, 1, 4, 5]


def test_only_eligible_tokens_are_chosen_each_once_in_ascending_order():
    tokens, eligible = rows_of([1, 5, 40, 62, 0], 64)

    result = masked(tokens, eligible, config=MlmConfig(mask_fraction=0.6))

    for row in range(5):
        chosen = result.positions[row][result.positions[row] != NO_POSITION]
        assert eligible[row][chosen].all()
        assert (chosen.diff() > 0).all()
        assert (result.positions[row][len(chosen) :] == NO_POSITION).all()
        assert torch.equal(result.labels[row][: len(chosen)], tokens[row][chosen])
        assert (result.labels[row][len(chosen) :] == IGNORED_LABEL).all()


def test_all_other_tokens_stay_as_they_are():
    tokens, eligible = rows_of([30, 3, 11], 32)
    before = tokens.clone()
    result = masked(tokens, eligible)
    untouched = torch.ones_like(tokens, dtype=torch.bool)
    for row, positions in enumerate(result.positions):
        untouched[row, positions[positions != NO_POSITION]] = False
    assert torch.equal(result.input_ids[untouched], tokens[untouched])
    assert torch.equal(tokens, before)


def test_of_the_chosen_80_percent_are_masked_10_random_10_kept():
    tokens, eligible = rows_of([500] * 256, 502)

    result = masked(tokens, eligible)
    shown = result.input_ids.gather(1, result.positions.clamp(min=0))[result.positions != NO_POSITION]
    labels = result.labels[result.labels != IGNORED_LABEL]

    share = {
        "masked": (shown == MASK_ID).double().mean().item(),
        "kept": (shown == labels).double().mean().item(),
        "random": ((shown != MASK_ID) & (shown != labels)).double().mean().item(),
    }
    assert share == pytest.approx({"masked": 0.8, "kept": 0.1, "random": 0.1}, abs=0.01)  # 19,200 draws: sigma 0.003
    assert torch.isin(shown[shown != MASK_ID], ORDINARY).all()


def test_every_eligible_position_is_equally_likely():
    tokens, eligible = rows_of([20] * 20_000, 22)
    positions = masked(tokens, eligible).positions
    frequencies = torch.bincount(positions.flatten(), minlength=22)[1:21] / 20_000
    assert torch.allclose(frequencies, torch.tensor(3 / 20), atol=0.012)


def test_the_generator_alone_decides():
    tokens, eligible = rows_of([50] * 8, 64)
    first, again, other = (masked(tokens, eligible, seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.positions, other.positions)
    state = torch.get_rng_state()
    masked(tokens, eligible)
    assert torch.equal(torch.get_rng_state(), state)


def test_no_rows_and_rows_without_tokens_have_nothing_masked():
    nothing = masked(*rows_of([], 8))
    special_only = masked(*rows_of([0, 0], 8))
    assert nothing.positions.shape == (0, 0)
    assert special_only.labels.shape == (2, 0)
