"""Migrations of our own tables, which stand beside Optuna's."""
