"""docker-compose.s3.yml is valid, and its commands work with an S3 server. Tests cannot start SeaweedFS itself."""

import json
import re
import shutil
import subprocess
import sys
import threading
import urllib.request
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.deployment.machine import REQUIRED, ROOT, Machine, compose, free_port, granted, require_hardened, tool
from tests.waiting import wait_for
from tests.web import answers

FILES = ("docker-compose.yml", "docker-compose.s3.yml")
KEYS = ("HPSEARCH_S3_SECRET", "HPSEARCH_S3_ARTIFACTS_SECRET", "HPSEARCH_S3_CHECKPOINTS_SECRET")
SECRETS = (*REQUIRED, "HPSEARCH_LOGIN_PASSWORD", *KEYS)
LACKING = [name for name in ("s3fs", "boto3", "moto") if find_spec(name) is None]


def test_the_file_is_valid() -> None:
    done = tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", "docker-compose.s3.yml")
    assert done.returncode == 0, done.stdout


def test_services_wait_for_the_object_store() -> None:
    given = {name: f"{name}-value" for name in SECRETS}
    model = compose(*FILES, **given)
    assert not [name for name, value in given.items() if value in json.dumps(model)]
    without = compose(**given)["services"]
    services = model["services"]
    assert set(services) - set(without) == {"seaweedfs", "s3", "bucket"}
    assert services["bucket"]["image"] == services["worker"]["image"]
    assert services["bucket"]["build"] == services["worker"]["build"], "one image of one build"
    users = {"mlflow", "study", "worker"}
    admin, artifacts, checkpoints = KEYS
    assert {
        name: granted(service) & set(KEYS) for name, service in services.items() if granted(service) & set(KEYS)
    } == {
        "seaweedfs": set(KEYS),
        "bucket": {admin},
        "mlflow": {artifacts},
        "study": {checkpoints},
        "worker": {checkpoints},
    }
    reach = {name for name, service in services.items() if "store" in service["networks"]}
    assert reach == {"s3", "bucket", *users}, "only they reach the store"
    of_seaweedfs = {name for name, service in services.items() if "seaweedfs" in service["networks"]}
    assert of_seaweedfs == {"seaweedfs", "s3"}, "its other ports need no key"
    assert model["networks"]["store"]["internal"]
    assert model["networks"]["seaweedfs"]["internal"]
    isolation = {"com.docker.network.bridge.inhibit_ipv4": "true"}  # users of the host reach an internal network
    assert model["networks"]["seaweedfs"]["driver_opts"] == isolation
    for name in ("seaweedfs", "s3", "bucket"):
        require_hardened(name, services[name])
    for name in users:
        assert set(without[name]["depends_on"]) < set(services[name]["depends_on"])
        assert services[name]["depends_on"]["bucket"]["condition"] == "service_completed_successfully"
        assert services[name]["command"] == without[name]["command"]
        assert granted(without[name]) < granted(services[name])
    assert services["worker"]["environment"] == services["study"]["environment"]
    assert not [name for name in ("seaweedfs", "s3") if "ports" in services[name]]


def test_the_keys_of_the_store_are_limited_to_their_folders(tmp_path: Path) -> None:
    """Run the first lines of the store's command, which write its identities."""
    service = compose(*FILES, **{name: f"{name}-value" for name in SECRETS})["services"]["seaweedfs"]
    for name in KEYS:
        (tmp_path / name).write_text(f"{name}-value\n")
    script = service["command"][0].split("exec weed")[0].replace("/run/secrets", str(tmp_path))
    subprocess.run([*service["entrypoint"], script.replace("/tmp/s3.json", str(tmp_path / "s3.json"))], check=True)
    identities = json.loads((tmp_path / "s3.json").read_text())["identities"]
    assert [identity["credentials"][0]["secretKey"] for identity in identities] == [f"{name}-value" for name in KEYS]
    for identity, folder in zip(identities[1:], ("mlflow", "checkpoints"), strict=True):
        assert identity["credentials"][0]["accessKey"] == f"hpsearch-{folder}"
        assert {action.partition(":")[2] for action in identity["actions"]} == {"hpsearch", f"hpsearch/{folder}/*"}
        assert "List:hpsearch" in identity["actions"]


@pytest.mark.skipif(shutil.which("caddy") is None, reason="Caddy is not installed")
def test_the_gateway_keeps_the_host_that_a_client_has_signed(tmp_path: Path) -> None:
    received: list[Message] = []

    class Store(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            received.append(self.headers)
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Store) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = free_port()
        content = compose(*FILES, **dict.fromkeys(SECRETS, "x"))["configs"]["s3-caddyfile"]["content"]
        content = content.replace("http://seaweedfs:8333", f"http://127.0.0.1:{server.server_port}")
        (tmp_path / "Caddyfile").write_text(content.replace("http://:8333", f"http://:{port}"))
        caddy = subprocess.Popen(["caddy", "run", "--config", tmp_path / "Caddyfile", "--adapter", "caddyfile"])
        try:
            wait_for(lambda: answers(port), "Caddy")
            request = urllib.request.Request(f"http://127.0.0.1:{port}/b/k", b"body", {"Host": "s3:8333"}, method="PUT")
            with urllib.request.urlopen(request) as response:
                assert response.status == 200
        finally:
            caddy.kill()
            caddy.wait()
            server.shutdown()
    (headers,) = received
    assert headers["Host"] == "s3:8333"
    assert not [name for name in headers if name.lower().startswith("x-forwarded")]


@pytest.mark.parametrize("missing", KEYS)
def test_a_missing_key_is_an_error_with_a_remedy(missing: str) -> None:
    rest = dict.fromkeys([*REQUIRED, *(key for key in KEYS if key != missing)], "x")
    done = tool("docker-compose", "--env-file", "/dev/null", *(f"--file={file}" for file in FILES), "config", **rest)
    assert done.stdout == ""
    assert f"required variable {missing} is missing a value: run ./hpsearch secrets" in done.stderr


@pytest.mark.e2e
@pytest.mark.skipif(bool(LACKING), reason=f"not installed: {', '.join(LACKING)}")
def test_checkpoints_and_artifacts_are_in_the_bucket(machine: Machine) -> None:
    machine.model = compose(*FILES, **machine.secrets, HPSEARCH_TRIALS="1")
    port = machine.ports[8333] = free_port()
    machine.replaced["http://s3:"] = "http://127.0.0.1:"
    server = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (machine.folder / "s3.log").open("ab") as log:
        machine.running.append(subprocess.Popen(server, stdout=log, stderr=log, cwd=ROOT))
    machine.wait_for(8333, machine.running[-1], "s3")
    machine.finish("migrate")
    for _ in range(2):  # every `up` runs it again
        bucket = machine.start("bucket")
        assert bucket.wait() == 0, machine.log("bucket")
    machine.until_healthy("mlflow")
    machine.finish("study")
    machine.finish("worker")
    code = "import boto3; print(*(o['Key'] for o in boto3.client('s3').list_objects(Bucket='hpsearch')['Contents']))"
    environment = {**machine.environment("worker"), "AWS_SECRET_ACCESS_KEY": machine.secrets[KEYS[2]]}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    kept = done.stdout.split()
    # Checkpoints of a trial that has ended are removed. The server's log proves that they were uploaded.
    assert re.search(r"PUT /hpsearch/checkpoints/\S+ .* 200 ", machine.log("s3")), machine.log("s3")[-3000:]
    assert any(key.startswith("mlflow/") and key.endswith("best.pt") for key in kept)
    assert not list((machine.folder / "artifacts").rglob("best.pt"))
    for name in ("bucket", "mlflow", "study", "worker"):
        assert not [key for key in KEYS if machine.secrets[key] in machine.log(name)]
