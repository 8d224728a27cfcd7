"""Alembic's entry point: runs the migrations on the connection that `hpsearch.storage.database.migrate` gives."""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    # Optuna has a version table of Alembic's default name in the same database.
    version_table="hpsearch_alembic_version",
    transaction_per_migration=False,
)
with context.begin_transaction():
    context.run_migrations()
