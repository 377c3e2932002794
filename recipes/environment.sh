# shellcheck shell=bash
# Sourced by every recipe that make_recipes.py writes: the environment variables of a run, in one place. A value that is
# already set stays.

# PyTorch and the host
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}
# One hardware queue: Megatron relies on the order of communication and computation under tensor parallelism.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}

# Images and videos: one token is a square of 32 x 32 pixels.
export IMAGE_MAX_TOKEN_NUM=${IMAGE_MAX_TOKEN_NUM:-1024}
export VIDEO_MAX_TOKEN_NUM=${VIDEO_MAX_TOKEN_NUM:-128}
export FPS_MAX_FRAMES=${FPS_MAX_FRAMES:-12}

# torchrun: ms-swift's `megatron` starts it when these are set.
export NNODES=${NNODES:-$RECIPE_NODES}
export NPROC_PER_NODE=${NPROC_PER_NODE:-8}
export NODE_RANK=${NODE_RANK:-0}
export MASTER_PORT=${MASTER_PORT:-29500}
if [ "$NNODES" -eq 1 ] 2>/dev/null; then export MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}; fi

# Several nodes must see one cache of prepared data, or each prepares its own.
if [ "$NNODES" != 1 ]; then export MODELSCOPE_CACHE=${MODELSCOPE_CACHE:-$OUTPUT/cache}; fi

# Nothing of GDN is set here: --gdn_impl fla_safe needs no variable. Its own are in docs/flags.md.
