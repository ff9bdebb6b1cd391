"""The orchestrator against an engine that answers from a script: what is drawn, dropped, packed and remembered."""

import asyncio
from typing import Any

import numpy as np
import pytest

from megatron_rl.engine.records import Completion
from megatron_rl.orchestrator.config import OrchestratorConfig
from megatron_rl.orchestrator.evaluate import EvaluationError, pass_rates
from megatron_rl.orchestrator.loop import NothingToTrainError, Orchestrator
from megatron_rl.orchestrator.source import PromptSource
from megatron_rl.orchestrator.state import decode_state, encode_state
from megatron_rl.records import Prompt, wire
from megatron_rl.rollout.env import StepOutcome
from megatron_rl.rollout.run import RolloutConfig
from megatron_rl.telemetry.values import from_wire


class Letters:
    """Renders one letter per token; token 0 ends a turn."""

    pad_id = 1
    stop_token_ids = (0,)

    def prompt_ids(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        return [ord(c) for c in messages[-1]["content"]]

    def continuation_ids(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        raise AssertionError("single turn")

    def decode(self, ids: Any) -> str:
        return "".join(chr(i) for i in ids if i)


class Scored:
    """Reward 1 when the answer is in the prompt's list of right answers."""

    splits = ("train", "heldout")

    def __init__(self, name: str, right: str = "ab") -> None:
        self.name, self._right = name, right

    def size(self, split: str) -> int | None:
        return None if split == "train" else 4

    def prompt(self, split: str, index: int) -> Prompt:
        return Prompt(f"{self.name}/{split}/{index}", self.name, [{"role": "user", "content": f"q{index}"}])

    def episode(self, prompt: Prompt) -> "Scored":
        return self

    def step(self, assistant_text: str) -> StepOutcome:
        return StepOutcome(messages=[], done=True, reward=float(assistant_text in self._right), signals={})


class Scripted:
    """Gives the answers of a list in turn, or raises what is in it."""

    def __init__(self, answers: list[str | Exception]) -> None:
        self.answers, self.calls = answers, 0

    async def generate(self, prompt_ids: Any, **_: Any) -> Completion:
        answer = self.answers[self.calls % len(self.answers)]
        self.calls += 1
        if isinstance(answer, Exception):
            raise answer
        ids = np.array([*(ord(c) for c in answer), 0], dtype=np.int32)
        return Completion(
            token_ids=ids,
            logp=np.full(len(ids), -0.5, dtype=np.float32),
            weight_version=np.full(len(ids), 3, dtype=np.int32),
            finish_reason="stop",
        )


def make(answers: list[str | Exception], **config: Any) -> tuple[Orchestrator, PromptSource, Scripted]:
    environments = [Scored("one")]
    source = PromptSource(environments, [1.0], seed=0)
    engine = Scripted(answers)
    settings = {"groups_per_step": 2, "max_redraws": 0, "microbatch_tokens": 64, "max_concurrent_rollouts": 1, **config}
    orchestrator = Orchestrator(
        environments,
        source,
        engine,
        Letters(),  # type: ignore[arg-type]
        config=OrchestratorConfig(**settings),
        rollout=RolloutConfig(group_size=2, max_new_tokens=8, context_length=32),
        pad_multiple=1,
    )
    return orchestrator, source, engine


REQUEST = wire.BatchRequest(step=5, weight_version=4, data_parallel_size=1)


def test_advantages_are_reward_minus_group_mean_on_sampled_tokens_only() -> None:
    orchestrator, _, _ = make(["a", "x"])
    batch = asyncio.run(orchestrator.step_batch(REQUEST))
    packed = batch.microbatches[0][0]
    assert packed.advantages is not None
    for document, info in enumerate(packed.info):
        start, end = packed.cu_seqlens[document], packed.cu_seqlens[document + 1]
        trained = packed.loss_mask[start:end]
        assert trained.sum() == 2, "the answer and its end-of-turn token"
        expected = 0.5 if info["reward"] == 1 else -0.5
        assert np.all(packed.advantages[start:end][trained] == expected)
    assert batch.num_trained == packed.num_trained == 8
    metrics = {name: from_wire(value).result() for name, value in batch.metrics.items()}
    assert metrics["reward/mean"] == 0.5 and metrics["groups/kept"] == 2 and metrics["staleness/max"] == 1


def test_a_group_without_spread_is_redrawn_from_its_environment_and_counted() -> None:
    orchestrator, source, engine = make(["x", "x", "a", "x"], groups_per_step=1, max_redraws=2)
    batch = asyncio.run(orchestrator.step_batch(REQUEST))
    metrics = {name: from_wire(value).result() for name, value in batch.metrics.items()}
    assert metrics["groups/drawn"] == 2 and metrics["groups/kept"] == 1 and metrics["groups/dropped/no_spread"] == 1
    assert engine.calls == 4 and source.state.next_index == {"one": 2}


def test_a_step_without_any_signal_is_drawn_anew_and_then_an_error_that_says_why() -> None:
    orchestrator, source, _ = make([*["x"] * 4, "a", "x", "x", "x"], max_empty_rounds=1)
    batch = asyncio.run(orchestrator.step_batch(REQUEST))
    assert from_wire(batch.metrics["groups/drawn"]).result() == 4 and source.state.next_index == {"one": 4}
    orchestrator, _, engine = make(["x"], max_redraws=1, max_empty_rounds=2)
    with pytest.raises(NothingToTrainError, match=r"no_spread.*group_size"):
        asyncio.run(orchestrator.step_batch(REQUEST))
    assert engine.calls == 3 * 2 * 2 * 2


def test_a_round_of_failures_alone_is_not_drawn_anew() -> None:
    orchestrator, _, engine = make([ConnectionError("engine gone")], max_redraws=1, max_empty_rounds=9)
    with pytest.raises(NothingToTrainError, match=r"every one.*engine gone"):
        asyncio.run(orchestrator.step_batch(REQUEST))
    assert engine.calls == 2 * 2 * 2, "two places, each drawn twice, two rollouts each"


def test_failed_rollouts_leave_before_the_baseline() -> None:
    orchestrator, _, _ = make(["a", ConnectionError("engine gone"), "a", "x"], groups_per_step=2)
    batch = asyncio.run(orchestrator.step_batch(REQUEST))
    metrics = {name: from_wire(value).result() for name, value in batch.metrics.items()}
    assert metrics["rollout/errors"] == 1 and metrics["groups/dropped/too_few"] == 1 and metrics["groups/kept"] == 1


def test_the_order_of_prompts_is_a_function_of_seed_and_draws_through_a_restart() -> None:
    environments, weights = [Scored("one"), Scored("two")], [1.0, 3.0]
    whole = PromptSource(environments, weights, seed=7)
    expected = [whole.draw().prompt_id for _ in range(40)]
    first = PromptSource(environments, weights, seed=7)
    got = [first.draw().prompt_id for _ in range(15)]
    second = PromptSource(environments, weights, seed=7)
    second.restore(decode_state(encode_state(first.state)))
    got += [second.draw().prompt_id for _ in range(25)]
    assert got == expected and len(set(got)) == 40
    assert 20 <= sum(p.startswith("two/") for p in got) <= 38


def test_evaluation_counts_passes_per_split_and_refuses_failed_rollouts() -> None:
    config = RolloutConfig(group_size=2, max_new_tokens=8, context_length=32)

    def rates(answers: list[str | Exception]) -> Any:
        return asyncio.run(
            pass_rates(
                [Scored("one")],
                Scripted(answers),
                Letters(),  # type: ignore[arg-type]
                config,
                prompts_per_split=16,
                max_concurrent=1,
            )
        )

    rate = rates(["a", "x", "x", "x"])["eval/pass_rate/one/heldout"]
    assert (rate.successes, rate.count) == (1, 4)
    with pytest.raises(EvaluationError, match="engine gone"):
        rates(["a", ConnectionError("engine gone")])
