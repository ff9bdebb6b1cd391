"""The reasoning_gym adapter: same prompts everywhere, disjoint splits, the data set's own score."""

from typing import Any

import pytest

from megatron_rl.config import ConfigError
from megatron_rl.rollout.environments import EnvironmentConfig, make_environment


def gym(dataset: str, **options: Any) -> Any:
    return make_environment(EnvironmentConfig(name="reasoning_gym", options={"dataset": dataset, **options}))


def questions(env: Any, split: str, count: int) -> set[str]:
    return {env.prompt(split, index).messages[0]["content"] for index in range(count)}


@pytest.mark.parametrize(
    ("dataset", "config"),
    [("gcd", {"max_value": 12, "max_numbers": 2}), ("chain_sum", {"max_terms": 2, "max_digits": 1})],
)
def test_no_question_is_in_two_splits_though_the_generator_repeats_itself(dataset: str, config: dict[str, int]) -> None:
    env = gym(dataset, config=config)
    train, heldout = questions(env, "train", 2000), questions(env, "heldout", 2000)
    assert len(train) < 1500 and heldout, "the sample must be large enough to repeat itself"
    assert not train & heldout


def test_prompts_are_the_same_for_every_instance_and_differ_by_seed() -> None:
    first, second, other = gym("gcd"), gym("gcd"), gym("gcd", seed=1)
    assert [first.prompt("train", i) for i in (5, 0)] == [second.prompt("train", i) for i in (5, 0)]
    assert questions(first, "train", 20) != questions(other, "train", 20)


@pytest.mark.parametrize("dataset", ["chain_sum", "gcd", "leg_counting", "basic_arithmetic"])
def test_the_right_answer_in_tags_passes_and_nothing_else_does(dataset: str) -> None:
    env = gym(dataset)
    for index in range(10):
        prompt = env.prompt("heldout", index)
        answer = prompt.task["answer"]
        for text, reward in [
            (f"So: <answer> {answer} </answer>", 1.0),
            (f"<answer>{answer}1</answer>", 0.0),
            (f"<answer>{answer}</answer> no, <answer>{answer}1</answer>", 0.0),
            (answer, 0.0),
            ("<answer></answer>", 0.0),
        ]:
            outcome = env.episode(prompt).step(text)
            assert (outcome.done, outcome.reward) == (True, reward), text


def test_partial_credit_is_the_score_of_the_data_set() -> None:
    prompt_env, strict = gym("letter_counting", partial_credit=True), gym("letter_counting")
    prompt = prompt_env.prompt("train", 0)
    entry = prompt_env._dataset[prompt.task["item"]]
    text = f"<answer>about {entry['answer']}</answer>"
    score = prompt_env._dataset.score_answer(f"about {entry['answer']}", entry)
    assert 0 < score < 1
    assert prompt_env.episode(prompt).step(text).reward == score
    assert strict.episode(prompt).step(text).reward == 0.0


def test_a_data_set_without_a_held_out_question_is_a_config_error() -> None:
    env = gym("coin_flip", size=2)
    with pytest.raises(ConfigError, match=r"coin_flip .* split"):
        for split in env.splits:
            env.prompt(split, 0)
