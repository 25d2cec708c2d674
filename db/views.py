"""The views that others build on, and the statements they are made of.

Plain joins on materialised probabilities, at the temperature of the run itself. The
migration runner drops every view before it changes a table and creates these anew.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from sqlalchemy import ColumnElement, Connection, Dialect, Select, and_, inspect, select, text

from weighbridge.db import tables
from weighbridge.db.errors import MigrationFailed

VIEWS_SINCE = MappingProxyType(
    {"results": "0001", "choice_probabilities": "0001", "stability": "0002"}
)
"""The version that brought each of our views."""

SCHEMA_VIEW = re.compile(r"^CREATE VIEW \S+ AS /\* weighbridge: schema (\d+) \*/")
"""The beginning of the view of a schema (`schema_views`), which tells it from a user's own."""

_RUN = tables.table(tables.Run)
_ITEM = tables.table(tables.Item)
_ANSWER = tables.table(tables.Answer)
_CHOICE = tables.table(tables.AnswerChoice)
_CHECKPOINT = tables.table(tables.Checkpoint)
_ANSWER_P = tables.table(tables.AnswerProbability)
_CHOICE_P = tables.table(tables.ChoiceProbability)


def results_statement(*, by_item: bool = False) -> Select[*tuple[Any, ...]]:
    """One row per answered field of each item; booleans as `true`/`false`, scores as level.

    Args:
        by_item: Start from the items, in their order, rather than from the index on
            probabilities: what is first in the run comes without looking at the rest.
    """
    scaling = scaling_by_item() if by_item else _RUN.c.scaling_id
    source = (
        _ITEM.join(_RUN, _RUN.c.id == _ITEM.c.run_id)
        .join(
            _ANSWER_P,
            and_(
                _ANSWER_P.c.scaling_id == scaling,
                _ANSWER_P.c.decision_id == _ITEM.c.decision_id,
            ),
        )
        .join(
            _ANSWER,
            and_(
                _ANSWER.c.decision_id == _ANSWER_P.c.decision_id,
                _ANSWER.c.field_position == _ANSWER_P.c.field_position,
            ),
        )
        # Outer, so that SQLite leaves the join out of queries that do not ask for the name.
        .outerjoin(_CHECKPOINT, _CHECKPOINT.c.id == _RUN.c.checkpoint_id)
    )
    columns: list[ColumnElement[Any]] = [
        _ITEM.c.run_id.label("run_id"),
        _ITEM.c.position.label("position"),
        _ITEM.c.external_id.label("external_id"),
        _ITEM.c.document_id.label("document_id"),
        _ANSWER_P.c.field.label("field"),
        _ANSWER.c.kind.label("kind"),
        _ANSWER.c.value.label("value"),
        _ANSWER_P.c.probability.label("probability"),
        _ANSWER.c.margin.label("margin"),
        _ANSWER_P.c.expected_value.label("expected_value"),
        _RUN.c.temperature.label("temperature"),
        _CHECKPOINT.c.name.label("checkpoint"),
        _RUN.c.schema_name.label("schema"),
    ]
    return select(*columns).select_from(source)


def scaling_by_item() -> ColumnElement[int]:
    """Give the scaling of an item's run, so that answers are only found by way of items.

    Without statistics SQLite takes all answers of a scaling for no more than the items of a
    run, starts from them, and sorts a million answers for the first fifty. What depends on
    the item it cannot look up before it has the item.
    """
    return _RUN.c.scaling_id + 0 * _ITEM.c.position


def choice_probabilities_statement() -> Select[*tuple[Any, ...]]:
    """One row per choice of each answered field of each item."""
    source = (
        _ITEM.join(_RUN, _RUN.c.id == _ITEM.c.run_id)
        .join(_ANSWER, _ANSWER.c.decision_id == _ITEM.c.decision_id)
        .join(
            _CHOICE,
            and_(
                _CHOICE.c.decision_id == _ANSWER.c.decision_id,
                _CHOICE.c.field_position == _ANSWER.c.field_position,
            ),
        )
        .join(
            _CHOICE_P,
            and_(
                _CHOICE_P.c.scaling_id == _RUN.c.scaling_id,
                _CHOICE_P.c.decision_id == _CHOICE.c.decision_id,
                _CHOICE_P.c.field_position == _CHOICE.c.field_position,
                _CHOICE_P.c.choice_position == _CHOICE.c.choice_position,
            ),
        )
    )
    columns: list[ColumnElement[Any]] = [
        _ITEM.c.run_id.label("run_id"),
        _ITEM.c.position.label("position"),
        _ITEM.c.external_id.label("external_id"),
        _ANSWER.c.field.label("field"),
        _CHOICE.c.choice.label("choice"),
        _CHOICE.c.logit.label("logit"),
        _CHOICE_P.c.probability.label("probability"),
    ]
    return select(*columns).select_from(source)


def stability_statement() -> Select[*tuple[Any, ...]]:
    """One row per answered field of each item: how often the orders of the choices disagreed.

    The flip rate is null where nothing was compared: one order, or one choice.
    """
    source = _ITEM.join(_RUN, _RUN.c.id == _ITEM.c.run_id).join(
        _ANSWER, _ANSWER.c.decision_id == _ITEM.c.decision_id
    )
    columns: list[ColumnElement[Any]] = [
        _ITEM.c.run_id.label("run_id"),
        _ITEM.c.position.label("position"),
        _ITEM.c.external_id.label("external_id"),
        _ANSWER.c.field.label("field"),
        _ANSWER.c.value.label("value"),
        _ANSWER.c.flip_rate.label("flip_rate"),
        _RUN.c.permutations.label("permutations"),
    ]
    return select(*columns).select_from(source)


def view_definitions(dialect: Dialect) -> Mapping[str, str]:
    """Give the CREATE VIEW statement of each of our views, by name."""
    statements = {
        "results": results_statement(),
        "choice_probabilities": choice_probabilities_statement(),
        "stability": stability_statement(),
    }
    return MappingProxyType(
        {
            name: f"CREATE VIEW {name} AS {statement.compile(dialect=dialect)}"
            for name, statement in statements.items()
        }
    )


def drop_views(connection: Connection, version: str | None) -> dict[str, str]:
    """Drop every view, ours and those users have added; give the users' definitions.

    A view over a table makes SQLite refuse to rebuild that table.

    Args:
        connection: A connection in a writing transaction.
        version: What the store is at; None for a new one. A view that came later is
            not ours, whatever its name.

    Raises:
        MigrationFailed: A view or table of the user's has a name that this version needs.
    """
    ours = {name for name, since in VIEWS_SINCE.items() if version and since <= version}
    inspector = inspect(connection)
    names = inspector.get_view_names()
    taken = sorted({*names, *inspector.get_table_names()} & (VIEWS_SINCE.keys() - ours))
    if taken:
        raise MigrationFailed(
            f"a store must have no view or table of its own called {taken[0]}, which this "
            "version adds, and this one has; the store is as it was",
            hint="give yours another name, then: weighbridge db upgrade",
        )
    kept: dict[str, str] = {}
    preparer = connection.dialect.identifier_preparer
    for name in names:
        definition = inspector.get_view_definition(name)
        # The views of schemas are made anew too, from the answers.
        if name not in ours and not SCHEMA_VIEW.match(definition):
            kept[name] = definition
        connection.execute(text(f"DROP VIEW {preparer.quote(name)}"))
    return kept


def create_views(connection: Connection, kept: Mapping[str, str]) -> None:
    """Create our views as this version defines them, and the users' as they were."""
    for definition in (*view_definitions(connection.dialect).values(), *kept.values()):
        connection.exec_driver_sql(definition)
