"""Ids of documents that are spelt almost like one that is not there."""

from sqlalchemy import Engine, func, select

from weighbridge.db import tables
from weighbridge.db.engine import reading

_ITEM = tables.table(tables.Item)


def near_ids(engine: Engine, external_id: str, *, limit: int = 3) -> list[str]:
    """Give ids that differ only in case, of ASCII letters at least, in order.

    Reads all ids, which takes a moment in a large store: for what is not found otherwise.
    """
    statement = (
        select(_ITEM.c.external_id)
        .where(func.lower(_ITEM.c.external_id) == func.lower(external_id))
        .distinct()
        .order_by(_ITEM.c.external_id)
        .limit(limit)
    )
    with reading(engine) as connection:
        return [str(each) for each in connection.execute(statement).scalars()]
