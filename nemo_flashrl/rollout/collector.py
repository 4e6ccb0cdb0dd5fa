"""Keeps episodes running and hands over a batch as soon as enough have ended.

    PromptStream -> waiting samples -> episodes in flight -> ready groups -> chosen -> Batch
                                            |                    |
                              an exception stops the run         +-> dropped, counted by reason

Two ways of working. Streaming: `max_in_flight` episodes run all the time, who does not fit in this batch goes into the
next one, and nobody waits for a straggler. Otherwise the collector begins as many episodes as a batch needs, all of
them inside `collect`, and nothing is left running between two batches, so every token comes from the weights of that
moment.

Back-pressure: when B trajectories in whole groups wait for the trainer, no episode begins until `collect` takes them.
What runs by then may end, so at most B + G * max_in_flight trajectories are ever finished and not handed over.

Groups of different sizes: a batch still holds exactly B trajectories. What is begun adds up to B after every B, and a
group that does not fit into what a batch lacks is the first of the next one (`Groups.take`).
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from nemo_flashrl.algorithms.schedules import FixedGroupSize
from nemo_flashrl.engines.base import Engine
from nemo_flashrl.environments.environment import Environment
from nemo_flashrl.records import Batch, Sampling, Trajectory
from nemo_flashrl.rollout.chat_tokens import Codec
from nemo_flashrl.rollout.episode import Limits
from nemo_flashrl.rollout.groups import Failing, FirstErrors, Groups, Siblings, SlotClock, none_usable, reason_to_drop
from nemo_flashrl.rollout.metrics import rollout_metrics
from nemo_flashrl.rollout.player import Play, Player
from nemo_flashrl.rollout.prompts import PromptSource, PromptStream


class CollectionStopped(Exception):
    """`collect` was told from outside to give up: the trainer ends between two steps."""


class Collector:
    """Makes batches of B = `batch_size` trajectories, `group_size` (G) of each prompt.

    `sampling.max_tokens` bounds each action; `sampling` may be replaced between two batches and holds for the
    episodes that begin later. One event loop runs it all, and every method is called on it.
    """

    def __init__(
        self,
        engine: Engine,
        make_environment: Callable[[], Environment],
        tasks: Sequence[Any],
        tokenizer: Any,
        prompts: PromptSource | None = None,
        limits: Limits = Limits(),
        sampling: Sampling | None = None,
        *,
        batch_size: int,
        group_size: int = 1,
        max_in_flight: int | None = None,
        streaming: bool = False,
        max_staleness: int | None = None,
        dynamic_sampling_max_groups: int = 0,
        seed: int = 0,
        temperature: Callable[[int], float] | None = None,
        group_sizes: FixedGroupSize | None = None,
        novelty: Callable[[Trajectory], Awaitable[Trajectory]] | None = None,
        play: Play | None = None,
    ) -> None:
        """`temperature` (of the policy version) goes before that of `sampling`, `group_sizes` before `group_size`;
        `novelty` marks what a trajectory repeats; `play` plays episodes elsewhere than on this event loop.

        Left out, `prompts` are epochs over `tasks` in an order fixed by `seed`, `sampling` ends an action at the
        tokenizer's and the chat template's end tokens, and `max_in_flight` is `batch_size`.

        Raises:
            ValueError: `batch_size` is no multiple of `group_size`, or a size below 1 (`max_staleness`: 0).
        """
        max_in_flight = batch_size if max_in_flight is None else max_in_flight
        if min(batch_size, group_size, max_in_flight) < 1:
            raise ValueError(f"{batch_size=}, {group_size=} and {max_in_flight=} must be at least 1")
        if batch_size % group_size:
            raise ValueError(f"{batch_size=} counts trajectories and must be a multiple of {group_size=}")
        if max_staleness is not None and max_staleness < 0:
            raise ValueError(f"{max_staleness=} must be at least 0, or None for no bound")
        codec = Codec(tokenizer)
        ends = {tokenizer.eos_token_id, *codec.turn_ends} - {None}
        self.sampling = Sampling(stop_token_ids=tuple(ends)) if sampling is None else sampling
        self._play = play or Player(engine, make_environment, tasks, codec, limits, seed=seed, novelty=novelty).play
        self._prompts = PromptStream(len(tasks), seed=seed) if prompts is None else prompts
        self._temperature, self._batch_size = temperature, batch_size
        self._sizes = FixedGroupSize(group_size) if group_sizes is None else group_sizes
        self._max_in_flight, self._streaming, self._max_staleness = max_in_flight, streaming, max_staleness
        self._replacements = dynamic_sampling_max_groups
        self._replaced = 0  # tied groups that were dropped for the batch that is being collected
        self._waiting: deque[tuple[int, int, int, int]] = deque()  # prompt, task, sample, group size; not begun
        self._running: set[asyncio.Task] = set()
        self._siblings = Siblings()  # ended, of groups that are not complete
        self._ready = Groups()  # complete, in the order in which they were completed
        self._chosen = Groups()  # for the batch that is being collected
        self._totals: Counter[str] = Counter()  # of the whole run, what was resumed included
        self._errors, self._failing = FirstErrors(), Failing()
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self._collecting = self._closed = self._stopped = False
        self._clock: SlotClock | None = None  # begins with the first `collect`
        self._sampled = 0  # action tokens of episodes that ended since the last batch

    async def collect(self, policy_version: int) -> Batch:
        """The next batch, ordered by prompt index and sample number, for a trainer that is at `policy_version`.

        A group with a trajectory older than `policy_version - max_staleness`, without an action token, or with a prompt
        that leaves no room for one, is dropped and counted; its prompt is spent. So are the first
        `dynamic_sampling_max_groups` groups whose rewards are all equal: others are played instead (DAPO's dynamic
        sampling, Yu et al. 2025, with a bound).

        Raises:
            ValueError: every group of several batches' worth was dropped.
            RuntimeError: the collector is closed.
            CollectionStopped: `stop` was called.
            Whatever an episode raised: an engine's error, or `Limits.on_long_prompt`.
        """
        if self._closed:
            raise RuntimeError("the collector is closed")
        if self._temperature is not None:
            self.sampling = replace(self.sampling, temperature=self._temperature(policy_version))
        dropped: Counter[str] = Counter()
        ends: Counter[str] = Counter()
        self._collecting, self._replaced = True, 0
        self._tell_clock()
        try:
            while self._choose(policy_version, dropped, ends):
                self._fill()
                await self._next_change()
        finally:
            self._collecting = False
            self._tell_clock()
        chosen = self._chosen.take(self._batch_size)
        self._chosen.move_before(self._ready)  # groups of different sizes may hold more than a batch
        self._fill()  # what was taken made room, where episodes run on between batches
        ends.update(t.end_reason for group in chosen for t in group)
        trajectories = tuple(t for group in sorted(chosen, key=lambda g: g[0].prompt_index) for t in group)
        metrics = rollout_metrics(trajectories, policy_version, dropped, ends) | self._state_metrics()
        metrics |= self._sizes.metrics([[t.reward for t in group] for group in chosen])
        return Batch(trajectories, policy_version, metrics)

    def trained(self, batch: Batch) -> None:
        """The weights hold what `batch` teaches: its prompts do not come again after a resume."""
        groups: dict[int, list[Trajectory]] = defaultdict(list)
        for trajectory in batch.trajectories:
            groups[trajectory.prompt_index].append(trajectory)
        self._prompts.trained({i: sum(not t.failed for t in group) / len(group) for i, group in groups.items()})
        self._totals["trajectories_trained"] += len(batch.trajectories)
        self._sizes.trained({i: [t.reward for t in group] for i, group in groups.items()})

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and lists: `prompts`, the stream's position, `group_sizes`, and `totals` of the run.

        A prompt is finished when its batch was trained or its trajectories were dropped. All others that were handed
        out count as unfinished (in flight, waiting, in a batch that is not trained yet) and come first after a resume.
        """
        parts = {"prompts": self._prompts, "group_sizes": self._sizes}
        return {name: part.state_dict() for name, part in parts.items()} | {"totals": dict(self._totals)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state, before the first `collect`."""
        assert not (self._running or self._waiting or self._siblings.count or self._ready), (
            "the collector has started already"
        )
        self._prompts.load_state_dict(state["prompts"])
        self._totals = Counter(state["totals"])
        self._sizes.load_state_dict(state.get("group_sizes", {}))

    def _state_metrics(self) -> dict[str, float]:
        """Times since the last batch, and what is in flight now."""
        times = self._clock.take()
        elapsed = times.pop("between_batches_seconds")
        sampled, self._sampled = self._sampled, 0
        return {
            **times,
            **self._siblings.take(),
            **self._prompts.metrics(),
            "rollout_tokens_per_second": sampled / max(elapsed if self._streaming else times["rollout_seconds"], 1e-9),
            "episodes_in_flight": float(len(self._running)),
            "queue_depth": float(self._count_ended()),
            **{f"total_{name}": float(count) for name, count in self._totals.items()},
        }

    def _count_ended(self) -> int:
        """Trajectories that are finished and not handed over."""
        return self._ready.count + self._chosen.count + self._siblings.count

    def _tell_clock(self) -> None:
        now = asyncio.get_running_loop().time()
        self._clock = self._clock or SlotClock(self._max_in_flight, now)
        self._clock.update(now, running=len(self._running), asked=self._collecting)

    def stop(self) -> None:
        """Let `collect` give up at once, now and later; what is in flight stays so until `close`."""
        self._stopped = True
        self._changed.set()

    async def close(self) -> None:
        """Cancel what is in flight; each episode closes its environment."""
        self._closed = True
        for episode in self._running:
            episode.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._changed.set()

    def _choose(self, policy_version: int, dropped: Counter[str], ends: Counter[str]) -> bool:
        """Move ready groups into the batch, drop those that may not enter it; returns whether the batch lacks some."""
        if self._failure is not None:
            raise self._failure
        if self._stopped:
            raise CollectionStopped
        while self._ready and self._chosen.count < self._batch_size:
            group = self._ready.popleft()
            oldest = None if self._max_staleness is None else policy_version - self._max_staleness
            reason = reason_to_drop(group, oldest, replace_tied=self._replaced < self._replacements)
            if reason is None:
                self._chosen.append(group)
                continue
            self._replaced += reason == "tied"
            ends.update(trajectory.end_reason for trajectory in group)
            dropped[reason] += len(group)
            self._totals[f"trajectories_dropped_{reason}"] += len(group)
            self._errors.tell(group)
            self._prompts.finish(group[0].prompt_index)
            self._sizes.dropped(group[0].prompt_index, [trajectory.reward for trajectory in group], reason)
            # A sound run drops at most what was finished when the policy moved on; more in a row never ends.
            at_most = self._sizes.largest * (self._max_in_flight + self._replacements) + 4 * self._batch_size
            if not self._chosen and dropped.total() > at_most:
                raise none_usable(dropped, group)
        return self._chosen.count < self._batch_size

    def _fill(self) -> None:
        """Start episodes in free slots."""
        while not (self._closed or self._failure) and self._has_room():
            if not self._waiting:
                prompt_index, task_index = self._prompts.next()
                size = self._sizes.begin(prompt_index, task_index)
                self._waiting.extend((prompt_index, task_index, sample, size) for sample in range(size))
            episode = asyncio.get_running_loop().create_task(self._run(*self._waiting.popleft()))
            self._running.add(episode)
            episode.add_done_callback(self._on_ended)
        self._tell_clock()

    def _has_room(self) -> bool:
        if len(self._running) >= self._max_in_flight:
            return False
        if self._streaming:
            return self._ready.count < self._batch_size
        return self._collecting and len(self._running) + self._count_ended() < self._batch_size

    async def _run(self, prompt_index: int, task_index: int, sample: int, group_size: int) -> None:
        trajectory = await self._play(prompt_index, task_index, sample, self.sampling)
        if backoff := self._failing.backoff(trajectory):
            await asyncio.sleep(backoff)
        self._sampled += trajectory.action_count
        group = self._siblings.add(trajectory, sample, group_size, asyncio.get_running_loop().time())
        if group is not None:
            self._ready.append(group)

    def _on_ended(self, episode: asyncio.Task) -> None:
        self._running.discard(episode)
        if self._closed:
            return
        if episode.cancelled():
            self._failure = self._failure or RuntimeError("an episode was cancelled from outside")
        elif error := episode.exception():
            self._failure = self._failure or error
        self._fill()
        self._changed.set()

    async def _next_change(self) -> None:
        """Wait until an episode has ended."""
        self._changed.clear()
        await self._changed.wait()
        if self._closed:
            raise RuntimeError("the collector was closed")
