"""Gated DeltaNet layers for Megatron-core that never stall, diverge or touch the disk once training has started.

Importing this package imports nothing else: every floor (`runtime`, `gdn`, `megatron`, `swift`) imports its own
dependencies and says what is missing.
"""

__version__ = "0.1.0"
