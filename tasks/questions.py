"""Where a schema comes from: a file, JSON text, or a Pydantic model named `module:Class`."""

import importlib
import re
import sys
from collections.abc import Generator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path

from weighbridge.scorer.errors import SchemaError, quoted
from weighbridge.scorer.pydantic_schema import schema_of_model
from weighbridge.scorer.schema import Schema

_MODEL = re.compile(
    r"(?P<module>[^\W\d]\w*(?:\.[^\W\d]\w*)*):(?P<class>[^\W\d]\w*(?:\.[^\W\d]\w*)*)"
)


def read_schema(schema: str | Path, *, name: str | None = None) -> Schema:
    """Read a schema from a file, from JSON text (which starts with `{`), or from a model.

    A model is named `module:Class`, and is the only thing here that runs code: its module
    is imported, also from the current folder. A file of that name comes first.

    Args:
        schema: Where it is.
        name: What people call it; else the stem of the file or the name of the class.

    Raises:
        SchemaError: The file is missing, the module cannot be imported, or the schema does
            not hold what it must.
    """
    text = str(schema)
    if isinstance(schema, str) and text.lstrip().startswith("{"):
        return Schema.parse(text, name=name)
    read = _read_model(text) if names_model(schema) else Schema.load(schema)
    return read if name is None else replace(read, name=name)


def names_model(schema: str | Path) -> bool:
    """Say whether a schema is named as `module:Class`, and no such file is there."""
    return bool(isinstance(schema, str) and _MODEL.fullmatch(schema) and not Path(schema).exists())


def _read_model(reference: str) -> Schema:
    module, _, path = reference.partition(":")
    found: object = None
    try:
        with _current_folder_first(), redirect_stdout(sys.stderr):
            found = importlib.import_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # foreign code, which may also call sys.exit
        lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        missing = isinstance(error, ModuleNotFoundError) and error.name == module.split(".")[0]
        raise SchemaError(
            f"{reference}: module {module} must be importable, got "
            f"{quoted(reason, limit=200)[1:-1]}",
            hint="name it as Python does; the current folder and installed packages are looked in"
            if missing
            else f"see what python -c 'import {module}' says",
        ) from error
    for name in path.split("."):
        found = getattr(found, name, None)
    if not isinstance(found, type):
        raise SchemaError(
            f"{reference}: {module} must have a class {path}, got "
            + ("nothing of that name" if found is None else type(found).__name__),
            hint="name a subclass of pydantic.BaseModel as module:Class",
        )
    return schema_of_model(found)


@contextmanager
def _current_folder_first() -> Generator[None]:
    """Let Python look in the current folder first, as `python -m` does, within this block."""
    before = list(sys.path)
    sys.path.insert(0, str(Path.cwd()))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before
