"""What every known metric means, in one line for somebody new to it, and where the page draws it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Panel:
    """One chart: the metrics whose names match one of the patterns (`*` stands for one part between slashes)."""

    title: str
    about: str
    patterns: tuple[str, ...]
    log: bool = False
    """Logarithmic axis; used only where all values are positive."""


@dataclass(frozen=True)
class Section:
    """Charts of one phase that answer one question."""

    phase: str
    title: str
    panels: tuple[Panel, ...]


_GRADIENT_NORM = Panel(
    "Gradient norm",
    "Length of the gradient over all parameters, before clipping. Sudden peaks mean an unusual batch. "
    "Where trainer.optimizer.skip_above_norm is set, 1 marks the steps that it skipped.",
    ("grad_norm", "optimizer/skipped"),
)
_LEARNING_RATE = Panel("Learning rate", "Step size of the optimizer: warm-up, then decay.", ("learning_rate",))
_THROUGHPUT = Panel("Tokens per second", "Tokens of the batch over the seconds of the step.", ("perf/tokens_per_s",))
_RANK_TIMES = Panel(
    "Seconds per rank",
    "Forward and backward of one step, without the wait in the gradient reduction: the slowest rank and the median. "
    "A gap that stays means one slow machine or uneven batches.",
    ("perf/rank_s_max", "perf/rank_s_median"),
)
_SLOWEST_RANK = Panel(
    "Slowest rank", "Its number. Jumping about is healthy; a flat line names a slow machine.", ("perf/slowest_rank",)
)

SECTIONS = (
    Section(
        "sft",
        "Supervised fine-tuning",
        (
            Panel(
                "Loss",
                "Mean negative log-probability of the assistant's tokens, in nats; lower is better. "
                "Held-out conversations are never trained on: when theirs rises, the model memorises.",
                ("loss/sft", "loss/heldout"),
            ),
            _GRADIENT_NORM,
            _LEARNING_RATE,
            Panel(
                "Trained tokens", "Assistant tokens in the step; prompts are read, not trained.", ("tokens/trained",)
            ),
            Panel("Seconds per step", "Wall-clock time of one optimizer step.", ("perf/step_s",)),
            _THROUGHPUT,
            Panel(
                "Passes over each dataset",
                "Rows drawn so far over the rows there are. Above 1 rows come again; far above, the model memorises.",
                ("data/epochs/*",),
            ),
            Panel(
                "Rows left out or cut",
                "Rows so far that cannot be read or rendered (named in bad_rows.jsonl), that are longer than the "
                "context, or of which no token is trained.",
                ("data/bad_rows", "data/oversized_rows", "data/truncated_rows", "data/untrained_rows"),
            ),
            Panel(
                "Cost spread",
                "Cost of the dearest rank's microbatches over the mean rank's: how much longer a step takes than with "
                "equal costs. 1 is ideal.",
                ("data/cost_spread",),
            ),
            Panel("Padding", "Share of the microbatches' tokens that no conversation fills.", ("data/padding_share",)),
            Panel(
                "Wait for data",
                "Seconds of the step in which the slowest rank's trainer waited for its microbatches. Above zero once "
                "the first step is done, the trainer is faster than reading and rendering.",
                ("perf/data_wait_s",),
            ),
            _RANK_TIMES,
            _SLOWEST_RANK,
        ),
    ),
    Section(
        "rl",
        "Reinforcement learning: does it learn?",
        (
            Panel(
                "Held-out pass rate",
                "Share of attempts at held-out prompts that were solved, at the sampling temperature: pass@1. "
                "Bands are 95% Wilson intervals: two points whose bands overlap may not differ. With several attempts "
                "per prompt, n is how many independent ones would say as much.",
                ("eval/pass_rate/*/*",),
            ),
            Panel(
                "Held-out pass@k",
                "Chance that at least one of k attempts at a held-out prompt is solved, estimated without bias. Near "
                "pass@1, the attempts have become copies of each other.",
                ("eval/pass_at/*/*/*",),
            ),
            Panel(
                "Distinct answers",
                "Different final answers among the attempts at one held-out prompt, on average. 1: no variety is left.",
                ("eval/distinct_answers/*/*",),
            ),
            Panel(
                "Training pass rate",
                "Share of the step's rollouts that earned the full reward. Every step has new prompts, so it jumps.",
                ("pass_rate/train",),
            ),
            Panel("Reward", "Mean reward of the step's rollouts.", ("reward/mean",)),
            Panel(
                "Length of the answers",
                "Sampled tokens per rollout. A drift to the limit often precedes a falling reward.",
                ("rollout/length_mean", "rollout/length_max", "eval/length_mean/*/*"),
            ),
            Panel(
                "Answers cut off",
                "Share of rollouts that hit the longest turn or context; in training and on held-out prompts.",
                ("rollout/cut_share", "eval/cut_share/*/*"),
            ),
            Panel(
                "Entropy",
                "How undecided the policy is per token, in nats. Near 0 it no longer explores.",
                ("entropy",),
            ),
            Panel(
                "Held-out entropy, estimated",
                "Mean of -log p over sampled tokens, in nats: an unbiased estimate of the sampler's entropy.",
                ("eval/entropy_estimate/*/*",),
            ),
            Panel(
                "KL to the reference",
                "How far the policy is from its reference per token, in nats, estimated without bias by k3.",
                ("kl/reference_k3",),
            ),
            Panel(
                "KL coefficient",
                "Weight of the KL to the reference. With loss.kl.target it rises while the KL is above the target.",
                ("kl/coef",),
            ),
            Panel(
                "Resets of the reference",
                "Steps after which the policy became its own reference, so that the KL started again from 0.",
                ("reference/reset_step",),
            ),
            Panel(
                "Prompt groups",
                "Groups of rollouts of one prompt: kept for training, or dropped, mostly for equal rewards.",
                ("groups/kept", "groups/drawn", "groups/dropped/*"),
            ),
        ),
    ),
    Section(
        "rl",
        "Reinforcement learning: do engine and trainer agree?",
        (
            Panel(
                "|log r|",
                "r is the probability of a sampled token under the trainer's policy over that under the engine that "
                "sampled it. 0 is agreement; rounding, stale weights and bugs raise it.",
                ("log_ratio/abs_mean", "log_ratio/abs_max"),
                log=True,
            ),
            Panel(
                "|log r| by factor",
                "In the decoupled form: movement since the last weight update, and engine noise at that update.",
                ("log_ratio/movement_abs_mean", "log_ratio/engine_abs_mean"),
                log=True,
            ),
            Panel(
                "Mean ratio",
                "Mean of r over trained tokens, uncapped; an unbiased sampler keeps it near 1. In the decoupled form "
                "also of the engine's factor.",
                ("ratio/mean", "ratio/engine_mean"),
            ),
            Panel(
                "Mean weight",
                "What multiplies a token's push: the ratio after mask, clip and guards, 0 where there is no push; and "
                "its square. Mean squared over mean square is the effective share of the tokens.",
                ("ratio/capped_mean", "ratio/capped_square_mean"),
            ),
            Panel(
                "Masked share",
                "Trained tokens that push no more, mostly because their probability already moved further than the "
                "trust region allows: of all, and of those with positive and negative advantage.",
                ("mask/share", "mask/share_positive", "mask/share_negative"),
            ),
            Panel("Guarded share", "Trained tokens whose weight a guard on a ratio changed.", ("guard/share",)),
            Panel(
                "Gradient scale c",
                "Mean of the factor that bounds a token's gradient; 1 means that the bound never acted. And the share "
                "of tokens that it scaled down.",
                ("gradient_scale/mean", "gradient_scale/share_scaled"),
            ),
            Panel(
                "Probe error after a weight update",
                "Largest difference, in nats, between engine and trainer on a fixed text with the new weights.",
                ("weights/probe_max_error",),
                log=True,
            ),
            Panel(
                "Staleness",
                "Optimizer steps between the weights that sampled and the weights that train.",
                ("staleness/*",),
            ),
        ),
    ),
    Section(
        "rl",
        "Reinforcement learning: is the ratio signal or noise?",
        (
            Panel(
                "Signal-to-noise ratio",
                "Variance of log r that is policy movement over that which is engine noise, over all tokens and per "
                "bin of the policy's probability. From 3 on mostly movement, up to 1/3 mostly noise.",
                ("snr/total", "snr/bin/*"),
            ),
            Panel(
                "Engine noise",
                "Standard deviation of log r per bin of the policy's probability, with the same weights in engine and "
                "trainer. It grows as training moves, and is largest where the policy is undecided.",
                ("snr/noise/*",),
                log=True,
            ),
            Panel(
                "Mean ratio at calibration",
                "Uncapped mean of r with the same weights on both sides. Off 1, engine log-probs are not those that it "
                "sampled with, and the run stops.",
                ("snr/identity",),
            ),
            Panel(
                "Mismatch KL",
                "KL from engine to trainer with the same weights, in nats per token, estimated by r - 1 - log r.",
                ("snr/mismatch_kl",),
                log=True,
            ),
            Panel(
                "Fork tokens outside the band",
                "Of the tokens with r outside [0.5, 2], the share among the 20% where the policy is least sure: what "
                "a rejection band would delete.",
                ("snr/outside_on_forks",),
            ),
        ),
    ),
    Section(
        "rl",
        "Reinforcement learning: optimisation and time",
        (
            Panel(
                "Loss",
                "What the optimizer descends, and the terms that add up to it. Its value is no measure of progress: "
                "advantages have mean near 0.",
                ("loss/total", "loss/policy", "loss/regulariser", "kl/loss", "entropy/bonus", "loss/distill"),
            ),
            Panel(
                "Largest push of the regulariser",
                "2 tau |log r| of the token where it is largest, in units of an advantage; nothing bounds it.",
                ("regulariser/max_weight",),
            ),
            Panel(
                "Tokens",
                "Trained in the step, left out for want of an engine log-prob, and distilled from a teacher instead.",
                ("tokens/trained", "tokens/missing_logp", "tokens/distilled"),
            ),
            _GRADIENT_NORM,
            _LEARNING_RATE,
            Panel(
                "Seconds",
                "Wall-clock time of a step, of waiting for its rollouts, of generating them, "
                "and of sending the weights to the engine.",
                ("perf/step_s", "perf/rollout_s", "perf/generation_s", "weights/publish_s"),
            ),
            _THROUGHPUT,
            _RANK_TIMES,
            _SLOWEST_RANK,
        ),
    ),
)


def matches(name: str, pattern: str) -> bool:
    """Whether a metric's name fits a pattern, part by part: a/*/c fits a/b/c and not a/b/b/c."""
    parts, wanted = name.split("/"), pattern.split("/")
    return len(parts) == len(wanted) and all(w in ("*", p) for p, w in zip(parts, wanted, strict=True))
