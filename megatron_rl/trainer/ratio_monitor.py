"""The importance ratio measured while the run goes on: what trains, against fresh rollouts of equal weights."""

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron_rl_kernels import LogprobOut
from torch import Tensor

from megatron_rl.distributed.groups import ParallelGroups
from megatron_rl.loss.snr import NoiseTable, SnrConfig, Streams, measure, noise_table, require_identity
from megatron_rl.loss.streams import RlStreams
from megatron_rl.records import PackedBatch
from megatron_rl.telemetry.snr_log import SnrLog, SnrRecord


class RatioMonitor:
    """Collects both sides' log-probs of trained and of calibration tokens. Collective where it says so.

    The live window is not part of a checkpoint: after a resume it fills anew.
    """

    def __init__(self, config: SnrConfig, run_dir: Path, groups: ParallelGroups) -> None:
        self.config, self._groups = config, groups
        place = groups.place
        self._leads_batch = place.tp == 0 and place.cp == 0
        """Of the ranks that serve one batch, the one of the last stage that speaks for them."""
        self._live = _Window(max(1, config.window_tokens // groups.dp_size))
        self._calibration: list[np.ndarray] = []
        self._log = SnrLog(run_dir) if groups.rank == 0 else None

    def watch(self, streams: RlStreams, packed: PackedBatch) -> None:
        """One microbatch that is trained, on the last stage only."""
        if not self._leads_batch:
            return
        chosen = torch.from_numpy(np.flatnonzero(packed.loss_mask)).to(streams.engine_logp.device, non_blocking=True)
        rows = [streams.policy_logp, streams.engine_logp]
        rows += [] if streams.proximal_logp is None else [streams.proximal_logp]
        self._live.add(torch.stack([row.detach()[chosen] for row in rows]))

    def add_calibration(self, out: LogprobOut, packed: PackedBatch) -> None:
        """One microbatch that engine and trainer scored with the same weights; out on every stage."""
        if self._leads_batch and self._groups.pp_rank == 0:
            assert packed.engine_logp is not None, "calibration rollouts carry engine log-probs"
            policy_logp, entropy = (score.float().cpu().numpy() for score in (out.logp, out.entropy))
            self._calibration.append(np.stack([policy_logp, packed.engine_logp, entropy])[:, packed.loss_mask])

    def measure(self, step: int, *, must_hold: bool) -> tuple[SnrRecord, NoiseTable]:
        """What calibration and live window say after a step, equal on every rank; a line of RUN/snr.jsonl.

        The record is about policy / engine. The table for guards is about the ratio that has the noise in it: with a
        proximal policy that is proximal / engine, which has no movement. Collective over the world.
        must_hold: IdentityError on every rank if the engines' log-probs cannot be what they sampled with; the line is
        written all the same.
        """
        live, calibration = self._gathered(self._live.read()), self._gathered(self._calibration)
        self._calibration = []
        assert calibration is not None, "a calibration has at least one rollout"
        noise = Streams(*calibration)
        record = self._measured(noise, None if live is None else Streams(live[0], live[1]), step)
        if self._log is not None:
            self._log.write(record)
        if must_hold:
            require_identity(record.identity)
        if live is None or len(live) == 2:
            return record, noise_table(record)
        return record, noise_table(self._measured(noise, Streams(live[2], live[1]), step))

    def _measured(self, calibration: Streams, live: Streams | None, step: int) -> SnrRecord:
        return measure(calibration, live, step=step, weight_version=step, config=self.config)

    def _gathered(self, parts: Sequence[np.ndarray]) -> np.ndarray | None:
        """All ranks' [streams, tokens] end to end, in rank order; None where nobody has any."""
        of_ranks: list[Any] = [None] * self._groups.world_size
        dist.all_gather_object(of_ranks, list(parts))
        everything = [part for of_rank in of_ranks for part in of_rank]
        return np.concatenate(everything, axis=1) if everything else None


class _Window:
    """The newest trained tokens of this rank as [streams, tokens]; they stay on the device until they are read."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens, self._size = max_tokens, 0
        self._parts: deque[Tensor] = deque()

    def add(self, part: Tensor) -> None:
        """Row 1 is not finite where a token's engine log-prob is missing."""
        self._parts.append(part)
        self._size += part.shape[1]
        while self._size - self._parts[0].shape[1] >= self._max_tokens:
            self._size -= self._parts.popleft().shape[1]

    def read(self) -> list[np.ndarray]:
        """The tokens whose engine log-prob is known, float32, in at most one part; they stay in the window."""
        if not self._parts:
            return []
        tokens = torch.cat(list(self._parts), dim=1).float().cpu().numpy()
        return [tokens[:, np.isfinite(tokens[1])]]
