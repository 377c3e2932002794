"""Gated DeltaNet (GDN) layers for Megatron-core training that never stall, diverge or touch the disk once training started.

Importing this package imports nothing else: every floor (`runtime`, `gdn`, `megatron`, `swift`) imports its own
dependencies and says what is missing.
"""

__version__ = "0.1.0"
