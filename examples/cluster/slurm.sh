#!/bin/bash
# Trains on several machines under Slurm, for longer than one job may take:
#
#     sbatch examples/cluster/slurm.sh data/photos runs/photos --recipe photos --parallel fsdp --dp-replicate per-node
#
# The data, the run and this environment are on a file system that all machines share.
#
#SBATCH --job-name=limner
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1    # one torchrun for each machine, which starts a process for each of its GPUs
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300    # five minutes before the time is over this script hears of it
#SBATCH --requeue              # after pre-emption, or when a machine breaks, the same job begins again
#SBATCH --open-mode=append

set -uo pipefail
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# All processes save at the next update, and the job goes to the end of the queue.
over=
trap 'over=1; kill -TERM "$training"' TERM
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=270 # seconds for that; torchrun gives 30, then it kills them

srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-gpu}" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint "$first:${PORT:-29500}" \
    --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    -m limner train "$1" --out "$2" "${@:3}" &
training=$!
wait "$training"
code=$?
if [ -n "$over" ]; then
    wait "$training" # the trap ended the first wait
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$code"
