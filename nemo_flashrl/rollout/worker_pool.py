"""The trainer's side of its rollout workers: starts them, hands out episodes, replaces those that are lost.

    play ------> the worker with the fewest episodes ------> trajectory
                   |  lost: its episodes begin anew elsewhere, with the same seeds
    load_weights -> the engine of this process -> the servers; workers learn which of them are in use

A worker is lost when its process ends, when it says nothing, and when an episode blocks its event loop for longer than
`rollout.step_timeout`. An episode that is to blame for that, or that was lost with several workers, fails.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from nemo_flashrl.engines.http_refit import RemoteEngine
from nemo_flashrl.engines.server_pool import Fault, NoServer, say
from nemo_flashrl.records import Generation, Sampling, Trajectory
from nemo_flashrl.rollout import messages
from nemo_flashrl.rollout.episode import PROMPT_TOO_LONG, unplayed
from nemo_flashrl.rollout.messages import Message, Plan
from nemo_flashrl.rollout.worker_process import WorkerFactory, WorkerLost, WorkerProcess
from nemo_flashrl.weight_sync.probe import NamedTensors

MOST_LOST = 3  # workers that an episode may be lost with; then it fails
START_SECONDS = 300.0  # for a worker to load what it plays with
SILENT_SECONDS = 10.0  # beyond `step_timeout`, without a sign of life
CLOSE_SECONDS = 4.0
LOOK_SECONDS = 0.5
HARD_LIMIT = 1.5  # times `max_memory`, at which a worker does not get to finish its episodes
GIB = 2**30
OURS = {"ValueError": ValueError, "NoServer": NoServer}  # errors that are told in a line of their own


class WorkerPool:
    """An `Engine` whose episodes are played by `count` processes of this machine; for one event loop.

    Args:
        engine: loads weights, and samples for who asks this process.
        plan: what the workers play with.
        step_timeout: seconds for which an episode may block its worker's event loop.
        drain: whether weights wait for the requests in flight: "always", "never", or the "first" alone: requests for
            the adapter can be made once there is one.
        max_memory: GiB of a worker, beyond which it is replaced; None: no limit.
        long_prompts: told (task index, tokens) of a prompt that leaves no room; by whether the task is held out.
    """

    def __init__(
        self,
        engine: RemoteEngine,
        plan: Plan,
        count: int,
        *,
        step_timeout: float,
        drain: str,
        max_memory: float | None = None,
        long_prompts: Mapping[bool, Callable[[int, int], None]],
    ) -> None:
        self._engine, self._drain, self._step_timeout = engine, drain, step_timeout
        self._max_memory, self._long_prompts = max_memory, long_prompts
        self._plan = pickle.dumps(plan)
        self._indices, self._numbers = itertools.count(), itertools.count()
        self._faults: Counter[str] = Counter()  # of the pool itself, and of workers that are gone
        self._failure: Exception | None = None
        self._closed = self._held = False  # held: requests wait for weights
        self._unready_losses = 0  # workers in a row that were lost before they were ready
        self._looking: asyncio.Task | None = None
        self._tasks: set[asyncio.Task] = set()
        self._factory = WorkerFactory()
        self._workers = [self._begin() for _ in range(count)]  # they load while the trainer does

    @property
    def version(self) -> int:
        """The policy version that the servers serve."""
        return self._engine.version

    @property
    def faults(self) -> Counter[str]:
        """Of requests, the engine's and the workers'; `workers_lost`, and `episodes_restarted`."""
        return sum((Counter(worker.faults) for worker in self._workers), self._engine.faults + self._faults)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
        """As the engine's, from this process."""
        return await self._engine.generate(token_ids, sampling)

    async def play(
        self, prompt_index: int, task_index: int, sample: int, sampling: Sampling, *, held_out: bool = False
    ) -> Trajectory:
        """One episode of a task, `sample` of its prompt.

        Raises:
            What the worker's engine raised; RuntimeError where it was something unforeseen, or no worker starts.
        """
        lost = 0
        while True:
            await self._open()
            number = next(self._numbers)
            asked = (held_out, prompt_index, task_index, sample)
            sampled = (sampling.temperature, sampling.max_tokens, sampling.stop_token_ids, sampling.stop)
            try:
                trajectory = await self._ask(messages.Play(number, *asked, *sampled))
            except WorkerLost as error:
                lost += 1
                self._faults["episodes_restarted"] += 1
                if error.number == number or lost == MOST_LOST:
                    return unplayed(prompt_index, sampling.temperature, str(error))
                continue
            if trajectory.end_reason == PROMPT_TOO_LONG:
                self._long_prompts[held_out](task_index, len(trajectory.token_ids))
            return trajectory

    async def load_weights(self, stream: NamedTensors, version: int) -> None:
        """As the engine's."""
        await self._open()
        try:
            if self._drain == "always" or (self._drain == "first" and not self._engine.replaced):
                await self._hold()
            await self._engine.load_weights(stream, version)
        finally:
            self._tell_servers()
            if self._held:
                self._held = False
                self._tell(messages.Reopen())

    async def close(self) -> None:
        """Let the workers close their environments, then end them; free what the engine holds."""
        self._closed = True
        if self._looking is not None:
            for task in (self._looking, *(worker.reading for worker in self._workers)):
                task.cancel()
        for worker in self._workers:
            worker.fail_episodes(RuntimeError("the rollout workers are closed"))
            worker.close()
        await asyncio.to_thread(self._factory.close, CLOSE_SECONDS)
        await self._engine.close()

    async def _open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
            self._engine.pool.changed = self._tell_servers
            for worker in self._workers:
                worker.reading = asyncio.create_task(self._read(worker))

    async def _read(self, worker: WorkerProcess) -> None:
        """Until the worker is gone."""
        try:
            async for message in worker.messages(lambda: (messages.Start(self._plan), self._servers())):
                self._hear(worker, message)
            await asyncio.sleep(LOOK_SECONDS)  # its end is told after its connection's
            self._lose(worker, _how_it_ended(self._factory.status(worker.index)))
        except Exception as error:
            self._fail(error)
            raise

    def _hear(self, worker: WorkerProcess, message: Message) -> None:
        if not isinstance(message, messages.Alive) or message.ready:
            worker.heard, worker.ready, self._unready_losses = time.monotonic(), True, 0
        match message:
            case messages.Alive():
                self._examine(worker, message)
            case messages.Ended():
                worker.faults = message.faults
                if future := worker.waits_for(message.number):
                    future.set_result(messages.unpack_trajectory(message.trajectory))
            case messages.Failed():
                kind = OURS.get(message.kind)
                error = kind(message.error) if kind else RuntimeError(f"{message.kind}: {message.error}")
                if message.number < 0:
                    self._fail(error)
                elif future := worker.waits_for(message.number):
                    future.set_exception(error)
            case messages.Drained():
                worker.drained.set()
            case messages.Lost():
                self._engine.lost(message.server, message.life)
            case messages.Revive():
                task = asyncio.create_task(self._revive(worker, message.server))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _examine(self, worker: WorkerProcess, sign: messages.Alive) -> None:
        if sign.blocked_seconds > self._step_timeout:
            why = f"an episode blocked it for {sign.blocked_seconds:.0f} s (rollout.step_timeout)"
            self._lose(worker, why, sign.number)
        elif self._max_memory is not None and sign.memory > self._max_memory * GIB:
            why = f"{sign.memory / GIB:.1f} GiB of memory (rollout.worker_max_memory={self._max_memory:g})"
            if sign.memory > HARD_LIMIT * self._max_memory * GIB:
                self._lose(worker, why)
            elif not worker.retiring:
                say(f"rollout worker {worker.index} is replaced once its episodes have ended: {why}")
                worker.retiring = True
                self._add()

    async def _revive(self, worker: WorkerProcess, server: int) -> None:
        try:
            answer = messages.Revived(server, life=await self._engine.revive(server))
        except Fault as fault:
            answer = messages.Revived(server, error=messages.as_text(fault))
        except ValueError as error:
            answer = messages.Revived(server, error=messages.as_text(error), refused=True)
        except NoServer as error:
            self._fail(error)
            return
        worker.send(answer)

    async def _look(self) -> None:
        """Look after those that say nothing; twice, since it may be this process that was held up."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for worker in tuple(self._workers):
                silent = time.monotonic() - worker.heard
                limit = self._step_timeout + SILENT_SECONDS if worker.ready else START_SECONDS
                worker.missed = worker.missed + 1 if silent > limit else 0
                if worker.missed > 1:
                    self._lose(worker, f"no sign of life for {silent:.0f} s")
                elif worker.retiring and not worker.episodes:
                    self._lose(worker, "it had grown too large")

    def _lose(self, worker: WorkerProcess, why: str, number: int = -1) -> None:
        """End a worker; its episodes begin anew, but for the one of this `number`."""
        if self._closed or worker not in self._workers:
            return
        self._workers.remove(worker)
        self._faults.update(worker.faults)
        self._factory.kill(worker.index)
        worker.close()
        worker.drained.set()
        if not worker.retiring or worker.episodes:
            self._faults["workers_lost"] += 1
            say(f"rollout worker {worker.index} is lost, {len(worker.episodes)} episodes begin anew: {why}")
        worker.fail_episodes(WorkerLost(number, f"its rollout worker was lost: {why}"))
        self._unready_losses += not worker.ready
        if self._unready_losses == MOST_LOST:
            self._fail(RuntimeError(f"{MOST_LOST} rollout workers in a row did not start; the last: {why}"))
        elif not worker.retiring:
            self._add()

    def _begin(self) -> WorkerProcess:
        index = next(self._indices)
        return WorkerProcess(index, self._factory.begin(index))

    def _add(self) -> None:
        if self._factory.gone:
            self._factory = WorkerFactory()
        worker = self._begin()
        self._workers.append(worker)
        if self._held:
            worker.send(messages.Drain())
        worker.reading = asyncio.create_task(self._read(worker))

    def _fail(self, error: Exception) -> None:
        """Nothing is played from now on."""
        self._failure = self._failure or error
        for worker in self._workers:
            worker.fail_episodes(error)
            worker.drained.set()

    async def _ask(self, message: messages.Play) -> Trajectory:
        able = [worker for worker in self._workers if not worker.retiring]
        worker = min(able, key=lambda worker: (not worker.ready, len(worker.episodes)))
        worker.episodes[message.number] = future = asyncio.get_running_loop().create_future()
        worker.send(message)
        try:
            return await future
        except asyncio.CancelledError:
            worker.send(messages.Cancel(message.number))
            raise
        finally:
            del worker.episodes[message.number]

    async def _hold(self) -> None:
        """Return once no worker has a request in flight; further ones wait."""
        self._held = True
        for worker in self._workers:
            worker.drained.clear()
        self._tell(messages.Drain())
        await asyncio.gather(*(worker.drained.wait() for worker in self._workers))

    def _servers(self) -> Message:
        lives = [server.life if server.up else 0 for server in self._engine.pool.servers]
        return messages.Servers(lives, self._engine.replaced)

    def _tell_servers(self) -> None:
        self._tell(self._servers())

    def _tell(self, message: Message) -> None:
        for worker in self._workers:
            worker.send(message)


def _how_it_ended(status: int | None) -> str:
    if status is None:
        return "it is gone"
    return f"ended by signal {-status}" if status < 0 else f"ended with status {status}"
