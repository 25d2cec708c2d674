"""Commands on the files of a checkpoint: whether they are whole, and merging an adapter."""

import signal
import sys
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from weighbridge.deployments.cli.options import JsonOption
from weighbridge.deployments.console import (
    Column,
    answer_console,
    print_answer,
    print_hint,
    print_json,
    print_note,
    print_table,
)
from weighbridge.deployments.errors import CommandError

if TYPE_CHECKING:
    from weighbridge.scorer.adapters import Adapter
    from weighbridge.scorer.verify import FileCheck

_SHOWN = 12  # digits of a hash
_TOLD = {"adapter": "the adapter", "prompt_sha256": "the system text"}


def verify(
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A folder, or a hub id as org/name or org/name@revision; the setting if left out.",
            show_default=False,
        ),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(
            "--adapter",
            metavar="FOLDER",
            help="The adapter that was merged into it, or that is to be.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare the files of a checkpoint with the hashes written beside them.

    READY.json lists hashes of the weights, of the adapter merged into them and
    of the system text. Ends with 1 when something differs, or when nothing is
    written down.

    Example: weighbridge checkpoint verify ~/models/nimble-9b
    """
    from weighbridge.scorer.adapters import check_not_swapped, read_adapter
    from weighbridge.tasks.checkpoints import hash_cache, resolve_adapter, resolve_checkpoint
    from weighbridge.tasks.settings import load_settings

    settings = load_settings(checkpoint=checkpoint, adapter=adapter)
    folder = resolve_checkpoint(checkpoint, settings, say=print_note).folder
    named = resolve_adapter(adapter, checkpoint, settings, say=print_note)
    check_not_swapped(folder, named.folder if named else None)
    lora = read_adapter(named.folder) if named else None
    checks = _checks(folder, lora, hash_cache(settings))
    if as_json:
        print_json([asdict(check) for check in checks])
    elif checks:
        print_table(
            [Column(name) for name in ("state", "file", "expected", "found", "note")],
            [_row(check, narrow=answer_console().is_terminal) for check in checks],
        )
    _judge(folder, checks, lora)


def _row(check: "FileCheck", *, narrow: bool) -> dict[str, Any]:
    row = {
        **asdict(check),
        "expected": (check.expected or "-")[:_SHOWN],
        "found": (check.found or "-")[:_SHOWN],
    }
    if narrow and Path(check.file).is_absolute():
        # A path would be broken in its middle; whoever named the adapter knows its folder.
        row["file"] = Path(check.file).name
    return row


def _checks(folder: Path, adapter: "Adapter | None", hashes: Path) -> "tuple[FileCheck, ...]":
    """Verify a folder; one that is no checkpoint and has no hashes is told as what it is."""
    from weighbridge.scorer.checkpoint_folder import check_folder
    from weighbridge.scorer.verify import verify_checkpoint

    checks = verify_checkpoint(folder, adapter, hash_cache=hashes) if folder.is_dir() else ()
    if not any(check.expected for check in checks):
        check_folder(folder)
    return checks


def _judge(folder: Path, checks: "tuple[FileCheck, ...]", adapter: "Adapter | None") -> None:
    if all(check.state == "unchecked" for check in checks):
        if told := [check.file for check in checks if check.expected]:
            raise CommandError(
                "a checkpoint must hold something of what its hashes are of, got hashes of "
                f"{' and '.join(_TOLD.get(file, file) for file in told)} alone in {folder}",
                hint="name the adapter that was merged: --adapter FOLDER"
                if "adapter" in told
                else "READY.json of a release lists its weights too",
            )
        raise CommandError(
            f"a checkpoint must come with hashes to be verified, got none in {folder}",
            hint="READY.json of a release has them; weighbridge checkpoint fuse writes them",
        )
    bad = Counter(check.state for check in checks if not check.ok)
    if not bad:
        return
    if adapter is not None and [check.file for check in checks if not check.ok] == [
        str(adapter.weights)
    ]:
        raise CommandError(
            f"the adapter must be the one that was merged into {folder}, got another one in "
            f"{adapter.folder}",
            hint="name the adapter that was merged; nothing else differs",
        )
    counts = ", ".join(f"{count} {state}" for state, count in bad.items())
    raise CommandError(
        f"a checkpoint must be what is written down of it: {counts}, of {len(checks)} in {folder}",
        hint="fetch them again from where the checkpoint came from; --json tells the whole hashes",
    )


def fuse(
    base: Annotated[
        str,
        typer.Argument(
            metavar="BASE",
            help="The checkpoint that the adapter was trained on: a folder or a hub id.",
            show_default=False,
        ),
    ],
    adapter: Annotated[
        str,
        typer.Argument(
            metavar="ADAPTER",
            help="A LoRA adapter of mlx or PEFT: a folder or a hub id.",
            show_default=False,
        ),
    ],
    out: Annotated[
        str,
        typer.Argument(
            metavar="OUT", help="The merged folder; must not exist.", show_default=False
        ),
    ],
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(
            metavar="DTYPE",
            help="Of the merged weights: bfloat16, float16 or float32; the base's if left out.",
            show_default=False,
        ),
    ] = None,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait",
            help="Wait while another program holds a model; an idle worker gives it up.",
        ),
    ] = False,
    anyway: Annotated[
        bool,
        typer.Option("--anyway", help="Load a second model beside that of another program."),
    ] = False,
) -> None:
    """Merge an adapter into its base, as a new checkpoint folder with READY.json.

    The folder appears when all of it is written. In the dtype it is written in
    it scores as the base with --adapter does, and it starts faster.

    Example: weighbridge checkpoint fuse ~/models/base ~/my-adapter ~/models/mine
    """
    from weighbridge.scorer.adapters import check_not_swapped, read_adapter
    from weighbridge.scorer.checkpoint import inspect_checkpoint
    from weighbridge.scorer.errors import CheckpointError
    from weighbridge.scorer.fusing import check_not_merged, fuse_checkpoint
    from weighbridge.tasks.checkpoints import hash_cache, resolve_adapter, resolve_checkpoint
    from weighbridge.tasks.lease import AcceleratorBusy, LeasePolicy, set_policy
    from weighbridge.tasks.loading import take_accelerator
    from weighbridge.tasks.settings import load_settings

    if wait and anyway:
        raise typer.BadParameter("--wait and --anyway are two ways, name one of them")
    settings = load_settings(checkpoint=base)
    named = resolve_checkpoint(base, settings, say=print_note)
    found = resolve_adapter(adapter, base, settings, say=print_note)
    hashes = hash_cache(settings)
    if found is None:  # a blank name
        raise CommandError("an adapter must be named, got a blank", hint="give its folder")
    check_not_swapped(named.folder, found.folder)
    lora = read_adapter(found.folder)
    if named.folder.is_dir():
        check_not_merged(named.folder, lora, hashes)
    try:
        described = inspect_checkpoint(
            named.folder,
            adapter=found.folder,
            model_id=named.model_id,
            revision=named.revision,
            hash_cache=hashes,
            # Nothing is scored: consent is asked for when the merged folder is used.
            accept_prompt=True,
        )
    except CheckpointError as error:
        raise CheckpointError(error.message, hint=_as_argument(error.hint)) from error
    for note in described.notes:
        print_hint(note)
    set_policy(
        LeasePolicy.SHARE if anyway else LeasePolicy.WAIT if wait else LeasePolicy.REFUSE,
        what="weighbridge command",
    )
    with _ending_on_sigterm():
        try:
            take_accelerator(described.name, say=print_note)
        except AcceleratorBusy as busy:
            raise CommandError(
                busy.message,
                hint="wait for it with --wait, or load a second model with --anyway",
            ) from busy
        merged = fuse_checkpoint(described, Path(out), dtype=dtype, progress=print_note)
    print_answer(str(merged))


def _as_argument(hint: str | None) -> str | None:
    """Word a hint for a command that takes the adapter as an argument."""
    if hint is None:
        return None
    return hint.replace("with --adapter ", "as ADAPTER: ").replace("add --adapter ", "as ADAPTER ")


@contextmanager
def _ending_on_sigterm() -> Generator[None]:
    """End on SIGTERM as on Ctrl-C, so that what was begun is cleaned up."""

    def end(number: int, frame: FrameType | None) -> None:
        del frame
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        # None stands for a handler that Python knows nothing of.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
