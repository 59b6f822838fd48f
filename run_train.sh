#!/usr/bin/env bash
# Trains a model: ./run_train.sh [--section.key=value ...]. See --help.
set -euo pipefail
HERE=${BASH_SOURCE[0]}
ROOT=$(cd "$(dirname "$(readlink -f "$HERE")")" && pwd)
source "$ROOT/scripts/env.sh"

usage() {
    cat <<'HELP'
Usage: [VARIABLE=value ...] ./run_train.sh [--section.key=value ...]

Trains the model of a TOML file with one process a worker; options override what the file says, for example
  ./run_train.sh --training.steps=20 --disagmoe.attn_workers=3 --dump_folder=outputs/try

Variables:
  CONFIG_FILE   the TOML file (default: train_configs/debug_deepseek_moe.toml)
  NGPU          processes on this node (default: what the layout needs, an equal share of it on several nodes)
  NNODES        nodes (default: 1); run this script on each of them
  NODE_RANK     this node's number, from 0 (default: 0)
  MASTER_ADDR   address of node 0 (needed with several nodes)
  MASTER_PORT   free port of node 0 (default: 29500 with several nodes, any free one otherwise)
  LOG_RANK      local ranks whose output is shown, e.g. 0,1 (default: 0); errors of every rank are

Without an active environment that this project is installed in, makes .venv beside the script and installs into it.
All options: .venv/bin/disagmoe keys. What a configuration means, without starting it: disagmoe check CONFIG.
HELP
}
for argument in "$@"; do
    case $argument in -h | --help) usage && exit 0 ;; esac
done

CONFIG_FILE=${CONFIG_FILE:-train_configs/debug_deepseek_moe.toml}
if [ ! -e "$CONFIG_FILE" ] && [ -e "$ROOT/$CONFIG_FILE" ]; then
    CONFIG_FILE=$ROOT/$CONFIG_FILE
fi
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
export LOG_RANK=${LOG_RANK:-0} NNODES NODE_RANK

find_environment
# Refuses a bad configuration before any process starts; prints how many processes this node starts, and how many seconds
# they may take to end when they are told to.
answer=$("$PYTHON" -m disagmoe.cli check "$CONFIG_FILE" --launch "$@")
read -r processes shutdown_s <<<"$answer"

if [ "$NNODES" -gt 1 ]; then
    [ -n "${MASTER_ADDR:-}" ] || die "NNODES = $NNODES: set MASTER_ADDR to the address of node 0"
    rendezvous=(--nnodes="$NNODES" --node-rank="$NODE_RANK" --master-addr="$MASTER_ADDR" --master-port="${MASTER_PORT:-29500}")
else
    # By address: a machine's own name need not resolve to it.
    rendezvous=(--rdzv-backend=c10d --rdzv-endpoint="127.0.0.1:${MASTER_PORT:-0}" --local-addr=127.0.0.1)
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
fi
if [ -z "${OMP_NUM_THREADS:-}" ]; then
    cores=$(nproc)
    export OMP_NUM_THREADS=$((cores > processes ? cores / processes : 1))
fi
# Threads that wait for each other by spinning take the cores from the ones that they wait for, as soon as anything else
# runs on the machine.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
# In place of this shell, so that signals reach it; it passes these on to the workers, which save before they end.
exec "$PYTHON" -m torch.distributed.run --nproc-per-node="$processes" "${rendezvous[@]}" \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout="${shutdown_s:-30}" \
    -m disagmoe.train --config-file="$CONFIG_FILE" "$@"
