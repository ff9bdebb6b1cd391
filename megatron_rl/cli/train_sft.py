"""One rank of SFT: torchrun --nproc-per-node N -m megatron_rl.cli.train_sft CONFIG [key=value ...]."""

import sys

from megatron_rl.cli.preflight import check_sft_ranks
from megatron_rl.cli.rank import own_run, start_rank
from megatron_rl.cli.runs import SftRun
from megatron_rl.cli.user_errors import run_with_user_errors
from megatron_rl.config.load import load_config


def train(arguments: list[str]) -> None:
    """Loads the config, joins the ranks, trains."""
    run = load_config(arguments[0], SftRun, arguments[1:])
    with own_run(run, check_sft_ranks), start_rank(run.run, run.parallel) as (platform, groups):
        # Megatron-Core may be imported only after the platform was chosen.
        from megatron_rl.trainer.sft import SftJob, SftTrainer

        job = SftJob(
            run_dir=run.run.folder,
            model=run.model,
            trainer=run.trainer,
            data=run.data,
            context_length=run.context_length,
            seed=run.run.seed,
        )
        SftTrainer(job, platform, groups, run.parallel).run()


if __name__ == "__main__":
    sys.exit(run_with_user_errors(lambda: train(sys.argv[1:])))
