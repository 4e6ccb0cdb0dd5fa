"""The fused output layer in a training loop of your own: torch and transformers, no NeMo and no Megatron.

    python examples/light_loop.py [CHECKPOINT] [--steps 20] [--check]

Each step samples answers, rewards them by the share of their tokens in the lower half of the vocabulary, and makes two
updates on the REINFORCE loss. The body of the model gives hidden states; full logits are never held in training.
CHECKPOINT is a Hugging Face folder; without one a small random Llama is made. `--check` trains nothing: it compares
log-probs, loss and gradients with full logits in float64.

Shapes: B = answers, S = tokens of prompt and answer, N = B * (S - 1) positions, each of which predicts the next token.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from nemo_flashrl.ops import fused_linear_logprob, fused_linear_policy_loss

ANSWERS, PROMPT_TOKENS, ANSWER_TOKENS = 32, 4, 12
UPDATES = 2  # optimizer steps on each batch; the second needs the ratio to the policy that sampled
TOLERANCE = 1e-10  # relative, of norms in float64


def load_model(folder: str | None) -> PreTrainedModel:
    if folder is not None:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=512, max_position_embeddings=64, **sizes))


def head_inputs(model: PreTrainedModel, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the output layer is computed from: hidden [N, H], weight [V, H], targets int64 [N]."""
    hidden = model.base_model(tokens[:, :-1]).last_hidden_state
    return hidden.flatten(0, 1), model.get_output_embeddings().weight, tokens[:, 1:].flatten()


@torch.no_grad()
def sample(model: PreTrainedModel) -> tuple[Tensor, Tensor, Tensor]:
    """A batch: tokens int64 [B, S], mask bool [N] (True where an answer's token is predicted), rewards [B]."""
    vocabulary = model.get_output_embeddings().weight.shape[0]
    tokens = torch.randint(vocabulary, (ANSWERS, PROMPT_TOKENS))
    for _ in range(ANSWER_TOKENS):
        logits = model(tokens, logits_to_keep=1).logits[:, -1]
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], dim=1)
    mask = torch.ones_like(tokens[:, 1:], dtype=torch.bool)
    mask[:, : PROMPT_TOKENS - 1] = False
    rewards = (tokens[:, PROMPT_TOKENS:] < vocabulary // 2).float().mean(dim=1)
    return tokens, mask.flatten(), rewards


def token_weights(rewards: Tensor) -> Tensor:
    """[N]: each answer's advantage over the batch's mean, divided by the number of sampled tokens."""
    weights = (rewards - rewards.mean()) / (ANSWERS * ANSWER_TOKENS)
    return weights.repeat_interleave(PROMPT_TOKENS + ANSWER_TOKENS - 1)


def policy_loss(model: PreTrainedModel, tokens: Tensor, mask: Tensor, behavior: Tensor, weights: Tensor) -> Tensor:
    """-sum of weight * ratio * logprob over the answers, the ratio taken as a constant: one pass, no full logits."""

    def loss(logprobs: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        coefficient = -weights[part] * torch.exp(logprobs - behavior[part])
        return coefficient * logprobs, coefficient

    return fused_linear_policy_loss(*head_inputs(model, tokens), loss, mask=mask)[0]


def train(model: PreTrainedModel, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, steps + 1):
        tokens, mask, rewards = sample(model)
        with torch.no_grad():
            behavior = fused_linear_logprob(*head_inputs(model, tokens), mask=mask)
        for _ in range(UPDATES):
            optimizer.zero_grad()
            policy_loss(model, tokens, mask, behavior, token_weights(rewards)).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        print(f"step {step}: reward {rewards.mean():.3f}, grad norm {norm:.3g}")


def check(model: PreTrainedModel) -> None:
    """Both functions against `log_softmax` of full logits, off-policy.

    Raises SystemExit where a difference is above TOLERANCE.
    """
    model.double()
    tokens, mask, rewards = sample(model)
    weights = token_weights(rewards).double()
    full = model(tokens[:, :-1]).logits.flatten(0, 1).log_softmax(-1)
    full = full.gather(-1, tokens[:, 1:].flatten()[:, None])[:, 0]
    behavior = full.detach() + 0.1 * torch.randn_like(full)

    def reinforce(logprobs: Tensor) -> Tensor:
        return -(weights * torch.exp(logprobs - behavior).detach() * logprobs)[mask].sum()

    expected, gradients = reinforce(full), _gradients(model, reinforce(full))
    fused = fused_linear_logprob(*head_inputs(model, tokens), mask=mask)
    loss = policy_loss(model, tokens, mask, behavior, weights)
    differences = {
        "fused_linear_logprob: log-probs": _difference(fused[mask], full[mask]),
        "fused_linear_logprob: gradients": _difference(_gradients(model, reinforce(fused)), gradients),
        "fused_linear_policy_loss: loss": _difference(loss, expected),
        "fused_linear_policy_loss: gradients": _difference(_gradients(model, loss), gradients),
    }
    for name, difference in differences.items():
        print(f"{name} {difference:.1e}")
    if max(differences.values()) > TOLERANCE:
        raise SystemExit(f"the fused output layer differs from full logits by more than {TOLERANCE:g}")


def _gradients(model: PreTrainedModel, loss: Tensor) -> Tensor:
    """Of all parameters, one vector."""
    found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    return torch.cat([gradient.flatten() for gradient in found])


def _difference(found: Tensor, expected: Tensor) -> float:
    """Relative, of norms."""
    return ((found - expected).norm() / expected.norm()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", help="a Hugging Face folder; left out: a small random Llama")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--check", action="store_true", help="compare with full logits instead of training")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = load_model(options.checkpoint)
    check(model) if options.check else train(model, options.steps)


if __name__ == "__main__":
    main()
