#!/usr/bin/env bash
# One command from a fresh clone to a trained model: makes .venv, a tiny random Qwen3.5-MoE vision-language model and
# image-text data, trains it with the real `megatron sft --gdn_impl fla_safe`, and says what happened.
# Usage: bash scripts/quickstart.sh [megatron sft flags]      Variables: WORK (default runs/quickstart), ITERS (24),
#        GPUS (those found; 0 trains on the CPU), FLA_SAFE_VENV, FLA_SAFE_PYTHON (see environment.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/environment.sh
. scripts/environment.sh

WORK=${WORK:-$REPOSITORY/runs/quickstart}
mkdir -p "$WORK" 2>/dev/null || fail "cannot write to $WORK"
WORK=$(cd "$WORK" && pwd)

# Runs a maker once: its folder carries the hash of what made it.
make_once() {
    local folder=$1 stamp
    shift
    stamp=$(cat scripts/make_*.py scripts/photographs.json <(printf '%s\n' "$@") | sha256sum | cut -d ' ' -f 1)
    [ "$(cat "$folder/stamp" 2>/dev/null)" = "$stamp" ] && return 0
    rm -rf "$folder"
    mkdir -p "$folder"
    run_logged "$folder/log" "$@" || fail "$(grep -v '^ *$' "$folder/log" | tail -n 1) (log: $folder/log)"
    printf '%s\n' "$stamp" >"$folder/stamp"
}

say "1/4 environment"
make_environment train,dev
say "2/4 tiny model: $WORK/model"
make_once "$WORK/model" env TORCH_DEVICE_BACKEND_AUTOLOAD=0 "$PYTHON" scripts/make_tiny_model.py "$WORK/model"
say "3/4 image-text data: $WORK/data"
make_once "$WORK/data" "$PYTHON" scripts/make_multimodal_data.py "$WORK/data" --samples 400

say "4/4 training (log: $WORK/train.log)"
export HF_HUB_OFFLINE=1 HF_HOME=$WORK/cache/huggingface MODELSCOPE_CACHE=$WORK/cache/modelscope
rm -rf "$WORK/train"
MODEL=$WORK/model DATA=$WORK/data/train.jsonl OUTPUT=$WORK/train ITERS=${ITERS:-24} \
    "$PYTHON" scripts/watch_training.py "$WORK/train" "$WORK/train.log" -- bash recipes/tiny/train.sh "$@"
"$PYTHON" scripts/training_summary.py "$WORK/train"
printf 'fla-safe quick start: ok\n'
