"""MLflow's model registry: versions of registered models, their tags and aliases."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpsearch.storage.errors import StorageError
from hpsearch.storage.mlflow.client import list_model_ids
from hpsearch.storage.mlflow.health import get_or_none, iterate_pages, mlflow_request

if TYPE_CHECKING:
    from mlflow import MlflowClient

CHAMPION = "champion"

DESCRIPTION_LIMIT = 5000  # characters; the size of MLflow's column
TAG_LIMIT = 8000

_MAX_ALIAS = 255  # characters
_MAX_MODEL_NAME = 256
_MODEL_ID = re.compile(r"\bm-[0-9a-f]{32}\b")


@dataclass(frozen=True)
class Version:
    """One version of a registered model.

    Attributes:
        model: the name of the registered model.
        number: the version number, from 1; MLflow never reuses one.
        run_id: the id of the model's run; None if MLflow does not store it.
        model_id: the id of the logged model; None if the version was registered from files.
        user: the user who registered the version; None if the server has no user accounts.
        tags: the tags of the version.
        description: the description of the version, in Markdown.
    """

    model: str
    number: int
    run_id: str | None
    model_id: str | None
    user: str | None
    tags: Mapping[str, str]
    description: str

    @property
    def uri(self) -> str:
        """The model URI of the version, such as ``models:/digits/3``."""
        return f"models:/{self.model}/{self.number}"


def previous_alias(alias: str) -> str:
    """Return the alias for the version to which `alias` pointed before its last move.

    It is ``previous`` for ``champion``, and ``previous-x`` for ``x``.
    """
    return "previous" if alias == CHAMPION else f"previous-{alias}"


def is_previous(alias: str) -> bool:
    """Return whether an alias has the form of the aliases that `previous_alias` returns."""
    return alias == "previous" or alias.startswith("previous-")


def check_alias(alias: str) -> None:
    """Check that MLflow accepts an alias.

    Raises:
        StorageError: MLflow or hpsearch reserves the alias, or it has invalid characters.
    """
    setting = f"--alias {alias!r}"
    if not isinstance(alias, str) or not re.fullmatch(r"[\w-]+", alias) or len(alias) > _MAX_ALIAS:
        raise StorageError(f"{setting}: an alias contains only letters, digits, - and _, such as champion")
    if is_previous(alias):
        raise StorageError(f"{setting} is reserved for replaced versions; choose another alias, such as {CHAMPION}")
    if alias.lower() == "latest" or re.fullmatch(r"[vV]\d+", alias):
        raise StorageError(f"{setting}: MLflow reserves 'latest' and names like 'v3'; choose another alias")


def check_model_name(name: str) -> None:
    """Check that MLflow accepts a name of a registered model.

    Raises:
        StorageError: the name is empty, too long, or has invalid characters.
    """
    is_short = isinstance(name, str) and name.strip() and len(name) <= _MAX_MODEL_NAME
    if not is_short or not name.isprintable() or set(name) & set('/:"') or name in {".", ".."}:
        raise StorageError(
            f"--model {name!r} must have 1 to {_MAX_MODEL_NAME} printable characters without / : and quotes; "
            "choose another"
        )


class Registry:
    """The model registry of one MLflow server.

    Every method raises `StorageError` if the server is unavailable or rejects the request.
    """

    def __init__(self, client: MlflowClient) -> None:
        self._client = client

    def list_aliases(self) -> dict[tuple[str, str], int]:
        """Return the version number of each alias of all models, by (model, alias); one request per thousand models."""
        with mlflow_request("list its models"):
            models = list(iterate_pages(self._client.search_registered_models))
        return {(model.name, alias): int(version) for model in models for alias, version in model.aliases.items()}

    def get_version(self, model: str, number: int) -> Version | None:
        """Return a version of a registered model; None if the version does not exist."""
        with mlflow_request(f"look up version {number} of {model!r}"):
            found = get_or_none(self._client.get_model_version, model, str(number))
        return None if found is None else _to_version(found)

    def get_version_by_alias(self, model: str, alias: str) -> Version | None:
        """Return the version of a registered model with an alias; None if the model has no such alias."""
        with mlflow_request(f"look up {model}@{alias}"):
            # MLflow answers a request for a missing alias with INVALID_PARAMETER_VALUE.
            missing = "INVALID_PARAMETER_VALUE"
            found = get_or_none(self._client.get_model_version_by_alias, model, alias, also_ignored=missing)
        return None if found is None else _to_version(found)

    def list_versions_of_runs(self, run_ids: list[str]) -> list[Version]:
        """Return all registered versions whose models are from these runs."""
        found: list[Version] = []
        for start in range(0, len(run_ids), 100):
            names = ", ".join(f"'{run_id}'" for run_id in run_ids[start : start + 100])
            with mlflow_request("list the versions of its models"):
                found += map(_to_version, iterate_pages(self._client.search_model_versions, f"run_id IN ({names})"))
        return found

    def find_registrable_model(self, run_id: str) -> str | None:
        """Return the id of a run's logged model whose files are complete; None if the run has no such model."""
        with mlflow_request(f"look up run {run_id}"):
            run = get_or_none(self._client.get_run, run_id)
        if run is None:
            return None
        for model_id in list_model_ids(run):
            with mlflow_request(f"look up the model of run {run_id}"):
                if (model := get_or_none(self._client.get_logged_model, model_id)) and str(model.status) == "READY":
                    return str(model_id)
        return None

    def has_run(self, run_id: str) -> bool:
        """Return whether this server has a run, deleted or not; if not, another server may have tracked the run."""
        with mlflow_request(f"look up run {run_id}"):
            return get_or_none(self._client.get_run, run_id) is not None

    def register(self, model: str, model_id: str, run_id: str, *, tags: Mapping[str, str]) -> Version:
        """Register a logged model as a version of a registered model, and return the version.

        A missing registered model is created. If the logged model is already registered, the existing version is
        returned.

        Args:
            model: the name of the registered model.
            model_id: the id of the logged model.
            run_id: the id of the logged model's run.
            tags: the tags of a new version.
        """
        for version in self.list_versions_of_runs([run_id]):
            if version.model == model and version.model_id == model_id:
                return version
        with mlflow_request(f"register {model!r}"):
            get_or_none(self._client.create_registered_model, model, also_ignored="RESOURCE_ALREADY_EXISTS")
            created = self._client.create_model_version(
                model,
                source=f"models:/{model_id}",
                run_id=run_id,
                model_id=model_id,
                tags={key: value[:TAG_LIMIT] for key, value in tags.items()},
                await_creation_for=60,
            )
        return _to_version(created)

    def update_version(self, version: Version, *, tags: Mapping[str, str], description: str) -> None:
        """Set tags and description of a version if they differ; existing tags that are not in `tags` are kept."""
        number = str(version.number)
        with mlflow_request(f"write the tags of version {number} of {version.model!r}"):
            for key, value in tags.items():
                if version.tags.get(key) != value[:TAG_LIMIT]:
                    self._client.set_model_version_tag(version.model, number, key, value[:TAG_LIMIT])
            if version.description != description:
                self._client.update_model_version(version.model, number, description[:DESCRIPTION_LIMIT])

    def set_alias(self, version: Version, alias: str) -> None:
        """Let an alias point to a version; if it pointed to another version before, it is moved."""
        with mlflow_request(f"set alias {alias!r} of {version.model!r}"):
            self._client.set_registered_model_alias(version.model, alias, str(version.number))


def _to_version(entity: Any) -> Version:
    # The UI registers the location of a model's files, other clients `models:/m-...`; both contain the model's id.
    match = _MODEL_ID.search(entity.source or "")
    return Version(
        model=str(entity.name),
        number=int(entity.version),
        run_id=entity.run_id or None,
        model_id=entity.model_id or (match[0] if match else None),
        user=entity.user_id or None,
        tags=dict(entity.tags),
        description=entity.description or "",
    )
