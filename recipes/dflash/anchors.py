"""Packs documents and anchors under a token budget: which rows a step holds, and what each anchor may see of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch

from fla_safe.errors import FlaSafeError

__all__ = ["AnchorBatch", "Budget", "BudgetError", "Documents", "Pack", "Packer"]


class BudgetError(FlaSafeError, ValueError):
    """The token budget cannot hold what a step was asked to hold."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Tokens of one step: those of the context, and a block of draft tokens for every anchor.

    Attributes:
        tokens: most tokens of a step, context and draft together.
        anchors: A, most anchors of a step.
        block: B, draft tokens of an anchor; the first is the anchor's own token, which is known.
    """

    tokens: int
    anchors: int
    block: int

    def __post_init__(self) -> None:
        if self.anchors < 1 or self.block < 2 or self.context < 2:
            raise BudgetError(
                f"{self.tokens} tokens for {self.anchors} anchors of {self.block} draft tokens",
                "at least one anchor, blocks of 2 or more, and 2 tokens left for the context",
                "raise --budget, or lower --anchors or --block",
            )

    @property
    def draft(self) -> int:
        """Draft tokens of a full step, A * B."""
        return self.anchors * self.block

    @property
    def context(self) -> int:
        """C, most context tokens."""
        return self.tokens - self.draft


@dataclass(frozen=True, slots=True)
class AnchorBatch:
    """Anchors of one pack, in A places; places without an anchor see no context and weigh nothing.

    Attributes:
        first, last: `[A]` int32, the context rows `[first, last)` that an anchor sees: its document's, before it.
        token: `[A]` int64, the anchor's own token.
        position: `[A]` int64, its place in its document.
        labels: `[A, B - 1]` int64, the tokens that follow.
        weights: `[A, B - 1]` float32, 0 where the document has ended.
    """

    first: torch.Tensor
    last: torch.Tensor
    token: torch.Tensor
    position: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor

    def to(self, device: torch.device) -> Self:
        """On another device; from pinned memory without waiting."""
        pinned = device.type == "cuda"
        return type(self)(
            *(
                (x.pin_memory() if pinned else x).to(device, non_blocking=True)
                for x in (self.first, self.last, self.token, self.position, self.labels, self.weights)
            )
        )


@dataclass(frozen=True, slots=True)
class Pack:
    """What one step trains on.

    Attributes:
        tokens: `[T]` int64, T at most `Budget.context`.
        offsets: `[N + 1]` int32, where documents begin and end.
        position: `[T]` int64, place of every row in its document.
        anchors: on these documents.
        used: number of anchors.
    """

    tokens: torch.Tensor
    offsets: torch.Tensor
    position: torch.Tensor
    anchors: AnchorBatch
    used: int


class Documents:
    """Endless synthetic documents of random lengths, in which a token mostly determines the next one.

    Args:
        vocabulary: size V.
        words: how many of the V tokens occur; fewer are learnt sooner.
        shortest, longest: lengths, drawn with a uniform logarithm.
        noise: share of tokens that are drawn at random instead.
        seed: of lengths and tokens; which token follows which is the same for all seeds.
    """

    def __init__(
        self, vocabulary: int, words: int, shortest: int, longest: int, *, noise: float = 0.02, seed: int = 0
    ) -> None:
        rules = torch.Generator().manual_seed(1)
        self._words = torch.randperm(vocabulary, generator=rules)[:words]
        self._next = torch.randperm(len(self._words), generator=rules)
        self._bounds, self._noise = (shortest, longest), noise
        self._source = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        """`[length]` int64 tokens."""
        low, high = (torch.tensor(float(x)).log() for x in self._bounds)
        length = int((low + (high - low) * torch.rand((), generator=self._source)).exp().round())
        surprises = torch.randint(len(self._words), (length,), generator=self._source)
        surprised = torch.rand(length, generator=self._source) < self._noise
        follow, drawn, kept = self._next.tolist(), surprises.tolist(), surprised.tolist()
        word, document = drawn[0], []
        for i in range(length):
            word = drawn[i] if i == 0 or kept[i] else follow[word]
            document.append(word)
        return self._words[torch.tensor(document)]


class Packer:
    """Takes documents in order and cuts steps of them; a document that does not fit any more begins the next step.

    Args:
        documents: any iterator of `[length]` int64 tensors; what is longer than the context is cut off.
        budget: of a step.
        seed: of the choice of anchors.
        decay: weight of the k-th draft token is `exp(-(k - 1) / decay)`: a wrong token makes all later ones useless.
    """

    def __init__(self, documents: Iterator[torch.Tensor], budget: Budget, *, seed: int = 0, decay: float = 7.0) -> None:
        self.budget = budget
        self._documents = documents
        self._waiting: torch.Tensor | None = None
        self._source = torch.Generator().manual_seed(seed)
        self._decay = torch.exp(-torch.arange(budget.block - 1) / decay)

    def __iter__(self) -> Iterator[Pack]:
        return self

    def __next__(self) -> Pack:
        return self.pack(self._take())

    def _take(self) -> list[torch.Tensor]:
        room = self.budget.context
        taken: list[torch.Tensor] = []
        while True:
            document = self._waiting if self._waiting is not None else next(self._documents)
            self._waiting = None
            document = document[: self.budget.context]
            if len(document) > room:
                self._waiting = document
                return taken
            taken.append(document)
            room -= len(document)

    def pack(self, documents: list[torch.Tensor]) -> Pack:
        """One step of these documents, with anchors drawn from all tokens that are followed by another one.

        Raises:
            BudgetError: they hold more tokens than the context.
        """
        lengths = torch.tensor([len(document) for document in documents])
        if int(lengths.sum()) > self.budget.context:
            raise BudgetError(
                f"documents of {int(lengths.sum())} tokens", f"at most {self.budget.context}", "pack fewer of them"
            )
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        tokens = torch.cat(documents)
        starts = torch.repeat_interleave(offsets[:-1], lengths)
        ends = torch.repeat_interleave(offsets[1:], lengths)
        rows = torch.arange(len(tokens))
        possible = rows[rows + 1 < ends]
        chosen = possible[torch.randperm(len(possible), generator=self._source)[: self.budget.anchors]].sort().values
        return Pack(tokens, offsets.int(), rows - starts, self._anchors(tokens, starts, ends, chosen), used=len(chosen))

    def _anchors(
        self, tokens: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, chosen: torch.Tensor
    ) -> AnchorBatch:
        empty = self.budget.anchors - len(chosen)

        def placed(x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, x.new_zeros(empty, *x.shape[1:])])

        following = chosen[:, None] + torch.arange(1, self.budget.block)
        inside = following < ends[chosen][:, None]
        return AnchorBatch(
            placed(starts[chosen]).int(),
            placed(chosen).int(),
            placed(tokens[chosen]),
            placed(chosen - starts[chosen]),
            placed(tokens[torch.where(inside, following, 0)]),
            placed(inside * self._decay),
        )
