"""docker-compose.yml and the Dockerfile: their own tools validate them, and the tests run their commands."""

import json
import os
import re
import tomllib
import urllib.error
import urllib.request
from typing import Any

import psycopg2
import pytest

from tests.deployment.machine import (
    OURS,
    PASSWORDS,
    REQUIRED,
    ROOT,
    WEB_TOKEN,
    Machine,
    compose,
    granted,
    require_hardened,
    tool,
)


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return compose(**dict.fromkeys(REQUIRED, "x"))["services"]  # type: ignore[no-any-return]  # of JSON


def test_the_files_are_valid() -> None:
    done = tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", "docker-compose.yml")
    assert done.returncode == 0, done.stdout
    done = tool("hadolint", "Dockerfile")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("missing", REQUIRED)
def test_a_missing_password_is_an_error_with_a_remedy(missing: str) -> None:
    rest = {name: "x" for name in REQUIRED if name != missing}
    done = tool("docker-compose", "--env-file", os.devnull, "config", **rest)
    assert done.stdout == ""
    assert f"required variable {missing} is missing a value: run (umask 077; ./hpsearch secrets > .env)" in done.stderr


def test_services_have_restart_policies_limits_and_health_checks(services: dict[str, Any]) -> None:
    assert {name for name, service in services.items() if "profiles" not in service} == {"postgres", *OURS}
    assert {name: service["profiles"] for name, service in services.items() if "profiles" in service} == {
        "pgbouncer": ["pgbouncer"],
        "proxy": ["proxy"],
    }
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert {services[name]["image"] for name in OURS} == {f"hpsearch:{version}"}
    assert re.fullmatch(r"postgres:18\.\d+-\w+", services["postgres"]["image"])
    assert [volume["target"] for volume in services["postgres"]["volumes"]] == ["/var/lib/postgresql"]
    for name, service in services.items():
        assert "container_name" not in service
        assert name == "proxy" or {port["host_ip"] for port in service.get("ports", [])} <= {"127.0.0.1"}
    worker = services["worker"]
    assert worker["init"]
    assert worker["restart"] == "on-failure"
    assert "--final-exit-code=0" in worker["command"], "what is final is not started again"
    assert "ports" not in worker
    assert (worker["stop_grace_period"], worker["command"][2]) == ("1m0s", "--grace=60"), "one and the same"
    assert worker["volumes"] == services["study"]["volumes"]
    assert {name: link["condition"] for name, link in worker["depends_on"].items()} == {
        "study": "service_completed_successfully",
        "mlflow": "service_healthy",
        "pgbouncer": "service_started",
    }
    assert not worker["depends_on"]["pgbouncer"]["required"]
    assert "restart" not in services["study"]
    for name, service in services.items():
        there = {"mlflow": {"search", "web", "edge"}, "dashboard": {"search", "web", "edge"}, "proxy": {"web", "edge"}}
        assert set(service["networks"]) == there.get(name, {"search"}), f"{name} reaches what it has no need of"
        require_hardened(name, service)
    assert {services[name]["mem_limit"] for name in ("study", "worker")} == {str(8 << 30)}
    dashboard, tracking = services["dashboard"]["environment"], "HPSEARCH_TRACKING_URI"
    assert dashboard["HPSEARCH_DASHBOARD_READ_ONLY"] == "1"
    assert dashboard[tracking] == worker["environment"][tracking], (
        "the dashboard detects promotions on the server to which workers log"
    )


def test_each_service_receives_only_its_own_passwords() -> None:
    """Each service has the secret files that it needs, and passwords are nowhere else."""
    given = {name: f"{name}-value" for name in (*REQUIRED, "HPSEARCH_LOGIN_PASSWORD")}
    model = compose(**given)
    assert not [name for name, value in given.items() if value in json.dumps(model)]
    assert {name: secret["environment"] for name, secret in model["secrets"].items()} == {name: name for name in given}
    seen = {name: granted(service) for name, service in model["services"].items()}
    assert {name: secrets for name, secrets in seen.items() if secrets} == {
        "postgres": {"POSTGRES_PASSWORD"},
        "migrate": set(PASSWORDS),
        "mlflow": {"MLFLOW_DB_PASSWORD", WEB_TOKEN},
        "dashboard": {"HPSEARCH_WORKER_PASSWORD", WEB_TOKEN},
        "study": {"HPSEARCH_WORKER_PASSWORD", WEB_TOKEN},
        "worker": {"HPSEARCH_WORKER_PASSWORD", WEB_TOKEN},
        "pgbouncer": {"HPSEARCH_WORKER_PASSWORD"},
        "proxy": {"HPSEARCH_LOGIN_PASSWORD", WEB_TOKEN},
    }
    for name, service in model["services"].items():
        named = {value for key, value in service.get("environment", {}).items() if key.endswith("_FILE")}
        assert named <= {f"/run/secrets/{secret}" for secret in seen[name]}, f"{name} reads what it is not given"
    raw = (ROOT / "docker-compose.yml").read_text()
    assert not re.search(r"PASSWORD: [^$\n]", raw)
    assert not re.search(r"://\w+:[^$][^@\s]*@", raw)


def status(url: str, host: str, token: str) -> int:
    request = urllib.request.Request(url, headers={"Host": host, "Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.e2e
@pytest.mark.soak  # test_pgbouncer.py runs a search with the commands of the same services
def test_the_commands_of_the_services_run_a_search(machine: Machine) -> None:
    with pytest.raises(psycopg2.OperationalError, match="password authentication failed"):
        machine.connect("postgres", "wrong", "postgres")
    machine.finish("migrate")
    machine.finish("migrate")  # every `up` runs it again
    machine.until_healthy("mlflow")
    machine.until_healthy("dashboard")

    machine.finish("study")
    assert "1 trial" in machine.finish("study")
    machine.finish("worker")

    password = machine.secrets["HPSEARCH_WORKER_PASSWORD"]
    with machine.connect("hpsearch_worker", password, "optuna") as connection:
        cursor = connection.cursor()
        cursor.execute("SELECT state, count(*) FROM trials GROUP BY state")
        states = dict(cursor.fetchall())
        assert sum(states.values()) == 1
        assert set(states) <= {"COMPLETE", "PRUNED"}
        with pytest.raises(psycopg2.errors.InsufficientPrivilege):
            cursor.execute("CREATE TABLE mine (a int)")
    connection.close()
    with pytest.raises(psycopg2.OperationalError, match="permission denied for database"):
        machine.connect("hpsearch_worker", password, "mlflow")

    token = machine.secrets[WEB_TOKEN]
    experiment = f"http://127.0.0.1:{machine.ports[5000]}/api/2.0/mlflow/experiments/get?experiment_id=0"
    assert status(experiment, machine.local("mlflow:5000"), token) == 200
    assert status(experiment, machine.local("mlflow:5000"), "wrong") == 401
    assert status(experiment, "evil.example:5000", token) == 403
    assert list((machine.folder / "artifacts").rglob("best.pt")), "no checkpoint went through the server"
    studies = f"http://127.0.0.1:{machine.ports[8080]}/api/studies"
    request = urllib.request.Request(studies, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=300) as response:
        assert [study["study_name"] for study in json.load(response)["study_summaries"]] == ["digits"]
    for name in OURS:
        assert not [secret for secret in machine.secrets.values() if secret in machine.log(name)], f"{name} logs one"


def test_the_image_builds_from_the_files_that_the_dockerfile_copies() -> None:
    """.dockerignore includes all files that the build needs, and no others."""
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert {name for names in copied for name in names.split()} == kept
    assert all((ROOT / name).exists() for name in kept)
