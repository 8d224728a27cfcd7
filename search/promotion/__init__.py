"""Promotion: the test evaluation, promoted models with their evidence, and the check of the served model."""
