"""The manifest for Kubernetes: all fields, also after parsing with the real types."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from hpsearch.search.launch.launch import make_job_name
from tests.search.launch.support import HOME, URL, text

IMAGE = "registry.example:5000/team/hpsearch:0.1.0"


def manifest(**changed: Any) -> Any:
    return yaml.safe_load(text(engine="kubernetes", image=IMAGE, **changed))


def paths(value: Any, at: str = "") -> set[str]:
    """Return every field of a manifest by its path; the items of a list share a path."""
    if isinstance(value, dict):
        return set().union({at}, *(paths(below, f"{at}.{name}") for name, below in value.items()))
    if isinstance(value, list):
        return set().union({at}, *(paths(below, f"{at}[]") for below in value))
    return {at}


def test_the_manifest_equals_the_expected_one() -> None:
    """Compare field by field: a server without validation ignores a misspelt field."""
    labels = {"app.kubernetes.io/name": "hpsearch", "app.kubernetes.io/component": "worker"}
    worker = {
        "name": "worker",
        "image": IMAGE,
        "command": ["hpsearch", "worker", "--study", "wine", "--grace", "85", "--heartbeat", "/tmp/hpsearch/alive"],
        "env": [
            {"name": "HPSEARCH_SECRETS_FOLDER", "value": "/run/secrets/hpsearch"},
            {"name": "HPSEARCH_STORAGE_URL", "value": "postgresql://user@127.0.0.1:1/optuna"},
            {"name": "OMP_NUM_THREADS", "value": "3"},
            {"name": "HOME", "value": "/tmp"},
            {"name": "HPSEARCH_HOME", "value": "/var/lib/hpsearch"},
        ],
        "resources": {
            "requests": {"cpu": "3", "memory": "6Gi"},
            "limits": {"cpu": "3", "memory": "6Gi", "nvidia.com/gpu": "1"},
        },
        "startupProbe": {
            "exec": {"command": ["test", "-e", "/tmp/hpsearch/alive"]},
            "periodSeconds": 10,
            "failureThreshold": 360,
        },
        "livenessProbe": {
            "exec": {"command": ["sh", "-c", "find /tmp/hpsearch/alive -mmin -15 | grep -q ."]},
            "periodSeconds": 60,
            "timeoutSeconds": 10,
            "failureThreshold": 3,
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "secrets", "mountPath": "/run/secrets/hpsearch", "readOnly": True},
            {"name": "home", "mountPath": "/var/lib/hpsearch"},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    assert manifest(workers=7, cpus=3, memory="6G", gpus=1.0, grace=90) == {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "hpsearch-wine", "labels": labels},
        "spec": {
            "completionMode": "Indexed",
            "completions": 7,
            "parallelism": 7,
            "backoffLimitPerIndex": 20,
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "FailJob",
                        "onExitCodes": {"containerName": "worker", "operator": "In", "values": [2, 3]},
                    },
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "restartPolicy": "Never",
                    "terminationGracePeriodSeconds": 90,
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "securityContext": {
                        "runAsNonRoot": True,
                        "fsGroup": 10001,
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                    "containers": [worker],
                    "volumes": [
                        {
                            "name": "secrets",
                            "secret": {"secretName": "hpsearch", "defaultMode": 0o440, "optional": True},
                        },
                        {"name": "home", "emptyDir": {}},
                        {"name": "tmp", "emptyDir": {}},
                        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
                    ],
                },
            },
        },
    }


def test_without_a_url_the_manifest_requires_the_secret() -> None:
    pod = manifest(storage_url=None, home=HOME)["spec"]["template"]["spec"]
    (worker,) = pod["containers"]
    assert pod["volumes"][0]["secret"] == {"secretName": "hpsearch", "defaultMode": 0o440}
    assert "HPSEARCH_STORAGE_URL" not in {variable["name"] for variable in worker["env"]}
    assert "envFrom" not in worker, "a secret is not in the environment of the container"
    assert not [variable for variable in worker["env"] if "valueFrom" in variable]
    assert "limits" in worker["resources"]
    assert "nvidia.com/gpu" not in worker["resources"]["limits"]


def test_a_url_is_passed_unchanged() -> None:
    """Kubernetes replaces $(NAME) in a value; $$( is a plain $(."""
    (worker,) = manifest(storage_url=URL)["spec"]["template"]["spec"]["containers"]
    assert worker["env"][1]["value"].replace("$$(", "$(") == URL
    assert "$$(x)" in worker["env"][1]["value"]


@pytest.mark.parametrize(
    "study", ["wine", "A.b_c", "a-b-c", "9", "x" * 100, "x" * 99 + "y", "a..", "Wine", "a" * 50 + "b"]
)
def test_the_job_name_is_valid_for_kubernetes(study: str) -> None:
    name = make_job_name(study)
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", name)
    assert len(name) <= 63 - len("-9999")
    assert yaml.safe_load(text(engine="kubernetes", image=IMAGE, study=study))["metadata"]["name"] == name
    worker = manifest(study=study)["spec"]["template"]["spec"]["containers"][0]
    assert worker["command"][3] == study, "not a number, whatever it looks like"


def test_different_studies_have_different_jobs() -> None:
    studies = ["a.b", "a_b", "a-b", "A-b", "A.B", "x" * 100, "x" * 99, "x" * 50, "..", "a.", "a"]
    assert len({make_job_name(study) for study in studies}) == len(studies)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl on this machine")
@pytest.mark.parametrize("changed", [{"gpus": 1.0}, {"storage_url": None}, {"storage_url": URL}])
def test_kubectl_accepts_every_field(changed: dict[str, Any]) -> None:
    """kubectl parses the manifest into the real types without a cluster. Its output must have the same fields."""
    given = text(engine="kubernetes", image=IMAGE, **changed)
    assert paths(yaml.safe_load(given)) - paths(_typed(given)) == set()
    misspelt = given.replace("completionMode", "completionsMode")
    assert paths(yaml.safe_load(misspelt)) - paths(_typed(misspelt)) == {".spec.completionsMode"}, "it would be noticed"


def _typed(given: str) -> Any:
    command = ["kubectl", "set", "env", "--local", "-f", "-", "-o", "json", "ADDED=1"]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)
