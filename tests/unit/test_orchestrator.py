"""The orchestrator against an engine that answers from a script: what is drawn, dropped, packed and remembered."""

import asyncio
from typing import Any

import numpy as np
import pytest

from megatron_rl.engine.records import Completion
from megatron_rl.orchestrator.config import EvaluationConfig, OrchestratorConfig
from megatron_rl.orchestrator.evaluate import EvaluationError, evaluate_policy, metrics_of
from megatron_rl.orchestrator.loop import NothingToTrainError, Orchestrator
from megatron_rl.orchestrator.source import PromptSource
from megatron_rl.orchestrator.state import decode_state, encode_state
from megatron_rl.records import Prompt, wire
from megatron_rl.rollout.env import StepOutcome
from megatron_rl.rollout.run import RolloutConfig
from megatron_rl.telemetry.glossary import SECTIONS, matches
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


def evaluation(answers: list[str | Exception], **config: Any) -> dict[str, Any]:
    """Metrics of an evaluation of one environment; its one held-out split has four prompts."""
    results = evaluate_policy(
        [Scored("one")],
        Scripted(answers),
        Letters(),  # type: ignore[arg-type]
        RolloutConfig(group_size=2, max_new_tokens=3, context_length=32),
        evaluation=EvaluationConfig(prompts_per_split=16, **config),
        max_concurrent=1,
    )
    return {name.removesuffix("/one/heldout"): value for name, value in metrics_of(asyncio.run(results)).items()}


def test_evaluation_counts_passes_per_split_and_refuses_failed_rollouts() -> None:
    rate = evaluation(["a", "x", "x", "x"])["eval/pass_rate"]
    assert (rate.successes, rate.count) == (1, 4)
    with pytest.raises(EvaluationError, match="engine gone"):
        evaluation(["a", ConnectionError("engine gone")])


def test_evaluation_with_several_attempts_reports_pass_at_k_and_how_varied_answers_are() -> None:
    answers: list[str | Exception] = [*"axy", *"xxx", *"xay", *"abx"]
    metrics = {
        name: value.result() for name, value in evaluation(answers, attempts_per_prompt=3, pass_at=[1, 2]).items()
    }
    assert metrics == {
        "eval/pass_rate": pytest.approx(4 / 12),
        "eval/pass_at/2": pytest.approx((2 / 3 + 0 + 2 / 3 + 1) / 4),
        "eval/distinct_answers": (3 + 1 + 3 + 3) / 4,
        "eval/entropy_estimate": 0.5,
        "eval/length_mean": 2.0,
        "eval/cut_share": 0.0,
    }


def test_the_report_page_has_a_panel_for_every_measure_of_an_evaluation() -> None:
    patterns = [pattern for section in SECTIONS for panel in section.panels for pattern in panel.patterns]
    for name in evaluation(["a"], attempts_per_prompt=2, pass_at=[1, 2]):
        assert any(matches(f"{name}/one/heldout", pattern) for pattern in patterns), name


def test_answers_are_told_apart_by_the_last_assistant_turn() -> None:
    class Twice(Scored):
        def step(self, assistant_text: str) -> StepOutcome:
            done = assistant_text != "t"
            return StepOutcome(messages=[{"role": "tool", "content": "t"}], done=done, reward=0.0 if done else None)

    class Continued(Letters):
        def continuation_ids(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
            return [ord("c")]

    (result,) = asyncio.run(
        evaluate_policy(
            [Twice("one")],
            Scripted([*"tatbtatb"]),
            Continued(),  # type: ignore[arg-type]
            RolloutConfig(max_new_tokens=3, context_length=32, max_turns=2),
            evaluation=EvaluationConfig(prompts_per_split=2, attempts_per_prompt=2),
            max_concurrent=1,
        )
    )
    assert result.measures["distinct_answers"].result() == 2.0 and result.measures["length_mean"].result() == 4.0


def test_one_attempt_per_prompt_has_no_variety_to_count() -> None:
    metrics = evaluation(["a"])
    assert sorted(metrics) == ["eval/cut_share", "eval/entropy_estimate", "eval/length_mean", "eval/pass_rate"]


def test_evaluation_samples_at_its_own_temperature_and_without_injected_noise() -> None:
    seen = []

    class Watched(Scripted):
        async def generate(self, prompt_ids: Any, **options: Any) -> Completion:
            seen.append(options["temperature"])
            return await super().generate(prompt_ids, **options)

    for config, temperature in ((EvaluationConfig(), 1.3), (EvaluationConfig(temperature=0.7), 0.7)):
        orchestrator = Orchestrator(
            [Scored("one")],
            PromptSource([Scored("one")], [1.0], seed=0),
            Watched(["a", "x"]),
            Letters(),  # type: ignore[arg-type]
            config=OrchestratorConfig(groups_per_step=1, evaluation=config),
            rollout=RolloutConfig(
                group_size=2, max_new_tokens=8, context_length=32, temperature=1.3, injected_noise=1.0
            ),
            pad_multiple=1,
        )
        metrics = asyncio.run(orchestrator.evaluate())
        assert metrics["eval/entropy_estimate/one/heldout"].result() == 0.5
        assert set(seen) == {temperature}
        seen.clear()
        (packed,) = asyncio.run(orchestrator.step_batch(REQUEST)).microbatches[0]
        assert packed.engine_logp is not None
        trained = packed.engine_logp[packed.loss_mask]
        assert set(seen) == {1.3} and len(set(trained.tolist())) == len(trained), "each token has noise of its own"
        seen.clear()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"pass_at": [1, 4], "attempts_per_prompt": 3}, "set attempts_per_prompt to at least 4"),
        ({"pass_at": [0]}, "between 1 and attempts_per_prompt, got 0"),
        ({"pass_at": [2, 2], "attempts_per_prompt": 2}, "each k once"),
    ],
)
def test_a_pass_at_that_cannot_be_estimated_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EvaluationConfig(**config)
