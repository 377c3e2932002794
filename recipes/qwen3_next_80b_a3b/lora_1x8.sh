#!/usr/bin/env bash
# What:      LoRA fine-tuning of Qwen/Qwen3-Next-80B-A3B-Instruct on packed dialogues: full recompute.
# Hardware:  1 node of 8 GPUs with 80 GB or more.
# Sizes:     TP2 PP1 EP4 CP1, 4 model replicas, 32 micro-batches a step each; packs of up to 14000 tokens, 1 to a
#            micro-batch. Sizes from ms-swift's examples/models/qwen3_next/mcore.sh (8 GPUs).
# Expected:  3456 GDN kernel calls a step and rank, counted from the sizes. Memory, loss and speed: not verified, see
#            card.yaml beside this file.
# How long:  one epoch of your data (EPOCHS); not verified.
# Use:       DATA=<train.jsonl> OUTPUT=<folder> bash recipes/qwen3_next_80b_a3b/lora_1x8.sh [megatron sft flags].
#            MODEL is Qwen/Qwen3-Next-80B-A3B-Instruct if not set; it may be a checkpoint folder. Further variables of
#            a run are in recipes/environment.sh.
# Written by scripts/make_recipes.py from recipes/table.toml: change it there.
set -euo pipefail

RECIPE=${BASH_SOURCE[0]} RECIPE_NODES=1 RECIPE_MODEL=Qwen/Qwen3-Next-80B-A3B-Instruct
: "${MODEL:=$RECIPE_MODEL}"
: "${DATA:?a JSONL file of dialogues, or the hub name of a data set}"
: "${OUTPUT:?a folder to write to}"
. "$(dirname "$RECIPE")/../environment.sh"
. "$(dirname "$RECIPE")/../launch.sh"
check_inputs
check_nodes
check_sizes 2 1 4 1 1 128 "$@"

exec megatron sft \
    --gdn_impl fla_safe \
    --gdn_guard warn \
    --model "$MODEL" \
    --dataset "$DATA" \
    --split_dataset_ratio 0 \
    --load_from_cache_file true \
    --dataset_num_proc 8 \
    --dataloader_num_workers 8 \
    --packing true \
    --max_length 14000 \
    --num_train_epochs "${EPOCHS:-1}" \
    --micro_batch_size 1 \
    --global_batch_size 128 \
    --lr 1e-4 \
    --min_lr 1e-5 \
    --lr_warmup_fraction 0.05 \
    --tensor_model_parallel_size 2 \
    --pipeline_model_parallel_size 1 \
    --expert_model_parallel_size 4 \
    --context_parallel_size 1 \
    --sequence_parallel true \
    --moe_permute_fusion true \
    --moe_grouped_gemm true \
    --moe_shared_expert_overlap true \
    --moe_aux_loss_coeff 1e-6 \
    --recompute_granularity full \
    --recompute_method uniform \
    --recompute_num_layers 1 \
    --tuner_type lora \
    --lora_rank 16 \
    --lora_alpha 32 \
    --target_modules all-linear \
    --attention_backend flash \
    --cross_entropy_loss_fusion true \
    --finetune true \
    --output_dir "$OUTPUT" \
    --logging_steps 1 \
    --report_to tensorboard \
    --save_steps 200 \
    --no_save_optim true \
    --no_save_rng true \
    "$@"
