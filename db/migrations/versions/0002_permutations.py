"""Orders of the choices: how many a run asked in, how often they disagreed. Cache hits.

Revision ID: 0002
Revises: 0001
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Only additions: what an older run did not measure stays unknown, and it asked in one order.
    op.add_column(
        "run",
        sa.Column("permutations", sa.Integer(), server_default=sa.text("1"), nullable=False),
    )
    op.add_column("answer", sa.Column("flip_rate", sa.Float(), nullable=True))
    op.add_column("batch", sa.Column("resident_tokens", sa.Integer(), nullable=True))
    op.add_column("batch", sa.Column("resident_hits", sa.Integer(), nullable=True))


def downgrade() -> None:
    raise NotImplementedError("restore the copy that the upgrade kept")
