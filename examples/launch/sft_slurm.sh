#!/usr/bin/env bash
#SBATCH --job-name=megatron-rl-sft
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@600
# SFT, one task per rank: sbatch examples/launch/sft_slurm.sh CONFIG [key=value ...]
# Ten minutes before the end of its time, and when it is preempted, every rank gets SIGTERM and saves a checkpoint;
# the next start of the same job resumes from it.
set -euo pipefail
if [[ -z ${SLURM_JOB_NODELIST:-} ]]; then
    echo "error: this script must run inside a Slurm job, got none; start it with sbatch" >&2
    exit 2
fi
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${nodes[0]} MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))

# shellcheck disable=SC2016  # expanded by each task
exec srun --kill-on-bad-exit=1 bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
    exec python -m megatron_rl.cli.train_sft "$@" "run.processes=$SLURM_NTASKS"' rank "$@"
