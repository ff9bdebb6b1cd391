"""Distillation against a real vLLM server: the protocol, the exact place where the teacher goes on, resume, reports."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.cli.distill import load_distill, run_distill
from megatron_rl.config import ConfigError
from megatron_rl.data.distill.phrases import draw_phrase, load_phrases

EXAMPLES = Path(__file__).parents[2] / "examples" / "sft"
MAX_TOKENS = 40
TIE = 1e-3
"""Nats within which float32 of two implementations may choose differently."""
CLOSE, STOP = "</think>", "~"


def _letters() -> dict[str, int]:
    """The byte tokenizer's alphabet: what stands for each byte, and its id."""
    from tokenizers import pre_tokenizers

    return {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


def _ids(text: str) -> list[int]:
    """Ids of a text, found without the tokenizer: one per byte, 256 and 257 for the two marks."""
    letters = _letters()
    # The alphabet of byte-level BPE: printable bytes stand for themselves, the others follow from U+0100 on.
    shown = [byte for byte in range(256) if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174]
    hidden = [byte for byte in range(256) if byte not in shown]
    of_byte = {byte: letters[chr(byte)] for byte in shown}
    of_byte |= {byte: letters[chr(256 + number)] for number, byte in enumerate(hidden)}
    marks = {"<think>": [256], CLOSE: [257]}
    pieces = re.split(f"(<think>|{CLOSE})", text)
    return [id for piece in pieces for id in marks.get(piece) or [of_byte[byte] for byte in piece.encode()]]


ALLOWED = [*_ids("abcdefghijklmnopqrstuvwxyz ~"), 257]
"""What may be sampled: letters, space, the stop sign, and the closing mark."""


def _rows(count: int, **columns: Any) -> list[dict[str, Any]]:
    texts = [f"Aufgabe {'ä' * number} {number}" for number in range(count)]
    return [{"id": f"r{i}", "messages": [{"role": "user", "content": text}], **columns} for i, text in enumerate(texts)]


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _values(path: Path) -> dict[str, Any]:
    """Completions of a journal by sample id."""
    lines = _jsonl(path)[1:]
    return {line["key"].split(":")[0]: line["value"]["completion"] for line in lines}


def _prefill(server: Any, folder: Path, name: str, *overrides: str) -> Path:
    """Runs the shipped example on this server; the output's path."""
    output = folder / f"{name}.jsonl"
    body = {"allowed_token_ids": ALLOWED, "logit_bias": {"257": 2.0}, "stop": [STOP]}
    changes = (
        f"input={folder / 'in.jsonl'}",
        f"output={output}",
        f"teacher.url={server.url}/v1",
        f"teacher.model={server.model_path}",
        f"teacher.extra_body={json.dumps(body)}",
        f"sampling.max_tokens={MAX_TOKENS}",
        "sampling.temperature=0",
        f"prefill.tokenizer={server.model_path}",
        "language.min_share=0",
        *overrides,
    )
    run_distill(load_distill(EXAMPLES / "distill_prefill.yaml", list(changes)))
    return output


def test_the_teacher_goes_on_exactly_behind_the_phrase_in_both_modes(server: Any, tmp_path: Path) -> None:
    server.publish(server.first)
    _write(tmp_path / "in.jsonl", _rows(6))
    local = _prefill(server, tmp_path, "local")
    chat = _prefill(server, tmp_path, "chat", "prefill={kind: chat}")
    phrases = load_phrases([])
    answers = _values(local.with_suffix(".journal"))
    assert set(answers) == {f"r{i}" for i in range(6)}
    for row in _rows(6):
        phrase = draw_phrase(phrases, language="de", domain="general", seed=0, sample_id=row["id"])
        prompt = _ids(f"<user>{row['messages'][0]['content']}\n<assistant><think>\n{phrase}")
        completion = answers[row["id"]]
        sampled = _ids(completion["text"] + (STOP if completion["finish_reason"] == "stop" else ""))
        assert len(sampled) == completion["num_tokens"]
        with torch.no_grad():
            logits = server.first.model(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1]
        bias = np.array([2.0 if token == 257 else 0.0 for token in ALLOWED])
        scores = logits[:, ALLOWED].numpy() + bias
        chosen = scores[np.arange(len(sampled)), [ALLOWED.index(token) for token in sampled]]
        assert (scores.max(1) - chosen).max() <= TIE, "each token is the likeliest behind the phrase"
    by_chat = _values(chat.with_suffix(".journal"))
    assert {name: one["text"] for name, one in by_chat.items()} == {n: one["text"] for n, one in answers.items()}
    notes = json.loads(chat.with_suffix(".report.json").read_text())["notes"]
    assert notes == [], "the server's chat template was seen to leave the message as it is"


def test_a_template_that_would_close_the_reasoning_is_seen_before_anything_is_asked(
    server: Any, tmp_path: Path
) -> None:
    _write(tmp_path / "in.jsonl", _rows(2))
    body = {"chat_template_kwargs": {"empty_reasoning": True}}
    with pytest.raises(
        ConfigError, match=r"makes '<think>\\n\\n</think>\\n\\n<think>\\nprobe' of .*prefill\.kind=local"
    ):
        _prefill(server, tmp_path, "chat", "prefill={kind: chat}", f"teacher.extra_body={json.dumps(body)}")
    assert len(_jsonl(tmp_path / "chat.journal")) == 1, "the settings and no answer"


def test_a_run_goes_on_where_it_was_and_reports_what_all_runs_came_to(server: Any, tmp_path: Path) -> None:
    server.publish(server.first)
    _write(tmp_path / "in.jsonl", _rows(10))
    tokens = f"sampling.max_tokens={MAX_TOKENS}"
    sampled = ("sampling.temperature=1", "seed=3", tokens)
    _prefill(server, tmp_path, "halves", *sampled, "limit=4")
    assert len(_jsonl(tmp_path / "halves.journal")) == 1 + 4
    begun = (tmp_path / "halves.journal").read_bytes()
    output = _prefill(server, tmp_path, "halves", *sampled)
    journal = output.with_suffix(".journal").read_bytes()
    assert journal.startswith(begun) and len(_jsonl(output.with_suffix(".journal"))) == 1 + 10
    kept, dropped = _jsonl(output), _jsonl(output.with_suffix(".dropped.jsonl"))
    assert {row["id"] for row in kept} | {row["id"] for row in dropped} == {f"r{i}" for i in range(10)}
    answers = _values(output.with_suffix(".journal"))
    for row in kept:
        text = answers[row["id"]]["text"]
        assert answers[row["id"]]["finish_reason"] == "stop"
        reasoning, _, content = text.partition(CLOSE)
        turn = row["messages"][-1]
        assert (turn["reasoning_content"], turn["content"]) == ((row["phrase"] + reasoning).strip(), content.strip())
    total = json.loads(output.with_suffix(".report.json").read_text())["total"]
    assert total["rows"] == 10 and total.get("kept", 0) == len(kept) > 0
    assert total["tokens"] == sum(one["num_tokens"] for one in answers.values()) > 0


def test_backfill_asks_both_models_once_and_keeps_no_reasoning_that_leads_nowhere(server: Any, tmp_path: Path) -> None:
    server.publish(server.first)
    tools = [{"type": "function", "function": {"name": "f"}}]
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    turns = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "ok"}]
    rows = _rows(4, tools=tools, language="en")
    for row in rows:
        row["messages"] += [*turns, {"role": "assistant", "content": "fertig"}]
    _write(tmp_path / "in.jsonl", rows)
    body = {"allowed_token_ids": ALLOWED[:-1], "min_tokens": 8, "stop": [STOP]}
    changes = [f"input={tmp_path / 'in.jsonl'}", f"output={tmp_path / 'out.jsonl'}", "language.min_share=0", "seed=1"]
    for role in ("writer", "checker"):
        changes += [f"{role}.url={server.url}/v1", f"{role}.model={server.model_path}"]
        changes += [f"{role}.extra_body={json.dumps(body)}", f"{role}_sampling={{max_tokens: 64, temperature: 1}}"]
    run_distill(load_distill(EXAMPLES / "distill_backfill.yaml", changes))
    journal = (tmp_path / "out.journal").read_bytes()
    run_distill(load_distill(EXAMPLES / "distill_backfill.yaml", changes))
    assert (tmp_path / "out.journal").read_bytes() == journal, "all was known"
    answers = {line["key"]: line["value"]["completion"] for line in _jsonl(tmp_path / "out.journal")[1:]}
    written = [one for key, one in answers.items() if key.endswith("/1/write")]
    whole = [one for one in written if one["finish_reason"] == "stop" and one["text"].strip()]
    num_checked = sum(key.endswith("/1/check") for key in answers)
    assert len(written) == 4 and num_checked == len(whole) > 0
    out = _jsonl(tmp_path / "out.jsonl")
    assert [row["messages"] for row in out] == [row["messages"] for row in rows]
    assert [row["backfilled"] for row in out] == [[]] * 4
    dropped = [row["reason"] for row in _jsonl(tmp_path / "out.dropped.jsonl")]
    assert len(dropped) == 4 and set(dropped) <= {"cut off", "malformed call", "empty"}
    total = json.loads((tmp_path / "out.report.json").read_text())["total"]
    assert (total["rows"], total["turns"], total["written"]) == (4, 4, 4)
    assert (total["checked"], total["agreed_share"]) == (num_checked, 0.0)
