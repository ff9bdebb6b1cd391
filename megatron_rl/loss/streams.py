"""What the loss reads of one microbatch, checked and made safe outside the tokens that count."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from megatron_rl.loss.config import LossConfig
from megatron_rl.loss.reduce import broken_logps, check_streams, fill_outside, trained_mask
from megatron_rl.loss.sequences import check_sequence_ids, returning


@dataclass(frozen=True)
class RlStreams:
    """All [T] and aligned. Outside T and F they may hold anything, NaN too."""

    policy_logp: Tensor
    """Of the policy that is trained, with its graph."""
    engine_logp: Tensor
    """Of the engine that sampled; NaN or -inf where it is not known."""
    advantages: Tensor
    loss_mask: Tensor
    """bool: sampled tokens to be trained."""
    sequence_ids: Tensor | None = None
    """int: number of the token's document, each in one piece; for gspo, sequence_exact, after_observation."""
    loss_weight: Tensor | None = None
    """What the reduction multiplies each token's loss by; None: 1."""
    entropy: Tensor | None = None
    """Of the policy's next-token distribution, in nats; with its graph where there is an entropy bonus."""
    reference_logp: Tensor | None = None
    """Of the reference policy."""
    proximal_logp: Tensor | None = None
    """Of the trainer's weights at the last weight update, for the decoupled form."""
    distill_kl: Tensor | None = None
    """KL to the teacher in nats, with its graph, for the tokens of F."""
    distill_mask: Tensor | None = None
    """bool: F. Its tokens leave T, whatever loss_mask says."""

    @property
    def distilled(self) -> Tensor:
        """F. bool [T]"""
        return torch.zeros_like(self.loss_mask) if self.distill_mask is None else self.distill_mask

    @property
    def trained(self) -> Tensor:
        """T: to be trained, engine log-prob known, not distilled. bool [T]"""
        return trained_mask(self.loss_mask, self.engine_logp) & ~self.distilled


def check_rl_streams(streams: RlStreams, config: LossConfig) -> None:
    """ValueError unless all streams are aligned and all that config needs are there."""
    given = {field.name: getattr(streams, field.name) for field in fields(streams)}
    check_streams(**{name: stream for name, stream in given.items() if stream is not None})
    if streams.sequence_ids is not None:
        check_sequence_ids(streams.sequence_ids)
    in_loss = config.kl is not None and config.kl.placement == "loss"
    after_observation = config.entropy is not None and config.entropy.tokens == "after_observation"
    sequence_exact = config.kl is not None and config.kl.sequence_exact
    needs = {
        "reference_logp": ("loss.kl", in_loss),
        "proximal_logp": ("loss.proximal", config.proximal is not None),
        "entropy": ("loss.entropy", config.entropy is not None),
        "sequence_ids": (
            "gspo, sequence_exact or after_observation",
            config.policy.kind == "gspo" or sequence_exact or after_observation,
        ),
        "distill_kl": ("distill_mask", streams.distill_mask is not None),
        "distill_mask": ("distill_kl", streams.distill_kl is not None),
    }
    for name, (needed_by, is_needed) in needs.items():
        if is_needed and given[name] is None:
            raise ValueError(
                f"{name} must be given with {needed_by}, got None; pass the stream or remove what needs it"
            )


def safe_streams(streams: RlStreams) -> RlStreams:
    """The streams with every value outside T (of distill_kl: outside F) replaced, which no gradient passes.

    loss_mask is T, distill_mask F, and sequence_ids are -1 outside T. policy_logp, entropy and distill_kl keep their
    graph, the others none.
    """
    trained, distilled = streams.trained, streams.distilled

    def filled(stream: Tensor | None) -> Tensor | None:
        return None if stream is None else fill_outside(stream.detach(), trained)

    return RlStreams(
        policy_logp=fill_outside(streams.policy_logp, trained),
        engine_logp=fill_outside(streams.engine_logp.detach(), trained),
        advantages=fill_outside(streams.advantages.detach(), trained),
        loss_mask=trained,
        sequence_ids=None if streams.sequence_ids is None else torch.where(trained, streams.sequence_ids, -1),
        loss_weight=None if streams.loss_weight is None else fill_outside(streams.loss_weight, trained | distilled),
        entropy=None if streams.entropy is None else fill_outside(streams.entropy, trained),
        reference_logp=filled(streams.reference_logp),
        proximal_logp=filled(streams.proximal_logp),
        distill_kl=None if streams.distill_kl is None else fill_outside(streams.distill_kl, distilled),
        distill_mask=distilled,
    )


def broken_values(safe: RlStreams) -> dict[str, tuple[Tensor, Tensor]]:
    """By name: (the stream, bool [T] where it holds a value that no computation may have produced)."""
    trained, distilled = safe.loss_mask, safe.distilled
    broken = {}
    for name in ("policy_logp", "engine_logp", "reference_logp", "proximal_logp"):
        if (stream := getattr(safe, name)) is not None:
            broken[name] = (stream.detach(), broken_logps(stream.detach(), trained))
    for name, mask in (
        ("advantages", trained),
        ("entropy", trained),
        ("loss_weight", trained | distilled),
        ("distill_kl", distilled),
    ):
        if (stream := getattr(safe, name)) is not None:
            broken[name] = (stream.detach(), mask & ~stream.detach().isfinite())
    if safe.sequence_ids is not None:
        broken["sequence_ids"] = (safe.sequence_ids, returning(safe.sequence_ids))
    return broken
