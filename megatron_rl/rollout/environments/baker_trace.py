"""SFT conversations of the baker task, with the faults a real corpus has: wrong JSON types, wrong sums."""

import json
import random
from dataclasses import dataclass

from megatron_rl.records import Prompt
from megatron_rl.rollout.env import Message
from megatron_rl.rollout.environments.baker import BOOK_INCOME, BakerEpisode
from megatron_rl.rollout.environments.baker_problem import Numbers, working
from megatron_rl.rollout.environments.baker_text import euros

_SLIPS_CENTS = (-100, -50, -10, 10, 50, 100)


@dataclass(frozen=True)
class TraceNoise:
    """Shares of faulty traces. A trace that books correctly has neither fault."""

    string_value: float = 0.55
    """The amount goes into the call as a German string, "14,40", which the tool refuses."""
    wrong_result: float = 0.15
    """The last step of the working is off by 10 cents to 1 euro, and that is booked."""
    repaired: float = 0.0
    """Of the refused calls: the conversation shows the tool's error and a second, well-typed call."""


def baker_trace(prompt: Prompt, rng: random.Random, noise: TraceNoise) -> list[Message]:
    """Prompt and answer: a short German working, then the call. HF messages for the chat template."""
    numbers = Numbers.from_task(prompt.task)
    booked_cents = numbers.answer_cents
    if rng.random() < noise.wrong_result:
        booked_cents = rng.choice([booked_cents + slip for slip in _SLIPS_CENTS if booked_cents + slip > 0])
    amount = booked_cents // 100 if booked_cents % 100 == 0 else booked_cents / 100
    text = working(numbers, booked_cents)
    if rng.random() >= noise.string_value:
        return [*prompt.messages, _call(text, amount)]
    refused = _call(text, euros(booked_cents))
    if rng.random() >= noise.repaired:
        return [*prompt.messages, refused]
    arguments = json.dumps(refused["tool_calls"][0]["function"], ensure_ascii=False)
    error = BakerEpisode(prompt).step(f"<tool_call>{arguments}</tool_call>")
    return [*prompt.messages, refused, *error.messages, _call("", amount)]


def _call(text: str, amount: float | str) -> Message:
    function = {"name": BOOK_INCOME, "arguments": {"betrag": amount}}
    return {"role": "assistant", "content": text, "tool_calls": [{"type": "function", "function": function}]}
