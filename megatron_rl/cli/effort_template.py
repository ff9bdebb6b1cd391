"""megatron-rl effort-template: a model's chat template, extended so that it says the reasoning effort."""

from pathlib import Path
from typing import Any

from megatron_rl.cli.output_folder import check_folder, writing
from megatron_rl.config import ConfigError
from megatron_rl.data.effort_template import check_extension, extend_template
from megatron_rl.data.render import load_tokenizer


def effort_template(model: Path, out: Path | None) -> str:
    """The extended template, which is also written to out if one is given.

    ConfigError if out exists, or if the model's template cannot carry the effort or does already.
    """
    if not model.is_dir():
        raise ConfigError(f"MODEL must be a Hugging Face folder, got {model}; give one with a tokenizer")
    if out is not None:
        if out.exists():
            raise ConfigError(
                f"--out must not exist yet, got {out}; choose another name, and move the file there when you like it"
            )
        check_folder(out.parent, "the folder of --out")
    tokenizer = load_tokenizer(model)
    template = tokenizer.chat_template
    if not isinstance(template, str):
        raise ConfigError(f"{model} must have one chat template, got several: {', '.join(template)}; keep one")

    def render(source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
        return str(tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, **variables))

    try:
        extended = extend_template(template)
        check_extension(template, extended, render)
    except ConfigError as error:
        raise ConfigError(f"{model}: {error}") from error
    if out is not None:
        with writing(out.parent):
            out.write_text(extended, encoding="utf-8")
    return extended
