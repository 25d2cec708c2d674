"""Indexes on the document's own id and on the document, to show, forget and prune by them.

Revision ID: 0003
Revises: 0002
"""

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_item_external_id", "item", ["external_id"])
    op.create_index("ix_item_document_id", "item", ["document_id"])


def downgrade() -> None:
    raise NotImplementedError("restore the copy that the upgrade kept")
