"""Imports every module of an installed weighbridge; run by `make wheel` in a clean environment."""

import importlib
import importlib.metadata
import importlib.resources
import sys


def main() -> int:
    files = importlib.metadata.files("weighbridge") or []
    modules = sorted(
        str(file).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for file in files
        if file.suffix == ".py" and file.parts[0] == "weighbridge"
    )
    for name in modules:
        importlib.import_module(name)
    samples = importlib.resources.files("weighbridge.examples")
    missing = [
        name
        for name in ("documents/tickets.jsonl", "schemas/triage.json")
        if not (samples / name).is_file()
    ]
    layers = {name.split(".")[1] for name in modules if "." in name}
    wanted = {"scorer", "db", "tasks", "flows", "deployments"}
    if missing or not wanted <= layers:
        print(f"missing: {missing + sorted(wanted - layers)}", file=sys.stderr)
        return 1
    print(f"{len(modules)} modules imported")
    return 0


if __name__ == "__main__":
    sys.exit(main())
