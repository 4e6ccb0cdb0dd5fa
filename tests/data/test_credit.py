"""Techniques on real trajectories: what an episode leaves, masks, lengths, turns in a step's microbatches."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from doubles import STOP, TOKENIZER, ScriptedEngine, ScriptedEnvironment, ids, text_tokenizer
from tiny import random_trajectories

from nemo_flashrl.algorithms.advantages import CreditRules, LengthPenalty
from nemo_flashrl.algorithms.algorithm import TokenBatch
from nemo_flashrl.algorithms.flash_reinforce import FlashReinforce, FlashReinforceSettings
from nemo_flashrl.algorithms.grpo import Grpo, GrpoSettings
from nemo_flashrl.algorithms.unfused_loss import policy_loss
from nemo_flashrl.batching.planner import BatchingSettings, LengthBatcher
from nemo_flashrl.config import load
from nemo_flashrl.data.collate import truncate
from nemo_flashrl.data.context_parallel import context_share
from nemo_flashrl.data.credit import CodeMask, TrajectoryCredit, code_tokens, trajectory_credit
from nemo_flashrl.data.datamodule import plan_steps
from nemo_flashrl.environments.environment import StepResult
from nemo_flashrl.environments.tool_calls import MalformedCall, malformed
from nemo_flashrl.metrics.step import policy_metrics
from nemo_flashrl.records import Batch, Sampling, Trajectory
from nemo_flashrl.rollout.chat_tokens import Codec
from nemo_flashrl.rollout.episode import Limits, run_episode

PLAIN = TrajectoryCredit()


def encoded(text: str) -> list[int]:
    return text_tokenizer()(text, add_special_tokens=False).input_ids


def of_tokens(*turns: str, **fields) -> Trajectory:
    """A prompt of one token, then turns of text, a token a byte, with one byte of observation between them."""
    tokens, owner = [0], [-1]
    for number, said in enumerate(turns):
        own = encoded(said)
        tokens += [*own, 0]
        owner += [number] * len(own) + [-1]
    owner = np.array(owner, dtype=np.int32)
    return Trajectory(
        prompt_index=fields.pop("group", 0),
        group=0,
        token_ids=np.array(tokens),
        action_mask=owner >= 0,
        behavior_logprobs=np.where(owner >= 0, -1.0, 0).astype(np.float32),
        versions=np.where(owner >= 0, 0, -1).astype(np.int32),
        reward=fields.pop("reward", 0.0),
        turns=len(turns),
        end_reason="done",
        failed=True,
        turn_of_token=owner,
        **fields,
    )


def shown(trajectory: Trajectory) -> str:
    return text_tokenizer().decode(trajectory.token_ids[trajectory.action_mask].tolist())


def test_an_episode_keeps_turns_shaping_and_malformed_actions() -> None:
    results = [
        StepResult("> k 4 0", reward=0.25, process_reward=0.5, shaping={"cost": -1.0}, malformed=True),
        StepResult(reward=1.0, done=True, success=True, shaping={"cost": -2.0, "style": 0.5}),
    ]
    get = ids("get ( k 2 9 )")
    arguments = (None, Codec(TOKENIZER), Limits(max_context=128), Sampling(max_tokens=8, stop_token_ids=(STOP,)))
    episode = asyncio.run(run_episode(ScriptedEngine(get), ScriptedEnvironment(results), *arguments))
    assert (episode.reward, episode.turn_rewards) == (1.25, (0.75, 1.0))
    assert (episode.shaping, episode.malformed) == ({"cost": -3.0, "style": 0.5}, True)
    turns = episode.turn_of_token
    assert turns[turns >= 0].tolist() == [0] * len(get) + [1] * len(get)
    assert ((turns >= 0) == episode.action_mask).all()
    assert truncate(episode, 14).turn_of_token.tolist() == turns[:14].tolist()
    # An environment that fails in the second turn leaves a turn without a reward.
    broken = ScriptedEnvironment([StepResult("> k 4 0", reward=0.75), RuntimeError("down")])
    episode = asyncio.run(run_episode(ScriptedEngine(get), broken, *arguments))
    assert (episode.turn_rewards, episode.malformed, episode.end_reason) == ((0.75, 0.0), False, "environment_error")
    nan = ScriptedEnvironment([StepResult(shaping={"cost": float("nan")})])
    episode = asyncio.run(run_episode(ScriptedEngine(get), nan, *arguments))
    assert "the shaping term cost is nan" in episode.info["error"]


@pytest.mark.parametrize("way", ["observation", "end"])
def test_a_malformed_tool_call_is_flagged(way: str) -> None:
    assert malformed(MalformedCall("no JSON"), way).malformed


def test_code_mask_on_multi_byte_text() -> None:
    """A token is a byte here, so that every character beyond ASCII is spread over several tokens."""
    said = "Größe é→😀:\n```python\nprint('ß😀')\n```\nfertig `x` ✓\n```\nunfinished 😀"
    mask = CodeMask(text_tokenizer())
    trained = mask(of_tokens(said, "``` a`b\nno fence", "x\n  ````\n```\ny\n````"))
    assert shown(trained) == "print('ß😀')\nunfinished 😀```\ny\n"
    assert (trained.token_ids == of_tokens(said, "``` a`b\nno fence", "x\n  ````\n```\ny\n````").token_ids).all()
    # Places in the text, taken for places of tokens, are not where the code is.
    start, end = said.index("print"), said.index("```\nfertig")
    assert shown(of_tokens(said))[start:end] == "print('ß😀')\n" != text_tokenizer().decode(encoded(said)[start:end])


def test_a_token_belongs_to_code_if_a_character_does() -> None:
    pieces = ["Sure", ", here:", "\n```", "python\n", "print", "(1)", "\n``", "`", "\nDone"]
    assert code_tokens(pieces).tolist() == [False] * 4 + [True, True, True, False, False]
    assert code_tokens(["", "a"]).tolist() == [False, False]
    assert code_tokens([]).tolist() == []
    assert code_tokens(["```\n", "a\u2028```b\n", "c"]).tolist() == [False, True, True]  # no line ends at U+2028


def test_code_mask_leaves_out_what_has_no_code() -> None:
    """Rewards 1, 0, 1/2. T is the code's tokens: 2 of the first ("x\\n"), 0 of the second, 5 of the third."""
    batch = [
        of_tokens("a\n```\nx\n```", reward=1.0),
        of_tokens("none"),
        of_tokens("b", "```\nhello", reward=0.5),
    ]
    credit = TrajectoryCredit(code_mask=CodeMask(text_tokenizer()))
    (step,) = steps_of(batch, FlashReinforce(), credit)
    weights = by_place(step, "token_weights")
    assert weights == pytest.approx([1 / 6, 0, 1 / 15])
    assert sum(int(m["target_mask"].sum()) for m in step.microbatches) == 7
    assert step.metrics["dropped_no_code"] == 1
    assert step.metrics["left_out_share"] == pytest.approx(1 / 3)
    assert step.advantages[::2] == [0.5, 0] and np.isnan(step.advantages[1])
    assert step.metrics["effective_samples"] == 1  # the third's advantage is 0


def steps_of(batch, algorithm, credit, layout: str = "packed", dp_size: int = 1, version: int = 0):
    settings = BatchingSettings(64, 400, layout=layout, multiple=4, context_margin=0.0)
    return plan_steps(
        Batch(tuple(batch), version), algorithm, LengthBatcher(settings), credit=credit, dp_size=dp_size, seed=0
    )


def by_place(step, name: str) -> list[float]:
    pairs = [(p, v) for m in step.microbatches for p, v in zip(m["trajectory"].tolist(), m[name].tolist(), strict=True)]
    return [value for _, value in sorted(pairs)]


def test_lengths_by_unit() -> None:
    """24 bytes, of which the 12 of a second, same half repeat the first; two turns."""
    trajectory = of_tokens("abcdefghijkl", "abcdefghijkl")
    for unit, length in (("tokens", 24), ("turns", 2), ("new_tokens", 12)):
        credit = TrajectoryCredit(length_penalty=LengthPenalty(1.0, limit=length / 2), length_unit=unit)
        outcomes, metrics = credit.outcomes([trajectory], [trajectory], step=0)
        assert outcomes.shaping.tolist() == [-1.0], unit  # twice the limit
        assert metrics["length_penalty"] == 1.0
    assert PLAIN.outcomes([trajectory], [trajectory], step=0)[0].shaping.tolist() == [0]


def test_new_tokens_are_those_that_were_measured() -> None:
    """Of 24 bytes 18 were marked as repeats, whatever n-grams make of them: 6, three times the limit."""
    trajectory = of_tokens("abcdefghijkl", "abcdefghijkl")
    repeats = np.zeros(len(trajectory.token_ids), dtype=bool)
    repeats[np.flatnonzero(trajectory.action_mask)[:18]] = True
    credit = TrajectoryCredit(length_penalty=LengthPenalty(0.5, limit=2), length_unit="new_tokens")
    for repeated, new in ((repeats, 6), (None, 12)):
        own = replace(trajectory, repeats=repeated)
        outcomes, metrics = credit.outcomes([own], [own], step=0)
        assert outcomes.shaping.tolist() == [-0.5 * (new / 2 - 1)]
        assert metrics["new_tokens"] == new


def test_the_penalty_decays_with_the_steps_of_the_run() -> None:
    trajectory = of_tokens("abcdefghijkl")
    credit = TrajectoryCredit(length_penalty=LengthPenalty(1.0, limit=6, decay_steps=4))
    for version, left in ((0, 1.0), (3, 0.25), (4, 0.0)):
        (step,) = steps_of([trajectory], FlashReinforce(), credit, version=version)
        assert step.metrics["length_penalty"] == left


def test_malformed_and_shaping_filters() -> None:
    batch = [
        of_tokens("a", malformed=True, reward=1.0, shaping={"style": 1.0, "safe": 1.0}),
        of_tokens("b", shaping={"style": 2.0, "safe": -1.0}),
        of_tokens("c", shaping={"safe": 0.0}),
    ]
    credit = TrajectoryCredit(shaping={"style": 0.1}, at_least={"safe": 0.0}, leave_out_malformed=True)
    (step,) = steps_of(batch, FlashReinforce(), credit)
    assert by_place(step, "token_weights") == pytest.approx([0, 0, 1 / 3])  # B stays 3
    assert by_place(step, "advantages") == pytest.approx([2 / 3 + 0.1, -1 / 3 + 0.2, -1 / 3])
    names = ("dropped_malformed", "dropped_shaping", "malformed", "shaping")
    assert [step.metrics[name] for name in names] == pytest.approx([1, 1, 1, 0.1])
    (step,) = steps_of(batch, FlashReinforce(), PLAIN)  # off: counted, and no more
    assert by_place(step, "token_weights") == pytest.approx([1 / 3] * 3)
    assert step.metrics["malformed"] == 1 and "dropped_malformed" not in step.metrics


@pytest.mark.parametrize("field", ["shaping", "at_least"])
def test_a_term_that_nobody_reports_is_refused(field: str) -> None:
    """In the first batch alone: an environment may report a term now and then. A broken episode tells nothing."""
    batch = [of_tokens("a", shaping={"style": 1.0}), of_tokens("b", shaping={"safe": 1.0})]
    steps_of(batch, FlashReinforce(), TrajectoryCredit(**{field: {"style": 0.5}}))
    misspelt = TrajectoryCredit(**{field: {"styel": 0.5}})
    name = {"shaping": "advantage.shaping", "at_least": "selection.shaping_at_least"}[field]
    right = rf"{name}\.styel=0\.5: no episode of the first batch .* the environment reports safe, style \("
    with pytest.raises(ValueError, match=right):
        steps_of(batch, FlashReinforce(), misspelt)
    with pytest.raises(ValueError, match="reports none"):
        steps_of([of_tokens("a")], FlashReinforce(), misspelt)
    steps_of(batch, FlashReinforce(), misspelt, version=1)
    steps_of([replace(t, end_reason="environment_error") for t in batch], FlashReinforce(), misspelt)


def tokens_of(microbatch) -> TokenBatch:
    names = ("behavior_logprobs", "target_mask", "row_index")
    by_token = microbatch.get("token_advantages")
    return TokenBatch(
        *(microbatch[name].flatten() for name in names),
        *(microbatch[name] for name in ("advantages", "token_weights", "failures")),
        token_advantages=None if by_token is None else by_token.flatten(),
    )


@pytest.mark.parametrize("algorithm", [FlashReinforce(), Grpo(GrpoSettings(group_size=2))])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_turns_in_the_loss_by_hand(algorithm, layout: str) -> None:
    """Turn rewards (1, 0), (0, 2) alone: returns (1, 0) and (2, 2), baseline (1/2 + 2) / 2 = 5/4; A = -1/4, -5/4, 3/4.

    T = 3 and 2, B = 2, ratio 1: the gradient by a token's log-prob is -A / (B T).
    """
    batch = [
        of_tokens("ab", "c", reward=1.0, turn_rewards=(1.0, 0.0)),
        of_tokens("d", "e", reward=2.0, turn_rewards=(0.0, 2.0)),
    ]
    gradients = {}
    for step in steps_of(batch, algorithm, TrajectoryCredit(rules=CreditRules(turn_coefficient=1.0)), layout, 2):
        for microbatch in step.microbatches:
            tokens = tokens_of(microbatch)
            logprobs = tokens.behavior_logprobs.clone().requires_grad_()
            policy_loss(algorithm, logprobs, tokens)[0].backward()
            said = microbatch["targets"].flatten()[tokens.action_mask].tolist()
            found = logprobs.grad[tokens.action_mask].tolist()
            gradients |= dict(zip(map(chr_of, said), found, strict=True))
            assert (logprobs.grad[~tokens.action_mask] == 0).all()
    right = {"a": 1 / 24, "b": 1 / 24, "c": 5 / 24, "d": -3 / 16, "e": -3 / 16}
    assert gradients == pytest.approx(right)


def chr_of(token: int) -> str:
    return text_tokenizer().decode([token])


def test_context_ranks_hold_the_advantages_of_their_tokens() -> None:
    batch = [of_tokens("abc", "defg", turn_rewards=(1.0, 0.0)), of_tokens("h", turn_rewards=(0.5,))]
    (step,) = steps_of(batch, FlashReinforce(), TrajectoryCredit(rules=CreditRules(turn_coefficient=1.0)))
    (microbatch,) = step.microbatches
    shares = [context_share(microbatch, rank, 2) for rank in range(2)]
    seen = {}
    for share in (microbatch, *shares):
        pairs = zip(share["targets"].flatten().tolist(), share["token_advantages"].flatten().tolist(), strict=True)
        seen |= {} if share is microbatch else {t: a for t, a in pairs if t}
    whole = zip(
        microbatch["targets"].flatten().tolist(), microbatch["token_advantages"].flatten().tolist(), strict=True
    )
    assert seen == {t: a for t, a in whole if t}
    assert len(set(seen.values())) >= 3


def test_ratio_clip_by_hand() -> None:
    """Ratios 2, 1.1 and 1/2 clamped to [0.8, 1.2]: -A w rho = -1/2 * 1/6 * (1.2, 1.1, 0.8); unclipped, 2 and 1/2."""
    behavior = torch.tensor([-2.0, -2.0, -2.0, -1.0])
    current = behavior + torch.tensor([2.0, 1.1, 0.5, 1.0]).log()
    row, mask = torch.tensor([0, 0, 0, 1]), torch.ones(4, dtype=torch.bool)
    found, shares = {}, {}
    for clip in (0.2, float("inf")):
        algorithm = FlashReinforce(FlashReinforceSettings(ratio_clip=clip, delta=float("inf")))
        advantages, weights = algorithm.weigh(torch.tensor([1.0, 0.0]), torch.tensor([3, 1]), torch.tensor([0, 1]))
        logprobs = current.clone().requires_grad_()
        batch = TokenBatch(behavior, mask, row, advantages, weights, torch.zeros(2, dtype=torch.bool))
        loss, stats = policy_loss(algorithm, logprobs, batch)
        loss.backward()
        found[clip] = (logprobs.grad[:3] * -12).tolist()
        shares[clip] = policy_metrics(stats).get("clip_fraction")
    assert found[0.2] == pytest.approx([1.2, 1.1, 0.8])
    assert found[float("inf")] == pytest.approx([2.0, 1.1, 0.5])
    assert shares == {0.2: 0.5, float("inf"): None}  # of the four tokens, those at 2 and at 1/2


def test_a_configuration_turns_them_on() -> None:
    base = ["output=unused", "model.path=unused"]
    assert trajectory_credit(load("rehearsal", base), None) == PLAIN
    chosen = trajectory_credit(
        load(
            "rehearsal",
            [
                *base,
                "advantage.clip=3",
                "advantage.turn_coefficient=0.5",
                "advantage.turn_discount=0.9",
                "advantage.shaping.style=0.1",
                "selection.shaping_at_least.safe=0",
                "selection.malformed=leave_out",
                "selection.tokens=code",
                "length_penalty.coefficient=0.2",
                "length_penalty.unit=turns",
                "length_penalty.limit=4",
                "length_penalty.decay_steps=50",
            ],
        ),
        text_tokenizer(),
    )
    assert chosen.code_mask is not None
    assert replace(chosen, code_mask=None) == TrajectoryCredit(
        CreditRules(3.0, 0.5, 0.9), {"style": 0.1}, {"safe": 0.0}, LengthPenalty(0.2, 4.0, 50), "turns", True
    )


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("length_penalty.coefficient=0.1", "length_penalty.coefficient=0.1 needs length_penalty.limit above 0"),
        ("advantage.turn_discount=0.9", "advantage.turn_discount=0.9 applies to per-turn returns: set"),
        ("advantage.clip=0", "advantage.clip=0"),
        ("selection.tokens=all", "selection.tokens='all': must be one of actions, code"),
    ],
)
def test_refuses_settings(override: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load("rehearsal", ["output=unused", "model.path=unused", override])
    with pytest.raises(ValueError, match="are per trajectory, not per turn"):
        kl = ["kl.coefficient=0.1", "kl.place=reward", "reference.mode=frozen"]
        load("rehearsal", ["output=unused", "model.path=unused", "advantage.turn_coefficient=0.5", *kl])


def test_off_changes_nothing() -> None:
    """The credit of a batch without techniques is the algorithm's own."""
    trajectories = random_trajectories(9, 50)
    rewards = torch.tensor([t.reward for t in trajectories])
    right = FlashReinforce().weigh(rewards, torch.tensor([t.action_count for t in trajectories]), rewards)
    outcomes, _ = PLAIN.outcomes(trajectories, trajectories, step=0)
    credit, _ = PLAIN.assign(FlashReinforce(), outcomes)
    assert torch.equal(credit.advantages, right[0])
    assert torch.equal(credit.token_weights, right[1])
