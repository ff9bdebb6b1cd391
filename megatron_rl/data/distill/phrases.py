"""Phrases that open a reasoning, by language and domain: shipped lists and a user's own."""

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import xxhash

from megatron_rl.config import ConfigError
from megatron_rl.config.yaml_tree import parse, read, shown

Phrases = Mapping[tuple[str, str], Sequence[str]]
"""(language, domain) -> phrases."""
TextName = Literal["writer", "request", "checker", "answer"]

SHIPPED = ("de", "en")
"""Languages whose phrases and instructions come with the package."""


def load_phrases(paths: Sequence[str]) -> Phrases:
    """The shipped lists and those of the files, later ones first. ConfigError names the file that does not fit."""
    lists: dict[tuple[str, str], Sequence[str]] = {}
    for language in SHIPPED:
        lists |= _lists(shipped_texts(language), f"{language}.yaml")
    for path in paths:
        lists |= _lists(read(Path(path)), path)
    return lists


def draw_phrase(phrases: Phrases, *, language: str, domain: str, seed: int, sample_id: str) -> str:
    """The phrase of a sample, whatever other samples there are. KeyError where there is no list."""
    choices = phrases[language, domain]
    key = f"{seed}/{sample_id}".encode("utf-8", "surrogatepass")
    return choices[xxhash.xxh3_64_intdigest(key) % len(choices)]


def instruction(language: str, name: TextName) -> str:
    """What a model of the backfill is told; in English, naming the language, where no text is shipped in it."""
    texts = shipped_texts(language if language in SHIPPED else "en")
    return texts["backfill"][name]


def shipped_texts(language: str) -> dict[str, Any]:
    """The YAML file of a shipped language."""
    name = f"{language}.yaml"
    return parse(resources.files("megatron_rl.data.distill").joinpath("texts", name).read_text("utf-8"), name)


def _lists(tree: Mapping[str, Any], source: str) -> dict[tuple[str, str], Sequence[str]]:
    language, domains = tree.get("language"), tree.get("phrases")
    if not isinstance(language, str) or not isinstance(domains, dict) or not domains:
        raise ConfigError(
            f"{source} must have `language`, a two-letter code, and `phrases`, lists by domain, got the keys "
            f"{shown(list(tree))}; write it like the shipped de.yaml"
        )
    for domain, phrases in domains.items():
        if not isinstance(phrases, list) or not phrases:
            raise ConfigError(f"{source}: phrases.{domain} must be a list with at least one, got {shown(phrases)}")
        for phrase in phrases:
            if not isinstance(phrase, str) or not phrase or phrase != phrase.strip():
                raise ConfigError(
                    f"{source}: a phrase must be text without whitespace around it, which would change how the next "
                    f"word is tokenised, got {shown(phrase)} under {domain}; mend it"
                )
    return {(language, str(domain)): tuple(phrases) for domain, phrases in domains.items()}
