"""Tool calls in the text of an action, in the form that Hermes introduced and Qwen's chat templates ask for:

<tool_call>
{"name": "python", "arguments": {"code": "print(1)"}}
</tool_call>
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from nemo_flashrl.environments.environment import StepResult

ON_MALFORMED = ("observation", "end")
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class MalformedCall(ValueError):
    """A tool call that is none; the message tells the policy what is wrong with it."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call."""

    name: str
    arguments: dict[str, Any]


def parse_tool_calls(action: str, known: dict[str, frozenset[str]]) -> list[ToolCall]:
    """The calls of an action in order, none if it makes none. Strict: nothing is guessed or repaired.

    Args:
        action: what the policy said.
        known: tool name -> the names of its arguments, all of which a call must give.

    Raises:
        MalformedCall: tags that do not pair, what is no JSON object of exactly "name" and "arguments", an unknown
            tool, missing or unknown arguments.
    """
    before, *pieces = action.split(_OPEN)
    if _CLOSE in before or not all(piece.count(_CLOSE) == 1 for piece in pieces):
        raise MalformedCall(f"every {_OPEN} needs its {_CLOSE}")
    return [_parse(piece.split(_CLOSE)[0], known) for piece in pieces]


def _parse(text: str, known: dict[str, frozenset[str]]) -> ToolCall:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedCall(f"a tool call must be one JSON object: {error}") from error
    if not isinstance(call, dict) or call.keys() != {"name", "arguments"}:
        raise MalformedCall('a tool call must be a JSON object of exactly "name" and "arguments"')
    name, arguments = call["name"], call["arguments"]
    if not isinstance(name, str) or name not in known:
        raise MalformedCall(f"there is no tool {name!r:.100}; there is: {', '.join(sorted(known))}")
    if not isinstance(arguments, dict) or arguments.keys() != known[name]:
        raise MalformedCall(f"the arguments of {name} must be exactly: {', '.join(sorted(known[name]))}")
    return ToolCall(name, arguments)


def malformed(error: MalformedCall, on_malformed: str) -> StepResult:
    """What a malformed call leads to: the policy is told and may try again, or the episode ends with reward 0."""
    if on_malformed == "end":
        info = {"outcome": "malformed_call", "malformed": str(error)}
        return StepResult(done=True, success=False, info=info, malformed=True)
    return StepResult(observation=f"Error: {error}", role="tool", malformed=True)
