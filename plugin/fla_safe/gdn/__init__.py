"""Gated delta nets on packed rows: segments, kernels, the functional API and its oracle; nothing of Megatron."""
