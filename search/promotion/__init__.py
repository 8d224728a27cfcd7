"""Promotion: test evaluation, registration of models with their evidence, and checks of registered models."""
