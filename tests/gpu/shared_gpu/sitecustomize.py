"""First of two halves that let several ranks share one GPU: every rank believes to be alone on its host."""

import os

if "LOCAL_RANK" in os.environ:
    os.environ["LOCAL_RANK"] = "0"
    os.environ["LOCAL_WORLD_SIZE"] = "1"
