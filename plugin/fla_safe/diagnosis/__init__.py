"""Between the gdn and the megatron floor: which GDN tensor went bad first, a file of that call, and its replay.

Imports `gdn` and what is below. `megatron.watching` puts the check on layers, `swift` counts steps for it, the command
line replays.
"""
