"""Token records of the rollouts a step trained on, for people: what the report page shows."""

from collections.abc import Callable, Sequence

import numpy as np

from megatron_rl.loss.head import LossStats
from megatron_rl.records import PackedBatch
from megatron_rl.telemetry.rollouts import TokenRecord


def token_records(
    batch: PackedBatch, stats: LossStats, *, step: int, token_text: Callable[[int], str], limit: int
) -> list[TokenRecord]:
    """At most limit records, one per document of batch, from the loss's own per-token streams."""
    assert batch.advantages is not None and batch.engine_logp is not None and batch.weight_version is not None, (
        "an RL batch carries advantages, engine log-probs and weight versions"
    )
    policy_logp = stats.policy_logp.float().cpu().numpy()
    kept = stats.kept.cpu().numpy()
    gradient_scale = stats.gradient_scale.float().cpu().numpy()
    records = []
    for document, info in enumerate(batch.info[:limit]):
        start, end = int(batch.cu_seqlens[document]), int(batch.cu_seqlens[document + 1])
        trained = batch.loss_mask[start:end]
        advantages = batch.advantages[start:end][trained]
        records.append(
            TokenRecord(
                step=step,
                sample_id=batch.sample_ids[document],
                group_id=str(info.get("group_id", "")),
                environment=str(info.get("environment", "")),
                reward=float(info.get("reward", float("nan"))),
                advantage=float(advantages[0]) if len(advantages) else 0.0,
                tokens=[
                    token_text(int(batch.input_ids[start])),
                    *(token_text(int(t)) for t in batch.target_ids[start:end]),
                ],
                trained=[False, *(bool(t) for t in trained)],
                engine_logp=[None, *_optional(batch.engine_logp[start:end], trained)],
                policy_logp=[None, *_optional(policy_logp[start:end], trained)],
                kept=[True, *(bool(k) for k in kept[start:end])],
                gradient_scale=[1.0, *(float(c) for c in gradient_scale[start:end])],
                weight_version=[-1, *(int(v) for v in batch.weight_version[start:end])],
            )
        )
    return records


def _optional(values: np.ndarray, present: np.ndarray) -> Sequence[float | None]:
    return [float(v) if p and np.isfinite(v) else None for v, p in zip(values, present, strict=True)]
