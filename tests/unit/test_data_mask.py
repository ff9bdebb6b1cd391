"""Masks against spans drawn by hand, for three templates that behave as Qwen3's, GLM-4.5's and Llama 3's do."""

import json
import runpy
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest

from megatron_rl.data.conversation import Conversation
from megatron_rl.data.render import ChatRenderer, MaskConfig, Rendered

CHAT = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "chat_templates.py")))
user, system, assistant, result, call, tool = (
    getattr(CHAT, name) for name in ("user", "system", "assistant", "result", "call", "tool")
)
TOOLS = [tool("f", x="number"), tool("g", s="string")]
LISTED = "".join("\n" + json.dumps(one) for one in TOOLS)
LISTED_WIDE = "".join(json.dumps(one, indent=4) + "\n\n" for one in TOOLS)
TRACE = [
    user("q"),
    assistant(None, "r1", [call("f", x=1)]),
    result("1"),
    assistant("mid.", "r2", [call("f", x=2.5), call("g", s="ö\n")]),
    result("2"),
    result("3"),
    assistant("end", "r3"),
]
LLAMA_SYSTEM = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n{env}Cutting Knowledge Date: December 2023\n"
    "Today Date: 26 Jul 2024\n\n{system}<|eot_id|>"
)
LLAMA_USER = "<|start_header_id|>user<|end_header_id|>\n\n"
LLAMA_ASSISTANT = "<|start_header_id|>assistant<|end_header_id|>\n\n"

Case = tuple[str, list[dict[str, Any]], list[dict[str, Any]], str]
CASES: dict[str, Case] = {
    "qwen3: reasoning": (
        "qwen3",
        [user("Hü"), assistant("Ja.", "hm.")],
        [],
        "<|im_start|>user\nHü<|im_end|>\n<|im_start|>assistant\nⓡ<think>\nhm.\n</think>\n\nⓐJa.ⓔ<|im_end|>ⓧ\n",
    ),
    "qwen3: the reasoning of an earlier question is not there": (
        "qwen3",
        [system("s"), user("a"), assistant("b", "r1"), user("c"), assistant("d", "r2")],
        [],
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nⓐbⓔ<|im_end|>ⓧ\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\nⓡ<think>\nr2\n</think>\n\nⓐdⓔ<|im_end|>ⓧ\n",
    ),
    "qwen3: a trace of tool calls keeps its reasoning": (
        "qwen3",
        TRACE,
        TOOLS,
        f"<|im_start|>system\n# Tools\n\n<tools>{LISTED}\n</tools><|im_end|>\n<|im_start|>user\nq<|im_end|>\n"
        "<|im_start|>assistant\nⓡ<think>\nr1\n</think>\n\n"
        'ⓒ<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>ⓔ<|im_end|>ⓧ\n'
        "<|im_start|>user\n<tool_response>\n1\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nⓡ<think>\nr2\n</think>\n\nⓐmid.\n"
        'ⓒ<tool_call>\n{"name": "f", "arguments": {"x": 2.5}}\n</tool_call>\n'
        'ⓒ<tool_call>\n{"name": "g", "arguments": {"s": "ö\\n"}}\n</tool_call>ⓔ<|im_end|>ⓧ\n'
        "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nⓡ<think>\nr3\n</think>\n\nⓐendⓔ<|im_end|>ⓧ\n",
    ),
    "qwen3: a result in a user turn is no question": (
        "qwen3",
        [user("q"), assistant("a", "r1"), user("<tool_response>\nx\n</tool_response>"), assistant("b", "r2")],
        [],
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nⓡ<think>\nr1\n</think>\n\nⓐaⓔ<|im_end|>ⓧ\n"
        "<|im_start|>user\n<tool_response>\nx\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nⓡ<think>\nr2\n</think>\n\nⓐbⓔ<|im_end|>ⓧ\n",
    ),
    "qwen3: no reasoning, empty reasoning, an empty answer": (
        "qwen3",
        [user("a"), assistant(""), user("b"), assistant("c", ""), user("d"), assistant("")],
        [],
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nⓔ<|im_end|>ⓧ\n"
        "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\nⓐcⓔ<|im_end|>ⓧ\n"
        "<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\nⓡ<think>\n\n</think>\n\nⓔ<|im_end|>ⓧ\n",
    ),
    "qwen3: end-of-turn and end-of-text tokens inside a turn": (
        "qwen3",
        [user("a<|im_end|>"), assistant("c<|im_end|>d<|endoftext|>", "r<|im_end|>")],
        [],
        "<|im_start|>user\na<|im_end|><|im_end|>\n<|im_start|>assistant\n"
        "ⓡ<think>\nr<|im_end|>\n</think>\n\nⓐc<|im_end|>d<|endoftext|>ⓔ<|im_end|>ⓧ\n",
    ),
    "qwen3: an end-of-turn token inside a call": (
        "qwen3",
        [user("a"), assistant("b", "r", [call("g", s="<|im_end|>", t=[{"u": "<|im_end|>", "v": 1}], w={})])],
        [],
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nⓡ<think>\nr\n</think>\n\nⓐb\n"
        'ⓒ<tool_call>\n{"name": "g", "arguments": {"s": "<|im_end|>", "t": [{"u": "<|im_end|>", "v": 1}], "w": {}}}\n'
        "</tool_call>ⓔ<|im_end|>ⓧ\n",
    ),
    "qwen3: reasoning in the content": (
        "qwen3",
        [user("a"), assistant("<think>\nr\n</think>\n\nb"), user("c"), assistant("<think>\nr\n</think>\n\nd")],
        [],
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nⓐbⓔ<|im_end|>ⓧ\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\nⓡ<think>\nr\n</think>\n\nⓐdⓔ<|im_end|>ⓧ\n",
    ),
    "qwen3: tags of reasoning inside the reasoning": (
        "qwen3",
        [user("a"), assistant("a<think>b<think>c</think>d</think>e")],
        [],
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nⓡ<think>\nc\n</think>\n\nⓐeⓔ<|im_end|>ⓧ\n",
    ),
    "qwen3: whitespace that the template strips, and that it keeps": (
        "qwen3",
        [user("a"), assistant("\n\nb \n", "\nr \n")],
        [],
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nⓡ<think>\nr \n</think>\n\nⓐb \nⓔ<|im_end|>ⓧ\n",
    ),
    "qwen3: headers and tags in texts": (
        "qwen3",
        [
            user("<|im_start|>assistant\nx<|im_end|>\n<|im_start|>assistant\n"),
            assistant(
                "<|im_start|>assistant\n<tool_call>", "<|im_start|>user\n", [call("f", x="<|im_start|>assistant\n")]
            ),
            user("<|im_start|>assistant\n"),
            assistant(""),
        ],
        [],
        "<|im_start|>user\n<|im_start|>assistant\nx<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
        "<|im_start|>assistant\nⓐ<|im_start|>assistant\n<tool_call>\n"
        'ⓒ<tool_call>\n{"name": "f", "arguments": {"x": "<|im_start|>assistant\\n"}}\n</tool_call>ⓔ<|im_end|>ⓧ\n'
        "<|im_start|>user\n<|im_start|>assistant\n<|im_end|>\n"
        "<|im_start|>assistant\nⓡ<think>\n\n</think>\n\nⓔ<|im_end|>ⓧ\n",
    ),
    "qwen3: words that could be marks": (
        "qwen3",
        [user("qmarkx0z"), assistant("qmarkx1zqmarkxx0z", "qmarkx")],
        [],
        "<|im_start|>user\nqmarkx0z<|im_end|>\n<|im_start|>assistant\n"
        "ⓡ<think>\nqmarkx\n</think>\n\nⓐqmarkx1zqmarkxx0zⓔ<|im_end|>ⓧ\n",
    ),
    "glm45: reasoning": (
        "glm45",
        [user("Hü"), assistant("Ja.", "hm.")],
        [],
        "[gMASK]<sop><|user|>\nHü<|assistant|>ⓡ\n<think>hm.</think>\nⓐJa.ⓔ<|user|>",
    ),
    "glm45: two questions": (
        "glm45",
        [system("s"), user("a"), assistant("b", "r1"), user("c"), assistant("d", "r2")],
        [],
        "[gMASK]<sop><|system|>\ns<|user|>\na<|assistant|>ⓡ\n<think></think>\nⓐbⓔ<|user|>ⓧ\nc"
        "<|assistant|>ⓡ\n<think>r2</think>\nⓐdⓔ<|user|>",
    ),
    "glm45: a trace of tool calls": (
        "glm45",
        TRACE,
        TOOLS,
        f"[gMASK]<sop><|system|>\n# Tools\n\n<tools>{LISTED}\n</tools><|user|>\nq"
        "<|assistant|>ⓡ\n<think>r1</think>\n"
        "ⓒ<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
        "ⓔ<|observation|>ⓧ\n<tool_response>\n1\n</tool_response>"
        "<|assistant|>ⓡ\n<think>r2</think>\nⓐmid.\n"
        "ⓒ<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>2.5</arg_value>\n</tool_call>\n"
        "ⓒ<tool_call>g\n<arg_key>s</arg_key>\n<arg_value>ö\n</arg_value>\n</tool_call>"
        "ⓔ<|observation|>ⓧ\n<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>"
        "<|assistant|>ⓡ\n<think>r3</think>\nⓐendⓔ<|user|>",
    ),
    "glm45: a trace that ends in a call, arguments without text": (
        "glm45",
        [user("q"), assistant(" a ", None, [call("f", x={"<|user|>": []}), call("h")])],
        [],
        "[gMASK]<sop><|user|>\nq<|assistant|>ⓡ\n<think></think>\nⓐa\n"
        'ⓒ<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{"<|user|>": []}</arg_value>\n</tool_call>\n'
        "ⓒ<tool_call>h\n</tool_call>ⓔ<|observation|>",
    ),
    "glm45: end-of-turn and end-of-text tokens inside a turn, an empty answer": (
        "glm45",
        [user("a"), assistant("c<|endoftext|>d<|user|>", " \n "), user("b"), assistant("", "r<|observation|>")],
        [],
        "[gMASK]<sop><|user|>\na<|assistant|>ⓡ\n<think></think>\nⓐc<|endoftext|>d<|user|>ⓔ<|user|>ⓧ\nb"
        "<|assistant|>ⓡ\n<think>r<|observation|></think>ⓔ<|user|>",
    ),
    "glm45: nothing at all": (
        "glm45",
        [user("a"), assistant("  "), user("b"), assistant("")],
        [],
        "[gMASK]<sop><|user|>\na<|assistant|>ⓡ\n<think></think>ⓔ<|user|>ⓧ\nb<|assistant|>ⓡ\n<think></think>ⓔ<|user|>",
    ),
    "llama3: two turns, whitespace trimmed": (
        "llama3",
        [system(" S"), user("q "), assistant(" 👩\u200d🚀é<|end_of_text|>\n"), user("r"), assistant("v<|eot_id|>")],
        [],
        LLAMA_SYSTEM.format(env="", system="S") + f"{LLAMA_USER}q<|eot_id|>"
        f"{LLAMA_ASSISTANT}ⓐ👩\u200d🚀é<|end_of_text|>ⓔ<|eot_id|>ⓧ{LLAMA_USER}r<|eot_id|>"
        f"{LLAMA_ASSISTANT}ⓐv<|eot_id|>ⓔ<|eot_id|>",
    ),
    "llama3: a call takes the place of the text": (
        "llama3",
        [user("q"), assistant("not shown", None, [call("f", x=1)]), result("1"), assistant("one")],
        TOOLS,
        LLAMA_SYSTEM.format(env="Environment: ipython\n", system="")
        + f'{LLAMA_USER}Respond in the format {{"name": ..., "parameters": ...}}.\n\n{LISTED_WIDE}q<|eot_id|>'
        f'{LLAMA_ASSISTANT}ⓒ{{"name": "f", "parameters": {{"x": 1}}}}ⓔ<|eot_id|>ⓧ'
        f'<|start_header_id|>ipython<|end_header_id|>\n\n"1"<|eot_id|>{LLAMA_ASSISTANT}ⓐoneⓔ<|eot_id|>',
    ),
    "llama3: a built-in tool ends its turn by another token": (
        "llama3-builtin",
        [user("q"), assistant("", None, [call("search", query="<|eom_id|>x")]), result("1"), assistant("one")],
        [],
        LLAMA_SYSTEM.format(env="", system="") + f"{LLAMA_USER}q<|eot_id|>"
        f'{LLAMA_ASSISTANT}ⓒ<|python_tag|>search.call(query="<|eom_id|>x")ⓔ<|eom_id|>ⓧ'
        f'<|start_header_id|>ipython<|end_header_id|>\n\n"1"<|eot_id|>{LLAMA_ASSISTANT}ⓐoneⓔ<|eot_id|>',
    ),
}
TRAINED = {
    "all": {"reasoning", "answer", "tool_call", "end_of_turn"},
    "reasoning": {"reasoning"},
    "answer": {"answer", "tool_call", "end_of_turn"},
}


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatRenderer]:
    made = {name: CHAT.make_tokenizer(name, tmp_path_factory.mktemp(name)) for name in CHAT.SPECIAL}
    builtin = "{%- set builtin_tools = ['search'] %}\n" + CHAT.template("llama3")
    folder = tmp_path_factory.mktemp("builtin")
    made["llama3-builtin"] = CHAT.make_tokenizer("llama3", folder, chat_template=builtin)
    return {name: ChatRenderer(tokenizer) for name, tokenizer in made.items()}


def row(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, effort: str | None = None
) -> Conversation:
    return Conversation("data.jsonl:7", messages, tools or [], effort)


def shape(rendered: Rendered) -> list[tuple[int, int, str]]:
    """Spans of the turns, and what lies between them in one piece."""
    joined: list[tuple[int, int, str]] = []
    for span in rendered.spans:
        if joined and span.kind == joined[-1][2] == "context":
            joined[-1] = (joined[-1][0], span.end, "context")
        else:
            joined.append((span.start, span.end, span.kind))
    return joined


def check_cover(rendered: Rendered) -> None:
    """Every token is in one span, and the mask is theirs."""
    spans = rendered.spans
    assert spans[0].start == 0 and spans[-1].end == len(rendered.token_ids)
    assert all(a.end == b.start for a, b in pairwise(spans)) and all(span.start < span.end for span in spans)
    assert rendered.loss_mask.tolist() == [span.trained for span in spans for _ in range(span.start, span.end)]
    assert all(span.reason for span in spans)


@pytest.mark.parametrize("name", CASES)
def test_parts_are_those_drawn_by_hand(name: str, renderers: dict[str, ChatRenderer]) -> None:
    template, messages, tools, drawing = CASES[name]
    text, ids, spans = CHAT.drawn(drawing, template.split("-")[0])
    rendered = renderers[template].render(row(messages, tools), parts=True)
    assert renderers[template].decode(rendered.token_ids.tolist()) == text
    assert rendered.token_ids.tolist() == ids and rendered.token_ids.dtype == np.int32
    assert shape(rendered) == spans
    check_cover(rendered)


def marked_qwen3() -> str:
    """The template with {% generation %} blocks."""
    header = "{{- '<|im_start|>assistant\\n' }}\n        {%- if loop"
    end = "        {{- '<|im_end|>\\n' }}\n    {%- elif message.role == 'tool'"
    template = CHAT.template("qwen3")
    assert template.count(header) == template.count(end) == 1
    template = template.replace(header, header.replace("{%- if", "{%- generation %}{%- if"))
    ends_inside = "{{- '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}"
    return template.replace(end, end.replace("{{- '<|im_end|>\\n' }}", ends_inside))


def test_a_template_that_marks_its_turns_gives_the_same_parts_in_any_thread(tmp_path: Path) -> None:
    renderer = ChatRenderer(CHAT.make_tokenizer("qwen3", tmp_path, chat_template=marked_qwen3()))
    for name, (template, messages, tools, drawing) in CASES.items():
        if template == "qwen3":
            _, ids, spans = CHAT.drawn(drawing, template)
            rendered = renderer.render(row(messages, tools), parts=True)
            assert (rendered.token_ids.tolist(), shape(rendered)) == (ids, spans), name
            bare = renderer.render(row(messages, tools))
            assert bare.loss_mask.tolist() == rendered.loss_mask.tolist(), name
    long = [message for _ in range(20) for message in (user("q"), assistant("a"))]
    alone = renderer.conversation(long)[1].tolist()
    with ThreadPoolExecutor(4) as pool:
        masks = list(pool.map(lambda _: renderer.conversation(long)[1].tolist(), range(12)))
    assert all(mask == alone for mask in masks)


@pytest.mark.parametrize("train", ["all", "reasoning", "answer"])
@pytest.mark.parametrize("name", CASES)
def test_masks_train_the_parts_they_name(
    name: str, train: Literal["all", "reasoning", "answer"], renderers: dict[str, ChatRenderer]
) -> None:
    template, messages, tools, drawing = CASES[name]
    renderer = renderers[template]
    if train == "reasoning" and template.startswith("llama3"):
        return
    _, ids, spans = CHAT.drawn(drawing, template.split("-")[0])
    rendered = renderer.render(row(messages, tools), MaskConfig(train=train))
    expected = [kind in TRAINED[train] for start, end, kind in spans for _ in range(start, end)]
    assert rendered.token_ids.tolist() == ids
    assert rendered.loss_mask.tolist() == expected and rendered.loss_mask.dtype == np.bool_
    check_cover(rendered)
    if train == "all":
        token_ids, loss_mask = renderer.conversation(messages, tools)
        assert (token_ids.tolist(), loss_mask.tolist()) == (ids, expected)
