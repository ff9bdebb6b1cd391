"""Tools that environments offer: their schemas, and running the calls of an assistant turn.

Invariant: whatever the model writes becomes a tool message. Only a fault in a tool's own code raises.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.rewards.verify import ToolCall, ToolCallError, check_arguments, parse_tool_calls
from megatron_rl.rollout.env import Message


@dataclass(frozen=True)
class Tool:
    """A function the model may call."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments object."""
    run: Callable[[dict[str, Any]], str]
    """Arguments that fit the schema -> what the model reads back."""

    def schema(self) -> dict[str, Any]:
        """OpenAI function schema."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class ToolBox:
    """The tools of one episode and the counts behind its signals."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._num_calls = self._num_well_formed = self._num_in_schema = 0

    def run(self, assistant_text: str) -> list[Message]:
        """Runs every call of a turn, in order: one tool message each. A refused call does not stop the next."""
        return [{"role": "tool", "content": self._answer_to(call)} for call in parse_tool_calls(assistant_text)]

    def _answer_to(self, call: ToolCall | ToolCallError) -> str:
        self._num_calls += 1
        if isinstance(call, ToolCallError):
            return f"error: {call.reason}"
        self._num_well_formed += 1
        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: unknown tool {call.name!r}; tools are {', '.join(self._tools)}"
        faults = check_arguments(call.arguments, tool.parameters)
        if faults:
            return f"error: {'; '.join(faults)}"
        self._num_in_schema += 1
        return tool.run(call.arguments)

    def signals(self) -> dict[str, float]:
        """tool_well_formed, tool_in_schema: shares of the calls so far; absent before the first call."""
        if not self._num_calls:
            return {}
        return {
            "tool_well_formed": self._num_well_formed / self._num_calls,
            "tool_in_schema": self._num_in_schema / self._num_calls,
        }
