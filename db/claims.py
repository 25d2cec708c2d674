"""Grants claims, inside the caller's transaction.

A claim keeps two live runs from computing the same document under the same key. It is
no lock on the record: what is computed in vain all the same is found when it is recorded.
"""

from collections.abc import Sequence
from datetime import datetime
from functools import cache

from sqlalchemy import Connection, delete, insert, select

from weighbridge.db import tables
from weighbridge.db.probabilities import CHUNK
from weighbridge.db.processes import process_is_alive
from weighbridge.db.run_rows import OpenRun, decisions

_CLAIM = tables.table(tables.Claim)


def grant(
    connection: Connection,
    run: OpenRun,
    sha256s: Sequence[str],
    *,
    now: datetime,
    expires_at: datetime,
) -> set[str]:
    """Claim what is neither decided nor claimed by another live run; give what was granted."""
    decided = decisions(connection, run, sha256s)
    wanted = [sha256 for sha256 in sha256s if sha256 not in decided]
    granted: set[str] = set()
    alive = cache(process_is_alive)
    for start in range(0, len(wanted), CHUNK):
        chunk = wanted[start : start + CHUNK]
        others = connection.execute(
            select(_CLAIM).where(
                run.same_key(_CLAIM),
                _CLAIM.c.document_sha256.in_(chunk),
                _CLAIM.c.run_id != run.run_id,
                _CLAIM.c.expires_at > now,
            )
        )
        held = {
            claim.document_sha256
            for claim in others
            if claim.host != run.host or alive(claim.pid, claim.claimed_at)
        }
        free = [sha256 for sha256 in chunk if sha256 not in held]
        if not free:
            continue
        connection.execute(
            delete(_CLAIM).where(run.same_key(_CLAIM), _CLAIM.c.document_sha256.in_(free))
        )
        process = {"run_id": run.run_id, "host": run.host, "pid": run.pid}
        times = {"claimed_at": now, "expires_at": expires_at}
        connection.execute(
            insert(_CLAIM),
            [{**run.key, **process, **times, "document_sha256": sha256} for sha256 in free],
        )
        granted.update(free)
    return granted


def release(connection: Connection, run: OpenRun, sha256s: Sequence[str]) -> None:
    """Give a run's claims on documents back."""
    for start in range(0, len(sha256s), CHUNK):
        connection.execute(
            delete(_CLAIM).where(
                _CLAIM.c.run_id == run.run_id,
                _CLAIM.c.document_sha256.in_(sha256s[start : start + CHUNK]),
            )
        )
