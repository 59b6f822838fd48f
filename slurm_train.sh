#!/usr/bin/env bash
# An example of a multi-node run under Slurm: sbatch slurm_train.sh [--section.key=value ...].
#
# Adapt the lines below to your cluster. Nodes x GPUs must be the number of processes that the layout needs:
#   disagmoe check $CONFIG_FILE --print-world-size
# The tree and its environment must be visible on all nodes; set it up once before (./run_train.sh --training.steps=1).
#SBATCH --job-name=disagmoe
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
# With checkpoints on, a run told by SIGUSR1 or SIGTERM saves and ends; submitted again with the same dump folder, or
# requeued, it goes on from there. Two minutes before the time limit, and whenever a more urgent job needs the nodes:
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

# Slurm runs a copy of this script: the tree is where the job was submitted from.
cd "$SLURM_SUBMIT_DIR"
export CONFIG_FILE=${CONFIG_FILE:-train_configs/qwen3_235b.toml}
export NGPU=${NGPU:-8} NNODES=$SLURM_JOB_NUM_NODES MASTER_PORT=${MASTER_PORT:-29500}
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR

# One task a node; torchrun starts the node's processes. A failure on one node ends the others.
srun --kill-on-bad-exit=1 bash -c 'NODE_RANK=$SLURM_NODEID exec ./run_train.sh "$@"' run_train.sh "$@"
