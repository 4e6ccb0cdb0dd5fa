"""KL to a reference: what each estimator's value and gradient are, where it enters, and how its coefficient moves."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from plain import VOCAB_SIZE, hf_logprobs, worst_error
from processes import run_ranks
from tiny import random_trajectories, write_model

from nemo_flashrl.algorithms import grpo_loss
from nemo_flashrl.algorithms.grpo import Grpo
from nemo_flashrl.algorithms.kl import ESTIMATORS, WithKl, kl_estimate
from nemo_flashrl.algorithms.schedules import KlCoefficient
from nemo_flashrl.callbacks.kl_penalty import KLPenaltyCallback
from nemo_flashrl.config import load
from nemo_flashrl.preflight.prepare import with_reference

POLICY = torch.tensor([0.5, -0.2, 0.1, -1.0], dtype=torch.float64)  # logits of four tokens
REFERENCE = torch.log_softmax(torch.tensor([-0.3, 0.4, 0.0, 0.2], dtype=torch.float64), 0)


def expected_gradient(estimator: str) -> torch.Tensor:
    """sum_x p(x) * derivative(x) * d logp(x) / d logits: what infinitely many samples of the policy give."""
    logits = POLICY.clone().requires_grad_()
    logprobs = torch.log_softmax(logits, 0)
    _, slope = kl_estimate(estimator, logprobs.detach(), REFERENCE)
    ((logprobs.detach().exp() * slope) * logprobs).sum().backward()
    return logits.grad


def gradient_of(divergence) -> torch.Tensor:
    logits = POLICY.clone().requires_grad_()
    divergence(torch.log_softmax(logits, 0)).backward()
    return logits.grad


def test_gradients_in_expectation() -> None:
    forward = gradient_of(lambda logp: (logp.exp() * (logp - REFERENCE)).sum())  # KL(policy || reference)
    reverse = gradient_of(lambda logp: (REFERENCE.exp() * (REFERENCE - logp)).sum())  # KL(reference || policy)
    torch.testing.assert_close(expected_gradient("k2"), forward, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(expected_gradient("k3"), reverse, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(expected_gradient("k1"), torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-15)
    assert (forward - reverse).norm() > 0.1 * forward.norm()  # k3 for k2 would show


def test_values_in_expectation() -> None:
    logprobs = torch.log_softmax(POLICY, 0)
    divergence = float((logprobs.exp() * (logprobs - REFERENCE)).sum())
    means = {e: float((logprobs.exp() * kl_estimate(e, logprobs, REFERENCE)[0]).sum()) for e in ESTIMATORS}
    assert means["k1"] == pytest.approx(divergence, rel=1e-12)
    assert means["k3"] == pytest.approx(divergence, rel=1e-12)
    assert abs(means["k2"] - divergence) > 0.01 * divergence  # biased in value, right in gradient
    assert (kl_estimate("k3", logprobs, REFERENCE)[0] >= 0).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_derivative_is_that_of_the_value(estimator) -> None:
    logprobs = torch.tensor([-2.0, -0.5, -7.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0, -0.5, -9.0], dtype=torch.float64)
    value, slope = kl_estimate(estimator, logprobs, reference)
    (right,) = torch.autograd.grad(value.sum(), logprobs)
    torch.testing.assert_close(slope, right, rtol=1e-12, atol=1e-15)


def test_coefficients() -> None:
    annealed = KlCoefficient(0.01, schedule="annealed", steps=101)
    values = []
    for _ in range(101):
        values.append(annealed.value)
        annealed.after_step()
    assert values[:11] == [0.01] * 11  # a tenth of 101 steps
    assert values[-1] == pytest.approx(0.002)
    middle = 10.1 + (100 - 10.1) / 2  # half way the coefficient is half way: 0.006
    assert values[55] == pytest.approx(0.006 + (middle - 55) * 0.008 / 89.9)
    adaptive = KlCoefficient(0.1, schedule="adaptive", steps=9, target=0.05)
    adaptive.after_step(kl=1.0)  # far above: +2% at most
    assert adaptive.value == pytest.approx(0.102)
    adaptive.after_step(kl=0.045)  # 10% under: -1%
    assert adaptive.value == pytest.approx(0.102 * 0.99)
    adaptive.after_step()  # unknown
    assert adaptive.value == pytest.approx(0.102 * 0.99)
    floor = KlCoefficient(0.1, schedule="entropy", steps=9, entropy_floor=0.5)
    for entropy, right in ((0.4, 0.11), (0.1, 0.121), (0.6, 0.11), (0.9, 0.1), (0.9, 0.1)):
        floor.after_step(entropy=entropy)
        assert floor.value == pytest.approx(right)
    for _ in range(60):
        floor.after_step(entropy=0.0)
    assert floor.value == pytest.approx(1.0)
    falling = KlCoefficient(0.1, schedule="entropy", steps=99, entropy_floor=0.0, entropy_fall=0.3)
    slow = KlCoefficient(0.1, schedule="entropy", steps=99, entropy_floor=0.0, entropy_fall=0.5)
    # Step 11 is the first with one 10 steps before: 1.3 is under 0.7 x 2, 1.4 is not. Step 21 is held to 1.3.
    for entropy in [2.0] * 10 + [1.3, 1.3, 1.4] + [1.3] * 7 + [1.3]:
        falling.after_step(entropy=entropy)
        slow.after_step(entropy=entropy)
    assert slow.value == 0.1
    assert falling.value == pytest.approx(0.1 * 1.1 ** (2 - 1 + 7 - 1))


@pytest.mark.parametrize(
    ("schedule", "value"), [("fixed", 0.1), ("annealed", None), ("adaptive", None), ("entropy", 0.121)]
)
def test_coefficient_goes_on_where_it_was(schedule, value) -> None:
    """`entropy`: of 3, 2.9, ... 1.9 the last two are under 0.7 x 3 and 0.7 x 2.9, which came before the resume."""

    def new():
        return KlCoefficient(0.1, schedule=schedule, steps=20, target=0.05, entropy_floor=0.5)

    straight = new()
    for step in range(12):
        straight.after_step(kl=0.01 * step, entropy=3 - 0.1 * step)
        if step == 5:
            resumed, state = new(), straight.state_dict()
            resumed.load_state_dict(state)
        elif step > 5:
            resumed.after_step(kl=0.01 * step, entropy=3 - 0.1 * step)
    assert (resumed.value, resumed.step) == (straight.value, 12)
    assert value is None or resumed.value == pytest.approx(value)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"kl.schedule='linear': must be one of fixed, annealed, adaptive, entropy"):
        KlCoefficient(0.1, schedule="linear", steps=1)
    with pytest.raises(ValueError, match=r"kl.estimator='k4'"):
        WithKl(object(), "k4")


def configured(*overrides: str):
    return load("rehearsal", ["output=unused", "model.path=unused", *overrides])


def test_what_is_asked_of_a_reference() -> None:
    assert isinstance(with_reference(configured(), Grpo()), Grpo)
    only_evaluated = configured("reference.mode=frozen", "reference.evaluate=true")
    assert isinstance(with_reference(only_evaluated, Grpo()), WithKl)
    k1 = configured("reference.mode=frozen", "kl.coefficient=0.1", "kl.estimator=k1")
    with pytest.warns(UserWarning, match="kl.estimator=k1 in the loss has a gradient of mean zero"):
        with_reference(k1, Grpo())
    with pytest.raises(ValueError, match="algorithm.name='flash_reinforce' needs a reference policy"):
        with_reference(configured(), WithKl(Grpo()))


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Two checkpoints and three groups of four trajectories sampled near the policy."""
    from transformers import AutoModelForCausalLM

    root = tmp_path_factory.mktemp("kl")
    folders = [write_model(root / str(seed), vocab_size=VOCAB_SIZE, seed=seed) for seed in (0, 1)]
    options = {"dtype": torch.float64, "attn_implementation": "eager"}
    models = [AutoModelForCausalLM.from_pretrained(folder, **options) for folder in folders]
    with torch.no_grad():  # a few nats apart, as policies are
        for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
            ours.copy_((theirs + 0.02 * (ours - theirs)).float())
    models[1].float().save_pretrained(folders[1])
    models[1].double()
    trajectories = random_trajectories(12, VOCAB_SIZE, seed=3, group_size=4)
    rng = np.random.default_rng(5)
    for trajectory in trajectories:
        with torch.no_grad():
            logprobs = np.concatenate([[0.0], hf_logprobs(models[1], trajectory).numpy()])
        noisy = np.minimum(logprobs + rng.normal(0, 0.3, len(logprobs)), -1e-3)
        trajectory.behavior_logprobs[:] = np.where(trajectory.action_mask, noisy, 0)
    (root / "trajectories.pkl").write_bytes(pickle.dumps(trajectories))
    return root, folders, models, trajectories


def plain(models, trajectories, *, coefficient: float, penalty: float = 0.0):
    """(loss, gradients, mean k3, mean penalty) in float64, by the public function."""
    length = max(len(t.token_ids) for t in trajectories) - 1
    table = torch.zeros(3, len(trajectories), length, dtype=torch.float64)  # policy, reference, sampler
    mask = torch.zeros(table.shape[1:], dtype=torch.bool)
    rows = []
    for i, t in enumerate(trajectories):
        own = len(t.token_ids) - 1
        rows.append(torch.nn.functional.pad(hf_logprobs(models[1], t), (0, length - own)))
        with torch.no_grad():
            table[1, i, :own] = hf_logprobs(models[0], t)
        table[2, i, :own] = torch.from_numpy(t.behavior_logprobs[1:])
        mask[i, :own] = torch.from_numpy(t.action_mask[1:])
    logprobs = torch.stack(rows)
    k3 = (table[1] - logprobs).exp() - 1 - (table[1] - logprobs)
    k3 = torch.where(mask, k3, 0).detach()
    rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
    penalties = penalty * k3.sum(1) / mask.sum(1)
    groups = torch.tensor([t.group for t in trajectories])
    models[1].zero_grad()
    loss, _ = grpo_loss(
        logprobs, table[2], rewards - penalties, mask, groups, reference_logprobs=table[1], kl_coefficient=coefficient
    )
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in models[1].named_parameters()}
    return loss.item(), gradients, float(k3.sum() / mask.sum()), float(penalties.mean())


TP2_PP2 = ["parallel.tensor=2", "parallel.pipeline=2", "batching.max_tokens_per_microbatch=180"]


@pytest.mark.parametrize(
    ("processes", "place", "layout"),
    [(4, "loss", TP2_PP2), (2, "reward", ["parallel.pipeline=2", "batching.layout=padded"]), (2, "reward", [])],
)
def test_a_step_is_that_of_plain_float64(case, processes, place, layout) -> None:
    """(2, "reward", []) is data parallel: the penalties of both ranks form the advantages of a group."""
    root, folders, models, trajectories = case
    out = root / f"{place}_{processes}_{len(layout)}.pt"
    overrides = ["reference.mode=frozen", "kl.coefficient=0.3", f"kl.place={place}", "reference.evaluate=true", *layout]
    if place == "loss":
        overrides.append("kl.schedule=entropy")
    run_ranks(processes, "kl", *folders, root / "trajectories.pkl", out, VOCAB_SIZE, *overrides)
    step = torch.load(out)
    coefficients = {"coefficient": 0.3} if place == "loss" else {"coefficient": 0.0, "penalty": 0.3}
    loss, gradients, divergence, penalty = plain(models, trajectories, **coefficients)
    captured = step["gradients"]
    assert step["stats"]["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
    assert worst_error(captured["gradients"], gradients) < (2e-5,)
    assert step["stats"]["kl"] / step["stats"]["policy_tokens"] == pytest.approx(divergence, rel=1e-4)
    assert captured["metrics"]["beta"] == 0.3
    if place == "loss":
        assert 0 < step["stats"]["entropy"] / step["stats"]["policy_tokens"] < math.log(VOCAB_SIZE)
    else:
        assert captured["metrics"]["kl_penalty"] == pytest.approx(penalty, rel=1e-4)
    _, wrong, *_ = plain(models, trajectories, coefficient=0.0)  # without the KL
    assert worst_error(wrong, gradients) > (5e-3,)
    assert math.isfinite(captured["metrics"]["reference_entropy"])


def test_a_step_without_tokens_moves_no_coefficient() -> None:
    """A KL of 0 over no token would lower an adaptive coefficient."""
    callback = KLPenaltyCallback(KlCoefficient(0.1, schedule="adaptive", steps=4), place="loss", estimator="k3")
    callback.on_megatron_reduce_microbatches_end({"policy_tokens": torch.tensor(0.0), "kl": torch.tensor(0.0)})
    assert all(map(math.isnan, callback._means))
    callback.on_megatron_reduce_microbatches_end({"policy_tokens": torch.tensor(4.0), "kl": torch.tensor(1.0)})
    assert callback._means[0] == 0.25
