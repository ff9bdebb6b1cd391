"""Run by torchrun: an SFT run with packing kind stream, and runs resumed from its checkpoints.

Arguments: model folder, JSONL file, work folder, steps of the whole run, steps to resume after. Each rank records the
bytes of the microbatches that it trains on.
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.distributed.device import init_process_group, start_platform

PLATFORM = start_platform("cpu")

from megatron_rl.checkpoint.config import CheckpointConfig  # noqa: E402
from megatron_rl.data.sft import SftDataConfig  # noqa: E402
from megatron_rl.distributed.groups import ParallelConfig, ParallelGroups, build_groups  # noqa: E402
from megatron_rl.model.config import ModelConfig  # noqa: E402
from megatron_rl.records import wire  # noqa: E402
from megatron_rl.trainer.config import SftTrainerConfig  # noqa: E402
from megatron_rl.trainer.sft import SftJob, SftTrainer  # noqa: E402

PACKING = {"kind": "stream", "open_bins": 2, "buffer": 3}
"""Steps 1 to 3 empty the first buffer, 4 to 6 the second."""


def train(model: Path, rows: Path, run_dir: Path, groups: ParallelGroups, *, steps: int) -> list[str]:
    """Trains to the last step; a digest of the microbatches of each step of this process."""
    checkpoint = CheckpointConfig(every_steps=1, keep_last=steps)
    data = {"train": [str(rows)], "packing": PACKING, "microbatch_tokens": 128, "on_bad_row": "skip"}
    job = SftJob(
        run_dir=run_dir,
        model=ModelConfig(path=str(model), dtype="float32"),
        trainer=SftTrainerConfig(steps=steps, export=False, checkpoint=checkpoint),
        data=SftDataConfig.model_validate(data),
        context_length=128,
        seed=5,
    )
    trainer = SftTrainer(job, PLATFORM, groups, ParallelConfig())
    next_step, digests = trainer.data.next_step, []

    def recorded() -> object:
        step = next_step()
        digests.append(hashlib.sha256(b"".join(map(wire.encode, step.microbatches))).hexdigest())
        return step

    trainer.data.next_step = recorded  # type: ignore[method-assign]
    trainer.run()
    return digests


def main() -> None:
    model, rows, work = map(Path, sys.argv[1:4])
    steps, *stops = map(int, sys.argv[4:])
    torch.set_num_threads(1)
    init_process_group(PLATFORM)
    groups = build_groups(ParallelConfig(), PLATFORM, seed=5)
    digests = {"straight": train(model, rows, work / "straight", groups, steps=steps)}
    for stopped in stops:
        run_dir, name = work / f"resumed-{stopped}", f"step_{stopped:06}"
        if dist.get_rank() == 0:
            shutil.copytree(work / "straight" / "checkpoints" / name, run_dir / "checkpoints" / name)
            for file in ("metrics.jsonl", "bad_rows.jsonl"):
                shutil.copy(work / "straight" / file, run_dir / file)
        dist.barrier()
        digests[f"resumed-{stopped}"] = train(model, rows, run_dir, groups, steps=steps)
    (work / f"digests-{dist.get_rank()}.json").write_text(json.dumps(digests))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
