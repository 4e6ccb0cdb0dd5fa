"""Mathematics with a Python interpreter: the policy may run code before it answers in \\boxed{}.

    What is 17 * 23 - 4?                                                                the prompt
    <tool_call>{"name": "python", "arguments": {"code": "print(17*23-4)"}}</tool_call>    387
    \\boxed{387}                                                                         reward 1, done

Each call is a new process, see python_process.py; nothing is kept between calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nemo_flashrl.environments import verifiable_math
from nemo_flashrl.environments.answers import boxed_answer, is_equal
from nemo_flashrl.environments.environment import Message, StepResult
from nemo_flashrl.environments.python_process import Outcome, ProcessLimits, run_python
from nemo_flashrl.environments.tool_calls import ON_MALFORMED, MalformedCall, malformed, parse_tool_calls

_TOOLS = {"python": frozenset({"code"})}
_INSTRUCTION = (
    "You may run Python code, which must print what you want to see:\n"
    '<tool_call>{"name": "python", "arguments": {"code": "print(6 * 7)"}}</tool_call>\n'
    "Give the final answer in \\boxed{}."
)
_ENDS = {
    "timeout": "[stopped after {limits.seconds:g} seconds]",
    "output_limit": "[stopped after {limits.output_bytes} bytes of output]",
    "died": "[ended with an error]",
}


@dataclass(frozen=True)
class Settings:
    """The questions are verifiable_math's; `step_timeout` of the rollout must leave room for `seconds`."""

    questions: verifiable_math.Settings = field(
        default_factory=lambda: verifiable_math.Settings(instruction=_INSTRUCTION)
    )
    seconds: float = 10.0  # wall time of one call
    memory_mib: int = 512  # address space of one call
    output_bytes: int = 2**16
    on_malformed: str = "observation"  # a malformed tool call: "observation" tells the policy, "end" ends the episode

    def __post_init__(self) -> None:
        if self.on_malformed not in ON_MALFORMED:
            raise ValueError(
                f"python_tool: on_malformed={self.on_malformed!r} must be one of {', '.join(ON_MALFORMED)}"
            )
        if not (self.seconds > 0 and self.memory_mib >= 64 and self.output_bytes > 0):
            raise ValueError(
                f"python_tool: seconds={self.seconds} and output_bytes={self.output_bytes} must be above 0, "
                f"memory_mib={self.memory_mib} at least 64"
            )


class PythonTool:
    """One question."""

    Settings = Settings

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._limits = ProcessLimits(settings.seconds, settings.memory_mib * 2**20, settings.output_bytes)
        self._task: verifiable_math.Task | None = None
        self._calls = 0

    @classmethod
    def tasks(cls, settings: Settings) -> Sequence[verifiable_math.Task]:
        return verifiable_math.VerifiableMath.tasks(settings.questions)

    async def reset(self, task: verifiable_math.Task) -> list[Message]:
        self._task, self._calls = task, 0
        return [{"role": "user", "content": f"{task.question}\n{self._settings.questions.instruction}"}]

    async def step(self, action: str) -> StepResult:
        try:
            calls = parse_tool_calls(action, _TOOLS)
            if not all(isinstance(call.arguments["code"], str) for call in calls):
                raise MalformedCall('the argument "code" of python must be a string')
        except MalformedCall as error:
            return malformed(error, self._settings.on_malformed)
        if calls:
            self._calls += len(calls)
            outcomes = [await run_python(call.arguments["code"], self._limits) for call in calls]
            return StepResult("\n".join(map(self._shown, outcomes)), role="tool", info={"tool_calls": self._calls})
        answer = boxed_answer(action)
        if answer is None:
            return StepResult("Call the tool, or give the final answer in \\boxed{}.", malformed=True)
        solved = await is_equal(answer, boxed_answer(self._task.answer) or self._task.answer)
        info = {"outcome": "right" if solved else "wrong", "tool_calls": self._calls}
        return StepResult(reward=float(solved), done=True, success=solved, info=info)

    async def close(self) -> None:
        self._task = None

    def _shown(self, outcome: Outcome) -> str:
        end = _ENDS.get(outcome.how, "").format(limits=self._limits)
        return "\n".join(part for part in (outcome.output.rstrip(), end) if part) or "[no output]"
