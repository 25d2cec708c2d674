"""Where a run's checkpoint came from, and a prompt that was accepted though not the trained one.

Revision ID: 0004
Revises: 0003
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Only additions: an older run did not note its source, and could accept no prompt.
    op.add_column("run", sa.Column("checkpoint_source", sa.Text(), nullable=True))
    op.add_column("run", sa.Column("adapter_source", sa.Text(), nullable=True))
    op.add_column("run", sa.Column("accepted_prompt_sha256", sa.String(), nullable=True))


def downgrade() -> None:
    raise NotImplementedError("restore the copy that the upgrade kept")
