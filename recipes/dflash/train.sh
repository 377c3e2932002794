#!/usr/bin/env bash
# What:      N pairs of devices in one process, a thread each: a frozen GDN target gives hidden states on a pair's first
#            device, a block-diffusion drafter with flex_attention under torch.compile trains on them on its second.
#            With stock FLA the threads share one autotuner's state and one of them dies; with fla_safe they train.
# Hardware:  2 GPUs for each pair (pairs share them where there are fewer), 1 GPU (all devices are that one),
#            or none (scaled down: plain-torch GDN, SDPA for each anchor because flex_attention has no backward on CPUs).
# Sizes:     one process, a thread for each pair (--pairs, 2 if not given); --help lists the sizes of target and drafter.
# Expected:  500 steps of both pairs, the loss falls; the last line has late_tunes 0, late_compiles 0, file_ops 0.
#            --impl stock ends with status 1 and `PairFailedError: ... 'NoneType' object is not a mapping`.
# How long:  without a GPU 2 minutes on two cores, most of them compiling; on one shared H200 7.
# Use:       bash recipes/dflash/train.sh [--impl fla_safe|stock] [--pairs 2] [--steps 500] [--memory] [--cpu] [--help]
#            Further variables: PYTHON (default: python), and FLA_FLASH_QLA (default: 0, so that FLA runs its own
#            kernels where FlashQLA is installed). PYTHONPATH is extended.
set -euo pipefail

recipes=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$recipes${PYTHONPATH:+:$PYTHONPATH}"
export FLA_FLASH_QLA=${FLA_FLASH_QLA:-0} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

exec "${PYTHON:-python}" -m dflash.train "$@"
