"""A run that stops and resumes in a new process is the run that never stopped, bit by bit."""

import itertools
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Runs = dict[str, dict[str, Any]]
CASES = ["single", "single_bf16", "glm", "glm_dense", "tied"]
CASES += ["dp2", "dp2_bf16", "ep2", "tp2", "pp2", "etp2", "glm_tp2_ep2", "glm_dense_pp2", "tied_pp2"]
make_hf_model = runpy.run_path(str(Path(__file__).parents[1] / "hf_models.py"))["make_hf_model"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, run_script: Callable[..., None]) -> Runs:
    """What check_resume.py recorded: {"straight" | "resumed": {case or check: record}}."""
    models, work = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("training")
    for seed, name in enumerate(["plain", "tied", "glm"]):
        make_hf_model(models / name, name, seed)
    # Half of its layers are dense: of two pipeline stages the first has no experts.
    make_hf_model(models / "glm_dense", "glm", 3, num_hidden_layers=4, first_k_dense_replace=2)
    for mode, world_size in itertools.product(("straight", "resumed"), (1, 2)):
        run_script("check_resume.py", world_size, mode, models, work)
    records: Runs = {"straight": {}, "resumed": {}}
    for mode, record in records.items():
        for file in sorted(work.glob(f"{mode}-*.json")):
            record.update(json.loads(file.read_text()))
    return records


@pytest.mark.parametrize("case", CASES)
def test_resumed_losses_weights_moments_and_random_draws_are_bitwise_equal(runs: Runs, case: str) -> None:
    """Also where the save ran in the background and wrote only after training had changed everything."""
    straight, resumed = runs["straight"][case], runs["resumed"][case]
    assert resumed["per_rank"] == straight["per_rank"]
    assert resumed["weights"] == straight["weights"]


@pytest.mark.parametrize("case", CASES)
def test_step_and_extra_state_come_back_and_old_checkpoints_go(runs: Runs, case: str) -> None:
    resumed = runs["resumed"][case]
    assert (resumed["step"], resumed["extra"]) == (2, "\x00state")
    assert resumed["folders"] == ["step_000002"], "keep_last is 1"


def test_another_layout_goes_on_from_the_same_weights_and_moments(runs: Runs) -> None:
    """The same batches, other shards: losses and weights two steps on are equal up to rounding."""
    resharded = {name: record for name, record in runs["resumed"].items() if " as " in name}
    assert len(resharded) == 18
    for name, error in resharded.items():
        assert error["losses"] < 1e-5, name
        # A bfloat16 weight whose float32 master has moved by rounding may be the next one.
        assert error["weights"] < (1e-4 if "bf16" in name else 1e-5), name


def test_checkpoint_of_another_model_is_refused_with_what_differs(runs: Runs) -> None:
    message = runs["resumed"]["another_model"]
    assert "tensors" in message and "model.path" in message


def test_checkpoint_of_another_platform_is_refused(runs: Runs) -> None:
    message = runs["resumed"]["another_platform"]
    assert "saved on cuda" in message and "convert it to a Hugging Face folder" in message


def test_a_changed_tokenizer_is_refused_and_its_file_named(runs: Runs) -> None:
    message = runs["resumed"]["another_tokenizer"]
    assert "tokenizer_config.json" in message and "restore" in message
