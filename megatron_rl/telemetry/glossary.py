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
                "Share of held-out prompts solved in one attempt at the sampling temperature. "
                "Bands are 95% Wilson intervals: two points whose bands overlap may not differ.",
                ("eval/pass_rate/*/*",),
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
                ("rollout/length_mean", "rollout/length_max"),
            ),
            Panel(
                "Entropy",
                "How undecided the policy is per token, in nats. Near 0 it no longer explores.",
                ("entropy",),
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
            Panel("Mean ratio", "Mean of r over trained tokens; an unbiased sampler keeps it near 1.", ("ratio/mean",)),
            Panel(
                "Masked share",
                "Trained tokens with k = 0: their probability already moved further than the trust region allows, "
                "so they push no more.",
                ("mask/share",),
            ),
            Panel(
                "Gradient scale c",
                "Mean of the factor that bounds a token's gradient; 1 means that the bound never acted.",
                ("gradient_scale/mean",),
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
        "Reinforcement learning: optimisation and time",
        (
            Panel(
                "Loss",
                "What the optimizer descends. Its value is no measure of progress: advantages have mean near 0.",
                ("loss/total", "loss/policy", "loss/regulariser"),
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
