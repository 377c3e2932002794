"""`--gdn_check` in ms-swift's job: the check on the built models, kept for the callback that counts steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from swift.utils import get_logger

from fla_safe.diagnosis.watch import Watch
from fla_safe.megatron.watching import rank_in_words, watch_layers
from fla_safe.settings import Settings

__all__ = ["check_layers", "watches"]

logger = get_logger()
_watches: list[Watch] = []


def watches() -> Sequence[Watch]:
    """The checks that are on: one for each model that was built with the flag."""
    return _watches


def check_layers(args: Any, models: Sequence[torch.nn.Module], settings: Settings) -> None:
    """Check the GDN layers of `models` from now on; a file of what is found goes to the output directory."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    directory = Path(getattr(args, "output_dir", None) or ".")
    mode = cast(Literal["first", "every"], settings.check)
    watch = Watch(mode, rank=rank, where=rank_in_words(rank), directory=directory)
    count = watch_layers(models, watch)
    _watches.append(watch)
    logger.info(f"fla-safe: --gdn_check {mode}: {count} GDN layers of this rank wait for the device at every stage")
