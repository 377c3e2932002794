#!/usr/bin/env bash
# Runs a recipe on the nodes of a Slurm job, one torchrun a node.
# Use:  MODEL=... DATA=... OUTPUT=... sbatch --nodes=2 recipes/slurm.sh recipes/qwen3_5_35b_a3b/full_2x8.sh [flags]
#       from the repository's root. The number of nodes is in the recipe's name. Add your site's --partition, --account,
#       --time. `srun` must be able to start a shell on each node with the environment of the submitting shell.
# Expected: not verified on a cluster; a test runs it with stand-ins for srun and scontrol.
#SBATCH --job-name=fla-safe
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
set -euo pipefail

fail() {
    printf 'slurm.sh: %s\n' "$*" >&2
    exit 1
}

[ -n "${SLURM_JOB_NODELIST:-}" ] || fail "not inside a Slurm job; submit it with sbatch"
[ $# -ge 1 ] || fail "no recipe given"
recipe=$1
shift
# Slurm runs a copy of this script elsewhere, so the recipe is looked up where the job was submitted.
case $recipe in /*) ;; *) recipe=$SLURM_SUBMIT_DIR/$recipe ;; esac
[ -f "$recipe" ] || fail "there is no recipe $recipe; submit from the repository's root"

NNODES=$SLURM_JOB_NUM_NODES
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${hosts%%$'\n'*}
[ -n "$MASTER_ADDR" ] || fail "scontrol names no host for $SLURM_JOB_NODELIST"
# Jobs that share a node must not share a port.
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export NNODES MASTER_ADDR MASTER_PORT

# A node that fails ends the job: the others would wait for it in a collective.
# shellcheck disable=SC2016
exec srun --ntasks="$NNODES" --ntasks-per-node=1 --kill-on-bad-exit=1 \
    bash -c 'export NODE_RANK=$SLURM_NODEID; exec bash "$@"' recipe "$recipe" "$@"
