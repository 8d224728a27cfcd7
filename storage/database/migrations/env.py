"""Alembic's entry point: runs the migrations on the connection of `hpsearch.storage.database.migrate`."""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    # Optuna's version table in the same database has Alembic's default name.
    version_table="hpsearch_alembic_version",
    transaction_per_migration=False,
)
with context.begin_transaction():
    context.run_migrations()
