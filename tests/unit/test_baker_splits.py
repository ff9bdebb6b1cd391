"""The baker's problems: right answers, and held-out splits that share nothing with training."""

import os
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from typing import Any

import pytest

from megatron_rl.records import Prompt
from megatron_rl.rollout.environments.baker import Baker, BakerOptions
from megatron_rl.rollout.environments.baker_problem import KINDS, RANGES
from megatron_rl.rollout.environments.baker_text import DISTRACTORS

NUMERALS = dict(zip(["zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"], range(2, 10), strict=True))
SAMPLE = {"easy": 12000, "full": 5000}


def content(prompt: Prompt) -> str:
    return prompt.messages[0]["content"]


@cache
def prompts(level: str, split: str, seed: int = 0) -> list[Prompt]:
    env = Baker(BakerOptions(level=level, seed=seed))  # type: ignore[arg-type]
    return [env.prompt(split, index) for index in range(SAMPLE[level])]


def without_distractors(text: str) -> str:
    for distractor in DISTRACTORS:
        pattern = re.sub(r"\\\{\w+\\\}", r"\\d+", re.escape(distractor))
        text = re.sub(rf"(^| ){pattern}", "", text)
    return text.strip()


def masked(prompt: Prompt) -> str:
    """The text as a reader sees it, with every number and every distractor taken out."""
    text = re.sub(r"\d+(,\d\d)?|ein halbes", "#", without_distractors(content(prompt)))
    return re.sub(rf"\b({'|'.join(NUMERALS)})\b", "#", text, flags=re.IGNORECASE)


def read_numbers(prompt: Prompt) -> list[tuple[int, int]]:
    """(quantity, cents) pairs read back from the text alone."""
    text = without_distractors(content(prompt))
    for word, number in NUMERALS.items():
        text = re.sub(rf"\b{word}\b", str(number), text, flags=re.IGNORECASE)
    text = text.replace("ein halbes Dutzend", "6 Stück")
    prices = [int(euro) * 100 + int(cent) for euro, cent in re.findall(r"(\d+),(\d\d) €", text)]
    counts = [int(n) for n in re.findall(r"(?<![\d,])(\d+)(?= [A-ZÄÖÜ])(?! €)", text)]
    if "Dutzend" in text and "Ein Dutzend kostet" not in text:
        counts[0] *= 12
    returned = re.search(r"(\d+) davon werden zurückgegeben", text)
    if returned:
        counts[0] -= int(returned.group(1))
    return list(zip(counts, prices, strict=True))


@pytest.mark.parametrize("level", ["easy", "full"])
def test_answers_follow_from_the_text_alone(level: str) -> None:
    for split in Baker.splits:
        for prompt in prompts(level, split)[:800]:
            numbers = read_numbers(prompt)
            assert numbers == [tuple(pair) for pair in prompt.task["pairs"]], content(prompt)


@pytest.mark.parametrize("level", ["easy", "full"])
def test_no_held_out_text_or_number_occurs_in_training(level: str) -> None:
    train = prompts(level, "train") + (prompts("full", "train") if level == "easy" else [])
    known_texts = {masked(prompt) for prompt in train}
    known_pairs = {tuple(pair) for prompt in train for pair in prompt.task["pairs"]}
    new_texts, new_numbers = prompts(level, "new_texts"), prompts(level, "new_numbers")
    assert not known_texts & {masked(prompt) for prompt in new_texts}
    assert not known_pairs & {tuple(pair) for prompt in new_numbers for pair in prompt.task["pairs"]}
    if level == "easy":
        assert {tuple(pair) for prompt in new_texts for pair in prompt.task["pairs"]} <= known_pairs
        texts = [masked(prompt) in known_texts for prompt in new_numbers]
        assert sum(texts) > 0.95 * len(texts), "all but the texts that the sample of train happens to miss"


def test_both_held_out_splits_have_every_kind_and_enough_to_ask() -> None:
    for level, ranges in RANGES.items():
        for split in Baker.splits:
            kinds = Counter(prompt.task["kind"] for prompt in prompts(level, split))
            assert set(kinds) == set(ranges) <= set(KINDS)
            assert min(kinds.values()) > 0.8 * SAMPLE[level] / len(ranges)
    assert len({masked(prompt) for prompt in prompts("easy", "new_texts")}) > 400
    assert len({str(prompt.task["pairs"]) for prompt in prompts("easy", "new_numbers")}) >= 20


def test_a_held_out_problem_stays_held_out_for_every_seed() -> None:
    texts = {masked(prompt) for prompt in prompts("easy", "new_texts")}
    assert not texts & {masked(prompt) for prompt in prompts("easy", "train", seed=7)}
    assert prompts("easy", "train", seed=7)[:50] != prompts("easy", "train")[:50]


def test_prompts_are_the_same_in_another_process_with_another_hash_seed() -> None:
    code = (
        "from megatron_rl.rollout.environments.baker import Baker, BakerOptions\n"
        "env = Baker(BakerOptions(level='full'))\n"
        "print([env.prompt(s, i).messages[0]['content'] for s in env.splits for i in (7, 0)])"
    )
    env = os.environ | {"PYTHONHASHSEED": "123", "PYTHONIOENCODING": "utf-8"}
    got = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    expected = [content(prompts("full", split)[index]) for split in Baker.splits for index in (7, 0)]
    assert got.strip() == str(expected)


def test_distractors_come_as_often_as_asked_and_never_by_default_at_the_easy_level() -> None:
    def share(**options: Any) -> float:
        env = Baker(BakerOptions(**options))
        asked = [content(env.prompt("train", index)) for index in range(600)]
        return sum(without_distractors(text) != text for text in asked) / len(asked)

    assert share(level="easy") == 0
    assert share(level="easy", distractors=1.0) == 1
    assert share(level="full") == pytest.approx(0.5, abs=0.08)


def test_kinds_can_be_chosen() -> None:
    env = Baker(BakerOptions(level="full", kinds=["returned", "per_dozen"]))
    assert {env.prompt("train", index).task["kind"] for index in range(50)} == {"returned", "per_dozen"}
