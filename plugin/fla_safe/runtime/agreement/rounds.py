"""One decision table for each GPU architecture, on all ranks, in bounded time.

Every rank posts its table in the process group's store. Rank 0 of the job gathers them; for each architecture the
lowest rank that decided a key wins, so the first rank of an architecture decides and later ones only add keys that it
does not have (other pipeline stages, other head counts). Rank 0 posts the result, every rank loads it and answers with
the hash of what it loaded, and only when all hashes are right does anybody go on.

Decisions are taken, not timings averaged: a mean over ranks would elect a config that no rank's check has passed.
"""

import itertools
import json
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from fla_safe.errors import FlaSafeError
from fla_safe.runtime.agreement.mailbox import StoreUnreachableError
from fla_safe.runtime.agreement.peers import AgreementError, Limits, Peers
from fla_safe.runtime.tuning.decisions import DecisionTable, Stamp

__all__ = ["Agreed", "Agreement", "AgreementError", "Limits"]

_rounds = itertools.count()


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks of one architecture hold now.

    Args:
        table: the agreed decisions.
        hash: their hash, equal on all ranks of the architecture.
        ranks: all ranks of the job by architecture.
        overruled: keys on which a rank had decided otherwise than the agreed table says.
        seconds: time this rank spent in the agreement, waiting included.
    """

    table: DecisionTable
    hash: str
    ranks: Mapping[str, tuple[int, ...]]
    overruled: int
    seconds: float


class Agreement:
    """One round of agreement, opened before the warm-up so that peers can tell slow from dead.

        with Agreement.of_job() as agreement:
            for kernel in kernels:
                agreement.progress(f"tuning {kernel}")      # raises when a peer failed meanwhile
            agreed = agreement.agree(table, stamp)

    An exception inside the block is told to all other ranks, which then raise `AgreementError` naming it.
    All ranks open the same rounds in the same order.

    Args:
        store: a `torch.distributed` store that all ranks share; None for a job of one process.
        rank, world_size: this rank and the number of ranks.
        limits: bounds on waiting.
        name: distinguishes rounds; by default their number in this process.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, *, limits: Limits | None = None, name: str | None = None
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._peers: Peers | None = None
        self._turns = itertools.count()
        if store is not None and world_size > 1:
            prefix = f"fla_safe/{name if name is not None else next(_rounds)}/"
            self._peers = Peers(store, rank, world_size, limits or Limits(), prefix)

    @classmethod
    def of_job(cls, *, limits: Limits | None = None) -> "Agreement":
        """For the default process group; a job of one process when there is none."""
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            return cls(None, 0, 1, limits=limits)
        from torch.distributed.distributed_c10d import _get_default_store

        return cls(_get_default_store(), dist.get_rank(), dist.get_world_size(), limits=limits)

    def __enter__(self) -> "Agreement":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._peers is not None:
            if error is not None and error is not self._peers.failure:
                self._peers.fail(error)
            self._peers.close()

    def progress(self, text: str) -> None:
        """Say what this rank does now; a step of progress in the sense of `Limits.stall_after`.

        Raises:
            AgreementError: another rank failed; no need to go on.
        """
        if self._peers is not None:
            self._peers.progress(text)

    def agree(self, table: DecisionTable | None, stamp: Stamp) -> Agreed:
        """Exchange tables and return the agreed one.

        Args:
            table: this rank's decisions; None or empty for a rank that decided nothing.
            stamp: what this rank runs on; its architecture says which ranks it agrees with.

        Raises:
            AgreementError: with the rank, its host and what it was doing. The same on every rank that still lives.
            StampMismatchError: this rank's own table is not for this rank's `stamp`.
        """
        start = time.monotonic()
        mine = DecisionTable(stamp) if table is None else table
        mine.stamp.require(stamp, "this rank's decision table", "drop the table and let the job tune")
        if self._peers is None:
            kept = mine.copy()
            return Agreed(kept, kept.hash(), {stamp.arch: (self.rank,)}, 0, time.monotonic() - start)
        self.progress("waiting for the other ranks")
        try:
            result = self._exchange(self._peers, mine, stamp)
        except StoreUnreachableError as error:
            raise self._peers.lost(error) from error
        group = result[stamp.arch]
        agreed = DecisionTable.from_json(group["table"], source="agreed")
        ranks = {arch: tuple(g["ranks"]) for arch, g in result.items()}
        return Agreed(agreed, agreed.hash(), ranks, group["overruled"], time.monotonic() - start)

    def share(self, value: Any) -> list[Any]:
        """Values of all ranks in order, the same list on each; `value` must be JSON-serialisable.

        Raises:
            AgreementError: as `agree`.
        """
        if self._peers is None:
            return [value]
        peers, turn = self._peers, next(self._turns)
        try:
            peers.post(f"value{turn}/{self.rank}", zlib.compress(json.dumps(value).encode()))
            if self.rank == 0:
                values = peers.gather(f"value{turn}")
                every = [json.loads(zlib.decompress(values[rank])) for rank in range(self.world_size)]
                peers.post(f"values{turn}", zlib.compress(json.dumps(every).encode()))
                return every
            every = json.loads(zlib.decompress(peers.wait_for(f"values{turn}")))
        except StoreUnreachableError as error:
            raise peers.lost(error) from error
        return every

    def _exchange(self, peers: Peers, mine: DecisionTable, stamp: Stamp) -> dict[str, dict[str, Any]]:
        turn = next(self._turns)
        peers.post(f"table{turn}/{self.rank}", zlib.compress(mine.to_json().encode()))
        if self.rank == 0:
            result = _decide(peers, turn)
            peers.post(f"result{turn}", zlib.compress(json.dumps(result).encode()))
        else:
            result = json.loads(zlib.decompress(peers.wait_for(f"result{turn}")))
        mine = DecisionTable.from_json(result[stamp.arch]["table"])
        peers.post(f"hash{turn}/{self.rank}", mine.hash().encode())
        if self.rank == 0:
            _compare(peers, result, turn)
            peers.post(f"commit{turn}", b"1")
        else:
            peers.wait_for(f"commit{turn}")
        return result


def _decide(peers: Peers, turn: int) -> dict[str, dict[str, Any]]:
    tables = {r: _parse(peers, r, raw) for r, raw in peers.gather(f"table{turn}").items()}
    merged: dict[str, DecisionTable] = {}
    ranks: dict[str, list[int]] = {}
    overruled: dict[str, int] = {}
    for rank in sorted(tables):
        table, arch = tables[rank], tables[rank].stamp.arch
        ranks.setdefault(arch, []).append(rank)
        if arch not in merged:
            merged[arch], overruled[arch] = table.copy(), 0
            continue
        try:
            overruled[arch] += len(merged[arch].merge(table, "keep"))
        except FlaSafeError as error:
            peers.raise_first(
                AgreementError(
                    f"rank {rank} and rank {ranks[arch][0]} cannot share decisions: {error.seen}",
                    f"the same Triton and FLA on all ranks with {arch}",
                    "install the same versions on every node",
                )
            )
    return {
        arch: {"table": t.to_json(), "hash": t.hash(), "ranks": ranks[arch], "overruled": overruled[arch]}
        for arch, t in merged.items()
    }


def _parse(peers: Peers, rank: int, raw: bytes) -> DecisionTable:
    try:
        return DecisionTable.from_json(zlib.decompress(raw))
    except (FlaSafeError, zlib.error) as error:
        reason = getattr(error, "seen", str(error))
        raise peers.raise_first(
            AgreementError(f"rank {rank} posted no decision table: {reason}", "a table", f"look at rank {rank}'s log")
        ) from error


def _compare(peers: Peers, result: Mapping[str, Mapping[str, Any]], turn: int) -> None:
    hashes = peers.gather(f"hash{turn}")
    for group in result.values():
        for rank in group["ranks"]:
            if hashes[rank].decode() != group["hash"]:
                peers.raise_first(
                    AgreementError(
                        f"rank {rank} holds table {hashes[rank].decode():.16}, the agreed one is {group['hash']:.16}",
                        "one table on all ranks",
                        "install the same fla-safe on every node",
                    )
                )
