#!/usr/bin/env bash
# What:      the real `megatron sft` on a tiny random Qwen3.5-MoE vision-language model: packed image-text dialogues,
#            full recompute, TP x PP x EP, GDN layers of fla_safe.
# Hardware:  1, 2 or 4 GPUs; or none: gloo processes on the CPU (FLA_SAFE_CPU=1).
# Sizes:     TP2 PP2 EP2 on 4 GPUs and on the CPU, TP2 EP2 on 2, TP1 on 1; packs of up to 512 tokens, 1 to a micro-batch.
# Expected:  the loss falls from about 12.5 (the logarithm of the vocabulary) within 24 steps. See the card beside this file.
# How long:  some minutes on two CPU cores; a minute or more of a first run on a GPU is the warm-up.
# Use:       MODEL=<checkpoint> DATA=<train.jsonl> OUTPUT=<folder> bash recipes/tiny/train.sh [megatron sft flags]
#            Further variables: GPUS (default: those found), TP PP EP, ITERS, GDN_IMPL.
set -euo pipefail

RECIPE=${BASH_SOURCE[0]} RECIPE_MODEL=Qwen/Qwen3.5-35B-A3B
: "${MODEL:?a checkpoint, made by scripts/make_tiny_model.py}"
: "${DATA:?a JSONL file, made by scripts/make_multimodal_data.py}"
: "${OUTPUT:?a folder to write to}"
. "$(dirname "$RECIPE")/../launch.sh"
check_inputs
if [ "${FLA_SAFE_CPU:-0}" = 1 ]; then GPUS=0; fi
if [ -z "${GPUS:-}" ]; then
    GPUS=$(TORCH_DEVICE_BACKEND_AUTOLOAD=0 python -c 'import torch; print(torch.cuda.device_count())')
fi
check_number GPUS 0

if [ "$GPUS" -ge 4 ] || [ "$GPUS" -eq 0 ]; then
    processes=4 tp=2 pp=2 ep=2
elif [ "$GPUS" -ge 2 ]; then
    processes=2 tp=2 pp=1 ep=2
else
    processes=1 tp=1 pp=1 ep=1
fi
tp=${TP:-$tp} pp=${PP:-$pp} ep=${EP:-$ep} NNODES=${NNODES:-1}
export NPROC_PER_NODE=${NPROC_PER_NODE:-$processes}
check_number NNODES
check_number NPROC_PER_NODE
check_sizes "$tp" "$pp" "$ep" 1 1 2 "$@"
# A free port, so that two runs on one host do not meet.
export MASTER_PORT=${MASTER_PORT:-$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')}
[ "$tp" -gt 1 ] && sequence_parallel=true || sequence_parallel=false

if [ "$GPUS" -eq 0 ]; then
    export FLA_SAFE_CPU=1 CUDA_VISIBLE_DEVICES=
    device=(--torch_dtype float32 --fp16 false --bf16 false --ddp_backend gloo --use_cpu_initialization true --dataloader_pin_memory false)
else
    device=(--torch_dtype bfloat16 --attention_backend auto)
fi
# One image token is a square of 32 x 32 pixels.
export IMAGE_MAX_TOKEN_NUM=${IMAGE_MAX_TOKEN_NUM:-64}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false

exec megatron sft \
    --gdn_impl "${GDN_IMPL:-fla_safe}" \
    --model "$MODEL" \
    --model_type "${MODEL_TYPE:-qwen3_5_moe}" \
    --template qwen3_5 \
    --check_model false \
    --dataset "$DATA" \
    --split_dataset_ratio 0 \
    --load_from_cache_file false \
    --dataset_num_proc 1 \
    --dataloader_num_workers 0 \
    --packing true \
    --max_length 512 \
    --micro_batch_size 1 \
    --global_batch_size 2 \
    --train_iters "${ITERS:-24}" \
    --tensor_model_parallel_size "$tp" \
    --pipeline_model_parallel_size "$pp" \
    --expert_model_parallel_size "$ep" \
    --sequence_parallel "$sequence_parallel" \
    --recompute_granularity full \
    --recompute_method uniform \
    --recompute_num_layers 1 \
    --freeze_vit false \
    --freeze_aligner false \
    --vit_attn_impl sdpa \
    --lr 4e-3 \
    --min_lr 4e-4 \
    --lr_warmup_fraction 0.1 \
    --moe_aux_loss_coeff 1e-3 \
    --masked_softmax_fusion false \
    --bias_dropout_fusion false \
    --bias_activation_fusion false \
    --cross_entropy_loss_fusion false \
    --output_dir "$OUTPUT" \
    --add_version false \
    --report_to tensorboard \
    --logging_steps 1 \
    --save_steps 100000 \
    --no_save_optim true \
    --no_save_rng true \
    "${device[@]}" "$@"
