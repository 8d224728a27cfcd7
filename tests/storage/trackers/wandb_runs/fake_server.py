"""A fake Weights & Biases server: it stores runs by id and answers the requests of the wandb package."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar


@dataclass
class Run:
    """A run on the server."""

    settings: dict[str, Any]
    history: list[dict[str, Any]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    exit_codes: list[int] = field(default_factory=list)

    @property
    def steps(self) -> list[int]:
        return [json.loads(line)["_step"] for line in self.lines]


class FakeServer:
    """The fake server.

    Attributes:
        url: its address.
        runs: runs by id.
        away: whether it replies that it is unavailable.
    """

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.away = False
        handler = type("Handler", (_Handler,), {"server_of": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        match operation:
            case "RunResumeStatus":
                return {"model": self._known(variables["name"])}
            case "UpsertBucket":
                run = self.runs.setdefault(variables["name"], Run({}))
                run.settings |= {key: value for key, value in variables.items() if value is not None}
                project = {"id": "p", "name": "demo", "entity": {"id": "e", "name": "me"}}
                named = {"id": "b", "name": variables["name"], "displayName": variables["name"], "config": "{}"}
                bucket = {**named, "sweepName": None, "project": project, "historyLineCount": len(run.lines)}
                return {"upsertBucket": {"bucket": bucket, "inserted": True}}
            case "CreateRunFiles":
                files = [{"name": name, "uploadUrl": f"{self.url}/up/{name}"} for name in variables["files"]]
                return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
            case _:
                return {}

    def _known(self, name: str) -> dict[str, Any] | None:
        if (run := self.runs.get(name)) is None:
            return None
        counts = {"historyLineCount": len(run.lines), "eventsLineCount": 0, "logLineCount": 0}
        tails = {"historyTail": json.dumps(run.lines[-1:]), "eventsTail": "[]", "wandbConfig": '{"t": 1}'}
        fields = {
            "summaryMetrics": json.dumps(run.summary),
            "config": "{}",
            "tags": [],
            "notes": "",
            "displayName": name,
        }
        return {"id": "p", "name": "demo", "entity": {"id": "e", "name": "me"},
                "bucket": {"id": "b", "name": name, **counts, **tails, **fields}}  # fmt: skip

    def stream(self, name: str, body: dict[str, Any]) -> None:
        run = self.runs[name]
        for file, chunk in body.get("files", {}).items():
            if file == "wandb-history.jsonl":
                run.lines[chunk["offset"] :] = chunk["content"]
            if file == "wandb-summary.json":
                run.summary = json.loads(chunk["content"][-1])
        if body.get("complete"):
            run.exit_codes.append(body["exitcode"])


class _Handler(BaseHTTPRequestHandler):
    server_of: ClassVar[FakeServer]

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self._reply({})

    def do_PUT(self) -> None:
        self._body()
        self._reply({})

    def do_POST(self) -> None:
        body = json.loads(self._body())
        if self.server_of.away:
            self._reply({}, 503)
        elif self.path.endswith("/file_stream"):
            self.server_of.stream(self.path.split("/")[-2], body)
            self._reply({})
        else:
            self._reply({"data": self.server_of.answer(body.get("operationName") or "", body.get("variables") or {})})

    def _body(self) -> bytes:
        data = self.rfile.read(int(self.headers.get("content-length", 0)))
        return gzip.decompress(data) if self.headers.get("content-encoding") == "gzip" else data

    def _reply(self, answer: dict[str, Any], code: int = 200) -> None:
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    """Run a fake server during the block."""
    server = FakeServer()
    try:
        yield server
    finally:
        server.close()
