"""How a phrase reaches the teacher: as an unfinished message that the server continues, or as token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.config import ConfigError, DataError
from megatron_rl.data.distill.answer import CALL_MARKS, parsed_call
from megatron_rl.data.distill.config import LocalPrefill, ThinkingConfig
from megatron_rl.data.endpoint import Endpoint
from megatron_rl.data.endpoint_answer import Message

_PROBE: list[Message] = [{"role": "user", "content": "probe"}]


class LocalPrompt:
    """Prompts rendered with the teacher's own tokenizer, so that the reasoning goes on exactly behind the phrase."""

    def __init__(self, config: LocalPrefill, thinking: ThinkingConfig) -> None:
        """ConfigError if the folder has no tokenizer, or its template closes the reasoning in its prompt."""
        from megatron_rl.data.render import load_tokenizer  # imports transformers, which a typo need not wait for

        self._tokenizer = load_tokenizer(config.tokenizer)
        self._options = config.template_options
        end = self.text(_PROBE, ()).rstrip()
        if end.endswith(thinking.close.strip()):
            raise ConfigError(
                f"the chat template in {config.tokenizer} must leave the reasoning to the model, but its prompt ends "
                f"in {end[-40:]!r}; set prefill.template_options, such as enable_thinking: true"
            )
        self.opening = opening_behind(end, thinking)
        """What goes between the template's prompt and the phrase."""

        self._stop = str(self._tokenizer.eos_token or "")
        known = {thinking.open.strip(), thinking.close.strip(), *CALL_MARKS}
        special = [str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special]
        self._special = [token for token in special if token not in known]

    def answer_text(self, text: str) -> str:
        """A sampled text without the end-of-turn token, which some servers leave at its end."""
        return text.removesuffix(self._stop) if self._stop else text

    def has_special_token(self, text: str) -> bool:
        """Whether a text has marks that mean something to this model alone, such as another way to call tools."""
        return any(token in text for token in self._special)

    def text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        """The prompt up to where the assistant's turn starts. DataError if the template refuses the messages."""
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [_template_message(message) for message in messages],
                    tools=[dict(tool) for tool in tools] or None,
                    add_generation_prompt=True,
                    tokenize=False,
                    **self._options,
                )
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise DataError(f"the chat template refuses the conversation: {error}; mend the messages") from error

    def ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], phrase: str) -> list[int]:
        """Token ids of prompt, opening and phrase, tokenised as one text."""
        text = self.text(messages, tools) + self.opening + phrase
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def opening_behind(prompt: str, thinking: ThinkingConfig) -> str:
    """What opens the reasoning behind a prompt: nothing if its template has done so."""
    return "" if prompt.rstrip().endswith(thinking.open.strip()) else thinking.open


async def check_chat_prefill(endpoint: Endpoint, thinking: ThinkingConfig) -> bool:
    """Whether the server could be seen to continue an unfinished message as it is; False if it cannot be seen.

    ConfigError if it was seen that its template writes something else, such as an empty reasoning before it.
    """
    prefill = f"{thinking.open}probe"
    prompt = await endpoint.prompt_text(_PROBE)
    continued = await endpoint.prompt_text(_PROBE, prefill=prefill)
    if prompt is None or continued is None:
        return False
    if continued == _without_opening(prompt, thinking) + prefill:
        return True
    start = next((i for i, (a, b) in enumerate(zip(prompt, continued, strict=False)) if a != b), len(prompt))
    raise ConfigError(
        f"prefill.kind=chat needs a chat template that leaves an unfinished assistant message as it is, but "
        f"{endpoint.config.url} makes {continued[start:][:80]!r} of {prefill!r}; set prefill.kind=local and "
        "prefill.tokenizer"
    )


def _without_opening(prompt: str, thinking: ThinkingConfig) -> str:
    bare = prompt.rstrip()
    mark = thinking.open.strip()
    return bare.removesuffix(mark) if bare.endswith(mark) else prompt


def _template_message(message: Message) -> Message:
    """A copy as templates expect it: content is text, arguments are objects."""
    plain = {**message, "content": message.get("content") or ""}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [parsed_call(call) or _malformed(call) for call in calls]
    return plain


def _malformed(call: Mapping[str, Any]) -> dict[str, Any]:
    raise DataError(f"arguments of a tool call must be an object or its JSON text, got {str(call)[:80]}; mend the call")
