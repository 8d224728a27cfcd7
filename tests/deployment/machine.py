"""A deployment without a Docker engine: the commands of the resolved Compose file, run on this machine.

The services' commands, environments, health checks and order are Docker Compose's own reading of docker-compose.yml,
with the hosts, ports and folders of its network replaced by local ones.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg2

from hpsearch.storage.embedded.postgres import EmbeddedPostgres
from tests.faults.harness import Command, Zygote

ROOT = Path(__file__).parents[2]
TOOLS = Path(sys.executable).parent
PASSWORDS = ("POSTGRES_PASSWORD", "HPSEARCH_OWNER_PASSWORD", "HPSEARCH_WORKER_PASSWORD", "MLFLOW_DB_PASSWORD")
WEB_TOKEN = "HPSEARCH_WEB_TOKEN"
REQUIRED = (*PASSWORDS, WEB_TOKEN)  # without a profile
OURS = ("migrate", "mlflow", "dashboard", "study", "worker")
BOUNCER = "@pgbouncer:5432"


def tool(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{TOOLS}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [TOOLS / name, *arguments],
        cwd=ROOT,
        env={"PATH": path, "HOME": os.environ.get("HOME", "/"), **kept("PYTHONPATH"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def kept(*names: str) -> dict[str, str]:
    return {name: os.environ[name] for name in names if name in os.environ}


def compose(*files: str, **environment: str) -> dict[str, Any]:
    """Return the files as Docker Compose resolves them, with all profiles and without the developer's .env."""
    which = [word for file in files or ("docker-compose.yml",) for word in ("--file", file)]
    done = tool(
        *("docker-compose", "--env-file", os.devnull, *which, "--profile", "*", "config", "--format", "json"),
        **environment,
    )
    assert done.stdout, done.stderr  # the packaged binary's exit code is always 0
    model: dict[str, Any] = json.loads(done.stdout.replace("$$", "$"))  # `config` prints a Compose file
    return model


def granted(service: dict[str, Any]) -> set[str]:
    """Return the secrets of a service by name."""
    secrets = service.get("secrets", [])
    assert all(secret["target"] == f"/run/secrets/{secret['source']}" for secret in secrets)
    return {secret["source"] for secret in secrets}


def require_hardened(name: str, service: dict[str, Any]) -> None:
    """Check that a service has no rights that it does not need, and cannot exhaust the machine."""
    assert service["cap_drop"] == ["ALL"], name
    bind = {"NET_BIND_SERVICE"}
    added = {"proxy": bind, "s3": bind, "postgres": {"CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID", "SETUID"}}
    assert set(service.get("cap_add", [])) <= added.get(name, set()), name
    assert service["security_opt"] == ["no-new-privileges:true"], name
    assert int(service["mem_limit"]) > 0, name
    assert service["pids_limit"] > 0, name
    assert not {"privileged", "network_mode", "pid", "ipc", "devices"} & {
        key for key, value in service.items() if value
    }


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@dataclass
class Machine:
    """The services' commands on this machine, with a separate Postgres."""

    folder: Path  # every user can enter it
    server: EmbeddedPostgres
    model: dict[str, Any]
    secrets: dict[str, str]
    ports: dict[int, int]  # ports of the file -> free ports on this machine
    zygote: Zygote
    replaced: dict[str, str] = field(default_factory=dict)  # other replacements on this machine
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def services(self) -> dict[str, Any]:
        return self.model["services"]  # type: ignore[no-any-return]  # of JSON

    def local(self, text: str) -> str:
        for there, here in self.replaced.items():
            text = text.replace(there, here)
        for port, free in self.ports.items():
            text = re.sub(rf"\b{port}\b", str(free), text)
        text = text.replace("0.0.0.0", "127.0.0.1").replace("/artifacts", str(self.folder / "artifacts"))
        return re.sub(r"(?<=[@=])postgres(?=:| )|(?<=http://)(mlflow|dashboard)(?=:)", "127.0.0.1", text)

    def placed(self, name: str, text: str) -> str:
        """Replace the paths of a service's secrets and configurations in a text by those on this machine."""
        secrets = self.folder / name / "secrets"
        secrets.mkdir(parents=True, exist_ok=True)
        for secret in granted(self.services[name]):
            (secrets / secret).write_text(self.secrets[secret])
        text = text.replace("/run/secrets", str(secrets))
        for config in self.services[name].get("configs", []):
            path = self.folder / name / config["source"]
            if not path.exists():
                path.write_text("")
                path.write_text(self.placed(name, self.local(self.model["configs"][config["source"]]["content"])))
            text = text.replace(config["target"], str(path))
        return text

    def command(self, name: str) -> list[str]:
        service = self.services[name]
        words = [*(service.get("entrypoint") or ["hpsearch"]), *service["command"]]
        return [self.placed(name, self.local(word)) for word in words]

    def environment(self, name: str) -> dict[str, str]:
        given = self.services[name].get("environment", {})
        return {
            **kept("HOME", "LANG", "PYTHONPATH"),
            "PATH": f"{TOOLS}{os.pathsep}{os.environ['PATH']}{os.pathsep}/usr/sbin",
            "HPSEARCH_HOME": str(self.folder / "home"),
            "XDG_DATA_HOME": str(self.folder / "data"),
            "XDG_CONFIG_HOME": str(self.folder / "config"),
            **{key: self.placed(name, self.local(value)) for key, value in given.items()},
        }

    def start(self, name: str, *, user: str | None = None) -> subprocess.Popen[bytes]:
        """Start a service with the entry point of the image or the file, and the command of the file."""
        environment = self.environment(name)
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                ["/usr/bin/env", *self.command(name)],
                env=environment,
                cwd=self.folder,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                user=user,
            )
        self.running.append(process)
        return process

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def finish(self, name: str) -> str:
        """Run a one-shot service to its end and return its output."""
        log = self.folder / f"{name}.log"
        command, environment = self.command(name)[1:], self.environment(name)
        pid = self.zygote.start(command, environment, log, puppet=False, cwd=self.folder, alone=True)
        code = Command(self.zygote, pid, log).wait()
        assert code == 0, self.log(name)
        return self.log(name)

    def until_healthy(self, name: str) -> None:
        """Start a service and wait until its health check succeeds."""
        process = self.start(name)
        kind, *command = map(self.local, self.services[name]["healthcheck"]["test"])
        assert kind == "CMD"
        deadline = time.monotonic() + 600
        while subprocess.run(command, env=self.environment(name), capture_output=True, check=False).returncode:
            assert process.poll() is None, self.log(name)
            assert time.monotonic() < deadline, self.log(name)
            time.sleep(1.0)  # each check starts an interpreter

    def until_listening(self, name: str, port: int, *, user: str | None = None) -> None:
        """Start a service and wait until it accepts connections at a port of the file."""
        self.wait_for(port, self.start(name, user=user), name)

    def wait_for(self, port: int, process: subprocess.Popen[bytes], name: str) -> None:
        """Wait until a process accepts connections at a port of the file."""
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self.ports[port])).close()
            except OSError:
                assert process.poll() is None, self.log(name)
                time.sleep(0.1)  # until the service answers

    def connect(self, role: str, password: str, database: str) -> Any:
        return psycopg2.connect(
            host="127.0.0.1", port=self.ports[5432], user=role, password=password, dbname=database, connect_timeout=300
        )
