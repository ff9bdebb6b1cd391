"""The reference policy's settings, resets and folders, and values that stand in for a model's own."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_rl.checkpoint.folders import begin_folder, complete_folder, partial_folder, step_folder
from megatron_rl.config import ConfigError
from megatron_rl.model.folder import read_hf_config
from megatron_rl.trainer.frozen import FrozenTensors
from megatron_rl.trainer.reference_config import ReferenceConfig, check_reference
from megatron_rl.trainer.reference_resets import (
    ResetRule,
    needed_references,
    newest_reference,
    reference_folder,
    remove_later_references,
    remove_unneeded_references,
)


def asked(rule: ResetRule, step: int, pass_rate: float | None = None) -> bool:
    """Whether the rule resets after this step and its evaluation, if there was one."""
    if pass_rate is not None:
        rule.observe(pass_rate)
    return rule.resets_after_step(step)


RATES = st.lists(st.integers(0, 8).map(lambda count: count / 8), max_size=30)
STEPS = st.sets(st.integers(1, 12))


def references(run_dir: Path, *steps: int) -> Path:
    """A run folder with references of these steps."""
    for step in steps:
        begin_folder(step_folder(reference_folder(run_dir), step))
        complete_folder(step_folder(reference_folder(run_dir), step))
    return run_dir


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in reference_folder(run_dir).iterdir())


def other_model(model: Path, folder: Path, **settings: Any) -> ReferenceConfig:
    """A reference at folder: model's with these settings of config.json."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    return ReferenceConfig(path=str(folder))


def check(config: ReferenceConfig, model: Path, **options: Any) -> None:
    check_reference(config, model_path=model, hf_config=read_hf_config(model), **{"platform": "cpu", **options})


def test_an_optimizer_reset_without_a_reset_of_the_reference_is_refused() -> None:
    with pytest.raises(ValidationError, match="reset_optimizer has no effect without a reset of the reference"):
        ReferenceConfig(reset_optimizer=True)
    assert ReferenceConfig(reset_optimizer=True, reset_every_steps=5).reset_optimizer
    assert ReferenceConfig(reset_optimizer=True, reset_after_plateau=2).reset_optimizer


def test_settings_and_rules_are_known_without_megatron() -> None:
    modules = "megatron_rl.trainer.reference_resets, megatron_rl.trainer.config"
    code = f"import sys, {modules}; assert 'megatron' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_reference_is_reset_after_every_nth_step_but_not_before_the_first() -> None:
    rule = ResetRule(ReferenceConfig(reset_every_steps=3))
    assert [step for step in range(10) if asked(rule, step, 0.0)] == [3, 6, 9]


def test_a_plateau_is_so_many_evaluations_that_none_is_above_the_best_and_the_next_starts_at_the_reset() -> None:
    rule = ResetRule(ReferenceConfig(reset_after_plateau=2))
    rates = [0.1, 0.3, 0.2, None, 0.4, None, 0.4, 0.3, 0.35, None, 0.2, 0.3, 0.1, 0.2]
    resets = [step for step, rate in enumerate(rates) if asked(rule, step, rate)]
    # 0.3 < 0.4 is reset with step 7 and from then on the best; 0.35 is above it, 0.2 and 0.3 are not.
    assert resets == [7, 11, 13]


def test_a_reset_by_steps_starts_a_new_plateau() -> None:
    rule = ResetRule(ReferenceConfig(reset_after_plateau=2, reset_every_steps=2))
    assert [asked(rule, step, 0.5) for step in range(5)] == [False, False, True, False, True]
    rates = [0.9, 0.5, 0.4, 0.3, 0.2]
    assert [asked(rule, step, r) for step, r in zip(range(1, 6), rates, strict=True)] == [
        False, True, False, True, False,
    ]  # fmt: skip


def plateaus(rates: Sequence[float], patience: int) -> list[int]:
    """Evaluations after which the reference is reset, by looking back at the whole history each time."""
    resets, start = [], 0
    for now in range(len(rates)):
        since = rates[start : now + 1]
        best = since.index(max(since))
        if len(since) - 1 - best >= patience:
            resets.append(now)
            start = now
    return resets


@given(rates=RATES, patience=st.integers(1, 4), stops=st.sets(st.integers(0, 30)))
def test_plateaus_are_those_of_the_whole_history_also_where_the_run_was_resumed(
    rates: list[float], patience: int, stops: set[int]
) -> None:
    config = ReferenceConfig(reset_after_plateau=patience)
    rule, resets = ResetRule(config), []
    for step, rate in enumerate(rates):
        if step in stops:
            state, rule = rule.state(), ResetRule(config)
            rule.restore(state)
        if asked(rule, step, rate):
            resets.append(step)
    assert resets == plateaus(rates, patience)


def test_a_pass_rate_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="pass rate must be finite, got nan"):
        ResetRule(ReferenceConfig(reset_after_plateau=2)).observe(float("nan"))


def test_a_resumed_run_takes_the_newest_reference_up_to_its_step_and_drops_later_ones(tmp_path: Path) -> None:
    assert newest_reference(tmp_path, step=10) is None
    remove_later_references(tmp_path, step=10)
    run = references(tmp_path, 4, 8, 12)
    found = [newest_reference(run, step=step) for step in (3, 4, 7, 8, 11, 30)]
    assert [path and path.name[-2:] for path in found] == [None, "04", "04", "08", "08", "12"]
    remove_later_references(run, step=9)
    assert names(run) == ["step_000004", "step_000008"]
    remove_later_references(run, step=0)
    assert names(run) == []


def test_what_a_killed_reset_has_left_is_no_reference_and_goes(tmp_path: Path) -> None:
    run = references(tmp_path, 4)
    begin_folder(step_folder(reference_folder(run), 8))
    (partial_folder(step_folder(reference_folder(run), 8)) / "config.json").write_text("{}")
    newest = newest_reference(run, step=8)
    assert newest is not None and newest.name == "step_000004"
    remove_later_references(run, step=8)
    assert names(run) == ["step_000004"]


@given(held=STEPS, saved=STEPS)
def test_exactly_the_references_stay_that_a_checkpoint_resumes_with_now_or_later(
    held: set[int], saved: set[int]
) -> None:
    """A checkpoint under way may be of any step after the newest complete one."""

    def resumed_with(step: int, there: set[int]) -> int | None:
        return max((r for r in there if r <= step), default=None)

    needed = needed_references(held, saved)
    resumable = saved | set(range(max(saved, default=0) + 1, 14))
    assert [resumed_with(s, needed) for s in resumable] == [resumed_with(s, held) for s in resumable]
    assert needed == {resumed_with(s, held) for s in resumable} - {None}


def test_references_that_no_checkpoint_needs_are_removed(tmp_path: Path) -> None:
    run = references(tmp_path, 2, 4, 6, 8, 10)
    for step in (5, 7):
        target = step_folder(run / "checkpoints", step)
        target.mkdir(parents=True)
        (target / "meta.json").write_text("{}")
    step_folder(run / "checkpoints", 3).mkdir()  # without meta.json: not complete
    remove_unneeded_references(run)
    assert names(run) == ["step_000004", "step_000006", "step_000008", "step_000010"]


def test_a_reference_of_the_same_model_is_accepted_whatever_its_chat_template(tiny: Path, tmp_path: Path) -> None:
    model = tiny / "model"
    check(ReferenceConfig(), model)
    check(ReferenceConfig(path=str(model / ".." / "model")), model)
    same = other_model(model, tmp_path / "same")
    (tmp_path / "same" / "chat_template.jinja").write_text("another")
    check(same, model)
    for file in (tmp_path / "same").glob("tokenizer*"):
        file.unlink()
    check(same, model)


def test_another_architecture_vocabulary_or_tokenizer_is_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    model = tiny / "model"
    eps = other_model(model, tmp_path / "eps", rms_norm_eps=0.25)
    with pytest.raises(
        ConfigError, match=r"like that of model.path, got in .*eps: layernorm_epsilon 0.25 there, .* here"
    ):
        check(eps, model)
    words = other_model(model, tmp_path / "words")
    tokenizer = tmp_path / "words" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    with pytest.raises(ConfigError, match=r"must have the vocabulary of model.path, .* tokenizer.json in .*words"):
        check(words, model)
    tokenizer.rename(tokenizer.with_name("vocab.json"))
    with pytest.raises(ConfigError, match=r"must have the vocabulary of model.path, .* vocab.json in .*words"):
        check(words, model)
    larger = other_model(model, tmp_path / "larger", vocab_size=4096)
    with pytest.raises(ConfigError, match=r"trainer.reference.path .* a run could train: .* must have shape \[4096, "):
        check(larger, model)


def test_a_path_without_a_model_is_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer.reference.path must name a model .*no such folder"):
        check(ReferenceConfig(path=str(tmp_path / "nowhere")), tiny / "model")


def test_offload_is_refused_where_there_is_no_other_memory(tiny: Path) -> None:
    check(ReferenceConfig(offload=True), tiny / "model", platform="cuda")
    with pytest.raises(ConfigError, match="offload has no effect on platform cpu"):
        check(ReferenceConfig(offload=True), tiny / "model")


class TwoLinears(torch.nn.Module):
    """A model with a weight under two names, views of whose memory others hold, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = [torch.arange(12.0), torch.arange(12.0)]
        self.first = torch.nn.Parameter(self.memory[0][:8].view(2, 4))
        self.second = torch.nn.Parameter(self.memory[1][4:].view(2, 4))
        self.tied = self.first
        self.register_buffer("bias", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.first.t() + x @ self.second.t() + x @ self.tied.t() + self.get_buffer("bias")


def frozen(model: torch.nn.Module) -> FrozenTensors:
    """Sevens in the place of every value."""
    held = FrozenTensors(model.state_dict(keep_vars=True).values(), offload=False)
    with held.standing_in(fill=True), torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            tensor.fill_(7.0)
    return held


def test_values_stand_in_for_the_block_and_the_own_memory_is_never_written() -> None:
    model, x = TwoLinears(), torch.ones(1, 4)
    before, memory = model(x), [part.clone() for part in model.memory]
    places = [tensor.data_ptr() for tensor in model.state_dict().values()]
    held = frozen(model)
    assert all(torch.equal(now, then) for now, then in zip(model.memory, memory, strict=True))
    with held.standing_in():
        assert model(x).tolist() == [[3 * 4 * 7 + 7] * 2]
    assert torch.equal(model(x), before)
    assert places == [tensor.data_ptr() for tensor in model.state_dict().values()]


def test_own_values_come_back_after_an_exception() -> None:
    model, x = TwoLinears(), torch.ones(1, 4)
    held, before = frozen(model), model(x)
    with pytest.raises(KeyError), held.standing_in():
        assert not torch.equal(model(x), before)
        raise KeyError("out of memory")
    assert torch.equal(model(x), before)


def test_gradients_and_hooks_of_the_tensors_stay_while_others_stand_in() -> None:
    """Also between a forward and its backward."""
    model, plain, x = TwoLinears(), TwoLinears(), torch.ones(1, 4, requires_grad=True)
    calls: list[int] = []
    model.first.register_post_accumulate_grad_hook(lambda parameter: calls.append(int(parameter[0, 1])))
    held = frozen(model)
    loss = model(x).square().sum()
    with held.standing_in(), torch.no_grad():
        model(x)
    loss.backward()
    plain(x).square().sum().backward()
    assert calls == [1]
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None and expected.grad is not None
        assert torch.equal(parameter.grad, expected.grad)


def test_a_reset_copies_the_own_values_of_now() -> None:
    model, x = TwoLinears(), torch.ones(1, 4)
    held = frozen(model)
    model.memory[0].add_(1.0)
    held.copy_own()
    then = model(x)
    model.memory[0].zero_()
    with held.standing_in():
        assert torch.equal(model(x), then)


def test_a_tensor_of_two_names_is_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Size] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda shape, **kwargs: made.append(shape) or empty(shape, **kwargs))
    model = TwoLinears()
    FrozenTensors(model.state_dict(keep_vars=True).values(), offload=False)
    assert made == [(2, 4), (2, 4), (2,)]
