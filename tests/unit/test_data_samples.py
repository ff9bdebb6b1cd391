"""Rows as samples: what the rules leave out or cut, by whom it is counted, and what a run must resume with."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_rl.config import ConfigError, DataError
from megatron_rl.data.cost import attention_cost
from megatron_rl.data.dataset_config import DatasetConfig
from megatron_rl.data.mask import MaskConfig
from megatron_rl.data.mixture import Mixture
from megatron_rl.data.rank_step import Counts, DataRank
from megatron_rl.data.render import ChatRenderer
from megatron_rl.data.rows import open_rows
from megatron_rl.data.samples import MixtureSamples, SampleRules, check_rows, read_samples
from megatron_rl.data.sft import SftDataConfig, StepPacking, StreamPacking
from megatron_rl.data.stream import data_identity, make_stream, saved_steps, states_to_resume

TEMPLATE = """
{%- for message in messages %}{{- '<' + message.role + '>' + message.content + '</s>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<assistant>' }}{%- endif %}"""
FEW, SOME, MANY = 24, 30, 60
"""Tokens of the rows that row_of makes."""


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    """A token per byte and one for the end of a turn."""
    alphabet = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytes_only = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    bytes_only.add_special_tokens([AddedToken("</s>", special=True)])
    return ChatRenderer(PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token="</s>", chat_template=TEMPLATE))


def row_of(num_tokens: int, *, question: str = "q") -> dict[str, Any]:
    """A row whose answer is as long as it takes."""
    answer = "a" * (num_tokens - len("<user>" + question + "<assistant>") - 2)
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write(path: Path, *rows: Any) -> Path:
    """One line each: text as it is, anything else as JSON."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def rules(**changes: Any) -> SampleRules:
    options = {"context_length": 40, "mask": MaskConfig(), "on_bad_row": "error", "oversized": "error", **changes}
    return SampleRules(**options)


def test_a_row_becomes_a_sample_with_its_place_as_id(tmp_path: Path, renderer: ChatRenderer) -> None:
    path = write(tmp_path / "rows.jsonl", row_of(FEW), "", row_of(SOME, question="wie"))
    samples = list(read_samples(open_rows(path), renderer, rules(context_length=SOME)))
    assert [sample.sample_id for sample in samples] == [f"{path}:1", f"{path}:3"]
    assert [len(sample.token_ids) for sample in samples] == [FEW, SOME]
    trained = [renderer.decode(sample.token_ids[sample.loss_mask].tolist()) for sample in samples]
    assert trained == ["a" * (FEW - 20) + "</s>", "a" * (SOME - 22) + "</s>"]


def test_a_row_that_does_not_fit_ends_the_run_unless_the_rules_say_otherwise(
    tmp_path: Path, renderer: ChatRenderer
) -> None:
    long = write(tmp_path / "long.jsonl", row_of(FEW), row_of(MANY), row_of(MANY, question="q" * 50))
    with pytest.raises(
        DataError, match=rf"{long}:2: .*at most context_length = 40 tokens, got {MANY};.*truncate or drop"
    ):
        list(read_samples(open_rows(long), renderer, rules()))
    kept = list(read_samples(open_rows(long), renderer, rules(oversized="drop")))
    assert [len(sample.token_ids) for sample in kept] == [FEW]
    first, cut = read_samples(open_rows(long), renderer, rules(oversized="truncate"))
    (_, whole, _) = read_samples(open_rows(long), renderer, rules(context_length=100))
    np.testing.assert_array_equal(cut.token_ids, whole.token_ids[:40])
    np.testing.assert_array_equal(cut.loss_mask, whole.loss_mask[:40])
    assert len(first.token_ids) == FEW, "the third row is left out: nothing of its answer is left to train"

    bad = write(tmp_path / "bad.jsonl", row_of(FEW), '{"messages": [', {"messages": []}, row_of(SOME))
    with pytest.raises(DataError, match=f"{bad}:2: .*malformed JSON"):
        list(read_samples(open_rows(bad), renderer, rules()))
    kept = list(read_samples(open_rows(bad), renderer, rules(on_bad_row="skip")))
    assert [len(sample.token_ids) for sample in kept] == [FEW, SOME]


def test_what_a_mixture_draws_is_counted_by_its_fate_and_bad_rows_are_named(
    tmp_path: Path, renderer: ChatRenderer
) -> None:
    one = write(tmp_path / "one.jsonl", row_of(FEW), '{"messages": [', row_of(MANY), row_of(MANY, question="q" * 50))
    two = write(tmp_path / "two.jsonl", row_of(SOME))
    configs = [DatasetConfig(path=str(one)), DatasetConfig(path=str(two), epochs=2)]
    source = MixtureSamples(Mixture(configs, seed=0), renderer, rules(on_bad_row="skip", oversized="truncate"))
    assert source.pass_length == 6 and source.counts == Counts((0, 0))
    samples = {draw: source.read(draw) for draw in range(12)}
    assert source.counts == Counts((8, 4), bad=2, oversized=2, truncated=2)
    bad = source.take_bad_rows()
    assert [row.source for row in bad] == [f"{one}:2"] * 2 and source.take_bad_rows() == []
    assert bad[0].reason.startswith("a row must be one JSON object, got malformed JSON")
    for draw, sample in samples.items():
        if sample is not None:
            again = source.again(draw)
            assert again.sample_id == sample.sample_id and again.token_ids.tolist() == sample.token_ids.tolist()
    assert sum(source.counts.rows) == 12, "what is rendered again is not counted again"


def test_a_row_of_which_nothing_is_trained_is_left_out(tmp_path: Path, renderer: ChatRenderer) -> None:
    wrong = {**row_of(FEW), "tools": [{"name": "known", "parameters": {"type": "object"}}]}
    wrong["messages"][1]["tool_calls"] = [{"function": {"name": "unknown", "arguments": {}}}]
    path = write(tmp_path / "rows.jsonl", wrong, row_of(SOME))
    found = check_rows(open_rows(path), renderer, rules(), None)
    assert found.changed == (("untrained", 1),) and found.num_tokens == SOME
    source = MixtureSamples(Mixture([DatasetConfig(path=str(path))], seed=0), renderer, rules())
    assert {source.read(draw) is None for draw in range(2)} == {True, False}
    assert source.counts == Counts((2,), untrained=1) and source.take_bad_rows() == []
    both = rules(mask=MaskConfig(wrong_tool_calls="train"))
    assert len(list(read_samples(open_rows(path), renderer, both))) == 2


@pytest.mark.parametrize("packing", [{"kind": "step"}, {"kind": "stream", "open_bins": 2, "buffer": 2}])
def test_packed_and_unpacked_rows_train_the_same_tokens(
    tmp_path: Path, renderer: ChatRenderer, packing: dict[str, Any]
) -> None:
    """As a set of (row, position, token), over two ranks and a whole pass."""
    path = write(tmp_path / "rows.jsonl", *[row_of(22 + 3 * i, question="q" * (1 + i % 3)) for i in range(9)])
    data = config(path, packing=packing, samples_per_step=3, microbatch_tokens=64)
    trained = set()
    for rank in range(2):
        source = MixtureSamples(Mixture(data.train, seed=0), renderer, rules(context_length=64))
        stream = make_stream(data, source, DataRank(rank, 2, 64, pad_multiple=4), cost=attention_cost, seed=0)
        for batch in (batch for _ in range(12) for batch in stream.next_step().microbatches):
            for start, end, name in zip(batch.cu_seqlens, batch.cu_seqlens[1:], batch.sample_ids, strict=False):
                places = np.flatnonzero(batch.loss_mask[start:end])
                trained |= {(name, int(at) + 1, int(batch.target_ids[start + at])) for at in places}
    expected = set()
    for sample in read_samples(open_rows(path), renderer, rules(context_length=64)):
        places = np.flatnonzero(sample.loss_mask)
        expected |= {(sample.sample_id, int(at), int(sample.token_ids[at])) for at in places}
    assert trained == expected


def test_a_file_is_checked_up_to_the_limit_and_must_have_something_to_train(
    tmp_path: Path, renderer: ChatRenderer
) -> None:
    path = write(tmp_path / "rows.jsonl", row_of(FEW), row_of(SOME), "{", row_of(MANY))
    rows = open_rows(path)
    found = check_rows(rows, renderer, rules(), 2)
    assert (found.count, found.num_checked, found.num_tokens, found.longest) == (4, 2, FEW + SOME, SOME)
    with pytest.raises(DataError, match=f"{path}:3"):
        check_rows(rows, renderer, rules(), 3)
    with pytest.raises(DataError, match=f"{path}:3"):
        check_rows(rows, None, rules(), None)
    found = check_rows(rows, renderer, rules(on_bad_row="skip", oversized="drop"), None)
    assert found.changed == (("bad", 1), ("oversized", 1)) and found.num_samples == 2
    assert found.first_bad.startswith(f"{path}:3: ")
    found = check_rows(rows, None, rules(on_bad_row="skip"), None)
    assert (found.num_samples, found.num_tokens, found.changed) == (3, 0, (("bad", 1),))
    nothing = open_rows(write(tmp_path / "nothing.jsonl", "{", row_of(MANY)))
    with pytest.raises(
        DataError, match=r"nothing.jsonl must have rows that can be trained, got none in 2 of 2: 1 bad, 1 over"
    ):
        check_rows(nothing, renderer, rules(on_bad_row="skip", oversized="drop"), None)


def config(path: Path, **changes: Any) -> SftDataConfig:
    return SftDataConfig.model_validate({"train": [{"path": str(path)}], **changes})


def identity_of(data: SftDataConfig, *, seed: int = 0, context_length: int = 40) -> dict[str, Any]:
    return data_identity(data, Mixture(data.train, seed=seed), context_length)


def test_a_run_resumes_only_with_what_decides_about_its_steps(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", row_of(FEW), row_of(SOME))
    stream = {"kind": "stream", "buffer": 4}
    saved = saved_steps(identity_of(config(path, packing=stream)), [{"rank": 0}, {"rank": 1}])
    moved = write(tmp_path / "moved.jsonl", row_of(FEW), row_of(SOME))
    for same in (
        config(path, packing=stream, check_rows=1, heldout=["x"]),
        config(path, packing={**stream, "microbatches_per_step": 3}),
        config(moved, packing=stream),
    ):
        assert states_to_resume(saved, identity_of(same)) == [{"rank": 0}, {"rank": 1}]
    assert states_to_resume(saved, identity_of(config(path, packing=stream), context_length=50))
    changed = {
        "run.seed": identity_of(config(path, packing=stream), seed=1),
        "contents of data.train": identity_of(config(write(tmp_path / "b.jsonl", row_of(FEW)), packing=stream)),
        "data.mask": identity_of(config(path, packing=stream, mask={"train": "answer"})),
        "data.on_bad_row": identity_of(config(path, packing=stream, on_bad_row="skip")),
        "data.oversized": identity_of(config(path, packing=stream, oversized="drop")),
        "data.packing": identity_of(config(path, packing={**stream, "buffer": 5})),
    }
    for name, other in changed.items():
        with pytest.raises(
            ConfigError, match=rf"resume with the {name} it started with, .*, got .*; restore it, or start"
        ):
            states_to_resume(saved, other)
    for other in (config(path), config(path, packing=stream, microbatch_tokens=64)):
        with pytest.raises(ConfigError, match=r"resume with the data.packing it started with"):
            states_to_resume(saved, identity_of(other))


def test_a_place_in_the_data_of_an_older_version_is_refused(tmp_path: Path) -> None:
    saved = b'{"epoch": 1, "position": 3, "seed": 0, "num_samples": 2, "contents": "ab"}'
    with pytest.raises(
        ConfigError, match="got one of an older version, which drew rows in another order; finish the run"
    ):
        states_to_resume(saved, identity_of(config(write(tmp_path / "rows.jsonl", row_of(FEW)))))


def test_datasets_that_do_not_go_together_are_refused() -> None:
    def refused(train: list[Any]) -> str:
        with pytest.raises(ValueError) as caught:
            SftDataConfig.model_validate({"train": train})
        return str(caught.value)

    assert "train.0.weight has no effect with one dataset, got 2" in refused([{"path": "a", "weight": 2}])
    assert "train.0.epochs has no effect with one dataset, got 0.5" in refused([{"path": "a", "epochs": 0.5}])
    assert "must have different names" in refused(["x/a.jsonl", "y/a.jsonl"])
    assert "greater than or equal to 0" in refused([{"path": "a", "weight": -1}, {"path": "b", "weight": 1}])
    assert "must not all be zero" in refused([{"path": "a", "weight": 0}, {"path": "b", "weight": 0}])
    assert "either all datasets have a weight or none" in refused([{"path": "a", "weight": 1}, "b"])


def test_a_path_alone_is_a_dataset_and_packing_has_a_kind() -> None:
    data = SftDataConfig.model_validate({"train": ["a/b.jsonl"], "packing": {"kind": "stream"}})
    assert data.train == [DatasetConfig(path="a/b.jsonl")] and data.packing == StreamPacking()
    assert SftDataConfig.model_validate({"train": ["a"]}).packing == StepPacking()
    for name in ("open_bins", "buffer", "microbatches_per_step"):
        with pytest.raises(ValueError, match="greater than or equal to 1"):
            SftDataConfig.model_validate({"train": ["a"], "packing": {"kind": "stream", name: 0}})
        with pytest.raises(ValueError, match="Extra inputs are not permitted"):
            SftDataConfig.model_validate({"train": ["a"], "packing": {"kind": "step", name: 2}})
