"""Who may import whom, read from the source: the table in ARCHITECTURE.md, as a test."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = "weighbridge"
MAX_LINES = 400
MODELS = {"mlx", "mlx_lm", "transformers", "tokenizers"}
TABLES = {"sqlmodel", "sqlalchemy", "alembic"}
TERMINAL = {"typer", "rich", "click"}


@dataclass(frozen=True)
class Rule:
    """What a layer may import of ours, and what of others it must not.

    Attributes:
        ours: Layers it may import.
        banned: Packages that none of its files imports.
        banned_early: Packages that are imported inside functions only.
    """

    ours: set[str]
    banned: set[str]
    banned_early: set[str]


RULES = {
    "scorer": Rule({"scorer"}, {"prefect"} | TABLES | TERMINAL, set()),
    "db": Rule({"db"}, {"prefect", "numpy"} | MODELS | TERMINAL, set()),
    "tasks": Rule({"scorer", "db", "tasks"}, {"sqlmodel", "alembic"} | MODELS | TERMINAL, set()),
    "flows": Rule({"scorer", "db", "tasks", "flows"}, MODELS | TABLES | TERMINAL, set()),
    "deployments": Rule(
        {"scorer", "db", "tasks", "flows", "deployments", "examples"},
        MODELS | {"sqlmodel", "alembic"},
        {"prefect", "sqlalchemy", "weighbridge.db", "weighbridge.scorer", "weighbridge.flows"},
    ),
    "examples": Rule({"db", "tasks", "flows", "examples"}, MODELS | TABLES | TERMINAL, set()),
}
# Prefect's server and command line find the type of worker in it.
READ_BY_PREFECT = "deployments/worker.py"
LEAVES = (
    "checkpoints",
    "columns",
    "compression",
    "convert",
    "errors",
    "file_kinds",
    "json_array",
    "lease",
    "loading",
    "looking",
    "parquet",
    "planning",
    "questions",
    "records",
    "refusals",
    "scorers",
    "settings",
    "sources",
    "sql_parameters",
    "sql_source",
    "stopping",
    "template",
    "text_files",
)


def files() -> list[Path]:
    return sorted(path for layer in RULES for path in (ROOT / layer).rglob("*.py"))


def imports(tree: ast.AST, late: bool = False) -> Iterator[tuple[ast.stmt, str, bool]]:
    """Yield each import with the module it names, and whether only a call runs it.

    What type checkers alone see counts as late: it is never loaded.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name, late
        elif isinstance(node, ast.ImportFrom):
            # "from weighbridge import db" names a layer as much as "import weighbridge.db".
            names = [f".{alias.name}" for alias in node.names] if node.module == OURS else [""]
            for name in names:
                yield node, "." * node.level + (node.module or "") + name, late
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            yield from imports(node, late or inside or typing_only)


def violations(path: str, source: str) -> list[str]:
    """Return what a file of the layer that `path` begins with must not import."""
    rule = RULES[path.split("/", maxsplit=1)[0]]
    leaf = path in {f"tasks/{name}.py" for name in LEAVES}
    found: list[str] = []
    for node, module, late in imports(ast.parse(source)):
        parts = module.split(".")
        where = f"{path}:{node.lineno} imports {module}"
        if module.startswith("."):
            found.append(f"{where}: imports must be absolute")
        elif parts[0] in RULES:
            found.append(f"{where}: write {OURS}.{module}")
        elif parts[0] == OURS and (len(parts) == 1 or parts[1] not in rule.ours):
            found.append(f"{where}: another layer")
        elif parts[0] in rule.banned or (leaf and parts[0] == "prefect"):
            found.append(f"{where}: not in this layer")
        elif path == READ_BY_PREFECT and parts[0] == "prefect":
            continue
        elif not late and {parts[0], ".".join(parts[:2])} & rule.banned_early:
            found.append(f"{where}: only inside a function")
    return found


def test_every_layer_is_looked_at():
    assert {path.relative_to(ROOT).parts[0] for path in files()} == set(RULES)
    assert len(files()) > 50


def test_layers_import_what_they_may():
    found = [
        violation
        for path in files()
        for violation in violations(path.relative_to(ROOT).as_posix(), path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    ("path", "source", "words"),
    [
        ("scorer/engine.py", "from weighbridge.db import Store", "another layer"),
        ("scorer/engine.py", "from weighbridge import db", "another layer"),
        ("scorer/engine.py", "import weighbridge", "another layer"),
        ("scorer/engine.py", "def f():\n    import prefect.flows", "not in this layer"),
        ("db/store.py", "import mlx.core as mx", "not in this layer"),
        ("db/store.py", "from weighbridge.tasks.settings import load_settings", "another layer"),
        ("tasks/scoring.py", "from rich.console import Console", "not in this layer"),
        ("tasks/sources.py", "try:\n    import prefect\nexcept ImportError:\n    pass", "not in"),
        ("flows/score.py", "from sqlmodel import select", "not in this layer"),
        ("flows/score.py", "from weighbridge.deployments import main", "another layer"),
        ("flows/score.py", "from .artifacts import ProgressArtifact", "absolute"),
        ("flows/score.py", "from tasks.settings import load_settings", "write weighbridge.tasks"),
        ("deployments/worker.py", "from weighbridge.db.tables import Run", "inside a function"),
        ("deployments/orphans.py", "class A:\n    from prefect import flow", "inside a function"),
        ("deployments/worker.py", "def f():\n    import mlx.core", "not in this layer"),
    ],
)
def test_a_planted_violation_is_found(path: str, source: str, words: str):
    # Negative control: without it, a checker that finds nothing would pass too.
    (found,) = violations(path, source)
    assert words in found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("scorer/engine.py", "import mlx.core as mx\nfrom weighbridge.scorer.plan import Rows"),
        ("tasks/scoring.py", "from prefect import task\nfrom weighbridge.db import Store"),
        ("deployments/worker.py", "def f():\n    from weighbridge.db import Store"),
        ("deployments/worker.py", "from prefect.workers.base import BaseWorker"),
        ("deployments/orphans.py", "if TYPE_CHECKING:\n    from prefect import Flow"),
    ],
)
def test_what_is_allowed_is_not_reported(path: str, source: str):
    assert violations(path, source) == []


def test_files_stay_readable():
    long = {str(path): len(path.read_text().splitlines()) for path in files()}
    assert {path: lines for path, lines in long.items() if lines > MAX_LINES} == {}


@pytest.mark.parametrize("layer", ["scorer", "db", "tasks", "flows", "deployments"])
def test_what_a_layer_offers_is_there(layer: str):
    package = importlib.import_module(f"{OURS}.{layer}")
    assert list(package.__all__) == sorted(set(package.__all__))
    assert [name for name in package.__all__ if not hasattr(package, name)] == []
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = package.no_such_name
    # What the layer does, and what it does not know.
    documentation = package.__doc__ or ""
    assert "Knows" in documentation
    assert "not know" in documentation or "Knows no" in documentation


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("scorer", {"mlx", "prefect", "sqlalchemy", "typer", "rich"}),
        ("db", {"mlx", "prefect", "typer"}),
        ("tasks", {"mlx", "prefect", "sqlalchemy", "pydantic"}),
        *((f"tasks.{leaf}", {"prefect", "typer"}) for leaf in LEAVES),
        ("deployments", {"mlx", "prefect", "sqlalchemy", "typer"}),
        ("deployments.cli", {"mlx", "prefect", "sqlalchemy", "pydantic"}),
        (
            "deployments.worker",
            {"mlx", "sqlmodel", f"{OURS}.flows", f"{OURS}.db", f"{OURS}.scorer"},
        ),
    ],
)
def test_importing_loads_no_more_than_it_should(module: str, absent: set[str]):
    # In a process of its own: here everything is loaded already.
    code = f"import sys, {OURS}.{module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert absent & set(done.stdout.split()) == set()


def test_every_module_can_be_the_first_one_imported():
    # A circle of imports shows only when it is entered at the wrong place.
    modules = sorted(
        f"{OURS}.{path.relative_to(ROOT).with_suffix('').as_posix().replace('/', '.')}"
        for path in files()
        if path.name not in {"__init__.py", "__main__.py", "env.py"}
        and "versions" not in path.parts
    )
    code = (
        "import importlib, sys\n"
        "for module in sys.argv[1:]:\n"
        f"    for known in [name for name in sys.modules if name.startswith('{OURS}')]:\n"
        "        del sys.modules[known]\n"
        "    importlib.import_module(module)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *modules], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
