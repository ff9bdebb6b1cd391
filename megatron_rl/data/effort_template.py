"""Chat templates that say the reasoning effort: one fixed sentence per level at the end of the system prompt.

A template is extended at its top only, by giving `messages` another first message; what it makes of messages stays its
own, and without the variable `reasoning_effort` it renders what it rendered before.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import Environment, TemplateSyntaxError

from megatron_rl.config import ConfigError
from megatron_rl.data.conversation import EFFORTS

EFFORT_VARIABLE = "reasoning_effort"
"""What chat templates, and servers that render them, call the effort."""
EFFORT_SENTENCES = {effort: f"Reasoning effort: {effort}." for effort in EFFORTS}
_PRELUDE = """\
{#- The sentence for reasoning_effort closes the system prompt; without the variable nothing changes. -#}
{%- if reasoning_effort is defined and reasoning_effort is not none -%}
    {%- set effort_sentences = SENTENCES -%}
    {%- if reasoning_effort not in effort_sentences -%}
        {{- raise_exception('reasoning_effort must be one of LEVELS, got ' ~ reasoning_effort) -}}
    {%- endif -%}
    {%- set effort_sentence = effort_sentences[reasoning_effort] -%}
    {%- if not messages or messages[0].role != 'system' -%}
        {%- set messages = [{'role': 'system', 'content': effort_sentence}] + messages -%}
    {%- elif not messages[0].content -%}
        {%- set messages = [dict(messages[0], content=effort_sentence)] + messages[1:] -%}
    {%- elif messages[0].content is string -%}
        {%- set messages = [dict(messages[0], content=messages[0].content ~ '\\n\\n' ~ effort_sentence)]
            + messages[1:] -%}
    {%- else -%}
        {%- set effort_part = {'type': 'text', 'text': '\\n\\n' ~ effort_sentence} -%}
        {%- set messages = [dict(messages[0], content=messages[0].content + [effort_part])] + messages[1:] -%}
    {%- endif -%}
{%- endif %}
"""
"""Ends with a newline that trim_blocks takes away, so the template behind it is read as if it stood alone."""
_PROBES: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "probe"}],
    [{"role": "system", "content": "rules"}, {"role": "user", "content": "probe"}],
    [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "probe"},
        {"role": "assistant", "content": "answer"},
        {"role": "user", "content": "another"},
    ],
)

Render = Callable[..., str]
"""(template, messages, **variables) -> text"""


def uses_effort(template: str) -> bool:
    """Whether a chat template reads reasoning_effort; comments and quoted text do not count."""
    try:
        tokens = list(Environment().lex(template))
    except TemplateSyntaxError as error:
        raise ConfigError(f"a chat template must be Jinja, got: {error}; restore the original model's file") from error
    return any(kind == "name" and value == EFFORT_VARIABLE for _, kind, value in tokens)


def extend_template(template: str, sentences: Mapping[str, str] = EFFORT_SENTENCES) -> str:
    """The template with a sentence for each value of reasoning_effort, in a system message of its own if there is none.

    ConfigError if it reads that variable already.
    """
    if uses_effort(template):
        raise ConfigError(
            f"a chat template to extend must not read {EFFORT_VARIABLE} yet, but this one does; use it as it is"
        )
    written = json.dumps(dict(sentences), ensure_ascii=False)
    return _PRELUDE.replace("SENTENCES", written).replace("LEVELS", ", ".join(sentences)) + template


def check_extension(
    template: str, extended: str, render: Render, sentences: Mapping[str, str] = EFFORT_SENTENCES
) -> None:
    """Renders short conversations with both. ConfigError unless each effort's sentence shows exactly once, and nothing
    else changes without the variable: a template may refuse system messages, or leave them out.
    """
    for messages in _PROBES:
        plain = _rendered(render, template, messages)
        if _rendered(render, extended, messages) != plain:
            raise ConfigError(
                f"a chat template must render alike each time, but with {_roles(messages)} it does not; remove what "
                "changes, such as the time of day"
            )
        for effort, sentence in sentences.items():
            text = _rendered(render, extended, messages, **{EFFORT_VARIABLE: effort})
            if (count := text.count(sentence) - plain.count(sentence)) != 1:
                raise ConfigError(
                    f"a chat template must show the system message once, so that it can carry the effort, but "
                    f"{sentence!r} comes {count} times with {_roles(messages)}; mend how it renders role system"
                )


def _rendered(render: Render, template: str, messages: Sequence[dict[str, Any]], **variables: Any) -> str:
    try:
        return render(template, list(messages), **variables)
    except Exception as error:  # a template is a program: it may raise anything
        given = "a system message" if variables else "a short conversation"
        raise ConfigError(
            f"a chat template must take {given}, so that it can carry the effort, but with {_roles(messages)} it says: "
            f"{error}; mend the template"
        ) from error


def _roles(messages: Sequence[dict[str, Any]]) -> str:
    return "the roles " + ", ".join(message["role"] for message in messages)
