"""Messages to token ids and back, with the model's own tokenizer and chat template."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from megatron_rl.config import ConfigError, DataError
from megatron_rl.data.turns import Message, TokenizedText, marked_turns, prefix_turns, token_at, turn_mask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Tools = Sequence[dict[str, Any]]

_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TOKENIZER_FILES = ("tokenizer*", "vocab.*", "*.model")
_ANSWER, _REPLY = "probeanswer", "probereply"
"""Contents of the made-up conversations that show what a template writes between two turns."""
_OPENING: list[Message] = [{"role": "user", "content": "probe"}, {"role": "assistant", "content": _ANSWER}]


def has_tokenizer(folder: str | Path) -> bool:
    """Whether a folder holds any file of a tokenizer."""
    return any(file for pattern in _TOKENIZER_FILES for file in Path(folder).glob(pattern))


def load_tokenizer(path: str | Path) -> "PreTrainedTokenizerFast":
    """The tokenizer of a Hugging Face folder; ConfigError if there is none or it has no chat template."""
    from transformers import AutoTokenizer  # imports torch: seconds that a command line with a typo need not wait

    if not Path(path).is_dir():
        raise ConfigError(f"model.path must be a Hugging Face folder, got {path}, which is not a folder")
    # Without any of its files transformers makes an empty tokenizer up.
    if not has_tokenizer(path):
        raise ConfigError(
            f"{path} must hold a tokenizer that transformers can load, got none of its files; copy tokenizer.json and "
            "tokenizer_config.json of the model there"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{path} must hold a tokenizer that transformers can load, got {type(error).__name__}: {reason}; "
            f"copy tokenizer.json and tokenizer_config.json of the model there"
        ) from error
    if not tokenizer.is_fast:
        raise ConfigError(f"{path} must hold a fast tokenizer, got {type(tokenizer).__name__}; add its tokenizer.json")
    if not tokenizer.chat_template:
        raise ConfigError(
            f"the tokenizer in {path} must have a chat template, got none; add chat_template.jinja, "
            f"or use the instruct version of the model"
        )
    return tokenizer


class ChatRenderer:
    """Renders conversations, tells which tokens are the assistant's, and continues sampled ones without re-rendering.

    Raises ConfigError when the tokenizer's template cannot be continued after an assistant turn that ended.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._tokenizer = tokenizer
        self._encoder = _exact_encoder(tokenizer)
        self.stop_token_ids: tuple[int, ...] = _stop_token_ids(tokenizer)
        """Tokens that end an assistant turn: eos_token_id of generation_config.json and the tokenizer's own."""
        pad_id: Any = tokenizer.pad_token_id
        self.pad_id: int = self.stop_token_ids[0] if pad_id is None else pad_id
        """What fills padding positions."""
        self._stop_texts = tuple(self.decode([token]) for token in self.stop_token_ids)
        if fault := self._continuation_fault("user"):
            raise ConfigError(f"{tokenizer.name_or_path}: {fault}")
        self._tool_fault = self._continuation_fault("tool")

    def prompt_ids(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """The conversation so far and the start of an assistant turn."""
        return self._encode(self._render(_plain(messages), tools, add_generation_prompt=True)).token_ids.tolist()

    def continuation_ids(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """What follows a sampled turn that ended in its end-of-turn token: these messages and the next turn's start.

        Rendered after a made-up turn and cut behind that turn's end-of-turn token, so it holds after any turn.
        ConfigError if the template has no tool messages and one is given.
        """
        if self._tool_fault and any(message["role"] == "tool" for message in messages):
            raise ConfigError(self._tool_fault)
        return self._continue(_OPENING, messages, tools)

    def conversation(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[np.ndarray, np.ndarray]:
        """(token_ids int32 [T], loss_mask bool [T]): True on each assistant turn, its end-of-turn token included.

        DataError if the template refuses the conversation or gives no exact token spans for its turns.
        """
        plain = _plain(messages)
        num_turns = sum(message["role"] == "assistant" for message in plain)
        if _GENERATION_BLOCK.search(self._template(tools)):
            text, blocks = self._render_with_blocks(plain, tools)
            turns = marked_turns(text, blocks, self._stop_texts, num_turns)
        else:
            text = self._render(plain, tools)
            turns = prefix_turns(text, plain, lambda m, **options: self._render(m, tools, **options), self._stop_texts)
        tokens = self._encode(text)
        return tokens.token_ids, turn_mask(tokens, turns, self.stop_token_ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens, special ones included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _template(self, tools: Tools) -> str:
        return self._tokenizer.get_chat_template(tools=list(tools) or None)

    def _render(self, messages: Sequence[Message], tools: Tools, *, add_generation_prompt: bool = False) -> str:
        return self._render_with_blocks(messages, tools, add_generation_prompt=add_generation_prompt)[0]

    def _render_with_blocks(
        self, messages: Sequence[Message], tools: Tools, *, add_generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """(text, character spans of the template's generation blocks)."""
        template = self._template(tools)
        options: dict[str, Any] = {
            **self._tokenizer.special_tokens_map,
            "tools": list(tools) or None,
            "chat_template": template,
            "return_assistant_tokens_mask": bool(_GENERATION_BLOCK.search(template)),
            "add_generation_prompt": add_generation_prompt,
        }
        rendered: Any
        try:
            rendered = render_jinja_template([list(messages)], **options)
        except Exception as error:  # a template is a program: it may raise anything
            raise DataError(f"the chat template refuses the conversation: {error}; mend the messages") from error
        texts, blocks = rendered
        return texts[0], blocks[0] if blocks else []

    def _encode(self, text: str) -> TokenizedText:
        try:
            encoding = self._encoder.encode(text, add_special_tokens=False)
        except TypeError:
            raise DataError("a conversation must be Unicode text, got half of a surrogate pair; mend it") from None
        offsets = np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2)
        return TokenizedText(text, np.array(encoding.ids, dtype=np.int32), offsets[:, 0], offsets[:, 1])

    def _continue(self, opening: Sequence[Message], messages: Sequence[Message], tools: Tools) -> list[int]:
        """Token ids behind the end-of-turn token of the opening's last message, whose content is _ANSWER."""
        text = self._render([*opening, *_plain(messages)], tools, add_generation_prompt=True)
        found = text.find(_ANSWER)
        rest = text[found + len(_ANSWER) :].lstrip()
        if found < 0 or not rest.startswith(self._stop_texts):
            raise DataError(
                f"the chat template must end an assistant turn with one of {list(self._stop_texts)}, "
                f"got {rest[:24]!r}; add its end-of-turn token to eos_token_id in the model's generation_config.json"
            )
        tokens = self._encode(text)
        return tokens.token_ids[token_at(tokens, len(text) - len(rest)) + 1 :].tolist()

    def _continuation_fault(self, role: str) -> str:
        """Why a message of this role cannot follow a sampled turn, or nothing."""
        reply = [{"role": role, "content": _REPLY}]
        longer = [{"role": "user", "content": "another"}, {"role": "assistant", "content": "one"}, *_OPENING]
        try:
            ids = self._continue(_OPENING, reply, ())
            same = ids == self._continue(longer, reply, ())
        except DataError as error:
            return f"a {role} message must be able to follow a sampled turn: {error}"
        if _REPLY not in self.decode(ids):
            return f"the chat template must render {role} messages, got {self.decode(ids)!r} for {reply}; mend it"
        if not same:
            return f"the chat template must render a {role} message alike after any conversation; mend it"
        return ""


def _exact_encoder(tokenizer: "PreTrainedTokenizerFast") -> Tokenizer:
    """A copy of the fast tokenizer with offsets of every character: post-processors may trim whitespace off them."""
    encoder = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    encoder.post_processor = None
    encoder.no_truncation()
    encoder.no_padding()
    return encoder


def _stop_token_ids(tokenizer: "PreTrainedTokenizerFast") -> tuple[int, ...]:
    path = Path(tokenizer.name_or_path) / "generation_config.json"
    listed = _eos_token_id(path) if path.is_file() else None
    ids = [] if listed is None else listed if isinstance(listed, list) else [listed]
    own: Any = tokenizer.eos_token_id
    if own is not None:
        ids.append(own)
    if not ids:
        raise ConfigError(f"the tokenizer in {tokenizer.name_or_path} must have an eos_token, got none; add it")
    if unknown := [token for token in ids if not (isinstance(token, int) and 0 <= token < len(tokenizer))]:
        raise ConfigError(f"eos_token_id in {path} must be tokens below {len(tokenizer)}, got {unknown}; mend it")
    return tuple(dict.fromkeys(ids))


def _eos_token_id(path: Path) -> Any:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} must be JSON, got: {error}; restore the original model's file") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {config!r:.80}; restore the original model's file")
    return config.get("eos_token_id")


def _plain(messages: Sequence[Message]) -> list[Message]:
    """Copies in the form templates expect: content is text, tool-call arguments are objects."""
    return [_plain_message(message) for message in messages]


def _plain_message(message: Message) -> Message:
    plain = {**message, "content": message.get("content") or ""}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    return plain


def _plain_call(call: dict[str, Any]) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _plain_call(call["function"])}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise DataError(
            f"arguments of a tool call must be an object or its JSON text, got {call.get('arguments')!r:.80}; "
            "mend the call"
        )
    return {**call, "arguments": arguments}
