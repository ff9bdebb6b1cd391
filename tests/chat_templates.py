"""Tokenizers with chat templates that behave as well-known ones do, and conversations whose spans are drawn by hand.

A tokenizer has one token per special token and per byte, so tokens and spans follow from a drawing alone; merges are
added where a border is to be crossed. In a drawing a letter in a circle starts a span: ⓧ context, ⓡ reasoning,
ⓐ answer, ⓒ tool call, ⓔ end of turn.
"""

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

TEMPLATES = Path(__file__).parent / "templates"
KINDS = {"ⓧ": "context", "ⓡ": "reasoning", "ⓐ": "answer", "ⓒ": "tool_call", "ⓔ": "end_of_turn"}

SPECIAL = {
    "qwen3": ("<|im_end|>", "<|endoftext|>", "<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    "glm45": (
        *("<|endoftext|>", "<|user|>", "<|observation|>", "[gMASK]", "<sop>", "<|system|>", "<|assistant|>"),
        *(
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
        ),
    ),
    "llama3": (
        *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|begin_of_text|>", "<|start_header_id|>"),
        *("<|end_header_id|>", "<|python_tag|>"),
    ),
}
"""Template -> tokens that are one whole; those that end a turn come first."""
STOPS = {"qwen3": [0, 1], "glm45": [0, 1, 2], "llama3": [2, 1, 0]}
"""Template -> eos_token_id of generation_config.json."""
ENDS = {"qwen3": "<|im_end|>", "glm45": "<|endoftext|>", "llama3": "<|eot_id|>"}
"""Template -> eos_token of the tokenizer."""


def template(name: str) -> str:
    """Text of a template of tests/templates."""
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8").rstrip("\n")


def make_tokenizer(
    name: str, folder: Path, merges: Sequence[tuple[str, str]] = (), *, chat_template: str | None = None
) -> PreTrainedTokenizerFast:
    """Tokenizer of a template, saved into folder with its generation_config.json; merges as byte-level writes bytes."""
    special = SPECIAL[name]
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=list(merges)))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=ENDS[name],
        bos_token="<|begin_of_text|>" if name == "llama3" else None,
        chat_template=chat_template or template(name),
    )
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": STOPS[name]}))
    return PreTrainedTokenizerFast.from_pretrained(folder)


def drawn(drawing: str, name: str) -> tuple[str, list[int], list[tuple[int, int, str]]]:
    """(text, token ids, (first, behind the last, kind) of each span), by the drawing, the special tokens and UTF-8."""
    special = SPECIAL[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids: list[int] = []
    starts = [(0, "context")]
    for piece in re.split("(" + "|".join(map(re.escape, special)) + "|[ⓧⓡⓐⓒⓔ])", drawing):
        if piece in KINDS:
            starts.append((len(ids), KINDS[piece]))
        elif piece in special:
            ids.append(special.index(piece))
        else:
            ids += [len(special) + alphabet.index(bytes_to_unicode()[byte]) for byte in piece.encode()]
    spans = [(start, end, kind) for (start, kind), (end, _) in pairwise([*starts, (len(ids), "")]) if start < end]
    return re.sub("[ⓧⓡⓐⓒⓔ]", "", drawing), ids, spans


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def result(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content, **more}


def assistant(
    content: str | None, reasoning: str | None = None, calls: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    return {**message, "tool_calls": list(calls)} if calls else message


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name: str, **properties: str) -> dict[str, Any]:
    """Schema of a tool whose arguments have these JSON types, all of them required."""
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    schema |= {"required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema}}
