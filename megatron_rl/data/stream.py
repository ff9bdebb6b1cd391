"""Which stream of steps a run file asks for, and what a run must have kept to go on with one."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.config import ConfigError
from megatron_rl.data.conversation import shown
from megatron_rl.data.cost import CostModel, attention_cost
from megatron_rl.data.mixture import Mixture
from megatron_rl.data.packed_stream import Cost, PackedStream
from megatron_rl.data.rank_step import DataRank, SampleSource, SampleStream
from megatron_rl.data.sft import SftDataConfig
from megatron_rl.data.step_stream import StepStream


def make_stream(config: SftDataConfig, source: SampleSource, place: DataRank, *, cost: Cost, seed: int) -> SampleStream:
    """The stream of one rank, at its start. seed and cost matter to packing.kind stream alone."""
    if config.packing.kind == "step":
        return StepStream(source, config.samples_per_step, place)
    return PackedStream(source, config.packing, place, cost=cost, seed=seed)


def microbatch_cost(config: SftDataConfig, hf_config: Mapping[str, Any]) -> Cost:
    """What a microbatch of documents of these lengths costs. ConfigError for a model whose cost is unknown."""
    if config.packing.kind == "stream" and config.packing.cost == "model":
        return CostModel.from_hf_config(hf_config).cost
    return attention_cost


def data_identity(config: SftDataConfig, mixture: Mixture, context_length: int) -> dict[str, Any]:
    """What decides about the contents and the order of the steps, as plain data."""
    of_mixture = mixture.identity()
    packing: dict[str, Any] = {"kind": config.packing.kind}
    if config.packing.kind == "stream":
        packing = config.packing.model_dump(exclude={"microbatches_per_step"})
        packing["microbatch_tokens"] = config.microbatch_tokens
    return {
        "run.seed": of_mixture["seed"],
        "number of datasets in data.train": len(of_mixture["datasets"]),
        "contents of data.train": list(of_mixture["datasets"]),
        "rows that a pass draws of each dataset": list(of_mixture["quotas"]),
        "data.mask": config.mask.model_dump(),
        "data.on_bad_row": config.on_bad_row,
        "data.oversized": config.oversized,
        "context_length": context_length if config.oversized != "error" else None,
        "data.packing": packing,
    }


def saved_steps(identity: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> bytes:
    """What a checkpoint keeps: the states of all ranks after the same step."""
    return json.dumps({"identity": identity, "ranks": states}).encode()


def states_to_resume(saved: bytes, identity: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The states that saved_steps was given. ConfigError if they are of other data, or of an older version."""
    kept = json.loads(saved)
    if "ranks" not in kept:
        raise ConfigError(
            "the checkpoint's place in the data must be one of this version, got one of an older version, which drew "
            "rows in another order; finish the run with that version, or start in a new run folder from its weights"
        )
    for name, own in identity.items():
        before = kept["identity"].get(name)
        if before != own:
            raise ConfigError(
                f"a run must resume with the {name} it started with, {shown(before)}, got {shown(own)}; "
                "restore it, or start in a new run folder"
            )
    return kept["ranks"]
