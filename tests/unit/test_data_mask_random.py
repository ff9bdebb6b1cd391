"""Masks of random conversations against renderers in plain Python that know which text is whose.

Texts are put together from what makes borders hard: whitespace, tags, headers, end-of-turn tokens, long characters.
"""

import json
import runpy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config import DataError
from megatron_rl.data.conversation import Conversation
from megatron_rl.data.render import ChatRenderer, MaskConfig

CHAT = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "chat_templates.py")))
CIRCLE = {kind: circle for circle, kind in CHAT.KINDS.items()}
TRAINED = {
    "all": {"reasoning", "answer", "tool_call", "end_of_turn"},
    "reasoning": {"reasoning"},
    "answer": {"answer", "tool_call", "end_of_turn"},
}
Message = dict[str, Any]

PIECES = ["a", "b.", "Ü", "👩\u200d🚀", " ", "\n", "\n\n", '"', "{", "</", "qmarkx", "7z", "<tool_call>", "<think>"]
HEADERS = ["<|im_end|>", "<|im_start|>assistant\n", "<|user|>", "<|assistant|>", "<|endoftext|>", "<|observation|>"]


def texts(*, think: bool) -> st.SearchStrategy[str]:
    pieces = [*PIECES, *HEADERS, *(["</think>"] if think else [])]
    return st.lists(st.sampled_from(pieces), max_size=4).map("".join)


calls = st.builds(
    lambda name, arguments: {"type": "function", "function": {"name": name, "arguments": arguments}},
    st.sampled_from(["f", "g", "ff"]),
    st.dictionaries(
        st.sampled_from(["x", "y"]),
        st.recursive(
            texts(think=False) | st.integers(0, 9) | st.none(), lambda inner: st.lists(inner, max_size=2), max_leaves=3
        ),
        max_size=2,
    ),
)


@st.composite
def assistants(draw: st.DrawFn) -> Message:
    message: Message = {"role": "assistant", "content": draw(texts(think=True))}
    if draw(st.booleans()):
        message["reasoning_content"] = draw(texts(think=False))
    if draw(st.booleans()):
        message["tool_calls"] = draw(st.lists(calls, min_size=1, max_size=2))
    return message


others = st.builds(
    lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "tool"]), texts(think=False)
)
conversations = st.lists(assistants() | others, min_size=1, max_size=6).filter(
    lambda messages: any(message["role"] == "assistant" for message in messages)
)


def thoughts(message: Message) -> tuple[str, str]:
    """(reasoning, answer)"""
    content = message["content"]
    if isinstance(reasoning := message.get("reasoning_content"), str):
        return reasoning, content
    if "</think>" not in content:
        return "", content
    head, tail = content.split("</think>")[0], content.split("</think>")[-1]
    return head.rstrip("\n").split("<think>")[-1].lstrip("\n"), tail.lstrip("\n")


class Turn:
    """Parts of a turn in order; whitespace where two meet goes with the first of them, else with the next."""

    def __init__(self) -> None:
        self.parts: list[list[str]] = []
        self.space = ""

    def add(self, kind: str, text: str) -> None:
        if not text.strip():
            self.add_space(text)
        else:
            self.parts.append([kind, self.space + text])
            self.space = ""

    def add_space(self, text: str) -> None:
        if self.parts:
            self.parts[-1][1] += text
        else:
            self.space += text

    def drawing(self) -> str:
        parts = self.parts or [["answer", self.space]]
        return "".join(CIRCLE[kind] + text for kind, text in parts)


def qwen3(messages: list[Message]) -> str:
    questions = [i for i, message in enumerate(messages) if message["role"] == "user"]
    question = questions[-1] if questions else len(messages) - 1
    drawing = ""
    for index, message in enumerate(messages):
        content, last = message["content"], index == len(messages) - 1
        if message["role"] == "user":
            drawing += f"<|im_start|>user\n{content}<|im_end|>\n"
        elif message["role"] == "tool":
            drawing += "<|im_start|>user" if index == 0 or messages[index - 1]["role"] != "tool" else ""
            drawing += f"\n<tool_response>\n{content}\n</tool_response>"
            drawing += "<|im_end|>\n" if last or messages[index + 1]["role"] != "tool" else ""
        else:
            reasoning, answer = thoughts(message)
            turn = Turn()
            if index > question and (last or reasoning):
                turn.add("reasoning", "<think>\n" + reasoning.strip("\n") + "\n</think>\n\n")
                turn.add("answer", answer.lstrip("\n"))
            else:
                turn.add("answer", answer)
            for number, call in enumerate(message.get("tool_calls", [])):
                turn.add_space("\n" if number or answer else "")
                name, arguments = (
                    call["function"]["name"],
                    json.dumps(call["function"]["arguments"], ensure_ascii=False),
                )
                turn.add("tool_call", f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>')
            drawing += f"<|im_start|>assistant\n{turn.drawing()}ⓔ<|im_end|>ⓧ\n"
    return drawing


def glm45(messages: list[Message]) -> str:
    question = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    drawing = "[gMASK]<sop>"
    for index, message in enumerate(messages):
        before = messages[index - 1]["role"] if index else ""
        header = {"user": "<|user|>", "assistant": "<|assistant|>", "tool": "<|observation|>"}[message["role"]]
        if before == message["role"] == "tool":
            header = ""
        drawing += f"ⓔ{header}ⓧ" if before == "assistant" else header
        if message["role"] == "user":
            drawing += "\n" + message["content"]
        elif message["role"] == "tool":
            drawing += f"\n<tool_response>\n{message['content']}\n</tool_response>"
        else:
            reasoning, answer = thoughts(message)
            turn = Turn()
            turn.add("reasoning", f"\n<think>{reasoning.strip() if index > question else ''}</think>")
            if answer.strip():
                turn.add_space("\n")
                turn.add("answer", answer.strip())
            for call in message.get("tool_calls", []):
                turn.add_space("\n")
                turn.add("tool_call", glm45_call(**call["function"]))
            drawing += turn.drawing()
    if messages[-1]["role"] == "assistant":
        drawing += "ⓔ<|observation|>" if messages[-1].get("tool_calls") else "ⓔ<|user|>"
    return drawing


def glm45_call(name: str, arguments: dict[str, Any]) -> str:
    lines = [f"<tool_call>{name}\n"]
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines.append(f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n")
    return "".join([*lines, "</tool_call>"])


def llama3(messages: list[Message]) -> str:
    drawing = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
    drawing += "Today Date: 26 Jul 2024\n\n<|eot_id|>"
    for message in messages:
        content, calls = message["content"], message.get("tool_calls", [])
        role = "ipython" if message["role"] == "tool" else message["role"]
        drawing += f"<|start_header_id|>{role}<|end_header_id|>\n\n"
        if role == "ipython":
            drawing += json.dumps(content, ensure_ascii=False) + "<|eot_id|>"
        elif role == "user":
            drawing += content.strip() + "<|eot_id|>"
        elif calls:
            name, arguments = (
                calls[0]["function"]["name"],
                json.dumps(calls[0]["function"]["arguments"], ensure_ascii=False),
            )
            drawing += f'ⓒ{{"name": "{name}", "parameters": {arguments}}}ⓔ<|eot_id|>ⓧ'
        else:
            drawing += f"ⓐ{content.strip()}ⓔ<|eot_id|>ⓧ"
    return drawing


ORACLES: dict[str, Callable[[list[Message]], str]] = {"qwen3": qwen3, "glm45": glm45, "llama3": llama3}


def cannot_render(name: str, messages: list[Message]) -> bool:
    """Turns that a template joins without an end in between, and calls that it refuses."""
    pairs = pairwise(messages)
    joined = any(a["role"] == b["role"] == "assistant" for a, b in pairs)
    several = any(len(message.get("tool_calls", [])) > 1 for message in messages)
    return (name == "glm45" and joined) or (name == "llama3" and several)


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatRenderer]:
    return {name: ChatRenderer(CHAT.make_tokenizer(name, tmp_path_factory.mktemp(name))) for name in ORACLES}


@pytest.mark.parametrize("name", ORACLES)
@settings(max_examples=15, deadline=None)
@given(messages=conversations, train=st.sampled_from(["all", "reasoning", "answer"]))
def test_random_conversations_train_what_a_plain_renderer_says(
    name: str, messages: list[Message], train: Literal["all", "reasoning", "answer"], renderers: dict[str, ChatRenderer]
) -> None:
    if name == "llama3" and train == "reasoning":
        train = "all"
    conversation = Conversation("rows:1", messages, [])
    if cannot_render(name, messages):
        reason = "an assistant turn must end in one of" if name == "glm45" else "only supports single tool-calls"
        with pytest.raises(DataError, match=rf"^rows:1: .*{reason}"):
            renderers[name].render(conversation, MaskConfig(train=train))
        return
    text, ids, spans = CHAT.drawn(ORACLES[name](messages), name)
    rendered = renderers[name].render(conversation, MaskConfig(train=train))
    assert renderers[name].decode(rendered.token_ids.tolist()) == text
    assert rendered.token_ids.tolist() == ids
    expected = [kind in TRAINED[train] for start, end, kind in spans for _ in range(start, end)]
    assert rendered.loss_mask.tolist() == expected
