"""Which parts of the assistant's turns are trained, and why."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from megatron_rl.config import ConfigModel

if TYPE_CHECKING:  # the config of a run is read without what renders its data
    from megatron_rl.data.spans import SpanKind
    from megatron_rl.data.wrong_calls import WrongCall


class MaskConfig(ConfigModel):
    """What of the assistant's turns the loss counts. What is masked stays in the context."""

    train: Literal["all", "reasoning", "answer"] = "all"
    """all: whole turns, end-of-turn token included. reasoning: only the reasoning, with the marks that the chat
    template writes around it. answer: all but the reasoning, tool calls and end-of-turn token included."""
    wrong_tool_calls: Literal["mask_turn", "mask_call", "train"] = "mask_turn"
    """Calls that no one should learn: an unknown tool, arguments that do not fit the tool's JSON schema, and the exact
    repeat of a call that failed. mask_turn: the turn with such a call is not trained. mask_call: only the call is not.
    train: they are trained like any other."""


class Fates:
    """What becomes of each part of the turns of one conversation."""

    def __init__(self, mask: MaskConfig, wrong_calls: "Sequence[WrongCall]") -> None:
        self._mask = mask
        self._wrong: dict[int, dict[int, str]] = {}
        for wrong in wrong_calls:
            self._wrong.setdefault(wrong.message, {})[wrong.call] = wrong.reason

    @property
    def need_parts(self) -> bool:
        """Whether any turn is trained in part."""
        return self._mask.train != "all" or (bool(self._wrong) and self._mask.wrong_tool_calls == "mask_call")

    def __call__(self, message: int, kind: "SpanKind", call: int) -> tuple[bool, str]:
        """(trained, why) for a part of the turn of a message, or for its end-of-turn token."""
        wrong, handling = self._wrong.get(message, {}), self._mask.wrong_tool_calls
        if kind == "tool_call" and call in wrong and handling != "train":
            return False, f"wrong call: {wrong[call]}"
        if wrong and handling == "mask_turn":
            return False, f"turn with a wrong call: {next(iter(wrong.values()))}"
        if self._mask.train == "reasoning" and kind != "reasoning":
            return False, "not reasoning"
        if self._mask.train == "answer" and kind == "reasoning":
            return False, "not answer"
        return True, _NAMES[kind]


_NAMES: "dict[SpanKind, str]" = {
    "turn": "assistant's turn",
    "reasoning": "reasoning",
    "answer": "answer",
    "tool_call": "tool call",
    "end_of_turn": "end of turn",
}
