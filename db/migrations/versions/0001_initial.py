"""The tables of the first release.

Written out, not taken from `tables.py`: that file will move on and this one must not.

Revision ID: 0001
Revises:
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "checkpoint",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("fingerprint", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("model_id", sa.String(), nullable=True),
        sa.Column("revision", sa.String(), nullable=True),
        sa.Column("architecture", sa.String(), nullable=True),
        sa.Column("dtype", sa.String(), nullable=True),
        sa.Column("quantization", sa.String(), nullable=True),
        sa.Column("adapter_sha256", sa.String(), nullable=True),
        sa.Column("contract", sa.String(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_checkpoint")),
        sa.UniqueConstraint("fingerprint", name=op.f("uq_checkpoint_fingerprint")),
    )
    op.create_table(
        "document",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("characters", sa.Integer(), nullable=False),
        sa.Column("text", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_document")),
        sa.UniqueConstraint("sha256", name=op.f("uq_document_sha256")),
    )
    op.create_table(
        "scaling",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("temperature", sa.Float(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_scaling")),
        sa.UniqueConstraint("temperature", name=op.f("uq_scaling_temperature")),
    )
    op.create_table(
        "schema_version",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("canonical", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_schema_version")),
        sa.UniqueConstraint("sha256", name=op.f("uq_schema_version_sha256")),
    )
    op.create_table(
        "run",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("flow_run_id", sa.String(), nullable=True),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("host", sa.String(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("resumed_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("schema_version_id", sa.Integer(), nullable=False),
        sa.Column("schema_name", sa.String(), nullable=False),
        sa.Column("checkpoint_id", sa.Integer(), nullable=False),
        sa.Column("scaling_id", sa.Integer(), nullable=False),
        sa.Column("temperature", sa.Float(), nullable=False),
        sa.Column("temperature_kind", sa.String(), nullable=False),
        sa.Column("temperature_source", sa.Text(), nullable=False),
        sa.Column("documents_source", sa.Text(), nullable=False),
        sa.Column("mode", sa.String(), nullable=False),
        sa.Column("layout", sa.String(), nullable=False),
        sa.Column("encoding", sa.String(), nullable=False),
        sa.Column("contract", sa.String(), nullable=False),
        sa.Column("dtype", sa.String(), nullable=False),
        sa.Column("prompt_version", sa.String(), nullable=False),
        sa.Column("max_input_tokens", sa.Integer(), nullable=False),
        sa.Column("backend", sa.String(), nullable=False),
        sa.Column("versions", sa.JSON(), nullable=False),
        sa.Column("store_text", sa.Boolean(), nullable=False),
        sa.Column("rescore", sa.Boolean(), nullable=False),
        sa.Column("documents", sa.Integer(), nullable=False),
        sa.Column("scored", sa.Integer(), nullable=False),
        sa.Column("reused", sa.Integer(), nullable=False),
        sa.Column("rejected", sa.Integer(), nullable=False),
        sa.Column("wasted", sa.Integer(), nullable=False),
        sa.CheckConstraint(
            "status IN ('running', 'completed', 'failed', 'cancelled', 'crashed')",
            name=op.f("ck_run_status"),
        ),
        sa.CheckConstraint(
            "documents = scored + reused + rejected", name=op.f("ck_run_accounting")
        ),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoint.id"], name=op.f("fk_run_checkpoint_id")
        ),
        sa.ForeignKeyConstraint(["scaling_id"], ["scaling.id"], name=op.f("fk_run_scaling_id")),
        sa.ForeignKeyConstraint(
            ["schema_version_id"], ["schema_version.id"], name=op.f("fk_run_schema_version_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_run")),
        sa.UniqueConstraint("flow_run_id", name=op.f("uq_run_flow_run_id")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_run_status"), "run", ["status"], unique=False)
    op.create_table(
        "batch",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("recorded_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("mode", sa.String(), nullable=False),
        sa.Column("backend", sa.String(), nullable=False),
        sa.Column("scored", sa.Integer(), nullable=False),
        sa.Column("reused", sa.Integer(), nullable=False),
        sa.Column("rejected", sa.Integer(), nullable=False),
        sa.Column("wasted", sa.Integer(), nullable=False),
        sa.Column("prefill_seconds", sa.Float(), nullable=True),
        sa.Column("branch_seconds", sa.Float(), nullable=True),
        sa.Column("total_seconds", sa.Float(), nullable=True),
        sa.Column("prefix_tokens", sa.Integer(), nullable=True),
        sa.Column("suffix_tokens", sa.Integer(), nullable=True),
        sa.Column("prefills", sa.Integer(), nullable=True),
        sa.Column("start_bytes", sa.Integer(), nullable=True),
        sa.Column("peak_bytes", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_batch_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batch")),
    )
    op.create_index(op.f("ix_batch_run_id"), "batch", ["run_id"], unique=False)
    op.create_table(
        "claim",
        sa.Column("document_sha256", sa.String(), nullable=False),
        sa.Column("schema_version_id", sa.Integer(), nullable=False),
        sa.Column("checkpoint_id", sa.Integer(), nullable=False),
        sa.Column("dtype", sa.String(), nullable=False),
        sa.Column("prompt_version", sa.String(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("host", sa.String(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("claimed_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoint.id"], name=op.f("fk_claim_checkpoint_id")
        ),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_claim_run_id")),
        sa.ForeignKeyConstraint(
            ["schema_version_id"], ["schema_version.id"], name=op.f("fk_claim_schema_version_id")
        ),
        sa.PrimaryKeyConstraint(
            "document_sha256",
            "schema_version_id",
            "checkpoint_id",
            "dtype",
            "prompt_version",
            name=op.f("pk_claim"),
        ),
    )
    op.create_index(op.f("ix_claim_run_id"), "claim", ["run_id"], unique=False)
    op.create_table(
        "decision",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("document_id", sa.Integer(), nullable=False),
        sa.Column("schema_version_id", sa.Integer(), nullable=False),
        sa.Column("checkpoint_id", sa.Integer(), nullable=False),
        sa.Column("dtype", sa.String(), nullable=False),
        sa.Column("prompt_version", sa.String(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("batch_id", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["batch_id"], ["batch.id"], name=op.f("fk_decision_batch_id")),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoint.id"], name=op.f("fk_decision_checkpoint_id")
        ),
        sa.ForeignKeyConstraint(
            ["document_id"], ["document.id"], name=op.f("fk_decision_document_id")
        ),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_decision_run_id")),
        sa.ForeignKeyConstraint(
            ["schema_version_id"], ["schema_version.id"], name=op.f("fk_decision_schema_version_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_decision")),
        sa.UniqueConstraint(
            "document_id",
            "schema_version_id",
            "checkpoint_id",
            "dtype",
            "prompt_version",
            "generation",
            name="uq_decision_key",
        ),
    )
    op.create_table(
        "answer",
        sa.Column("decision_id", sa.Integer(), nullable=False),
        sa.Column("field_position", sa.Integer(), nullable=False),
        sa.Column("field", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("selected", sa.Integer(), nullable=False),
        sa.Column("value", sa.String(), nullable=False),
        sa.Column("margin", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(
            ["decision_id"], ["decision.id"], name=op.f("fk_answer_decision_id")
        ),
        sa.PrimaryKeyConstraint("decision_id", "field_position", name=op.f("pk_answer")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "item",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("batch_id", sa.Integer(), nullable=False),
        sa.Column("line", sa.Integer(), nullable=True),
        sa.Column("external_id", sa.String(), nullable=True),
        sa.Column("metadata", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("document_id", sa.Integer(), nullable=True),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("wasted", sa.Boolean(), nullable=False),
        sa.Column("code", sa.String(), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("decision_id", sa.Integer(), nullable=True),
        sa.CheckConstraint("(status = 'rejected') = (code IS NOT NULL)", name=op.f("ck_item_code")),
        sa.CheckConstraint(
            "(status = 'rejected') = (decision_id IS NULL)", name=op.f("ck_item_decision")
        ),
        sa.CheckConstraint(
            "status IN ('scored', 'reused', 'rejected')", name=op.f("ck_item_status")
        ),
        sa.ForeignKeyConstraint(["batch_id"], ["batch.id"], name=op.f("fk_item_batch_id")),
        sa.ForeignKeyConstraint(["decision_id"], ["decision.id"], name=op.f("fk_item_decision_id")),
        sa.ForeignKeyConstraint(["document_id"], ["document.id"], name=op.f("fk_item_document_id")),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_item_run_id")),
        sa.PrimaryKeyConstraint("run_id", "position", name=op.f("pk_item")),
        sqlite_with_rowid=False,
    )
    op.create_index(op.f("ix_item_decision_id"), "item", ["decision_id"], unique=False)
    op.create_table(
        "answer_choice",
        sa.Column("decision_id", sa.Integer(), nullable=False),
        sa.Column("field_position", sa.Integer(), nullable=False),
        sa.Column("choice_position", sa.Integer(), nullable=False),
        sa.Column("choice", sa.String(), nullable=False),
        sa.Column("logit", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["decision_id", "field_position"],
            ["answer.decision_id", "answer.field_position"],
            name=op.f("fk_answer_choice_decision_id"),
        ),
        sa.PrimaryKeyConstraint(
            "decision_id", "field_position", "choice_position", name=op.f("pk_answer_choice")
        ),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "answer_probability",
        sa.Column("scaling_id", sa.Integer(), nullable=False),
        sa.Column("decision_id", sa.Integer(), nullable=False),
        sa.Column("field_position", sa.Integer(), nullable=False),
        sa.Column("field", sa.String(), nullable=False),
        sa.Column("probability", sa.Float(), nullable=False),
        sa.Column("expected_value", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(
            ["decision_id", "field_position"],
            ["answer.decision_id", "answer.field_position"],
            name=op.f("fk_answer_probability_decision_id"),
        ),
        sa.ForeignKeyConstraint(
            ["scaling_id"], ["scaling.id"], name=op.f("fk_answer_probability_scaling_id")
        ),
        sa.PrimaryKeyConstraint(
            "scaling_id", "decision_id", "field_position", name=op.f("pk_answer_probability")
        ),
        sqlite_with_rowid=False,
    )
    op.create_index(
        "ix_answer_probability_field",
        "answer_probability",
        ["scaling_id", "field", "probability"],
        unique=False,
    )
    op.create_table(
        "choice_probability",
        sa.Column("scaling_id", sa.Integer(), nullable=False),
        sa.Column("decision_id", sa.Integer(), nullable=False),
        sa.Column("field_position", sa.Integer(), nullable=False),
        sa.Column("choice_position", sa.Integer(), nullable=False),
        sa.Column("probability", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["decision_id", "field_position", "choice_position"],
            [
                "answer_choice.decision_id",
                "answer_choice.field_position",
                "answer_choice.choice_position",
            ],
            name=op.f("fk_choice_probability_decision_id"),
        ),
        sa.ForeignKeyConstraint(
            ["scaling_id"], ["scaling.id"], name=op.f("fk_choice_probability_scaling_id")
        ),
        sa.PrimaryKeyConstraint(
            "scaling_id",
            "decision_id",
            "field_position",
            "choice_position",
            name=op.f("pk_choice_probability"),
        ),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    raise NotImplementedError("restore the copy that the upgrade kept")
