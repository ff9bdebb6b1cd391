"""megatron-rl inspect: what people see of tokens, masks and reasons, in the terminal and on the page."""

import html
import io
import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from megatron_rl.cli.inspect import Selection, inspect_files
from megatron_rl.data.conversation import Conversation
from megatron_rl.data.effort_template import extend_template
from megatron_rl.data.mask import MaskConfig
from megatron_rl.data.render import ChatRenderer
from megatron_rl.telemetry.inspect_page import inspect_page
from megatron_rl.telemetry.inspect_text import print_conversation
from megatron_rl.telemetry.inspect_view import ShownConversation, ShownSpan, ShownToken, totals, visible

CHAT = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "chat_templates.py")))
user, assistant, call, tool = (getattr(CHAT, name) for name in ("user", "assistant", "call", "tool"))
TOOLS = [tool("book", amount="number")]
ROWS: list[dict[str, Any]] = [
    {"messages": [user("q <b>&"), assistant("Ja 👩\u200d🚀.", "hm")]},
    {"messages": [user("q"), assistant("x", "r", [call("book", amount="1")])], "tools": TOOLS},
    {"messages": [user("q")]},
    {"messages": [user("q"), assistant("low")], "effort": "low"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    CHAT.make_tokenizer("qwen3", folder, chat_template=extend_template(CHAT.template("qwen3")))
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return path


def selection(*, skip: int = 0, rows: int = 9, effort: str | None = None, **mask: Any) -> Selection:
    return Selection(skip, rows, MaskConfig(**mask), effort)


def test_the_terminal_shows_what_is_trained_and_why_the_rest_is_not(
    model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inspect_files(model, [str(data)], selection())
    shown = capsys.readouterr().out
    assert f"{data}:1" in shown and "q <b>&<|im_end|>↵" in shown
    assert "«<think>↵\nhm↵\n</think>↵\n↵\n»«Ja 👩\u200d🚀.»«<|im_end|>»↵" in shown
    second = shown[shown.index(f"{data}:2") : shown.index(f"{data}:3")]
    assert "«" not in second and "0 trained" in second and '{"name": "book", "arguments": {"amount": "1"}}' in second
    flat = " ".join(second.split())
    assert "tool call, masked wrong call: arguments: amount: '1' is not of type 'number'" in flat
    assert "messages must have an assistant turn, got none" in shown and "effort low" in shown
    assert "4 conversations, 1 of them without a trained token, 1 refused" in shown


def test_options_choose_rows_mask_and_effort(model: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspect_files(model, [str(data)], selection(skip=1, rows=1, wrong_tool_calls="mask_call", effort="high"))
    shown = capsys.readouterr().out
    assert f"{data}:2" in shown and f"{data}:1" not in shown and f"{data}:3" not in shown
    assert "Reasoning effort: high." in shown and "effort high" in shown
    assert "«x↵\n»<tool_call>" in shown and "1 conversation\n" in shown
    inspect_files(model, [str(data)], selection(rows=1, train="answer"))
    shown = capsys.readouterr().out
    assert "<think>↵\nhm↵\n</think>↵\n↵\n«Ja" in shown and "not answer" in shown


def test_colours_tell_trained_from_masked(model: Path) -> None:
    spans = (
        ShownSpan(0, "context", False, "user", (ShownToken((1,), "ask"),)),
        ShownSpan(1, "answer", True, "answer", (ShownToken((2, 3), "Ü"),)),
        ShownSpan(3, "answer", False, "not answer", (ShownToken((4,), "no"),)),
    )
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", width=80)
    print_conversation(console, ShownConversation("f:1", spans))
    assert "\x1b[2mask\x1b[0m\x1b[1;32mÜ\x1b[0m\x1b[2mno\x1b[0m" in out.getvalue()
    assert "4 tokens, 2 trained (50%)" in out.getvalue()


def test_the_page_holds_every_token_once_and_runs_nothing(model: Path, data: Path, tmp_path: Path) -> None:
    evil = {"messages": [user("<script>alert(1)</script>"), assistant('"><img src=x onerror=alert(1)>')]}
    data.write_text(data.read_text() + json.dumps(evil) + "\n", encoding="utf-8")
    out = tmp_path / "page.html"
    inspect_files(model, [str(data)], selection(), html=out)
    page = out.read_text(encoding="utf-8")
    assert "<script" not in page and "<img" not in page and "http" not in page.replace("http-equiv", "")
    renderer = ChatRenderer(CHAT.PreTrainedTokenizerFast.from_pretrained(model))
    sections = page.split("<section>")[1:]
    assert len(sections) == 5 and "got none" in sections[2]
    for number in (0, 1, 3, 4):
        row = ([*ROWS, evil])[number]
        rendered = renderer.render(Conversation("f", row["messages"], row.get("tools", []), row.get("effort")))
        section = sections[number]
        tokens = re.findall(r'<span class="token" title="tokens? [^:]*: ([\d, ]+)">([^<]*)</span>', section)
        ids = [int(one) for listed, _ in tokens for one in listed.split(", ")]
        assert ids == rendered.token_ids.tolist()
        text = "".join(html.unescape(shown) for _, shown in tokens)
        assert text == visible(renderer.decode(ids))
        trained = 0
        for inner in re.findall(r'<span class="\w+ trained" title="[^"]*">(.*?</span>)</span>', section, re.DOTALL):
            trained += sum(len(listed.split(",")) for listed in re.findall(r'title="tokens? [^:]*: ([\d, ]+)"', inner))
        assert trained == int(rendered.loss_mask.sum())


def test_the_style_of_the_page_is_the_one_its_policy_allows() -> None:
    import base64
    import hashlib

    page = inspect_page([ShownConversation("f:1", error="<b>")], title="<t>", settings=[("model", "<m>")])
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)
    allowed = re.search(r"style-src 'sha256-([^']+)'", page)
    assert style and allowed
    assert base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode() == html.unescape(allowed[1])
    assert "<b>" not in page and "<m>" not in page and "<t>" not in page


def test_what_would_be_invisible_or_steer_the_terminal_is_written_out() -> None:
    assert visible("a\x1b[31m\u202e\u200b\n\t\ud800é") == "a<U+001B>[31m<U+202E><U+200B>↵\n⇥\t<U+D800>é"
    assert visible("👩\u200d🚀 ﷽") == "👩\u200d🚀 ﷽"


def test_totals_count_tokens_by_kind() -> None:
    span = ShownSpan(0, "answer", True, "answer", (ShownToken((2, 3), "Ü"),))
    context = ShownSpan(2, "context", False, "user", (ShownToken((4,), "x"),))
    both = [ShownConversation("f:1", (span, context)), ShownConversation("f:2", (span,)), ShownConversation("f:3")]
    assert [(one.kind, one.trained, one.masked) for one in totals(both)] == [("answer", 4, 0), ("context", 0, 1)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["{model}", "{data}", "--skip", "4"],
            r"--skip must leave rows of .*rows.jsonl, which has 4, got 4; skip fewer",
        ),
        (["{model}", "{data}x"], r"data file .*rows.jsonlx must be"),
        (["{model}x", "{data}"], r"MODEL must be a Hugging Face folder, got .*x, which is not a folder"),
        (
            ["{model}", "{data}", "--html", "{model}"],
            r"--html must be an HTML file, got the folder .*; add a file name",
        ),
        (["{model}", "{data}", "--html", "{data}/x.html"], r"the folder of --html must be a folder that can be made"),
    ],
)
def test_bad_input_is_one_clear_error(
    arguments: list[str], message: str, model: Path, data: Path, error_of: Callable[..., str]
) -> None:
    error = error_of("inspect", *(one.format(model=model, data=data) for one in arguments))
    assert re.search(message, error), error
