"""MLflow's model registry, by client calls: versions of registered models, their tags, and their aliases."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpsearch.storage.errors import StorageError
from hpsearch.storage.mlflow.client import models_of
from hpsearch.storage.mlflow.health import all_pages, mlflow_request, unless_missing

if TYPE_CHECKING:
    from mlflow import MlflowClient

CHAMPION = "champion"

DESCRIPTION_LIMIT = 5000  # characters; what MLflow's column holds, where Postgres refuses more
TAG_LIMIT = 8000

_LONGEST_ALIAS = 255
_LONGEST_MODEL = 256
_MODEL_ID = re.compile(r"\bm-[0-9a-f]{32}\b")


@dataclass(frozen=True)
class Version:
    """One version of a registered model.

    Attributes:
        model: name of the registered model.
        number: from 1; MLflow gives none twice.
        run_id: the run whose model it is; None where MLflow does not know.
        model_id: the logged model that it is; None for one that was registered from files.
        user: who registered it, where the server knows users.
        tags: of the version.
        description: of the version, in Markdown.
    """

    model: str
    number: int
    run_id: str | None
    model_id: str | None
    user: str | None
    tags: Mapping[str, str]
    description: str

    @property
    def address(self) -> str:
        """How the version is loaded: ``models:/digits/3``."""
        return f"models:/{self.model}/{self.number}"


def previous_alias(alias: str) -> str:
    """Return the alias that a replaced version gets: ``previous`` for ``champion``, ``previous-x`` for ``x``."""
    return "previous" if alias == CHAMPION else f"previous-{alias}"


def is_previous(alias: str) -> bool:
    """Whether an alias only says what another named before."""
    return alias == "previous" or alias.startswith("previous-")


def check_alias(alias: str) -> None:
    """Refuse, before anything is done, an alias that MLflow refuses.

    Raises:
        StorageError: it does.
    """
    head = f"--alias {alias!r}"
    if not re.fullmatch(r"[\w-]+", alias) or len(alias) > _LONGEST_ALIAS:
        raise StorageError(f"{head}: an alias is made of letters, digits, - and _: choose another, such as champion")
    if is_previous(alias):
        raise StorageError(f"{head}: that is for the version before: choose another, such as {CHAMPION}")
    if alias.lower() == "latest" or re.fullmatch(r"[vV]\d+", alias):
        raise StorageError(f"{head}: MLflow keeps 'latest' and names like 'v3' for itself: choose another")


def check_model_name(name: str) -> None:
    """Refuse, before anything is done, a name of a registered model that MLflow refuses.

    Raises:
        StorageError: it does.
    """
    if not name.strip() or len(name) > _LONGEST_MODEL or set(name) & set('/:"') or name in {".", ".."}:
        raise StorageError(
            f"--model {name!r}: a registered model's name has up to {_LONGEST_MODEL} characters, none of / : \": "
            "choose another"
        )


class Registry:
    """The model registry of one MLflow server.

    Every method raises `StorageError`, in one line, when the server is away or refuses.
    """

    def __init__(self, client: MlflowClient) -> None:
        self._client = client

    def aliases(self) -> dict[tuple[str, str], int]:
        """Return what every alias names, (model, alias) to version: one request for a thousand models."""
        with mlflow_request("list its models"):
            models = list(all_pages(self._client.search_registered_models))
        return {(model.name, alias): int(version) for model in models for alias, version in model.aliases.items()}

    def version(self, model: str, number: int) -> Version | None:
        """Return a version, or None where there is none of that number."""
        with mlflow_request(f"look up version {number} of {model!r}"):
            found = unless_missing(self._client.get_model_version, model, str(number))
        return None if found is None else _version(found)

    def version_by_alias(self, model: str, alias: str) -> Version | None:
        """Return the version that an alias names, or None."""
        with mlflow_request(f"look up {model}@{alias}"):
            # Of an alias that is not there MLflow says that the request is invalid.
            found = unless_missing(
                self._client.get_model_version_by_alias, model, alias, also="INVALID_PARAMETER_VALUE"
            )
        return None if found is None else _version(found)

    def versions_of_runs(self, run_ids: list[str]) -> list[Version]:
        """Return all versions that are models of these runs."""
        found: list[Version] = []
        for start in range(0, len(run_ids), 100):
            names = ", ".join(f"'{run_id}'" for run_id in run_ids[start : start + 100])
            with mlflow_request("list the versions of its models"):
                found += map(_version, all_pages(self._client.search_model_versions, f"run_id IN ({names})"))
        return found

    def model_of(self, run_id: str) -> str | None:
        """Return the logged model of a run that can be registered, or None."""
        with mlflow_request(f"look up run {run_id}"):
            run = unless_missing(self._client.get_run, run_id)
        if run is None:
            return None
        for model_id in models_of(run):
            with mlflow_request(f"look up the model of run {run_id}"):
                if (model := unless_missing(self._client.get_logged_model, model_id)) and str(model.status) == "READY":
                    return str(model_id)
        return None

    def knows_run(self, run_id: str) -> bool:
        """Whether this server has, or had, a run: a study may have been tracked by another one."""
        with mlflow_request(f"look up run {run_id}"):
            return unless_missing(self._client.get_run, run_id) is not None

    def register(self, model: str, model_id: str, run_id: str, *, tags: Mapping[str, str]) -> Version:
        """Return the version of a registered model that a logged model is, made unless it is there.

        Args:
            model: name of the registered model, made unless it is there.
            model_id: the logged model.
            run_id: the run that it is of.
            tags: of a new version.
        """
        for version in self.versions_of_runs([run_id]):
            if version.model == model and version.model_id == model_id:
                return version
        with mlflow_request(f"register {model!r}"):
            unless_missing(self._client.create_registered_model, model, also="RESOURCE_ALREADY_EXISTS")
            made = self._client.create_model_version(
                model,
                source=f"models:/{model_id}",
                run_id=run_id,
                model_id=model_id,
                tags={key: value[:TAG_LIMIT] for key, value in tags.items()},
                await_creation_for=60,
            )
        return _version(made)

    def describe(self, version: Version, *, tags: Mapping[str, str], description: str) -> None:
        """Set a version's tags and description, where they are not so already; tags of others stay."""
        number = str(version.number)
        with mlflow_request(f"write the tags of version {number} of {version.model!r}"):
            for key, value in tags.items():
                if version.tags.get(key) != value[:TAG_LIMIT]:
                    self._client.set_model_version_tag(version.model, number, key, value[:TAG_LIMIT])
            if version.description != description:
                self._client.update_model_version(version.model, number, description[:DESCRIPTION_LIMIT])

    def set_alias(self, version: Version, alias: str) -> None:
        """Let an alias name a version, and no longer what it named before."""
        with mlflow_request(f"set alias {alias!r} of {version.model!r}"):
            self._client.set_registered_model_alias(version.model, alias, str(version.number))


def _version(found: Any) -> Version:
    # The UI registers the place of a model's files, everyone else `models:/m-...`: both hold the model's id.
    match = _MODEL_ID.search(found.source or "")
    return Version(
        model=str(found.name),
        number=int(found.version),
        run_id=found.run_id or None,
        model_id=found.model_id or (match[0] if match else None),
        user=found.user_id or None,
        tags=dict(found.tags),
        description=found.description or "",
    )
