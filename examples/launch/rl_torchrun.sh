#!/usr/bin/env bash
# One role of an RL run that is spread over machines. Addresses are in the config: orchestrator.address, engine.urls.
#   examples/launch/rl_torchrun.sh orchestrator CONFIG [key=value ...]
#   FIRST_ENGINE=0 ENGINES=8 examples/launch/rl_torchrun.sh engines CONFIG [key=value ...]
#   NODES=2 NODE_RANK=0 HEAD=10.0.0.1 examples/launch/rl_torchrun.sh trainer CONFIG [key=value ...]
# engines: one per GPU of this node, engine.urls[FIRST_ENGINE] and those after it; when one ends, all do.
# trainer: on every trainer node, with its own NODE_RANK; HEAD is an address of node 0 that all of them reach.
set -euo pipefail
if [[ $# -lt 2 ]]; then
    echo "usage: $0 orchestrator|engines|trainer CONFIG [key=value ...]" >&2
    exit 2
fi
role=$1
shift

case $role in
orchestrator)
    exec megatron-rl orchestrator "$@"
    ;;
engines)
    trap 'exit 143' TERM
    trap 'exit 130' INT
    trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
    for ((gpu = 0; gpu < ${ENGINES:-8}; gpu++)); do
        CUDA_VISIBLE_DEVICES=$gpu megatron-rl engine "$@" --index $((${FIRST_ENGINE:-0} + gpu)) &
    done
    wait -n
    ;;
trainer)
    nodes=${NODES:-1}
    ranks_per_node=${RANKS_PER_NODE:-8}
    # After SIGTERM the ranks save a checkpoint; torchrun kills what is left after --shutdown-timeout seconds.
    exec torchrun --nnodes "$nodes" --node-rank "${NODE_RANK:-0}" --nproc-per-node "$ranks_per_node" \
        --master-addr "${HEAD:-127.0.0.1}" --master-port "${HEAD_PORT:-29500}" --shutdown-timeout 600 \
        -m megatron_rl.cli.train_rl "$@" "run.processes=$((nodes * ranks_per_node))"
    ;;
*)
    echo "error: the role must be orchestrator, engines or trainer, got $role" >&2
    exit 2
    ;;
esac
