"""Tokenizers of Hugging Face folders: loading one, and the tokens that end its turns."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.config import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_TOKENIZER_FILES = ("tokenizer*", "vocab.*", "*.model")


def has_tokenizer(folder: str | Path) -> bool:
    """Whether a folder holds any file of a tokenizer."""
    return any(file for pattern in _TOKENIZER_FILES for file in Path(folder).glob(pattern))


def load_tokenizer(path: str | Path, *, option: str = "model.path") -> "PreTrainedTokenizerFast":
    """The tokenizer of a Hugging Face folder; ConfigError if there is none or it has no chat template.

    option: what the user calls the folder.
    """
    from transformers import AutoTokenizer  # imports torch: seconds that a command line with a typo need not wait

    if not Path(path).is_dir():
        raise ConfigError(f"{option} must be a Hugging Face folder, got {path}, which is not a folder")
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


def stop_token_ids(tokenizer: "PreTrainedTokenizerFast") -> tuple[int, ...]:
    """Tokens that end a turn: eos_token_id of generation_config.json and the tokenizer's own. ConfigError: none."""
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
