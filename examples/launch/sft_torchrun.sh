#!/usr/bin/env bash
# SFT over several nodes. Run it on every node with the same CONFIG and its own NODE_RANK:
#   NODES=4 NODE_RANK=0 HEAD=10.0.0.1 examples/launch/sft_torchrun.sh CONFIG [key=value ...]
# HEAD is an address of node 0 that every node reaches. The same command again resumes from the last checkpoint.
set -euo pipefail
nodes=${NODES:-1}
ranks_per_node=${RANKS_PER_NODE:-8}
if [[ $# -eq 0 ]]; then
    echo "usage: NODES=4 NODE_RANK=0 HEAD=10.0.0.1 $0 CONFIG [key=value ...]" >&2
    exit 2
fi
# After SIGTERM the ranks save a checkpoint; torchrun kills what is left after --shutdown-timeout seconds.
exec torchrun --nnodes "$nodes" --node-rank "${NODE_RANK:-0}" --nproc-per-node "$ranks_per_node" \
    --master-addr "${HEAD:-127.0.0.1}" --master-port "${HEAD_PORT:-29500}" --shutdown-timeout 600 \
    -m megatron_rl.cli.train_sft "$@" "run.processes=$((nodes * ranks_per_node))"
