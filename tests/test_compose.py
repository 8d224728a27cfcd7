"""docker-compose.yml and the Dockerfile: valid by their own tools, and their commands run by hand on real services.

There is no Docker engine in a test: the services' commands, environments, health checks and order are read from what
Docker Compose itself makes of the file, with the hosts, ports and folders of its network replaced by local ones.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg2
import pytest

from storage.embedded.postgres_account import make_folder
from storage.embedded.postgres_server import Server
from tests.faults.harness import Command, Zygote

ROOT = Path(__file__).parent.parent
TOOLS = Path(sys.executable).parent
PASSWORDS = ("POSTGRES_PASSWORD", "HPSEARCH_OWNER_PASSWORD", "HPSEARCH_WORKER_PASSWORD", "MLFLOW_DB_PASSWORD")
OURS = ("migrate", "mlflow", "dashboard", "study", "worker")


def tool(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{TOOLS}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [TOOLS / name, *arguments],
        cwd=ROOT,
        env={"PATH": path, "HOME": os.environ.get("HOME", "/"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def compose(**environment: str) -> dict[str, Any]:
    """The file as Docker Compose understands it, with every profile on and no .env of the developer's."""
    done = tool(
        "docker-compose", "--env-file", os.devnull, "--profile", "*", "config", "--format", "json", **environment
    )
    assert done.stdout, done.stderr  # the packaged binary's exit code is always 0
    model: dict[str, Any] = json.loads(done.stdout)
    return model


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return compose(**dict.fromkeys(PASSWORDS, "x"))["services"]  # type: ignore[no-any-return]


def test_the_files_are_valid() -> None:
    done = tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", "docker-compose.yml")
    assert done.returncode == 0, done.stdout
    done = tool("hadolint", "Dockerfile")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("missing", PASSWORDS)
def test_a_missing_password_is_told_with_its_remedy(missing: str) -> None:
    rest = {name: "x" for name in PASSWORDS if name != missing}
    done = tool("docker-compose", "--env-file", os.devnull, "config", **rest)
    assert done.stdout == ""
    assert f"required variable {missing} is missing a value: run ./hpsearch secrets > .env" in done.stderr


def test_what_an_operator_relies_on(services: dict[str, Any]) -> None:
    assert set(services) == {"postgres", *OURS}
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert {services[name]["image"] for name in OURS} == {f"hpsearch:{version}"}
    assert re.fullmatch(r"postgres:18\.\d+-\w+", services["postgres"]["image"])
    assert [volume["target"] for volume in services["postgres"]["volumes"]] == ["/var/lib/postgresql"]
    for service in services.values():
        assert "container_name" not in service
        assert {port["host_ip"] for port in service.get("ports", [])} <= {"127.0.0.1"}
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
    }
    assert "profiles" not in services["study"], "`up` makes the study"
    assert "restart" not in services["study"]
    for name, service in services.items():
        there = {"search", "edge"} if "ports" in service else {"search"}
        assert set(service["networks"]) == there, f"{name} reaches what it has no need of"
        assert name == "postgres" or service["pids_limit"]
    assert {services[name]["mem_limit"] for name in ("study", "worker")} == {str(8 << 30)}
    dashboard, tracking = services["dashboard"]["environment"], "HPSEARCH_TRACKING_URI"
    assert dashboard["HPSEARCH_DASHBOARD_READ_ONLY"] == "1"
    assert dashboard[tracking] == worker["environment"][tracking], "it notices what is promoted where workers log"


def test_passwords_reach_only_whom_they_belong_to() -> None:
    """Each service is given files of the secrets that it needs, and no password stands anywhere else."""
    given = {name: f"{name}-value" for name in PASSWORDS}
    model = compose(**given)
    assert not [name for name, value in given.items() if value in json.dumps(model)]
    assert {name: secret["environment"] for name, secret in model["secrets"].items()} == {name: name for name in given}
    seen = {name: granted(service) for name, service in model["services"].items()}
    assert {name: secrets for name, secrets in seen.items() if secrets} == {
        "postgres": {"POSTGRES_PASSWORD"},
        "migrate": set(given),
        "mlflow": {"MLFLOW_DB_PASSWORD"},
        "dashboard": {"HPSEARCH_WORKER_PASSWORD"},
        "study": {"HPSEARCH_WORKER_PASSWORD"},
        "worker": {"HPSEARCH_WORKER_PASSWORD"},
    }
    for name, service in model["services"].items():
        named = {value for key, value in service.get("environment", {}).items() if key.endswith("_FILE")}
        assert named <= {f"/run/secrets/{secret}" for secret in seen[name]}, f"{name} reads what it is not given"
    raw = (ROOT / "docker-compose.yml").read_text()
    assert not re.search(r"PASSWORD: [^$\n]", raw)
    assert not re.search(r"://\w+:[^$][^@\s]*@", raw)


def granted(service: dict[str, Any]) -> set[str]:
    """The secrets that a service is given, each under its own name."""
    secrets = service.get("secrets", [])
    assert all(secret["target"] == f"/run/secrets/{secret['source']}" for secret in secrets)
    return {secret["source"] for secret in secrets}


@dataclass
class Machine:
    """The services' commands on this machine, beside a Postgres of their own."""

    folder: Path
    server: Server
    services: dict[str, Any]
    secrets: dict[str, str]
    ports: dict[int, int]  # of the file -> free ones here
    zygote: Zygote
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def local(self, text: str) -> str:
        for port, free in self.ports.items():
            text = re.sub(rf"\b{port}\b", str(free), text)
        text = text.replace("0.0.0.0", "127.0.0.1").replace("/artifacts", str(self.folder / "artifacts"))
        return re.sub(r"(?<=@)postgres(?=:)|(?<=http://)mlflow(?=:)", "127.0.0.1", text)

    def environment(self, name: str) -> dict[str, str]:
        mounted = self.mounted(name)
        given = {
            key: self.local(value).replace("/run/secrets", str(mounted))
            for key, value in self.services[name]["environment"].items()
        }
        kept = {key: os.environ[key] for key in ("PATH", "HOME", "LANG", "PYTHONPATH") if key in os.environ}
        return {
            **kept,
            "PATH": f"{TOOLS}{os.pathsep}{kept['PATH']}",
            "HPSEARCH_HOME": str(self.folder / "home"),
            **given,
        }

    def mounted(self, name: str) -> Path:
        """The folder that stands for /run/secrets of a service: with its own secrets alone."""
        folder = self.folder / "secrets" / name
        folder.mkdir(parents=True, exist_ok=True)
        for secret in granted(self.services[name]):
            (folder / secret).write_text(self.secrets[secret])
        return folder

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """Start a service: the image's entry point and the file's command."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                ["hpsearch", *map(self.local, self.services[name]["command"])],
                executable=TOOLS / "hpsearch",
                env=self.environment(name),
                cwd=self.folder,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        self.running.append(process)
        return process

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def finish(self, name: str) -> str:
        """Run a one-shot service to its end and return what it said."""
        log, command = self.folder / f"{name}.log", list(map(self.local, self.services[name]["command"]))
        pid = self.zygote.start(command, self.environment(name), log, puppet=False, cwd=self.folder, alone=True)
        code = Command(self.zygote, pid, log).wait()
        assert code == 0, self.log(name)
        return self.log(name)

    def until_healthy(self, name: str) -> None:
        """Start a service and wait for its own health check."""
        process = self.start(name)
        kind, *command = map(self.local, self.services[name]["healthcheck"]["test"])
        assert kind == "CMD"
        deadline = time.monotonic() + 600
        while subprocess.run(command, env=self.environment(name), capture_output=True, check=False).returncode:
            assert process.poll() is None, self.log(name)
            assert time.monotonic() < deadline, self.log(name)
            time.sleep(1.0)  # each look is an interpreter's start

    def connect(self, role: str, password: str, database: str) -> Any:
        return psycopg2.connect(
            host="127.0.0.1", port=self.ports[5432], user=role, password=password, dbname=database, connect_timeout=300
        )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def machine(fresh_home: Path, tmp_path: Path, zygote: Zygote) -> Iterator[Machine]:
    fresh_home.mkdir(mode=0o755)
    server = Server(make_folder(fresh_home), fresh_home / "postgres.log")
    ports = {5432: server.start(None), 5000: free_port(), 8080: free_port()}
    secrets = dict(line.split("=", 1) for line in tool("hpsearch", "secrets").stdout.splitlines())
    assert set(secrets) == set(PASSWORDS)
    secrets["POSTGRES_PASSWORD"] = server.password
    services = compose(**secrets, HPSEARCH_TRIALS="1")["services"]
    machine = Machine(tmp_path, server, services, secrets, ports, zygote)
    try:
        yield machine
    finally:
        for process in machine.running:
            process.terminate()
        for process in machine.running:
            process.wait()
        server.stop()


def status(url: str, host: str) -> int:
    request = urllib.request.Request(url, headers={"Host": host})
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.e2e
def test_the_commands_of_the_services_make_a_search(machine: Machine) -> None:
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

    mlflow = f"http://127.0.0.1:{machine.ports[5000]}"
    assert status(f"{mlflow}/api/2.0/mlflow/experiments/get?experiment_id=0", machine.local("mlflow:5000")) == 200
    assert status(f"{mlflow}/api/2.0/mlflow/experiments/get?experiment_id=0", "evil.example:5000") == 403
    assert list((machine.folder / "artifacts").rglob("best.pt")), "no checkpoint went through the server"
    studies = f"http://127.0.0.1:{machine.ports[8080]}/api/studies"
    with urllib.request.urlopen(studies, timeout=300) as response:
        assert [study["study_name"] for study in json.load(response)["study_summaries"]] == ["digits"]
    for name in OURS:
        assert not [secret for secret in machine.secrets.values() if secret in machine.log(name)], f"{name} logs one"


def test_the_image_is_made_of_what_the_dockerfile_copies() -> None:
    """Everything the build needs passes .dockerignore, and nothing else does."""
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert {name for names in copied for name in names.split()} == kept
    assert all((ROOT / name).exists() for name in kept)
