"""The Optuna dashboard over a storage that reads little, with the files that MLflow keeps.

Imports: errors, urls, pareto, database, study_storage, mlflow.
"""
