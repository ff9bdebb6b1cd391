"""Messages to token ids and back with the model's own chat template; which tokens of a conversation are trained."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config import ConfigError, DataError

Message = dict[str, Any]


def load_tokenizer(path: str | Path) -> Any:
    from transformers import AutoTokenizer
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"a tokenizer folder must exist, got {folder}; give the model's Hugging Face folder")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not tokenizer.chat_template:
        raise ConfigError(f"the tokenizer of {folder} must have a chat template; save one with tokenizer.chat_template = ...")
    return tokenizer


class ChatRenderer:
    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.pad_id = int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id)
        self.stop_token_ids = [int(tokenizer.eos_token_id)]

    def prompt_ids(self, messages, tools):
        return list(self.tokenizer.apply_chat_template(messages, tools=tools or None, add_generation_prompt=True, tokenize=True, return_dict=False))

    def continuation_ids(self, messages, tools):
        base = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
        eot = self.tokenizer.decode(self.stop_token_ids)
        whole = self.tokenizer.apply_chat_template([*base, *messages], tools=tools or None, add_generation_prompt=True, tokenize=False)
        head = self.tokenizer.apply_chat_template(base, tools=tools or None, tokenize=False)
        cut = head.rindex(eot) + len(eot)
        assert whole[:cut] == head[:cut]
        return self.tokenizer.encode(whole[cut:], add_special_tokens=False)

    def conversation(self, messages, tools):
        out = self.tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return list(out["input_ids"]), [bool(x) for x in out["assistant_masks"]]

    def decode(self, ids):
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)
