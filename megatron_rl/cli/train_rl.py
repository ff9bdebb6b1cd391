"""One rank of the RL trainer: torchrun --nproc-per-node N -m megatron_rl.cli.train_rl CONFIG [key=value ...]."""

import sys

from megatron_rl.cli.preflight import check_rl_ranks
from megatron_rl.cli.rank import own_run, start_rank
from megatron_rl.cli.runs import RlRun
from megatron_rl.cli.user_errors import run_with_user_errors
from megatron_rl.config import ConfigError
from megatron_rl.config.load import load_config


def train(arguments: list[str]) -> None:
    """Loads the config, joins the ranks, trains until the last step."""
    run = load_config(arguments[0], RlRun, arguments[1:])
    if not run.orchestrator.address or not run.engine.urls:
        raise ConfigError(
            "a trainer started by torchrun needs orchestrator.address and engine.urls; "
            "on one machine start everything with: megatron-rl rl CONFIG"
        )
    ranks = start_rank(run.run, run.parallel, longest_wait_s=run.trainer.batch_timeout_s)
    with own_run(run, check_rl_ranks), ranks as (platform, groups):
        # Megatron-Core may be imported only after the platform was chosen.
        from megatron_rl.trainer.rl import RlJob, RlTrainer

        job = RlJob(
            run_dir=run.run.folder,
            model=run.model,
            trainer=run.trainer,
            loss=run.loss,
            weight_sync=run.weight_sync,
            temperature=run.rollout.temperature,
            orchestrator_address=run.orchestrator.address,
            engine_urls=run.engine.urls,
            engine_timeout_s=run.engine.request_timeout_s,
            low_precision="bfloat16" in (run.model.dtype, run.engine.dtype),
        )
        RlTrainer(job, platform, groups, run.parallel).run()


if __name__ == "__main__":
    sys.exit(run_with_user_errors(lambda: train(sys.argv[1:])))
