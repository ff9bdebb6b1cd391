"""The two root configs of `megatron-rl distill`, told apart by `kind`."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from megatron_rl.config import ConfigModel
from megatron_rl.data.endpoint import EndpointConfig

LanguageCode = Annotated[str, Field(pattern=r"^[a-z]{2}$")]
"""ISO 639-1, such as de."""


class SamplingConfig(ConfigModel):
    """How answers are sampled; more options of the server go into the endpoint's extra_body."""

    max_tokens: int = Field(ge=1, default=8192)
    """Longest answer in tokens, reasoning included; what is cut off is dropped."""
    temperature: float = Field(ge=0, default=0.6)
    """Sampling temperature."""


class ThinkingConfig(ConfigModel):
    """How the model marks its reasoning."""

    open: str = Field(min_length=1, default="<think>\n")
    """What opens the reasoning, whitespace included; left out where the chat template opens it already."""
    close: str = Field(min_length=1, default="</think>")
    """What closes it."""


class LanguageConfig(ConfigModel):
    """Which language a reasoning has to stay in, and how that is judged."""

    default: LanguageCode = "de"
    """Two-letter code for rows without a column language."""
    min_share: float = Field(ge=0, le=1, default=0.9)
    """Least share of a reasoning's letters in its language; below it the reasoning is dropped. 0 keeps everything."""
    others: list[LanguageCode] = ["en", "de", "fr", "es", "it", "pt", "ru", "zh", "ja"]
    """Languages that the detector tells apart, besides those of the rows; each costs about 20 MB."""


class ChatPrefill(ConfigModel):
    """The server continues an unfinished assistant message: vLLM, SGLang. Its chat template must leave it as it is."""

    kind: Literal["chat"] = "chat"
    """Over /v1/chat/completions with continue_final_message."""


class LocalPrefill(ConfigModel):
    """The prompt is rendered here and sent as token ids: exact with any chat template. The server's parsers take no
    part: tool calls are read from JSON in <tool_call> marks, answers with other special tokens are dropped."""

    kind: Literal["local"] = "local"
    """Over /v1/completions."""
    tokenizer: str
    """Folder with the teacher's tokenizer and chat template."""
    template_options: dict[str, Any] = {}
    """Variables of the chat template, such as enable_thinking."""


class NoPrefill(ConfigModel):
    """Nothing is opened: the baseline that shows what the phrases bring."""

    kind: Literal["none"] = "none"
    """Over /v1/chat/completions."""


Prefill = Annotated[ChatPrefill | LocalPrefill | NoPrefill, Field(discriminator="kind")]


class DistillConfig(ConfigModel):
    """What both kinds have."""

    input: str = Field(min_length=1)
    """Rows: JSONL, Parquet, a `datasets` folder, or a folder of those."""
    output: str = Field(min_length=1)
    """JSONL file to write. Beside it: .journal (every answer, for resuming), .dropped.jsonl and .report.json."""
    seed: int = Field(ge=0, lt=2**32, default=0)
    """Seeds the phrase of each row, and sampling where the server takes a seed."""
    limit: int | None = Field(ge=1, default=None)
    """Only the first so many rows; null takes all. A higher one later asks only for the further rows."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that cannot be used ends the run before anything is asked, or is left out and named in .dropped.jsonl."""
    domain: str = Field(min_length=1, default="general")
    """Domain of rows without a column domain."""
    language: LanguageConfig = LanguageConfig()
    """Language of the reasoning."""

    @field_validator("output")
    @classmethod
    def _is_jsonl(cls, output: str) -> str:
        if not output.endswith(".jsonl"):
            raise ValueError(f"must be a JSONL file, got {output!r}; end its name in .jsonl")
        return output

    @model_validator(mode="after")
    def _differs_from_input(self) -> "DistillConfig":
        if self.output == self.input:
            raise ValueError(f"output must differ from input, got {self.output} for both; choose another output")
        return self


class PrefillRun(DistillConfig):
    """Answers of a teacher whose reasoning is opened with a phrase, so that it stays in the phrase's language."""

    kind: Literal["prefill"]
    """Prefill distillation."""
    teacher: EndpointConfig
    """The model that answers."""
    sampling: SamplingConfig = SamplingConfig()
    """How the teacher is sampled."""
    thinking: ThinkingConfig = ThinkingConfig()
    """Marks of the teacher's reasoning."""
    prefill: Prefill = ChatPrefill()
    """How the phrase reaches the teacher."""
    phrases: list[str] = []
    """YAML files of phrases by domain, each for one language; a list replaces the shipped one of its domain."""

    @model_validator(mode="after")
    def _phrases_are_used(self) -> "PrefillRun":
        if self.phrases and isinstance(self.prefill, NoPrefill):
            raise ValueError("phrases have no effect with prefill.kind=none; leave them out or choose another kind")
        return self


class BackfillRun(DistillConfig):
    """Reasoning for tool calls that have none, kept only where it leads a second model to the same call."""

    kind: Literal["backfill"]
    """Reasoning backfill."""
    writer: EndpointConfig
    """The model that sees conversation and call, and writes the reasoning."""
    writer_sampling: SamplingConfig = SamplingConfig(max_tokens=2048)
    """How the writer is sampled."""
    checker: EndpointConfig
    """The model that sees nothing but the reasoning and the tools, and must derive the same call."""
    checker_sampling: SamplingConfig = SamplingConfig(max_tokens=2048, temperature=0)
    """How the checker is sampled."""
    thinking_close: str = Field(min_length=1, default="</think>")
    """What closes a reasoning of the models' own, which is no part of what they are asked for."""
    checker_answers: Literal["json", "tool_calls"] = "json"
    """Calls as a JSON list in the checker's text, or as tool calls, which need the server's tool parser."""
