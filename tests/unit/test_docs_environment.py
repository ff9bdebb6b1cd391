"""The environment that docs/environments.md shows is one."""

import re
from pathlib import Path

import yaml

from megatron_rl.rollout.environments import EnvironmentConfig, make_environment

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_example_asks_judges_and_keeps_its_splits_apart() -> None:
    names: dict = {}
    exec(blocks("python")[0], names)
    environment = names["Sums"](names["SumOptions"](largest=20))
    train = {environment.prompt("train", i).messages[0]["content"] for i in range(200)}
    assert not train & {environment.prompt("heldout", i).messages[0]["content"] for i in range(200)}
    prompt = environment.prompt("train", 7)
    episode = environment.episode(prompt)
    assert not episode.step("eight").done
    assert episode.step(str(prompt.task["answer"])).reward == 1
    assert environment.episode(prompt).step("99").reward == 0


def test_the_configs_it_shows_are_valid() -> None:
    own, gym = (yaml.safe_load(block)["environments"][0] for block in blocks("yaml"))
    assert EnvironmentConfig(**own).options == {"largest": 20}
    assert make_environment(EnvironmentConfig(**gym)).prompt("train", 0).messages
