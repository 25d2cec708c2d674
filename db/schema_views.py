"""The view of each schema, `answers_<name>`: one row per document, one column per field.

A writer makes it when a run records its first answers; readers never write. The plain name
goes to the schema of that name that answers were recorded for last. Another schema of the
same name (an earlier edition, as a rule) keeps a view whose name ends in the start of its
hash. What the user has made under such a name is left alone.

Only in SQLite, which keeps the text of a view as it was written: a comment in it says which
views are ours.
"""

import logging
import re
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, func, select
from sqlalchemy.exc import DBAPIError

from weighbridge.db import tables
from weighbridge.db.fields import RunField, fields_of_run
from weighbridge.db.views import SCHEMA_VIEW
from weighbridge.db.wide import ITEM_TYPES, wide_columns, wide_statement

_RUN = tables.table(tables.Run)
_ITEM = tables.table(tables.Item)
_SCHEMA = tables.table(tables.SchemaVersion)
# SQLite's own limit for a result: 2000 columns, of which each field takes two.
MOST_FIELDS: Final = (2000 - len(ITEM_TYPES)) // 2
_LONGEST_NAME: Final = 60
_HASH: Final = 8
_LOG = logging.getLogger("weighbridge.db")


@dataclass(frozen=True)
class SchemaView:
    """Where a schema's answers can be asked for by column.

    Attributes:
        name: Of the view; None when there is none.
        remark: Why it is not there, or not under the plain name; None when it is.
    """

    name: str | None
    remark: str | None = None


@dataclass(frozen=True)
class _Schema:
    id: int
    sha256: str
    plain: str

    @property
    def suffixed(self) -> str:
        return f"{self.plain}_{self.sha256[:_HASH]}"


def view_of_run(connection: Connection, run_id: int) -> SchemaView:
    """Give the view that a run's answers are in."""
    if connection.dialect.name != "sqlite":
        return SchemaView(None, "only SQLite stores have a view for each schema")
    schema = _schema_of(connection, run_id)
    owners = _owners(connection)
    taken = owners.get(schema.plain.casefold(), 0) is None
    remark = _is_yours(schema.plain) if taken else None
    for name in (schema.plain, schema.suffixed):
        if owners.get(name.casefold()) == schema.id:
            return SchemaView(name, remark)
    fields = fields_of_run(connection, run_id)
    if not fields:
        remark = "its schema has a view once there are answers"
    elif len(fields) > MOST_FIELDS:
        remark = f"a view has room for {MOST_FIELDS} fields, and there are {len(fields)}"
    return SchemaView(None, remark)


def ensure_schema_view(connection: Connection, run_id: int) -> None:
    """Make the view of a run's schema, or see that it is there, in the caller's transaction.

    A view is a convenience: one that cannot be made is told, and takes nothing else back.
    """
    if connection.dialect.name != "sqlite":
        return
    try:
        with connection.begin_nested():
            _ensure(connection, run_id)
    except DBAPIError as error:
        _LOG.warning("the schema of run %d has no view: %s", run_id, error.orig)


def create_schema_views(connection: Connection) -> None:
    """Make the views of all schemas anew, as if their runs came again in their order."""
    newest = (
        select(func.max(_RUN.c.id))
        .join(_ITEM, _ITEM.c.run_id == _RUN.c.id)
        .where(_ITEM.c.decision_id.is_not(None))
        .group_by(_RUN.c.schema_version_id, _RUN.c.schema_name)
    )
    for run_id in sorted(connection.execute(newest).scalars()):
        ensure_schema_view(connection, run_id)


def view_name(schema_name: str) -> str:
    """Give the plain name of a schema's view: letters and digits, what is between as `_`."""
    slug = re.sub(r"\W+", "_", schema_name.casefold()).strip("_")[:_LONGEST_NAME]
    return f"answers_{slug or 'schema'}"


def _ensure(connection: Connection, run_id: int) -> None:
    schema = _schema_of(connection, run_id)
    owners = _owners(connection)
    holder = owners.get(schema.plain.casefold(), 0)
    if holder == schema.id:
        return
    fields = fields_of_run(connection, run_id)
    if not 0 < len(fields) <= MOST_FIELDS:
        return
    if holder is None:
        # The user's own; ours goes beside it unless that is taken too.
        _LOG.warning("%s; look for %s", _is_yours(schema.plain), schema.suffixed)
        if schema.suffixed.casefold() not in owners:
            _create(connection, schema.suffixed, schema, fields)
        return
    if holder:
        _move_aside(connection, holder, schema.plain, owners)
    if owners.get(schema.suffixed.casefold()) == schema.id:
        _drop(connection, schema.suffixed)
    _create(connection, schema.plain, schema, fields)


def _schema_of(connection: Connection, run_id: int) -> _Schema:
    statement = (
        select(_SCHEMA.c.id, _SCHEMA.c.sha256, _RUN.c.schema_name)
        .join(_RUN, _RUN.c.schema_version_id == _SCHEMA.c.id)
        .where(_RUN.c.id == run_id)
    )
    found = connection.execute(statement).one()
    return _Schema(found.id, found.sha256, view_name(found.schema_name))


def _owners(connection: Connection) -> dict[str, int | None]:
    """Give every table and view by its name, with the schema whose view it is."""
    rows = connection.exec_driver_sql(
        "SELECT name, sql FROM sqlite_master WHERE type IN ('table', 'view', 'index')"
    )
    matches = {str(name).casefold(): SCHEMA_VIEW.match(sql or "") for name, sql in rows}
    return {name: int(match[1]) if match else None for name, match in matches.items()}


def _move_aside(
    connection: Connection, schema_id: int, plain: str, owners: dict[str, int | None]
) -> None:
    """Give the view of an older schema of the same name a name of its own."""
    _drop(connection, plain)
    run_ids = select(func.max(_RUN.c.id)).join(_ITEM, _ITEM.c.run_id == _RUN.c.id)
    of_schema = (_RUN.c.schema_version_id == schema_id, _ITEM.c.decision_id.is_not(None))
    run_id = connection.execute(run_ids.where(*of_schema)).scalar_one()
    if run_id is None:
        return  # its runs were pruned, and nothing is left to show
    sha256 = connection.execute(select(_SCHEMA.c.sha256).where(_SCHEMA.c.id == schema_id))
    older = _Schema(schema_id, sha256.scalar_one(), plain)
    if older.suffixed.casefold() not in owners:
        _create(connection, older.suffixed, older, fields_of_run(connection, run_id))


def _create(connection: Connection, name: str, schema: _Schema, fields: list[RunField]) -> None:
    statement = wide_statement(wide_columns(fields, taken=list(ITEM_TYPES))).where(
        _RUN.c.schema_version_id == schema.id, _ITEM.c.decision_id.is_not(None)
    )
    # Numbers of our own, written out: a view takes no parameters.
    body = statement.compile(dialect=connection.dialect, compile_kwargs={"literal_binds": True})
    quoted = connection.dialect.identifier_preparer.quote_identifier(name)
    connection.exec_driver_sql(
        f"CREATE VIEW {quoted} AS /* weighbridge: schema {schema.id} */ {body}"
    )


def _drop(connection: Connection, name: str) -> None:
    quoted = connection.dialect.identifier_preparer.quote_identifier(name)
    connection.exec_driver_sql(f"DROP VIEW {quoted}")


def _is_yours(name: str) -> str:
    return f"{name} is a table or view of your own and is left alone"
