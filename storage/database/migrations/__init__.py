"""Migrations of hpsearch's own tables, in the same database as Optuna's."""
