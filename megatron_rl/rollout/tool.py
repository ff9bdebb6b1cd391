"""Tools that environments offer: their schemas, and running the calls of an assistant turn.

Invariant: whatever the model writes becomes a tool message. Only a fault in a tool's own code raises.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.rewards.verify import ToolCallError, check_arguments, parse_tool_calls
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


@dataclass(frozen=True)
class ToolTurn:
    """What came of the calls of one assistant turn."""

    messages: list[Message]
    """One tool message per call, in order; empty if the turn calls nothing."""
    errors: list[ToolCallError]
    """Calls that were refused."""


class ToolBox:
    """The tools of one episode and the counts behind its signals."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._schemas = [tool.schema() for tool in tools]
        self._num_calls = self._num_well_formed = self._num_in_schema = 0

    def run(self, assistant_text: str) -> ToolTurn:
        """Runs every call of a turn, in order; a refused one does not stop the next."""
        messages: list[Message] = []
        errors: list[ToolCallError] = []
        for call in parse_tool_calls(assistant_text):
            self._num_calls += 1
            if isinstance(call, ToolCallError):
                error = call
            else:
                self._num_well_formed += 1
                error = check_arguments(call, self._schemas)
            if error is None:
                self._num_in_schema += 1
                content = self._tools[call.name].run(call.arguments)
            else:
                errors.append(error)
                content = f"Fehler {error.kind}: {error.message}"
            messages.append({"role": "tool", "content": content})
        return ToolTurn(messages, errors)

    def signals(self) -> dict[str, float]:
        """tool_well_formed, tool_in_schema: shares of the calls so far (SPEC 2); absent before the first call."""
        if not self._num_calls:
            return {}
        return {
            "tool_well_formed": self._num_well_formed / self._num_calls,
            "tool_in_schema": self._num_in_schema / self._num_calls,
        }
