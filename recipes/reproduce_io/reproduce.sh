#!/usr/bin/env bash
# What:      FLA issue 1072 with and without fla_safe: {FLA 0.4.2, 0.5.1, 0.6.0} x {TileLang absent, half-installed, working}
#            x {stock, fla_safe}, GDN layers on packed image-text data whose images are read from disk; one report of file
#            operations by cause, host gaps, step time, tunes and compilations.
# Hardware:  one GPU, or none: then the device is a stand-in; FLA, Triton's host path and the file system are real.
# Sizes:     one process a cell (--ranks), 2 GDN layers, 2 micro-batches a step.
# Expected:  stock 0.5.1 searches for TileLang at every step, and reads the disk for it where TileLang is half-installed;
#            fla_safe: nothing but images.
# How long:  without a GPU 7 minutes on two quiet cores, about twice that where strace is there; on GPUs not verified.
# Use:       bash recipes/reproduce_io/reproduce.sh [--out runs/reproduce_io] [--steps N] [--help]
#            Further variables: PYTHON (default: python), FLA_SAFE_TEST_FLA_DIR (a folder with one unpacked fla-core a version;
#            what is missing is fetched into it with pip).
set -euo pipefail

exec "${PYTHON:-python}" "$(dirname "${BASH_SOURCE[0]}")/matrix.py" "$@"
