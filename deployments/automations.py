"""What the server does by itself about our runs, as code."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import UUID

from weighbridge.deployments.errors import CommandError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.events import Automation, AutomationCore

ZOMBIES = "weighbridge: crash runs without a heartbeat"
REJECTED = "weighbridge: notify when many documents are rejected"

# Prefect sends a heartbeat every 180 s unless a worker is set to another frequency. A run has
# to miss three of them, so that a server which was away for a moment crashes nothing.
SILENCE = timedelta(minutes=10)

_HEARTBEAT = "prefect.flow-run.heartbeat"


@dataclass(frozen=True, slots=True)
class AppliedAutomation:
    """An automation as it is on the server now.

    Attributes:
        name: Its name.
        id: Its id.
        made: Whether it was not there before.
        changed: Whether it is another one than before.
        enabled: Whether it is switched on.
    """

    name: str
    id: UUID
    made: bool
    changed: bool
    enabled: bool


def zombie_automation(flow_id: UUID, *, silence: timedelta = SILENCE) -> "AutomationCore":
    """Say that a run of our flow is `Crashed` when nothing is heard of it any more.

    A worker that starts again does so for its own host at once; this is for one that does not
    come back. Until then the run would be `Running`, and hold the slot of its deployment.

    Args:
        flow_id: Of the flow `score-documents`, whatever deployment its runs are of.
        silence: For how long nothing must be heard.
    """
    from prefect.client.schemas.objects import StateType
    from prefect.events import AutomationCore, EventTrigger, Posture, ResourceSpecification
    from prefect.events.actions import ChangeFlowRunState

    return AutomationCore(
        name=ZOMBIES,
        description="Made by weighbridge deploy. A run that sends no heartbeat and ends in no "
        f"other way for {silence} is marked Crashed; a new run reuses what it has recorded.",
        trigger=EventTrigger(
            after={_HEARTBEAT},
            # Any sign of life: also of a run that a worker put back before it ended.
            expect={"prefect.flow-run.*"},
            match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
            match_related=ResourceSpecification(
                {"prefect.resource.role": "flow", "prefect.resource.id": f"prefect.flow.{flow_id}"}
            ),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=silence,
        ),
        actions=[
            ChangeFlowRunState(
                name=None,
                state=StateType.CRASHED,
                force=False,
                message=f"No heartbeat for {silence}: the process of this run is gone.",
            )
        ],
    )


def rejected_automation(block_id: UUID) -> "AutomationCore":
    """Say that people are told when a run has rejected more than the share it was given.

    Args:
        block_id: The notification block that knows how to reach them.
    """
    from prefect.events import AutomationCore, EventTrigger, Posture, ResourceSpecification
    from prefect.events.actions import SendNotification

    from weighbridge.flows.telling import REJECTED_EVENT

    return AutomationCore(
        name=REJECTED,
        description="Made by weighbridge deploy --notify. Runs emit the event when they reject "
        "more than their alert_rejected_share of the documents.",
        trigger=EventTrigger(
            expect={REJECTED_EVENT},
            match=ResourceSpecification({"prefect.resource.id": "weighbridge.run.*"}),
            for_each={"prefect.resource.id"},
            posture=Posture.Reactive,
            threshold=1,
        ),
        actions=[
            SendNotification(
                block_document_id=block_id,
                subject="Weighbridge rejected {{ event.payload.rejected }} of "
                "{{ event.payload.documents }} documents",
                body="{{ event.resource.name }}: {{ event.payload.rejected }} of "
                "{{ event.payload.documents }} documents were rejected.\n"
                "Run {{ event.payload.run_id }}; weighbridge rejected "
                "{{ event.payload.run_id }} says which and why.",
            )
        ],
    )


def apply_automations(
    client: "SyncPrefectClient", wanted: Sequence["AutomationCore"]
) -> list[AppliedAutomation]:
    """Make automations, or bring those of the same name up to date.

    One that was switched off in the UI stays off.
    """
    return [_apply(client, each) for each in wanted]


def find_automation(client: "SyncPrefectClient", name: str) -> "Automation | None":
    """Return our automation of a name, None when there is none."""
    found = client.read_automations_by_name(name)
    return found[0] if found else None


def notification_block(client: "SyncPrefectClient", block: str) -> UUID:
    """Return the id of a block that is named as `type/name`, such as `slack-webhook/ops`.

    Raises:
        CommandError: There is none, or the name is no such name.
    """
    from prefect.exceptions import ObjectNotFound

    kind, _, name = block.partition("/")
    if not kind or not name or "/" in name:
        raise CommandError(
            f"a notification block must be named as TYPE/NAME, got {block!r:.80}",
            hint="such as slack-webhook/ops; prefect block ls shows those that exist",
        )
    try:
        found = client.read_block_document_by_name(name, kind, include_secrets=False)
    except ObjectNotFound as error:
        raise CommandError(
            f"the notification block must exist, and there is no {block!r:.80}",
            hint="prefect block ls shows those that exist; make one in the UI under Blocks",
        ) from error
    return found.id


def _apply(client: "SyncPrefectClient", wanted: "AutomationCore") -> AppliedAutomation:
    existing = find_automation(client, wanted.name)
    if existing is None:
        made = client.create_automation(wanted)
        return AppliedAutomation(wanted.name, made, made=True, changed=True, enabled=True)
    kept = wanted.model_copy(update={"enabled": existing.enabled})
    changed = kept.model_dump(mode="json") != existing.model_dump(mode="json", exclude={"id"})
    if changed:
        client.update_automation(existing.id, kept)
    return AppliedAutomation(
        wanted.name, existing.id, made=False, changed=changed, enabled=existing.enabled
    )
