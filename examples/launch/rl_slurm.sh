#!/usr/bin/env bash
#SBATCH --job-name=megatron-rl-rl
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@600
# RL: the first TRAINER_NODES nodes (2) train, the others serve one engine per task.
#   TRAINER_NODES=2 sbatch examples/launch/rl_slurm.sh CONFIG [key=value ...]
# Ten minutes before the end of its time this script gets SIGTERM and passes it to the ranks alone: they save a
# checkpoint, for which they still ask the orchestrator. The next start of the same job resumes from it.
set -euo pipefail
if [[ -z ${SLURM_JOB_NODELIST:-} ]]; then
    echo "error: this script must run inside a Slurm job, got none; start it with sbatch" >&2
    exit 2
fi
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
num_trainers=${TRAINER_NODES:-2}
trainers=("${nodes[@]:0:num_trainers}")
engines=("${nodes[@]:num_trainers}")
if ((${#engines[@]} == 0)); then
    echo "error: TRAINER_NODES must leave nodes for engines, got $num_trainers of ${#nodes[@]}; lower it" >&2
    exit 2
fi
per_node=$SLURM_NTASKS_PER_NODE
port=${ENGINE_PORT:-8000}

joined() { # joined with commas
    local IFS=,
    echo "$*"
}

urls=()
for node in "${engines[@]}"; do
    for ((task = 0; task < per_node; task++)); do urls+=("http://$node:$((port + task))"); done
done
addresses=("engine.urls=[$(joined "${urls[@]}")]")
addresses+=("orchestrator.address=tcp://${trainers[0]}:${ORCHESTRATOR_PORT:-5555}")
export MASTER_ADDR=${trainers[0]} MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))

trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
srun --overlap --nodes=1 --ntasks=1 --nodelist="${trainers[0]}" --gpus=0 \
    megatron-rl orchestrator "$@" "${addresses[@]}" &
orchestrator=$!

# shellcheck disable=SC2016  # expanded by each task
srun --nodes=${#engines[@]} --ntasks=$((${#engines[@]} * per_node)) --ntasks-per-node="$per_node" \
    --nodelist="$(joined "${engines[@]}")" --kill-on-bad-exit=1 bash -c '
    export CUDA_VISIBLE_DEVICES=$SLURM_LOCALID
    exec megatron-rl engine "$@" --index "$SLURM_PROCID"' engine "$@" "${addresses[@]}" &

# shellcheck disable=SC2016  # expanded by each task
srun --nodes="$num_trainers" --ntasks=$((num_trainers * per_node)) --ntasks-per-node="$per_node" \
    --nodelist="$(joined "${trainers[@]}")" --kill-on-bad-exit=1 bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
    exec python -m megatron_rl.cli.train_rl "$@" "run.processes=$SLURM_NTASKS"' rank "$@" "${addresses[@]}" &
trainer=$!
trap 'kill -TERM "$trainer"' TERM

# The orchestrator ends with the trainer; whatever else ends first ends the job.
while true; do
    status=0
    wait -n -p ended || status=$?
    if [[ -z ${ended:-} ]]; then continue; fi # a signal, not a part
    if [[ $ended != "$orchestrator" || $status -ne 0 ]]; then exit "$status"; fi
done
