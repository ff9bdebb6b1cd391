"""The objective that a config resolves to, as a few lines for people; printed when a run starts."""

from megatron_rl.loss.config import (
    ClampGuardConfig,
    ClipGuardConfig,
    DerivedGuardConfig,
    GuardConfig,
    KlConfig,
    LossConfig,
    OffGuardConfig,
    RejectGuardConfig,
    ShrinkGuardConfig,
    TisGuardConfig,
)
from megatron_rl.loss.policy_config import (
    BtvConfig,
    CispoConfig,
    DppoKlConfig,
    GspoConfig,
    NoTrustRegionConfig,
    PolicyConfig,
    PpoClipConfig,
    RejectConfig,
    TisConfig,
)

_DIRECTION = {
    "k1": "pushes nowhere on average: noise only",
    "k2": "descends KL(policy || reference)",
    "k3": "descends KL(reference || policy)",
}


def objective_formula(config: LossConfig, *, has_reference: bool) -> str:
    """The objective with its numbers, one term a line. has_reference: a reference policy is scored in every step."""
    lines = [_sum(config), *_policy(config.policy, "proximal" if config.proximal else "engine")]
    lines += _ratios(config)
    if config.g_max is None:
        lines.append("  c = 1: no bound on a token's gradient on the logits")
    else:
        lines.append(
            f"  c = min(1, {config.g_max:g} / (weight (1 - p))): no entry of a token's gradient on logits / temperature"
            f" is above {config.g_max:g} |A|"
        )
    if config.tau:
        tokens = "all trained tokens" if config.regulariser_tokens == "all" else "the tokens that are pushed"
        lines.append(f"  (log p/p_engine)^2 over {tokens}; its push is not bounded")
    if config.kl is not None:
        lines += _kl(config.kl)
    elif has_reference:
        lines.append("  KL(policy || reference) is measured (kl/reference_k3), in no term")
    if config.entropy is not None:
        where = "every trained token" if config.entropy.tokens == "all" else "the first token after an observation"
        lines.append(f"  H: entropy over the whole vocabulary at {where}, pulls towards the uniform distribution")
    return "\n".join(lines)


def _sum(config: LossConfig) -> str:
    terms = ["c l_pg"]
    if config.tau:
        terms.append(f"+ {config.tau:g} (log p/p_engine)^2")
    if config.kl is not None and config.kl.placement == "loss":
        terms.append(f"+ {_beta(config.kl)} KL")
    if config.entropy is not None:
        terms.append(f"- {config.entropy.coef:g} H")
    weight, denominator = {
        "token_mean": ("", "trained tokens of the step"),
        "sequence_mean": ("1/(tokens of the rollout) * ", "rollouts of the step"),
        "fixed_length": ("", f"({config.fixed_length} * rollouts of the step)"),
    }[config.reduction]
    inner = terms[0] if len(terms) == 1 else f"({' '.join(terms)})"
    return f"loss = sum over trained tokens of {weight}{inner} / {denominator}"


def _policy(policy: PolicyConfig, sampler: str) -> list[str]:
    ratio = f"r = p/p_{sampler}"
    match policy:
        case BtvConfig():
            stops = f"p - p_{sampler} > {policy.eps_high:g} (A > 0) or < -{policy.eps_low:g} (A <= 0)"
            if policy.sided == "symmetric":
                stops = f"p - p_{sampler} is above {policy.eps_high:g} or below -{policy.eps_low:g}, whatever A"
            return [f"  l_pg (btv) = -k A r, {ratio}; k = 0 once {stops}"]
        case DppoKlConfig():
            return [
                f"  l_pg (dppo_kl) = -k A r, {ratio}; k = 0 once the binary KL is above {policy.delta:g} and A pushes "
                "further away"
            ]
        case PpoClipConfig():
            dual = "" if policy.dual_clip is None else f" or r > {policy.dual_clip:g} (A <= 0)"
            return [
                f"  l_pg (ppo_clip) = -A r, {ratio}; no push once r > {1 + policy.eps_high:g} (A > 0), "
                f"r < {1 - policy.eps_low:g} (A <= 0){dual}"
            ]
        case CispoConfig():
            return [
                f"  l_pg (cispo) = -A w log p, w = {ratio[4:]} clamped to [{policy.low:g}, {policy.high:g}], constant"
            ]
        case GspoConfig():
            return [
                f"  l_pg (gspo) = -A s, s = exp(mean over the sequence of log {ratio[4:]}); no push once "
                f"s > {1 + policy.eps_high:g} (A > 0), s < {1 - policy.eps_low:g} (A <= 0)"
            ]
        case TisConfig():
            return [f"  l_pg (tis) = -A w log p, w = min({ratio[4:]}, {policy.cap:g}), constant"]
        case RejectConfig():
            return [
                f"  l_pg (reject) = -k A r, {ratio}; k = 0 outside [{policy.low:g}, {policy.high:g}]",
                _deletes("r"),
            ]
        case NoTrustRegionConfig():
            return [f"  l_pg (none) = -A r, {ratio}; no trust region"]


def _ratios(config: LossConfig) -> list[str]:
    sampler = "engine" if config.proximal is None else "proximal"
    lines = _guard(config.guard, f"p/p_{sampler}")
    if config.proximal is not None:
        lines.append("  l_pg is multiplied by the constant p_proximal/p_engine")
        lines += _guard(config.proximal.guard, "p_proximal/p_engine")
    return lines


def _guard(guard: GuardConfig, ratio: str) -> list[str]:
    match guard:
        case OffGuardConfig():
            return []
        case TisGuardConfig():
            effect = f"is capped at {guard.high:g}"
        case ClipGuardConfig():
            effect = f"is clipped to [{guard.low:g}, {guard.high:g}], no push outside"
        case RejectGuardConfig():
            effect = f"drops the token outside [{guard.low:g}, {guard.high:g}]"
        case ClampGuardConfig():
            effect = f"is clamped to [{guard.low:g}, {guard.high:g}]"
        case ShrinkGuardConfig():
            effect = "is raised to its bin's SNR / (1 + SNR), from the last calibration"
        case DerivedGuardConfig():
            effect = "is clamped to its bin's derived bounds, from the last calibration"
    lines = [f"  {ratio} {effect} (guard {guard.kind})"]
    return [*lines, _deletes(ratio)] if guard.kind == "reject" else lines


def _deletes(what: str) -> str:
    return f"  warning: rejecting by {what} deletes mostly tokens where the policy decides; clamp keeps them, bounded"


def _kl(kl: KlConfig) -> list[str]:
    adaptive = (
        [] if kl.target is None else [f"  beta starts at {kl.coef:g}, steered to a KL of {kl.target:g} per token"]
    )
    if kl.placement == "reward":
        return [
            f"  reward of a rollout - {_beta(kl)} * sum of k1 over its tokens, before the advantages: the gradient of "
            "KL(policy || reference) of whole sequences, scaled like the rewards",
            *adaptive,
        ]
    if kl.sequence_exact:
        return [f"  KL ({kl.kind}, sequence_exact) descends KL(policy || reference) of whole sequences", *adaptive]
    direction = _DIRECTION["k2" if kl.kind.endswith("+") else kl.kind]
    return [f"  KL ({kl.kind}) {direction}, token by token, prefixes held", *adaptive]


def _beta(kl: KlConfig) -> str:
    return f"{kl.coef:g}" if kl.target is None else "beta"
