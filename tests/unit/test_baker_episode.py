"""The baker's judge: what a booking earns, and what a faulty call is told."""

import json
import random
from typing import Any

import pytest

from megatron_rl.records import Prompt
from megatron_rl.rollout.environments.baker import Baker, BakerOptions
from megatron_rl.rollout.environments.baker_trace import TraceNoise, baker_trace
from megatron_rl.rollout.tool import Tool, ToolBox

ENV = Baker(BakerOptions(decoy_tool=True))
PROMPT = next(p for i in range(2000) if (p := ENV.prompt("new_numbers", i)).task["pairs"] == [[36, 40]])
RIGHT = 14.4


def call(amount: Any, name: str = "buche_einnahme") -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'betrag': amount}})}</tool_call>"


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (f"36 mal 0,40 ist 14,40.{call(RIGHT)}", 1.0),
        (call(14.40000001), 1.0),
        (call(144e-1), 1.0),
        (call(1440), 0.0),
        (call(14), 0.0),
        (call(-14.4), 0.0),
        (call(RIGHT, "buche_ausgabe"), 0.0),
        (call(RIGHT) + call(RIGHT), 0.0),
        (call("14,40") + call(RIGHT), 1.0),
        ("Das Einkommen ist 14,40 €.", 0.0),
        ("", 0.0),
    ],
)
def test_one_right_booking_as_income_passes_and_ends_the_episode(text: str, reward: float) -> None:
    outcome = ENV.episode(PROMPT).step(text)
    assert (outcome.done, outcome.reward) == (True, reward)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (call("14,40"), "betrag"),
        (call(None), "betrag"),
        (call(True), "betrag"),
        (call([14.4]), "betrag"),
        (call(14.4, "buche"), "buche"),
        ('<tool_call>{"name":"buche_einnahme","arguments":{"betrag":14,40}}</tool_call>', ""),
        ('<tool_call>{"name":"buche_einnahme","arguments":{"betrag":NaN}}</tool_call>', ""),
        ('<tool_call>{"name":"buche_einnahme","arguments":{}}</tool_call>', "betrag"),
        ('<tool_call>{"name":"buche_einnahme","arguments":{"betrag":1,"tag":2}}</tool_call>', "tag"),
        ('<tool_call>{"name":"buche_einnahme"}</tool_call>', ""),
        ("<tool_call>14.4</tool_call>", ""),
    ],
)
def test_a_refused_call_is_told_and_may_be_corrected(text: str, said: str) -> None:
    episode = ENV.episode(PROMPT)
    refused = episode.step(text)
    assert (refused.done, refused.reward) == (False, None)
    (reply,) = refused.messages
    assert reply["role"] == "tool" and reply["content"].startswith("error: ") and said in reply["content"]
    corrected = episode.step(call(RIGHT))
    assert (corrected.done, corrected.reward) == (True, 1.0)
    assert corrected.signals["tool_in_schema"] == 0.5


def test_signals_are_shares_of_the_calls_so_far_and_absent_without_one() -> None:
    assert ENV.episode(PROMPT).step("nichts").signals == {}
    episode = ENV.episode(PROMPT)
    assert episode.step("<tool_call>{</tool_call>").signals == {"tool_well_formed": 0.0, "tool_in_schema": 0.0}
    assert episode.step(call("x")).signals == {"tool_well_formed": 0.5, "tool_in_schema": 0.0}
    assert episode.step(call(RIGHT)).signals == {"tool_well_formed": 2 / 3, "tool_in_schema": 1 / 3}


def test_a_fault_in_a_tools_own_code_is_not_blamed_on_the_model() -> None:
    def broken(arguments: dict[str, Any]) -> str:
        raise RuntimeError("no connection")

    box = ToolBox([Tool("f", "", {"type": "object"}, broken)])
    with pytest.raises(RuntimeError, match="no connection"):
        box.run('<tool_call>{"name":"f","arguments":{}}</tool_call>')


def answer_text(message: dict[str, Any]) -> str:
    calls = "".join(f"<tool_call>{json.dumps(c['function'])}</tool_call>" for c in message["tool_calls"])
    return message["content"] + calls


def judged(
    noise: TraceNoise, count: int = 2000, **options: Any
) -> list[tuple[Prompt, list[dict[str, Any]], list[Any]]]:
    env, rows = Baker(BakerOptions(**options)), []
    for index in range(count):
        prompt = env.prompt("train", index)
        messages = baker_trace(prompt, random.Random(index), noise)
        episode = env.episode(prompt)
        rows.append((prompt, messages, [episode.step(answer_text(m)) for m in messages if m["role"] == "assistant"]))
    return rows


@pytest.mark.parametrize("level", ["easy", "full"])
def test_traces_without_noise_all_pass(level: str) -> None:
    for _, messages, outcomes in judged(TraceNoise(0.0, 0.0), level=level):
        assert [outcome.reward for outcome in outcomes] == [1.0], messages


def test_noise_gives_the_shares_it_names() -> None:
    rows = judged(TraceNoise(string_value=0.55, wrong_result=0.15))
    refused = sum(not outcomes[-1].done for *_, outcomes in rows) / len(rows)
    passed = sum(outcomes[-1].reward == 1.0 for *_, outcomes in rows) / len(rows)
    assert refused == pytest.approx(0.55, abs=0.04)
    assert passed == pytest.approx(0.45 * 0.85, abs=0.04)
    strings = [m for _, messages, o in rows if not o[-1].done for m in messages[-1:]]
    assert all(isinstance(m["tool_calls"][0]["function"]["arguments"]["betrag"], str) for m in strings)


def test_repaired_traces_show_the_tools_own_error_and_end_well() -> None:
    for _, messages, outcomes in judged(TraceNoise(string_value=1.0, wrong_result=0.0, repaired=1.0), count=100):
        assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant"]
        assert messages[2] == outcomes[0].messages[0]
        assert [outcome.reward for outcome in outcomes] == [None, 1.0]


def test_the_working_books_what_it_says() -> None:
    for prompt, messages, _ in judged(TraceNoise(0.0, 0.5), count=200, level="full"):
        amount = messages[-1]["tool_calls"][0]["function"]["arguments"]["betrag"]
        said = messages[-1]["content"].rstrip(".").split()[-1].replace(",", ".")
        assert float(said) == amount, prompt.messages
