"""Environments by name: what a run file may say, and what it is told when it is wrong."""

import sys
from types import ModuleType
from typing import Any

import pytest

from megatron_rl.config import ConfigError, ConfigModel
from megatron_rl.records import Prompt
from megatron_rl.rollout.environments import EnvironmentConfig, make_environment


def make(name: str, **fields: Any) -> Any:
    return make_environment(EnvironmentConfig(name=name, **fields))


@pytest.mark.parametrize(
    ("name", "options", "parts"),
    [
        ("bakr", {}, ["did you mean baker?", "'bakr'", "reasoning_gym"]),
        ("no.such.module:Thing", {}, ["importable", "no.such.module"]),
        ("json:Thing", {}, ["importable", "Thing"]),
        ("json:JSONDecoder", {}, ["Options"]),
        ("baker", {"levl": "easy"}, ["options.levl", "did you mean level?"]),
        ("baker", {"level": "hard"}, ["options.level", "'hard'", "easy"]),
        ("baker", {"kinds": ["per_dozen"]}, ["kinds", "per_dozen", "dozen"]),
        ("baker", {"distractors": 2}, ["options.distractors"]),
        ("reasoning_gym", {}, ["options.dataset"]),
        ("reasoning_gym", {"dataset": "chainsum"}, ["options.dataset", "did you mean chain_sum"]),
        ("reasoning_gym", {"dataset": "chain_sum", "config": {"max_term": 2}}, ["options.config", "max_term"]),
        ("reasoning_gym", {"dataset": "chain_sum", "config": {"min_terms": 9}}, ["options.config", "min_terms"]),
        ("reasoning_gym", {"dataset": "chain_sum", "config": {"seed": 9}}, ["options.config", "seed"]),
    ],
)
def test_a_wrong_entry_is_one_config_error_that_names_it(name: str, options: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        make(name, options=options)
    for part in parts:
        assert part in str(caught.value)


class OwnOptions(ConfigModel):
    word: str = "hi"


class Own:
    Options = OwnOptions
    splits = ("train",)

    def __init__(self, options: OwnOptions, *, name: str) -> None:
        self.name, self.word = name, options.word

    def prompt(self, split: str, index: int) -> Prompt:
        return Prompt(prompt_id=f"{self.name}/{split}/{index}", environment=self.name, messages=[])


def test_a_class_of_the_user_is_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("a_users_module")
    module.Own = Own  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_users_module", module)
    plain = make("a_users_module:Own", options={"word": "ja"})
    assert (plain.name, plain.word) == ("Own", "ja")
    assert make("a_users_module:Own", label="mine").prompt("train", 0).environment == "mine"


@pytest.mark.parametrize("name", ["baker", "reasoning_gym"])
def test_an_unknown_split_or_index_is_refused(name: str) -> None:
    env = make(name, options={"dataset": "chain_sum"} if name == "reasoning_gym" else {})
    with pytest.raises(ValueError, match="splits"):
        env.prompt("tests", 0)
    with pytest.raises(ValueError, match="splits"):
        env.size("tests")
    with pytest.raises(ValueError, match="at least 0"):
        env.prompt("train", -1)
