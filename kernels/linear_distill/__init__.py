"""KL to a detached teacher over the whole vocabulary without its logits: dispatch over implementations."""

from megatron_rl_kernels.dispatch import Impl, takes_kernel
from megatron_rl_kernels.linear_distill.reference import reference_linear_distill
from torch import Tensor
from torch.distributed import ProcessGroup

__all__ = ["linear_distill"]


def linear_distill(
    student_TH: Tensor,
    teacher_TH: Tensor,
    head_VH: Tensor,
    *,
    vocab_start: int = 0,
    group: ProcessGroup | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
    impl: Impl = "auto",
    teacher_head_VH: Tensor | None = None,
) -> Tensor:
    """KL(q || p) in nats, float32: q = softmax(teacher @ head.T / temperature), p the student's, alike. [T]

    Row t of both is the same token's state, without and with what the teacher was told. teacher_head_VH: the teacher's
    own head, if it is not head_VH; its hidden size may differ. Both heads are sharded over group on V alike, in shards
    of any sizes; this rank holds rows vocab_start onwards. student_TH and teacher_TH are equal on every rank of group,
    and so is the result. Never holds more than chunk rows of either's logits (chunk None: as many as fit the cache, see
    vocabulary.py).

    Differentiable, once, in student and head: the gradient on the student's logits over temperature is p - q. The
    teacher is detached; head_VH gets its gradient through the student alone. The student gradient is summed over group
    inside the backward; the head gradient is this shard's. Every rank of group must run the backward, or none.

    ValueError: shapes that disagree, temperature or chunk not above 0, vocab_start below 0, an impl that is unknown or
    cannot run here.
    """
    passes = None
    if takes_kernel(impl, student_TH.device):
        from megatron_rl_kernels.linear_distill.kernel import TRITON_PASSES as passes
    return reference_linear_distill(
        student_TH,
        teacher_TH,
        head_VH,
        vocab_start=vocab_start,
        group=group,
        temperature=temperature,
        chunk=chunk,
        teacher_head_VH=teacher_head_VH,
        passes=passes,
    )
