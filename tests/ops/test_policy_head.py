"""The fused output layer on one rank, against plain formulas over full logits in float64.

What fp32 can hold: a logit of size |z| carries a rounding error of |z| 2^-24, log-prob and gradient with it.
Errors of log-probs are relative to max(1, |logp|), of gradients in the norm, for logits up to 3 and for logits up to 80
that fp32 holds exactly. Peaked logits that it does not hold are compared with what plain fp32 makes of them.
"""

from __future__ import annotations

import re

import pytest
import torch
from accelerator import TORCHES, act_as_accelerator
from paths import ROOT
from plain_policy_head import linear_logprob, linear_policy_loss
from torch import Tensor

from nemo_flashrl.ops import fused_linear_gated_policy_loss, fused_linear_logprob, fused_linear_policy_loss

SIZES = [  # T, H, rows of the weight, true vocabulary, chunk
    (0, 8, 16, 16, 4),
    (1, 3, 7, 7, 4),
    (31, 16, 128, 101, 32),
    (32, 16, 128, 101, 32),
    (33, 16, 128, 101, 32),
    (97, 61, 509, 509, 40),
    (29, 24, 300, 300, 1),
    (61, 32, 640, 515, 1000),
]
WAYS = ["logprob", "single", "recomputed", "held", "given"]


def relative(actual: Tensor, expected: Tensor) -> float:
    size = expected.double().norm()
    return float((actual.double() - expected.double()).norm() / size) if size > 0 else float(actual.double().norm())


def problem(size, dtype, seed: int, peak: float = 3.0) -> dict[str, Tensor]:
    """Inputs whose largest logit is about `peak`; a third of the coefficients are 0, and not all targets are likely."""
    tokens, width, rows, vocab_size, _ = size
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    logits = hidden @ weight[:vocab_size].t()
    weight *= peak / logits.abs().max() if tokens else 1
    likely = logits.argmax(1) if tokens else torch.zeros(0, dtype=torch.int64)
    targets = torch.randint(vocab_size, (tokens,), generator=generator)
    coefficient = torch.randn(tokens, generator=generator, dtype=torch.float64)
    coefficient[torch.rand(tokens, generator=generator) < 1 / 3] = 0
    return {
        "hidden": hidden.to(dtype),
        "weight": weight.to(dtype),
        "targets": torch.where(torch.rand(tokens, generator=generator) < 0.5, likely, targets),
        "coefficient": coefficient,
        "entropy_weight": 0.1 * torch.randn(tokens, generator=generator, dtype=torch.float64),
    }


def linear_loss(coefficient: Tensor):
    def loss(logprobs: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
        derivative = coefficient[tokens].to(logprobs.dtype)
        return torch.where(derivative != 0, derivative * logprobs, 0), derivative

    return loss


def run(way: str, inputs: dict[str, Tensor], *, entropy: bool, vocab_size, temperature=1.0, chunk_tokens, **more):
    """(loss, log-probs, gradients of hidden and weight) of sum(coefficient * logp + entropy_weight * entropy)."""
    hidden, weight = (inputs[name].clone().requires_grad_() for name in ("hidden", "weight"))
    coefficient, targets = inputs["coefficient"], inputs["targets"]
    settings = {"vocab_size": vocab_size, "temperature": temperature, "chunk_tokens": chunk_tokens, **more}
    slope = inputs["entropy_weight"].to(weight.dtype if weight.dtype == torch.float64 else torch.float32)
    slope = torch.where(coefficient != 0, slope, 0)
    loss = linear_loss(coefficient)
    if way == "logprob":
        result = fused_linear_logprob(hidden, weight, targets, return_entropy=entropy, **settings)
        logprobs, entropies = result if entropy else (result, None)
        live = coefficient != 0
        total = torch.where(live, coefficient.to(logprobs.dtype) * logprobs, 0).sum()
        total = total + (torch.where(live, slope * entropies, 0).sum() if entropy else 0)
    elif way == "single":
        total, logprobs = fused_linear_policy_loss(
            hidden, weight, targets, loss, entropy_weight=slope if entropy else None, **settings
        )
    else:
        if way == "given":
            with torch.no_grad():
                given = fused_linear_logprob(hidden, weight, targets, return_entropy=True, **settings)
            settings |= {"logprobs": given[0], "entropies": given[1]}
        settings["logits_budget_bytes"] = 2**30 if way == "held" else 0
        total, logprobs = fused_linear_gated_policy_loss(
            hidden,
            weight,
            targets,
            lambda logprobs, entropies: coefficient != 0,
            lambda logprobs, keep, tokens: loss(logprobs, tokens),
            entropy_weight=slope if entropy else None,
            **settings,
        )
    total.backward()
    return total.detach(), logprobs.detach(), hidden.grad, weight.grad


def expected(inputs: dict[str, Tensor], *, entropy: bool, vocab_size, temperature=1.0, dtype=torch.float64):
    hidden, weight = (inputs[name].to(dtype, copy=True).requires_grad_() for name in ("hidden", "weight"))
    slope = torch.where(inputs["coefficient"] != 0, inputs["entropy_weight"], 0)
    total, logprobs = linear_policy_loss(
        hidden,
        weight,
        inputs["targets"],
        linear_loss(inputs["coefficient"]),
        vocab_size=vocab_size,
        temperature=temperature,
        entropy_weight=slope if entropy else None,
    )
    total.backward()
    return total.detach(), logprobs, hidden.grad, weight.grad


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_float64_and_float32_match_full_logits(size, way, entropy):
    for seed, temperature in enumerate((0.5, 1.0, 2.0)):
        for dtype, logprob_bound, gradient_bound in ((torch.float64, 1e-14, 2e-14), (torch.float32, 2e-6, 1e-6)):
            inputs = problem(size, dtype, seed)
            settings = {"entropy": entropy, "vocab_size": size[3], "temperature": temperature}
            total, logprobs, grad_hidden, grad_weight = run(way, inputs, chunk_tokens=size[4], **settings)
            right = expected(inputs, **settings)
            scale = right[1].abs().clamp(min=1)
            assert ((logprobs - right[1]).abs() <= logprob_bound * scale).all()
            assert (logprobs <= 0).all()
            assert abs(total - right[0]) <= logprob_bound * (1 + scale.sum())
            assert relative(grad_hidden, right[2]) <= gradient_bound
            assert relative(grad_weight, right[3]) <= gradient_bound
            assert not grad_weight[size[3] :].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_each_token_has_the_temperature_that_it_was_sampled_at(way, entropy, dtype):
    size = (61, 32, 640, 515, 16)
    inputs = problem(size, dtype, 3)
    temperature = torch.where(torch.arange(61) < 20, 1.0, 0.85).double()
    settings = {"entropy": entropy, "vocab_size": 515}
    actual = run(way, inputs, chunk_tokens=16, temperature=temperature, **settings)
    right = expected(inputs, temperature=temperature, **settings)
    bound = 1e-14 if dtype == torch.float64 else 2e-6
    assert ((actual[1] - right[1]).abs() <= bound * right[1].abs().clamp(min=1)).all()
    assert all(
        relative(a, b) <= (2e-14 if dtype == torch.float64 else 2**-8)
        for a, b in zip(actual[2:], right[2:], strict=True)
    )
    for old in (1.0, 0.85):  # one for all is wrong on the other part
        wrong = expected(inputs, temperature=old, **settings)
        assert (wrong[1] - right[1]).abs().max() > 0.05 and relative(wrong[3], right[3]) > 0.02


def test_a_temperature_of_each_token_is_checked():
    inputs = problem((5, 8, 16, 16, 4), torch.float32, 0)
    for wrong in (torch.ones(4), torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]), torch.ones(5, dtype=torch.int64)):
        with pytest.raises(ValueError, match="temperature has shape .* give 5 finite numbers above 0"):
            run("logprob", inputs, entropy=False, vocab_size=16, chunk_tokens=4, temperature=wrong)


@pytest.mark.parametrize("way", WAYS)
def test_logits_of_80_that_fp32_holds_exactly(way):
    # Eighths up to 80: every logit is exact, so the errors are the operation's own. Rows are one peak, a tie, or flat.
    generator = torch.Generator().manual_seed(3)
    tokens, vocab_size = 60, 331
    hidden = torch.eye(tokens, dtype=torch.float32)
    weight = torch.randint(-640, 641, (vocab_size, tokens), generator=generator).float() / 8
    weight[:, :20] = weight[:, :20].clamp(max=40)
    weight[torch.arange(20), torch.arange(20)] = 80  # p = 1 - e^-40 on the target
    weight[:, 20:30] = -80  # flat
    weight[[7, 9], 30:40] = 80  # a tie
    targets = torch.randint(vocab_size, (tokens,), generator=generator)
    targets[:20] = torch.arange(20)
    targets[30:40] = 9
    inputs = {
        "hidden": hidden,
        "weight": weight,
        "targets": targets,
        "coefficient": torch.randn(tokens, generator=generator, dtype=torch.float64),
        "entropy_weight": torch.randn(tokens, generator=generator, dtype=torch.float64),
    }
    for entropy in (False, True):
        _, logprobs, grad_hidden, grad_weight = run(
            way, inputs, entropy=entropy, vocab_size=vocab_size, chunk_tokens=16
        )
        right = expected(inputs, entropy=entropy, vocab_size=vocab_size)
        assert ((logprobs - right[1]).abs() <= 2e-6 * right[1].abs().clamp(min=1)).all()
        assert relative(grad_hidden, right[2]) <= 1e-6
        assert relative(grad_weight, right[3]) <= 1e-6


def test_large_logits_that_need_no_shift():
    # Up to 45 in eighths, exact in fp32: log p = z_y - log s is then a small difference of two large numbers.
    generator = torch.Generator().manual_seed(4)
    weight = torch.randint(200, 321, (50, 400), generator=generator).float() / 8
    targets = torch.where(torch.arange(400) % 2 == 0, weight.argmax(0), torch.randint(50, (400,), generator=generator))
    sure = torch.arange(0, 400, 4)
    weight[targets[sure], sure] = 25 + sure / 32
    weight[:, sure] -= torch.where(torch.arange(50)[:, None] == targets[sure], 0, 20)
    logprobs = fused_linear_logprob(torch.eye(400), weight, targets)
    right, _ = linear_logprob(torch.eye(400).double(), weight.double(), targets)
    assert ((logprobs - right).abs() <= 5e-7 * right.abs().clamp(min=1)).all()
    assert (logprobs <= 0).all()


@pytest.mark.parametrize("way", WAYS)
def test_peaked_logits_are_as_exact_as_plain_fp32(way):
    worst = {"fused": 0.0, "plain": 0.0}
    for seed in range(8):
        inputs = problem(SIZES[5], torch.float32, seed, peak=80)
        right = expected(inputs, entropy=False, vocab_size=509)
        _, logprobs, *gradients = run(way, inputs, entropy=False, vocab_size=509, chunk_tokens=40)
        plain = expected(inputs, entropy=False, vocab_size=509, dtype=torch.float32)
        largest = (inputs["hidden"] @ inputs["weight"].t()).abs().amax(1).clamp(min=1)
        assert ((logprobs - right[1]).abs() <= 2e-6 * largest).all()
        worst["fused"] = max(worst["fused"], *(relative(a, b) for a, b in zip(gradients, right[2:], strict=True)))
        worst["plain"] = max(worst["plain"], *(relative(a, b) for a, b in zip(plain[2:], right[2:], strict=True)))
    assert worst["fused"] <= 2 * worst["plain"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_half_precision_is_no_worse_than_plain_half_precision(way, entropy, dtype):
    for seed, peak in enumerate((3.0, 20.0)):
        inputs = problem((193, 64, 640, 515, 48), dtype, seed, peak)
        settings = {"entropy": entropy, "vocab_size": 515, "temperature": 0.7}
        right = expected(inputs, **settings)
        fused = run(way, inputs, chunk_tokens=48, **settings)
        plain = expected(inputs, dtype=dtype, **settings)
        assert fused[1].dtype == torch.float32 and fused[2].dtype == fused[3].dtype == dtype
        for ours, theirs, true in zip(fused[1:], plain[1:], right[1:], strict=True):
            assert relative(ours, true) <= relative(theirs, true)


@pytest.mark.parametrize("apex", [False, True])
@pytest.mark.parametrize("torch_version", TORCHES)
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("way", ["logprob", "single", "recomputed", "held"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_half_precision_products(monkeypatch, way, entropy, dtype, bound, torch_version, apex):
    # Gradients of logits are narrowed within the logits' own storage; sums are fp32. Coefficients are small, as those
    # of a mean over a million tokens: fp16 would flush them to 0.
    act_as_accelerator(monkeypatch, torch_version, apex=apex)
    inputs = problem((193, 64, 640, 515, 48), dtype, 5, 20.0)
    inputs["coefficient"], inputs["entropy_weight"] = inputs["coefficient"] * 1e-6, inputs["entropy_weight"] * 1e-6
    settings = {"entropy": entropy, "vocab_size": 515}
    main_grad = torch.zeros(640, 64)
    _, logprobs, grad_hidden, _ = run(way, inputs, chunk_tokens=48, grad_weight=main_grad, **settings)
    right = expected(inputs, **settings)
    assert relative(logprobs, right[1]) <= 2e-6
    assert relative(main_grad, right[3]) <= bound
    if dtype == torch.bfloat16:
        assert relative(grad_hidden, right[2]) <= bound


def test_a_product_that_older_torches_refuse_is_refused_here(monkeypatch):
    rows, weight, out = torch.ones(2, 3).bfloat16(), torch.ones(3, 4).bfloat16(), torch.ones(2, 4)
    for torch_version in TORCHES:
        refused = torch_version != "2.10"
        with monkeypatch.context() as patch:
            act_as_accelerator(patch, torch_version)
            try:
                torch.addmm(out, rows, weight, out_dtype=torch.float32, out=out)
            except RuntimeError as error:
                assert refused and "self and mat2 must have the same dtype" in str(error)
            else:
                assert not refused


def test_ci_runs_these_tests_on_each_torch_whose_rules_they_follow():
    matrix = re.search(r"torch: \[(.*)\]", (ROOT / ".github/workflows/ci.yml").read_text())[1]
    assert re.findall(r'"(\d+\.\d+)\.\d+"', matrix) == list(TORCHES)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_an_accelerators_way_matches_full_logits(monkeypatch, size, way, entropy):
    act_as_accelerator(monkeypatch)
    generator = torch.Generator().manual_seed(size[0])
    temperatures = 0.5 + torch.rand(size[0], generator=generator, dtype=torch.float64)
    for temperature, peak in ((0.7, 3.0), (temperatures, 3.0), (1.0, 80.0)):
        inputs = problem(size, torch.float64, 1, peak)
        settings = {"entropy": entropy, "vocab_size": size[3], "temperature": temperature}
        mask = (inputs["coefficient"] != 0) | (torch.rand(size[0], generator=generator) < 0.5)
        total, logprobs, grad_hidden, grad_weight = run(way, inputs, chunk_tokens=size[4], mask=mask, **settings)
        right = expected(inputs, **settings)
        assert ((logprobs - torch.where(mask, right[1], 0)).abs() <= 1e-13 * right[1].abs().clamp(min=1)).all()
        assert relative(grad_hidden, right[2]) <= 1e-13
        assert relative(grad_weight, right[3]) <= 1e-13
        assert not grad_weight[size[3] :].any()


@pytest.mark.parametrize("way", WAYS)
def test_gradcheck(way):
    inputs = problem((7, 5, 13, 11, 3), torch.float64, 0)

    def function(hidden: Tensor, weight: Tensor) -> Tensor:
        loss = linear_loss(inputs["coefficient"])
        slope = torch.where(inputs["coefficient"] != 0, inputs["entropy_weight"], 0)
        settings = {"vocab_size": 11, "temperature": 0.7, "chunk_tokens": 3}
        if way == "logprob":
            logprobs, entropies = fused_linear_logprob(
                hidden, weight, inputs["targets"], return_entropy=True, **settings
            )
            return torch.cat([logprobs, entropies])
        if way == "single":
            return fused_linear_policy_loss(hidden, weight, inputs["targets"], loss, entropy_weight=slope, **settings)[
                0
            ]
        if way == "given":
            given = fused_linear_logprob(hidden.detach(), weight, inputs["targets"], return_entropy=True, **settings)
            settings |= {"logprobs": given[0].detach(), "entropies": given[1].detach()}
        settings["logits_budget_bytes"] = 2**30 if way == "held" else 0
        return fused_linear_gated_policy_loss(
            hidden,
            weight,
            inputs["targets"],
            lambda logprobs, entropies: inputs["coefficient"] != 0,
            lambda logprobs, keep, tokens: loss(logprobs, tokens),
            entropy_weight=slope,
            **settings,
        )[0]

    class Fresh(torch.autograd.Function):
        """Runs anew for each backward: gradcheck asks for several, a one-pass loss hands its gradients over once."""

        @staticmethod
        def forward(ctx, hidden, weight):
            ctx.save_for_backward(hidden, weight)
            return function(hidden, weight).detach()

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad():
                leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
                return torch.autograd.grad(function(*leaves), leaves, grad)

    assert torch.autograd.gradcheck(Fresh.apply, (inputs["hidden"].requires_grad_(), inputs["weight"].requires_grad_()))
