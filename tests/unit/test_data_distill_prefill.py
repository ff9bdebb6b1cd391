"""Prefill distillation against a scripted teacher: what it is sent, what is kept, what is reported, and resuming."""

import asyncio
import json
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from megatron_rl.cli.distill import load_distill, run_distill
from megatron_rl.config import ConfigError, DataError, RunError
from megatron_rl.data.distill.config import LocalPrefill, ThinkingConfig
from megatron_rl.data.distill.opening import LocalPrompt
from megatron_rl.data.distill.phrases import draw_phrase, load_phrases
from megatron_rl.data.distill.run import distill
from megatron_rl.data.render import load_tokenizer

SCRIPTED = runpy.run_path(str(Path(__file__).parents[1] / "scripted_endpoint.py"))
ScriptedEndpoint, chat_answer, text_answer = (
    SCRIPTED[name] for name in ("ScriptedEndpoint", "chat_answer", "text_answer")
)
GERMAN = " dass jedes Brötchen fünfundvierzig Cent kostet, und davon gibt es drei Dutzend, also sechsunddreißig Stück."
ENGLISH = " Let me think about this. Each of the rolls costs forty-five cents, and there are thirty-six of them in all."
FRENCH = " Chaque petit pain coûte quarante-cinq centimes, et il y en a trois douzaines, donc trente-six en tout."
ANSWER = "Der Bäcker nimmt sechzehn Euro und zwanzig Cent ein."
TOOLS = [{"type": "function", "function": {"name": "buche", "parameters": {"type": "object"}}}]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    import openai._base_client as client

    monkeypatch.setattr("megatron_rl.data.endpoint._FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(client, "INITIAL_RETRY_DELAY", 0.001)


def asked(number: int, **columns: Any) -> dict[str, Any]:
    return {"id": f"r{number}", "messages": [{"role": "user", "content": f"Aufgabe {number}"}], **columns}


def number_of(body: dict[str, Any]) -> int:
    return next(int(m["content"].split()[-1]) for m in reversed(body["messages"]) if m["role"] == "user")


def answering(answers: Callable[[int], Any]) -> Callable[[dict[str, Any]], Any]:
    """A script for a server that does not show its prompts."""
    return lambda body: web.Response(status=404) if body["path"].endswith("tokenize") else answers(number_of(body))


def config(folder: Path, url: str, rows: list[dict[str, Any]], **changes: Any) -> Path:
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "kind": "prefill",
        "input": str(folder / "in.jsonl"),
        "output": str(folder / "out.jsonl"),
        "teacher": {"url": url, "model": "scripted", "max_retries": 1, "timeout_s": 5},
        "language": {"others": ["de", "en"]},
        **changes,
    }
    path = folder / "distill.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def go(path: Path, *overrides: str) -> None:
    run_distill(load_distill(path, list(overrides)))


def test_kept_rows_hold_the_teachers_turn_behind_its_phrase_and_the_rest_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "buche", "arguments": '{"betrag": 16.2}'}}
    answers = {
        0: chat_answer(f"{GERMAN}\n</think>\n\n{ANSWER}", tokens=10),
        1: chat_answer(ANSWER, reasoning=ENGLISH, tokens=10),
        2: chat_answer(f"{ENGLISH}</think>{ANSWER}", tokens=10),
        3: chat_answer(GERMAN, finish_reason="length", tokens=100),
        4: chat_answer(None, reasoning=GERMAN, tool_calls=[call], finish_reason="tool_calls", tokens=10),
        5: chat_answer(
            None, reasoning=GERMAN, tool_calls=[{**call, "function": {"name": "buche", "arguments": '{"b'}}]
        ),
        6: chat_answer(" 3 * 12 = 36</think>36", tokens=10),
    }
    old = {"role": "assistant", "content": "alt"}
    rows = [asked(0, domain="math", difficulty="easy", effort="low"), asked(1, language="en"), asked(2)]
    rows += [asked(3), asked(4, tools=TOOLS), asked(5, tools=TOOLS), asked(6)]
    rows[2]["messages"] = [{"role": "system", "content": "Sei kurz."}, *rows[2]["messages"], old]
    with ScriptedEndpoint(answering(answers.__getitem__)) as server:
        go(config(tmp_path, server.url, rows))
        bodies = {number_of(body): body for body in server.bodies if "max_tokens" in body}
    phrases = load_phrases([])

    def phrase(number: int, language: str = "de", domain: str = "general") -> str:
        return draw_phrase(phrases, language=language, domain=domain, seed=0, sample_id=f"r{number}")

    assert bodies[0]["messages"][-1] == {"role": "assistant", "content": f"<think>\n{phrase(0, domain='math')}"}
    assert [m["content"] for m in bodies[2]["messages"]] == ["Sei kurz.", "Aufgabe 2", f"<think>\n{phrase(2)}"]
    assert bodies[4]["tools"] == TOOLS and "tools" not in bodies[0]
    kept = jsonl(tmp_path / "out.jsonl")
    assert [row["id"] for row in kept] == ["r0", "r1", "r4", "r6"], "in the order of the input"
    assert kept[0] == {
        "id": "r0",
        "messages": [
            rows[0]["messages"][0],
            {"role": "assistant", "reasoning_content": phrase(0, domain="math") + GERMAN, "content": ANSWER},
        ],
        "difficulty": "easy",
        "language": "de",
        "domain": "math",
        "phrase": phrase(0, domain="math"),
        "language_share": 1.0,
    }
    assert kept[1]["messages"][-1]["reasoning_content"] == phrase(1, "en") + ENGLISH
    turn = kept[2]["messages"][-1]
    assert turn["content"] == "" and kept[2]["tools"] == TOOLS
    assert turn["tool_calls"] == [{**call, "function": {"name": "buche", "arguments": {"betrag": 16.2}}}]
    assert kept[3]["language_share"] is None, "too few letters to judge are kept"
    dropped = {row["id"]: row["reason"] for row in jsonl(tmp_path / "out.dropped.jsonl")}
    assert dropped == {"r2": "not in its language", "r3": "cut off", "r5": "malformed call"}
    _check_report(json.loads((tmp_path / "out.report.json").read_text()), capsys.readouterr().out)


def _check_report(report: dict[str, Any], printed: str) -> None:
    total = report["total"]
    assert (total["rows"], total["kept"], total["judged"], total["in_language"]) == (7, 4, 4, 3)
    assert total["in_language_share"] == 0.75 and total["tokens"] == 155
    assert {(g["language"], g["domain"]): g["rows"] for g in report["groups"]} == {
        ("de", "math"): 1,
        ("en", "general"): 1,
        ("de", "general"): 5,
    }
    assert report["config"]["teacher"]["model"] == "scripted" and "does not show its prompts" in report["notes"][0]
    assert "de/general" in printed and "75.0%" in printed and "dropped 1: not in its language" in printed


def test_a_threshold_may_change_afterwards_and_what_answers_depend_on_may_not(tmp_path: Path) -> None:
    rows = [*(asked(number) for number in range(3)), asked(3, language="en")]
    texts = [f"{GERMAN}{ENGLISH}"] * 3 + [FRENCH]
    with ScriptedEndpoint(answering(lambda number: chat_answer(f"{texts[number]}</think>{ANSWER}"))) as server:
        path = config(tmp_path, server.url, rows)
        go(path)
        kept = [row["id"] for row in jsonl(tmp_path / "out.jsonl")]
        assert kept == ["r3"], "between German and English, French is taken for English"
    # Nothing is asked from here on: the server is gone.
    go(path, "language.min_share=0.3")
    assert len(jsonl(tmp_path / "out.jsonl")) == 4
    go(path, "language.others=[de,en,fr]", "language.min_share=0.3")
    assert [row["id"] for row in jsonl(tmp_path / "out.jsonl")] == ["r0", "r1", "r2"], "judged anew"
    go(path, "limit=2", "language.min_share=0.3")
    assert len(jsonl(tmp_path / "out.jsonl")) == 2
    for change in ("sampling.temperature=1", "seed=1", "teacher.model=other", "prefill.kind=none"):
        with pytest.raises(DataError, match=r"out\.journal must be continued with the settings .*, now "):
            go(path, change)


def test_rows_whose_requests_failed_are_asked_by_the_next_start_alone(tmp_path: Path) -> None:
    is_down = True

    def answers(number: int) -> Any:
        return web.Response(status=500) if is_down and number in (2, 5) else chat_answer(f"{GERMAN}</think>{ANSWER}")

    with ScriptedEndpoint(answering(answers)) as server:
        path = config(tmp_path, server.url, [asked(number) for number in range(8)])
        with pytest.raises(RunError, match=r"2 of 8 failed for good, at last: teacher .*500.*; run the same command"):
            go(path)
        assert [row["id"] for row in jsonl(tmp_path / "out.jsonl")] == [f"r{i}" for i in (0, 1, 3, 4, 6, 7)]
        assert json.loads((tmp_path / "out.report.json").read_text())["total"]["failed"] == 2
        is_down = False
        server.asked.clear()
        go(path)
        assert {number_of(body) for body in server.bodies if "max_tokens" in body} == {2, 5}
    assert [row["id"] for row in jsonl(tmp_path / "out.jsonl")] == [f"r{i}" for i in range(8)]


def test_a_run_killed_again_and_again_ends_like_one_that_was_not(tmp_path: Path) -> None:
    num_rows, concurrency = 60, 4
    rows = [asked(number, domain=("math", "code")[number % 2]) for number in range(num_rows)]

    def answers(number: int) -> Any:
        return chat_answer(f"{GERMAN if number % 3 else ENGLISH} {number}</think>{ANSWER}")

    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    teacher = {"model": "scripted", "concurrency": concurrency}
    with ScriptedEndpoint(answering(answers)) as server:
        go(config(tmp_path / "whole", server.url, rows, teacher={**teacher, "url": server.url}))
        server.asked.clear()
        path = config(tmp_path / "killed", server.url, rows, teacher={**teacher, "url": server.url})
        argv = [sys.executable, "-m", "megatron_rl.cli.main", "distill", str(path)]
        for stop_at in (9, 33):
            process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            while len(server.asked) < stop_at and process.poll() is None:
                time.sleep(0.002)
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
            assert not (tmp_path / "killed" / "out.jsonl").exists(), "the output appears when it is whole"
        go(path)
        times = [number_of(body) for body in server.bodies if "max_tokens" in body]
    assert set(times) == set(range(num_rows)) and len(times) <= num_rows + 2 * concurrency
    for name in ("out.jsonl", "out.dropped.jsonl"):
        whole, killed = ((tmp_path / folder / name).read_text() for folder in ("whole", "killed"))
        assert whole.replace("/whole/", "/killed/") == killed


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{"role": "system", "content": "x"}]}, "must end in a user or tool message, got system"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "must end in a user or tool message, got nothing"),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\]\.content must be text, got 3"),
        ({"messages": []}, "must have messages"),
        (
            asked(1, domain="chemie"),
            r"must have phrases, got de/chemie, there are de/agentic, .*add a file to `phrases`",
        ),
        (asked(1, language="fr"), "got fr/general"),
        (asked(1, language=["de"]), r'language must be text, got \["de"\]'),
        ({**asked(1), "id": 1.5}, "id must be text or a whole number, got 1.5"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "half of a surrogate pair"),
    ],
)
def test_a_bad_row_ends_the_run_before_anything_is_asked_or_is_skipped_and_named(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    with ScriptedEndpoint(answering(lambda _: chat_answer(f"{GERMAN}</think>{ANSWER}"))) as server:
        path = config(tmp_path, server.url, [asked(0), row])
        with pytest.raises(DataError, match=rf"in\.jsonl:2: .*{message}"):
            go(path)
        assert not server.asked
        go(path, "on_bad_row=skip")
    assert len(jsonl(tmp_path / "out.jsonl")) == 1
    (dropped,) = jsonl(tmp_path / "out.dropped.jsonl")
    assert dropped["reason"] == "cannot be used" and "in.jsonl:2" in dropped["error"]


def test_a_chat_template_that_changes_an_unfinished_message_is_refused(tmp_path: Path) -> None:
    """Qwen3's does: it puts an empty reasoning before it. A server that shows its prompts is asked first."""
    opens, between = "", ""

    def script(body: dict[str, Any]) -> Any:
        if body["path"] == "/tokenize":
            continued = "continue_final_message" in body
            ending = between + body["messages"][-1]["content"] if continued else opens
            return {"tokens": [ord(letter) for letter in f"<user>probe<assistant>{ending}"]}
        if body["path"] == "/detokenize":
            return {"prompt": "".join(map(chr, body["tokens"]))}
        return chat_answer(f"{GERMAN}</think>{ANSWER}")

    with ScriptedEndpoint(script) as server:
        path = config(tmp_path, server.url, [asked(0)])
        between = "<think>\n\n</think>\n\n"
        with pytest.raises(
            ConfigError, match=r"makes '<think>\\n\\n</think>.* of '<think>\\nprobe'; set prefill\.kind"
        ):
            go(path)
        assert not [body for body in server.bodies if "max_tokens" in body]
        between, opens = "", "<think>\n"
        go(path)
        assert json.loads((tmp_path / "out.report.json").read_text())["notes"] == []


def test_a_local_prompt_ends_in_the_phrase_and_opens_the_reasoning_once(tiny: Path, tmp_path: Path) -> None:
    thinking = ThinkingConfig()
    tokenizer = load_tokenizer(tiny / "model")
    row = json.loads((tiny / "train.jsonl").read_text().splitlines()[0])
    messages, tools = row["messages"][:-1], row["tools"]
    prompt = LocalPrompt(LocalPrefill(tokenizer=str(tiny / "model")), thinking)
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert prompt.ids(messages, tools, "Gegeben ist:") == tokenizer.encode(f"{text}<think>\nGegeben ist:")
    as_text = json.loads(json.dumps(messages))
    for message in as_text:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    assert prompt.ids(as_text, tools, "Gegeben ist:") == prompt.ids(messages, tools, "Gegeben ist:")
    template = str(tokenizer.chat_template)
    end = "{%- if add_generation_prompt -%}{{ '<think>\n' if thinks else '<think>\n\n</think>\n\n' }}{%- endif -%}"
    tokenizer.chat_template = template + end
    tokenizer.save_pretrained(tmp_path)
    folder = str(tmp_path)
    opened = LocalPrompt(LocalPrefill(tokenizer=folder, template_options={"thinks": True}), thinking)
    assert opened.ids(messages, tools, "Also,") == tokenizer.encode(f"{text}<think>\nAlso,")
    with pytest.raises(ConfigError, match=r"must leave the reasoning to the model, .* set prefill\.template_options"):
        LocalPrompt(LocalPrefill(tokenizer=folder), thinking)
    with pytest.raises(DataError, match="the chat template refuses the conversation"):
        prompt.ids([*messages, {"role": "system", "content": "x"}], tools, "")


def test_token_ids_are_sent_and_the_text_is_split_by_the_mark(tiny: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny / "model")
    bad = {**asked(2), "messages": [*asked(2)["messages"], {"role": "system", "content": "x"}, *asked(2)["messages"]]}

    def script(body: dict[str, Any]) -> Any:
        is_first = "Aufgabe 0" in str(tokenizer.decode(body["prompt"]))
        return text_answer(f"{GERMAN}</think>\n\n{ANSWER}{'' if is_first else '<|im_start|>'}<|im_end|>", tokens=9)

    with ScriptedEndpoint(script) as server:
        local = {"kind": "local", "tokenizer": str(tiny / "model")}
        with pytest.raises(RunError, match=r"1 of 3 failed .* at last: .*in\.jsonl:3: the chat template refuses"):
            go(config(tmp_path, server.url, [asked(0), asked(1), bad], prefill=local))
        assert len(server.asked) == 2
        (request,) = (one for one in server.asked if "Aufgabe 0" in str(tokenizer.decode(one.body["prompt"])))
    (row,) = jsonl(tmp_path / "out.jsonl")
    assert [one["reason"] for one in jsonl(tmp_path / "out.dropped.jsonl")] == ["special token in the text"]
    assert request.path == "/v1/completions" and request.body["skip_special_tokens"] is False
    assert str(tokenizer.decode(request.body["prompt"])).endswith(f"<think>\n{row['phrase']}")
    assert row["messages"][-1]["reasoning_content"] == row["phrase"] + GERMAN
    assert row["messages"][-1]["content"] == ANSWER


def test_the_baseline_sends_no_phrase(tmp_path: Path) -> None:
    with ScriptedEndpoint(lambda _: chat_answer(ANSWER, reasoning_content=ENGLISH)) as server:
        path = config(tmp_path, server.url, [asked(0, domain="chemie")], prefill={"kind": "none"})
        with pytest.raises(ConfigError, match=r"phrases have no effect with prefill\.kind=none"):
            go(path, "phrases=[own.yaml]")
        go(path)
        (request,) = server.asked
    assert "continue_final_message" not in request.body and request.body["messages"][-1]["role"] == "user"
    assert json.loads((tmp_path / "out.report.json").read_text())["total"]["in_language_share"] == 0.0


def test_a_run_file_that_does_not_fit_is_one_line(tmp_path: Path, error_of: Callable[..., str]) -> None:
    path = str(config(tmp_path, "http://127.0.0.1:9/v1", [asked(0)]))
    for override, message in (
        ("kind=prefil", "kind must be 'prefill', got 'prefil'; did you mean prefill?"),
        ("prefill.kind=lokal", "did you mean local?"),
        ("output=out.json", "must be a JSONL file, got 'out.json'"),
        (f"output={tmp_path}/in.jsonl", "output must differ from input"),
        ("teacher.temprature=1", "unknown key teacher.temprature"),
        ("prefill={kind: chat, tokenizer: x}", "unknown key prefill.tokenizer"),
        ("language.default=german", "language.default"),
        ("thinking.opens=x", "unknown key thinking.opens"),
        ("teacher.api_key_env=NO_SUCH_KEY", "teacher.api_key_env must name a set environment variable"),
        (f"input={tmp_path}/none.jsonl", "none.jsonl"),
        ("teacher.max_retries=0", "teacher http://127.0.0.1:9/v1 must be reachable"),
    ):
        assert message in error_of("distill", path, override), override


def test_many_rows_are_under_way_at_once_and_progress_counts_them(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    script = answering(lambda _: chat_answer(f"{GERMAN}</think>{ANSWER}"))
    with ScriptedEndpoint(script, models=None) as server:
        path = config(tmp_path, server.url, [asked(number) for number in range(30)], prefill={"kind": "none"})
        server.gather = 6
        run = load_distill(path, ["teacher.concurrency=6"])
        asyncio.run(distill(run, lambda counts, total, live: seen.append((counts.seen, total))))
    assert server.most_at_once == 6
    assert seen == [(number, 30) for number in range(1, 31)]
