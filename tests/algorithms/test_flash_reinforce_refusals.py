"""What FlashREINFORCE refuses, and that the message names it."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_flashrl.algorithms import flash_reinforce_loss
from nemo_flashrl.algorithms.algorithm import TokenBatch
from nemo_flashrl.algorithms.flash_reinforce import FlashReinforce, FlashReinforceSettings

NAN, INF = math.nan, math.inf


def arguments():
    logprobs = torch.full((3, 4), -1.0)
    return {
        "logprobs": logprobs,
        "behavior_logprobs": logprobs.clone(),
        "rewards": torch.tensor([0.0, 1.0, 0.5]),
        "action_mask": torch.ones(3, 4, dtype=torch.bool),
    }


@pytest.mark.parametrize("name", ["logprobs", "behavior_logprobs"])
@pytest.mark.parametrize("value", [NAN, INF, -INF, 0.5, 1e-4])
def test_refuses_impossible_logprobs(name, value):
    given = arguments()
    given[name][1, 2] = value
    with pytest.raises(ValueError, match=rf"^{name} must be finite and at most 0 .*rows \[1\] have \["):
        flash_reinforce_loss(**given)
    given["action_mask"][1, 2] = False
    flash_reinforce_loss(**given)


@pytest.mark.parametrize("name", ["logprobs", "behavior_logprobs"])
def test_rounding_above_zero_is_probability_one(name):
    # logit - logsumexp(logits) of a certain token: 100 + 8e-6 - 100 in float32.
    given = arguments()
    given["logprobs"][:], given["behavior_logprobs"][:] = -1e-7, -1e-7
    given[name][1, 2] = 8e-6
    _, stats = flash_reinforce_loss(**given, delta=0.003)
    assert stats["admitted"].all()
    assert (stats["sequence_kl"] == 0).all()


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_refuses_rewards_that_are_not_finite(value):
    given = arguments()
    given["rewards"][2] = value
    with pytest.raises(ValueError, match=r"rewards must be finite; trajectories \[2\]"):
        flash_reinforce_loss(**given)


def test_refuses_empty_trajectories_and_batches():
    given = arguments()
    given["action_mask"][1] = False
    with pytest.raises(ValueError, match=r"trajectories \[1\] have no action token"):
        flash_reinforce_loss(**given)
    with pytest.raises(ValueError, match="at least one trajectory"):
        flash_reinforce_loss(torch.zeros(0, 4), torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, 4, dtype=torch.bool))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"delta": NAN}, r"delta = nan: must be a number from 0 to inf"),
        ({"delta": -1e-9}, r"delta = -1e-09"),
        ({"delta": "3e-3"}, r"delta = '3e-3': must be a number"),
        ({"delta": True}, r"delta = True"),
        ({"negative_token_fraction": 1.5}, r"negative_token_fraction = 1.5: must be a number from 0 to 1"),
        ({"negative_token_fraction": NAN}, r"negative_token_fraction = nan"),
        ({"ratio_guard": NAN}, r"ratio_guard = nan"),
        ({"ratio_guard": -20.0}, r"ratio_guard = -20.0"),
    ],
)
def test_refuses_settings(settings, words):
    with pytest.raises(ValueError, match=words):
        FlashReinforceSettings(**settings)
    if "ratio_guard" not in settings:
        with pytest.raises(ValueError, match=words):
            flash_reinforce_loss(**arguments(), **settings)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"logprobs": torch.full((12,), -1.0)}, r"logprobs must be \[B, T\]"),
        ({"behavior_logprobs": torch.full((3, 1), -1.0)}, r"behavior_logprobs must be \[B, T\] = \(3, 4\)"),
        ({"rewards": torch.zeros(3, 1)}, r"rewards must be \[B\] = \(3,\), got shape \(3, 1\)"),
        ({"action_mask": torch.ones(3, 4)}, "action_mask must be bool"),
        ({"failures": torch.ones(3)}, "failures must be bool"),
        ({"failures": torch.ones(2, dtype=torch.bool)}, r"failures must be \[B\]"),
        ({"entropies": torch.ones(3)}, r"entropies must be \[B, T\]"),
    ],
)
def test_refuses_shapes_and_dtypes(changes, words):
    with pytest.raises(ValueError, match=words):
        flash_reinforce_loss(**(arguments() | changes))


def test_filter_refuses_what_it_cannot_rank():
    given = arguments() | {"negative_token_fraction": 0.5}
    failures = torch.ones(3, dtype=torch.bool)
    with pytest.raises(ValueError, match="negative_token_fraction = 0.5 needs `failures`"):
        flash_reinforce_loss(**given, entropies=torch.ones(3, 4))
    with pytest.raises(ValueError, match="negative_token_fraction = 0.5 needs the tokens' entropies"):
        flash_reinforce_loss(**given, failures=failures)
    entropies = torch.ones(3, 4)
    entropies[0, 3] = NAN
    with pytest.raises(ValueError, match=r"entropies must be finite on action tokens; rows \[0\] have \[nan\]"):
        flash_reinforce_loss(**given, failures=failures, entropies=entropies)


@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize("fraction", [1.0, 0.2])
def test_a_microbatch_of_padding_has_complete_statistics(tokens, fraction):
    algorithm = FlashReinforce(FlashReinforceSettings(negative_token_fraction=fraction))
    rubbish = torch.full((tokens,), NAN)
    batch = TokenBatch(
        behavior_logprobs=rubbish,
        action_mask=torch.zeros(tokens, dtype=torch.bool),
        row=torch.zeros(tokens, dtype=torch.int64),
        advantages=torch.zeros(1),
        token_weights=torch.zeros(1),
        failures=torch.ones(1, dtype=torch.bool),
        entropies=rubbish,
    )
    gate = algorithm.gate(rubbish, batch)
    assert set(gate.stats) == {
        "rows", "admitted", "guarded", "sequence_kl", "ratio", "ratio_max", "policy_tokens", "admitted_tokens",
        "retained_tokens", "extreme_tokens", "logprob_difference", "logprob_difference_max",
    }  # fmt: skip
    assert all(value.item() == 0 and value.dtype == torch.float32 and value.ndim == 0 for value in gate.stats.values())
    value, derivative = algorithm.token_loss(rubbish, batch, gate.keep, slice(0, tokens))
    assert value.tolist() == derivative.tolist() == [0] * tokens


def test_declares_what_it_needs():
    assert FlashReinforce.Settings is FlashReinforceSettings
    assert not FlashReinforce().needs_entropy
    assert FlashReinforce(FlashReinforceSettings(negative_token_fraction=0.5)).needs_entropy
    assert (FlashReinforce().needs_reference, FlashReinforce().group_size) == (False, 1)
