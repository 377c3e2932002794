"""One pair: target on its first device, drafter on its second, and the step that takes a pack through both."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import torch

from dflash.anchors import Pack, Packer
from dflash.attention import Attention
from dflash.compiled import Compiled
from dflash.drafter import Drafter
from dflash.mask import AnchorMask
from dflash.sizes import Sizes
from dflash.target import Target
from fla_safe.gdn.backends import Backend
from fla_safe.gdn.segments import PackedSegments
from fla_safe.gdn.steady.rehearsal import AWKWARD_ROWS

__all__ = ["Pair", "on_device", "pair_devices"]


def pair_devices(pairs: int, gpus: int) -> list[tuple[torch.device, torch.device]]:
    """Devices of each pair's target and drafter. With too few GPUs pairs share them; on one, both are that one."""
    if gpus == 0:
        return [(torch.device("cpu"), torch.device("cpu"))] * pairs
    own = gpus >= 2 * pairs
    numbers = [(2 * i, 2 * i + 1) if own else (i % gpus, (i + 1) % gpus) for i in range(pairs)]
    return [(torch.device("cuda", a), torch.device("cuda", b)) for a, b in numbers]


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Triton and FLA launch on the current device, and every thread has its own."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Pair:
    """Everything that one thread trains.

    Args:
        number: of the pair; also the seed of its documents and of its drafter.
        devices: of target and drafter.
        sizes: of both.
        kernel: the target's gated delta rule.
        attention: the drafter's.
        compiled: `drafter_loss`, compiled; shared by all pairs.
        section: see `Target`.
    """

    def __init__(
        self,
        number: int,
        devices: tuple[torch.device, torch.device],
        sizes: Sizes,
        kernel: Backend,
        attention: Attention,
        compiled: Compiled,
        *,
        section: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.number = number
        self.devices = devices
        self.sizes = sizes
        self.compiled = compiled
        budget = sizes.step_budget
        self.target = Target(sizes.target, kernel, devices[0], sizes.dtype, section=section)
        embedding = self.target.embedding.weight.to(devices[1])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            self.drafter = Drafter(sizes.drafter, budget, embedding, attention).to(devices[1])
        self.mask = AnchorMask(budget, devices[1], compiled=devices[1].type == "cuda")
        self.packs = Packer(sizes.documents(seed=100 + number), budget, seed=number)
        trained = [p for p in self.drafter.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=sizes.lr, weight_decay=0.0, fused=devices[1].type == "cuda")

    def loss(self, pack: Pack) -> torch.Tensor:
        """Target forward, drafter forward; the loss is on the drafter's device."""
        with on_device(self.devices[0]):
            features = self._features(pack)
        return self.draft(features.to(self.devices[1], non_blocking=True), pack)

    def draft(self, features: torch.Tensor, pack: Pack) -> torch.Tensor:
        """The drafter's part of `loss`, from features `[C, features]` on its device."""
        there = self.devices[1]
        position = torch.zeros(features.shape[0], dtype=torch.int64)
        position[: len(pack.position)] = pack.position
        anchors = pack.anchors.to(there)
        self.mask.update(anchors)
        mask = self.mask.block_mask() if self.drafter.attention == "flex" else self.mask.rows()
        return self.compiled(self.drafter, features, position.to(there), anchors, mask)

    def step(self) -> torch.Tensor:
        """Train on the next pack; returns the loss, detached and not yet waited for."""
        loss = self.loss(next(self.packs))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def rehearse(self) -> None:
        """Run whatever a step can run, once, without learning: the target at awkward numbers of rows, both passes."""
        there = self.devices[0]
        longest = self.sizes.step_budget.context
        with on_device(there):
            for rows in (longest, *(n for n in AWKWARD_ROWS if n < longest)):
                offsets = torch.tensor(sorted({0, 1, rows // 3, rows // 2, rows}), dtype=torch.int32, device=there)
                tokens = torch.zeros(rows, dtype=torch.int64, device=there)
                self.target(tokens, PackedSegments.prepare(offsets, rows, device=there))
            for pack in self._rehearsed(2):
                self.loss(pack).backward()
                self.optimizer.zero_grad(set_to_none=True)

    def rehearse_drafter(self) -> None:
        """Both passes of the drafter, without learning, on made-up features: no kernel of the target runs."""
        shape = self.sizes.step_budget.context, self.sizes.target.features
        features = torch.zeros(shape, dtype=self.sizes.dtype, device=self.devices[1])
        with on_device(self.devices[0]):
            for pack in self._rehearsed(1):
                self.draft(features, pack).backward()
                self.optimizer.zero_grad(set_to_none=True)

    def _rehearsed(self, steps: int) -> Iterator[Pack]:
        return islice(Packer(self.sizes.documents(seed=50), self.sizes.step_budget), steps)

    def _features(self, pack: Pack) -> torch.Tensor:
        there, total = self.devices[0], len(pack.tokens)
        segments = PackedSegments.prepare(pack.offsets.to(there), total, device=there)
        features = self.target(pack.tokens.to(there, non_blocking=True), segments)
        # The drafter's shapes are fixed; no anchor sees the rows that are added here.
        return torch.nn.functional.pad(features, (0, 0, 0, self.sizes.step_budget.context - total))
