"""A model that was changed in MLflow, or that can execute code, is rejected before it is loaded."""

from __future__ import annotations

import io
import json
import os
import shutil
import stat
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
import yaml
from optuna.trial import create_trial
from torch import nn
from torch.export.pt2_archive import PT2ArchiveReader

from hpsearch import load_model, load_objective
from hpsearch.search.errors import SearchError
from hpsearch.search.promotion.exported_program import find_unsafe_part
from hpsearch.search.promotion.model_files import find_code
from hpsearch.search.promotion.promote import promote
from hpsearch.search.promotion.sandbox import run_isolated
from hpsearch.search.promotion.serve_check import ServeCheckResult, serve_check
from hpsearch.storage.attributes import MODEL_SHA256, RUN_ID
from hpsearch.storage.files import compute_folder_sha256
from hpsearch.storage.journals.journal_records import Model
from hpsearch.storage.mlflow.model import ensure_model
from hpsearch.storage.mlflow.model_export import export_model, write_checkpoint_model
from hpsearch.storage.mlflow.run_links import RunLinks
from hpsearch.storage.records.promotions import read_model_sha256
from tests.search.promotion.support import Tracked

TRIAL = 4  # the trial with the exported model, the best one


class Classifier(nn.Module):
    """A model with the inputs and outputs of the objective `digits`, which trains nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.flatten(1))


@pytest.fixture(scope="module")
def _exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "model"
    export_model(Classifier().eval(), [("", torch.randn(4, 1, 8, 8))], [{0}], folder)
    return folder


@pytest.fixture
def exported(_exported: Path, tmp_path: Path) -> Path:
    """Return a copy of an exported model that the test may change."""
    return Path(shutil.copytree(_exported, tmp_path / "model"))


@pytest.fixture
def own_model(own_tracked: Tracked, _exported: Path, tmp_path: Path) -> str:
    """Add a trial with an exported model, as a worker does, and return the id of the model."""
    suggested = optuna.create_study().ask()
    load_objective("digits").configure(suggested)
    parent = str(own_tracked.stored.attrs[RUN_ID])
    run_id = own_tracked.tracking.create_trial_run(own_tracked.name, TRIAL, parent=parent, tags={})
    made = create_trial(
        value=0.95, params=suggested.params, distributions=suggested.distributions, user_attrs={RUN_ID: run_id}
    )
    optuna.load_study(study_name=own_tracked.name, storage=own_tracked.storage).add_trial(made)
    folder = Path(shutil.copytree(_exported, tmp_path / "%20"))  # MLflow decodes paths
    record = Model(name="own", step=0, at=0.0, metrics={}, params={"x" * 300: 1}, tags={})
    trial = own_tracked.stored.trials()[TRIAL]
    links = RunLinks(own_tracked.storage.engine)
    return ensure_model(own_tracked.tracking, links, trial._trial_id, run_id, record, folder)


def check(tracked: Tracked, *, allow_code: bool = False) -> ServeCheckResult:
    return serve_check(tracked.storage, tracked.tracking, f"{tracked.name}@champion", allow_code=allow_code)


def load(tracked: Tracked) -> nn.Module:
    url = tracked.storage.engine.url.render_as_string(hide_password=False)
    return load_model(f"{tracked.name}@champion", storage_url=url, tracking_uri=tracked.tracking.uri)


def poison(folder: Path, marker: Path) -> Path:
    """Return the files that add code to a model: the code writes a file when the model is loaded."""
    metadata = yaml.safe_load((folder / "MLmodel").read_text())
    metadata["flavors"]["python_function"] |= {"loader_module": "poison", "code": "code"}
    target = folder.parent / "poison"
    (target / "code").mkdir(parents=True)
    (target / "MLmodel").write_text(yaml.safe_dump(metadata))
    (target / "code" / "poison.py").write_text(f"open({str(marker)!r}, 'w').write('executed')\n")
    return target


@pytest.mark.soak
def test_code_that_another_client_adds_to_a_promoted_model_is_not_loaded(
    own_tracked: Tracked, own_model: str, exported: Path, tmp_path: Path
) -> None:
    """Row 1 of the audit: a client of MLflow overwrites the files of the champion."""
    promote(own_tracked.stored, own_tracked.tracking)
    marker = tmp_path / "marker"
    own_tracked.client.log_model_artifacts(own_model, str(poison(exported, marker)))
    with pytest.raises(SearchError, match=rf"^\S+@champion: the files of model {own_model} in MLflow were changed"):
        check(own_tracked)
    with pytest.raises(SearchError, match="were changed"):
        load(own_tracked)
    with pytest.raises(SearchError, match="were changed"):  # the option accepts code, but no changed files
        check(own_tracked, allow_code=True)
    assert not marker.exists()


def test_a_verified_model_is_loaded_also_in_a_folder_that_contains_its_address(
    own_tracked: Tracked, own_model: str, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models:" / own_model).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    promote(own_tracked.stored, own_tracked.tracking)
    assert own_tracked.version("champion").source == f"models:/{own_model}"
    inputs = torch.randn(3, 1, 8, 8)
    expected = torch.export.load(exported / "data" / "model.pt2").module()(inputs)
    assert torch.equal(load(own_tracked)(inputs), expected)


def test_a_model_that_was_changed_before_its_promotion_is_not_promoted(
    own_tracked: Tracked, own_model: str, exported: Path, tmp_path: Path
) -> None:
    own_tracked.client.log_model_artifacts(own_model, str(poison(exported, tmp_path / "marker")))
    with pytest.raises(SearchError, match=rf"^trial {TRIAL}: the files of model {own_model} in MLflow were changed"):
        promote(own_tracked.stored, own_tracked.tracking)
    assert own_tracked.promotions() == []


def test_the_digest_of_the_files_is_recorded_with_the_trial_and_the_promotion(
    own_tracked: Tracked, own_model: str, tmp_path: Path
) -> None:
    digest = compute_folder_sha256(tmp_path / "%20")
    with own_tracked.storage.engine.connect() as connection:
        assert read_model_sha256(connection, own_model) == digest
    promote(own_tracked.stored, own_tracked.tracking)
    (promotion,) = own_tracked.promotions()
    assert (promotion.evidence["model_id"], promotion.evidence["model_sha256"]) == (own_model, digest)
    version = own_tracked.version("champion")
    assert version.tags["hpsearch.model_sha256"] == digest
    assert f"sha256 {digest}" in version.description
    shell = "cd $0 && find * -type f | LC_ALL=C sort | xargs sha256sum | sha256sum"
    said = subprocess.run(["sh", "-c", shell, tmp_path / "%20"], capture_output=True, text=True, check=True).stdout
    assert said.split()[0] == digest


@pytest.mark.soak
def test_the_digest_of_the_promotion_is_valid_if_a_worker_changes_its_own(own_tracked: Tracked, own_model: str) -> None:
    promote(own_tracked.stored, own_tracked.tracking)
    trial_id = own_tracked.stored.trials()[TRIAL]._trial_id
    RunLinks(own_tracked.storage.engine).set_attr_of_trials([trial_id], MODEL_SHA256, {own_model: "0" * 64})  # type: ignore[arg-type]
    assert check(own_tracked).recomputed_value is not None


def test_a_model_without_digest_is_checked_but_its_code_is_not_loaded(
    own_tracked: Tracked, own_model: str, exported: Path, tmp_path: Path
) -> None:
    """Earlier versions of hpsearch recorded no digest, and users may register other models of a trial's run."""
    trial_id = own_tracked.stored.trials()[TRIAL]._trial_id
    RunLinks(own_tracked.storage.engine).remove_attr_of_trials([trial_id], MODEL_SHA256)
    client = own_tracked.client
    client.create_registered_model(own_tracked.name)
    run_id = own_tracked.run_of(TRIAL)
    client.create_model_version(own_tracked.name, f"models:/{own_model}", run_id=run_id, model_id=own_model)
    client.set_registered_model_alias(own_tracked.name, "champion", "1")
    assert isinstance(load(own_tracked), nn.Module)
    marker = tmp_path / "marker"
    client.log_model_artifacts(own_model, str(poison(exported, marker)))
    with pytest.raises(SearchError, match=r"code: 'code' in the flavor python_function, .* --allow-code"):
        check(own_tracked)
    assert not marker.exists()


@pytest.mark.soak
def test_a_model_with_code_is_loaded_with_the_option(
    own_tracked: Tracked, own_model: str, exported: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The code sees no credentials of the user."""
    trial_id = own_tracked.stored.trials()[TRIAL]._trial_id
    RunLinks(own_tracked.storage.engine).remove_attr_of_trials([trial_id], MODEL_SHA256)
    files = poison(exported, tmp_path / "marker")
    code = "import os; raise SystemExit('variables: ' + ' '.join(sorted(os.environ)))"
    (files / "code" / "poison.py").write_text(code)
    own_tracked.client.log_model_artifacts(own_model, str(files))
    promote(own_tracked.stored, own_tracked.tracking)
    secrets = ("PGPASSWORD", "HPSEARCH_STORAGE_URL", "MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY", "OPENAI_KEY")
    for name in secrets:
        monkeypatch.setenv(name, "secret")
    error = check(own_tracked, allow_code=True).mismatch
    assert "variables: " in error
    assert "PATH" in error
    assert not [name for name in secrets if name in error]


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_bubblewrap_hides_files_and_network(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("password")
    folder = tmp_path / "work"
    folder.mkdir()
    code = f"""
import os, socket
print(os.path.exists({str(secret)!r}), os.path.exists("/etc/passwd"), len(socket.if_nameindex()))
open({str(folder / "result")!r}, "w").write("written")
"""
    done = run_isolated(
        [sys.executable, "-I", "-c", code], folder=folder, readable=[], variables={}, timeout_seconds=60
    )
    assert (done.stdout, done.stderr) == ("False False 1\n", "")
    assert (folder / "result").read_text() == "written"


def test_bubblewrap_that_cannot_start_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program = tmp_path / "bin" / "bwrap"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    folder = tmp_path / "work"
    folder.mkdir()
    command = [sys.executable, "-I", "-c", "print('ran')"]
    done = run_isolated(command, folder=folder, readable=[], variables={}, timeout_seconds=60)
    assert done.stdout == "ran\n"
    assert "bubblewrap cannot start (bwrap: No permissions to create new namespace)" in caplog.text


def test_an_exported_model_and_a_checkpoint_have_no_code(exported: Path, tmp_path: Path) -> None:
    assert find_code(exported) == ""
    weights = tmp_path / "best.pt"
    weights.write_bytes(b"weights")
    write_checkpoint_model(weights, tmp_path / "checkpoint", objective="digits", reason="why")
    assert find_code(tmp_path / "checkpoint") == ""


class Product(nn.Module):
    """A model with two inputs."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y


def test_an_exported_model_with_several_inputs_has_no_code(tmp_path: Path) -> None:
    inputs = [("x", torch.randn(4, 6)), ("y", torch.randn(4, 6))]
    export_model(Product().eval(), inputs, [{0}] * 2, tmp_path / "model")
    assert find_code(tmp_path / "model") == ""


class Symbolic(nn.Module):
    """A model with symbolic sizes, a branch on data, and operators with texts as arguments."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        size = x.shape[1] // 2 + y.shape[1] % 3
        product = torch.einsum("bi,bj->bij", x, y)
        chosen = torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,))
        return {"product": torch.div(product, 2, rounding_mode="floor"), "chosen": chosen[:, :1].expand(-1, size)}


def test_symbolic_sizes_and_control_flow_are_no_code(tmp_path: Path) -> None:
    inputs = [("x", torch.randn(4, 6)), ("y", torch.randn(4, 5))]
    sizes = [{0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}] * 2
    program = torch.export.export(Symbolic(), tuple(x for _, x in inputs), dynamic_shapes=sizes)
    torch.export.save(program, tmp_path / "model.pt2")
    assert find_unsafe_part(tmp_path / "model.pt2") == ""


Members = dict[str, bytes]


def edit_program(change: Callable[[Any], None]) -> Callable[[Members, str], None]:
    """Return a function that changes the JSON of the program in an archive."""

    def edit(members: Members, _: str) -> None:
        name = next(name for name in members if name.endswith("models/model.json"))
        program = json.loads(members[name])
        change(program)
        members[name] = json.dumps(program).encode()

    return edit


class Opened:
    """An object whose unpickling creates a file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (self._path, "w")


def write_file(members: Members, path: str) -> None:
    """Add an operator that creates a file."""
    values = {"filename": {"as_string": path}, "shared": {"as_bool": True}, "size": {"as_int": 1}}
    arguments = [{"name": name, "arg": value, "kind": 1} for name, value in values.items()]

    def change(program: Any) -> None:
        graph = program["graph_module"]["graph"]
        graph["tensor_values"]["made"] = next(iter(graph["tensor_values"].values()))
        output = {"as_tensor": {"name": "made"}}
        node = {"target": "torch.ops.aten.from_file.default", "inputs": arguments, "outputs": [output], "metadata": {}}
        graph["nodes"].insert(0, {**graph["nodes"][0], **node, "name": "made"})

    edit_program(change)(members, path)


def guard(members: Members, path: str) -> None:
    edit_program(lambda program: program["guards_code"].append(f"open({path!r}, 'w') is not None"))(members, path)


def evaluate_text(path: str) -> str:
    """Return code without quotation marks that creates a file."""
    return f"eval({'+'.join(f'chr({each})' for each in f'open({path!r}, {chr(39)}w{chr(39)})'.encode())})"


def guard_message(members: Members, path: str) -> None:
    """Add a guard whose bytes end the text of the message that torch writes into its code."""
    code = f"1 != b'\"); {evaluate_text(path)} #'"
    edit_program(lambda program: program["guards_code"].append(code))(members, path)


def guard_with_line_feed(members: Members, path: str) -> None:
    """Hide the end of the text in an escape that is complete after torch has removed the line feeds."""
    code = f"1 != '\\\nx22); {evaluate_text(path)} #'"
    edit_program(lambda program: program["guards_code"].append(code))(members, path)


def evaluate_size(members: Members, path: str) -> None:
    def change(program: Any) -> None:
        values = program["graph_module"]["graph"]["tensor_values"]
        next(iter(values.values()))["sizes"][0] = {"as_expr": {"expr_str": evaluate_text(path), "hint": None}}

    edit_program(change)(members, path)


def pickle_weight(members: Members, path: str) -> None:
    name = next(name for name in members if name.endswith("weights/model_weights_config.json"))
    config = json.loads(members[name])
    entry = next(iter(config["config"].values()))
    entry["use_pickle"] = True
    members[name] = json.dumps(config).encode()
    members[f"{name.rpartition('/')[0]}/{entry['path_name']}"] = save(Opened(path))


def pickle_inputs(members: Members, path: str) -> None:
    name = next(name for name in members if "sample_inputs" in name)
    members[name] = save(Opened(path))


def save(value: object) -> bytes:
    torch.save(value, file := io.BytesIO())
    return file.getvalue()


def rewrite(path: Path, change: Callable[[Members], None]) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda members: members.update({"version": b"8.14"}), "an unreadable program (RuntimeError)"),
        (lambda members: members.pop(next(n for n in members if n.endswith("models/model.json"))), "no program of the"),
    ],
    ids=["file outside of the folder", "no program"],
)
def test_files_that_torch_reads_as_an_older_format_are_detected(
    exported: Path, change: Callable[[Members], object], part: str
) -> None:
    """Older formats contain pickles."""
    rewrite(exported / "data" / "model.pt2", change)
    assert find_code(exported).startswith(part)


def test_a_file_with_other_members_for_zipfile_is_detected(exported: Path) -> None:
    """torch's own reader takes the zip64 record at the stored offset, and zipfile the one at the end."""
    path = exported / "data" / "model.pt2"
    shown, count, directory, start = split_zip(path.read_bytes())
    other = io.BytesIO()
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("version", b"8.14")
        archive.writestr("serialized_state_dict.pt", b"a pickle")
    hidden, hidden_count, hidden_directory, hidden_start = split_zip(other.getvalue())
    first = zip64_record(count, len(directory), start)
    base = len(shown) + len(directory) + len(first)
    moved, position = bytearray(hidden_directory), 0
    while position < len(moved):  # the offsets of the members in the file
        lengths = struct.unpack("<HHH", moved[position + 28 : position + 34])
        offset = struct.unpack("<I", moved[position + 42 : position + 46])[0]
        moved[position + 42 : position + 46] = struct.pack("<I", offset + base)
        position += 46 + sum(lengths)
    last = zip64_record(hidden_count, len(moved), base + hidden_start)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, start + len(directory), 1)
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    path.write_bytes(shown + directory + first + hidden + moved + last + locator + end)
    assert zipfile.ZipFile(path).namelist() == ["version", "serialized_state_dict.pt"]
    assert any(name.startswith("models/") for name in PT2ArchiveReader(str(path)).get_file_names())
    assert find_code(exported).startswith("files that not all readers find")


def split_zip(content: bytes) -> tuple[bytes, int, bytes, int]:
    """Return the members, their number, the central directory, and its offset."""
    end = content.rfind(b"PK\5\6")
    count, size, start = struct.unpack("<HII", content[end + 10 : end + 20])
    return content[:start], count, content[start : start + size], start


def zip64_record(count: int, size: int, start: int) -> bytes:
    return struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, start)


@pytest.mark.parametrize("name", ["__enum__", "\\u005f_enum__", "default_factory_modul\\u0065"])
def test_structures_that_import_a_module_are_detected(exported: Path, name: str) -> None:
    def change(program: Any) -> None:
        program["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = f'[1, {{"{name}": true}}]'

    rewrite(exported / "data" / "model.pt2", lambda members: edit_program(change)(members, ""))
    assert "in_spec" in find_code(exported) or "the name" in find_code(exported)


def test_internal_operators_that_do_not_check_their_indices_are_detected(exported: Path) -> None:
    target = "torch.ops.aten._convert_indices_from_csr_to_coo.default"

    def change(program: Any) -> None:
        nodes = program["graph_module"]["graph"]["nodes"]
        nodes.insert(0, {**nodes[0], "target": target, "name": "made"})

    rewrite(exported / "data" / "model.pt2", lambda members: edit_program(change)(members, ""))
    assert find_code(exported) == f"the operator {target!r} in data/model.pt2"


def call(name: str, function: Any, *arguments: str, keyword: str = "") -> dict[str, Any]:
    """Return a node that calls a function with texts, as if it were a subgraph."""
    texts = [{"name": keyword, "arg": {"as_string": text}, "kind": 2 if keyword else 1} for text in arguments]
    function = [] if function is None else [{"name": "", "arg": {"as_tensor": {"name": function}}, "kind": 1}]
    return {
        "target": "torch.ops.higher_order.wrap_with_set_grad_enabled",
        "inputs": [{"name": "", "arg": {"as_bool": True}, "kind": 1}, *function, *texts],
        "outputs": [{"as_tensor": {"name": name}}],
        "metadata": {},
        "is_hop_single_tensor_return": True,
        "name": name,
    }


def add_nodes(program: Any, *nodes: dict[str, Any]) -> None:
    graph = program["graph_module"]["graph"]
    for node in nodes:
        graph["tensor_values"][node["name"]] = next(iter(graph["tensor_values"].values()))
    graph["nodes"][:0] = nodes


def add_parameter(members: Members, program: Any, path: str) -> None:
    """Add a parameter `p_made` that torch looks up at a path in the loaded module."""
    module = program["graph_module"]
    specs, graph = module["signature"]["input_specs"], module["graph"]
    made = json.loads(json.dumps(next(spec for spec in specs if "parameter" in spec)))
    former, arg = made["parameter"]["parameter_name"], made["parameter"]["arg"]
    graph["tensor_values"]["p_made"] = graph["tensor_values"][arg["name"]]
    made["parameter"]["parameter_name"], arg["name"] = path, "p_made"
    specs.insert(0, made)
    graph["inputs"].insert(0, {"as_tensor": {"name": "p_made"}})
    name = next(name for name in members if name.endswith("weights/model_weights_config.json"))
    config = json.loads(members[name])
    config["config"][path] = config["config"][former]
    members[name] = json.dumps(config).encode()


def parameter_as_code(members: Members, path: str) -> None:
    """Name a parameter so that torch writes `getattr(self, "NAME")` with a closing quotation mark in the name."""

    def change(program: Any) -> None:
        add_parameter(members, program, '["*0,eval or "]')
        add_nodes(program, call("first", "p_made", "torch.os.mknod"), call("second", "first", path))

    edit_program(change)(members, path)


def parameter_as_globals(members: Members, path: str) -> None:
    """Name a parameter so that torch reads the global variables of a method of the loaded module."""

    def get(name: str, source: str, key: str) -> dict[str, Any]:
        values = [{"as_tensor": {"name": source}}, {"as_string": key}]
        node = call(name, None)
        return node | {
            "target": "_operator.getitem",
            "inputs": [{"name": "", "arg": value, "kind": 1} for value in values],
            "outputs": [{"as_tensor": {"name": name}}],
        }

    def change(program: Any) -> None:
        add_parameter(members, program, "__class__.named_parameters.__globals__")
        builtins, evaluate = get("builtins", "p_made", "__builtins__"), get("evaluate", "builtins", "eval")
        function, result = call("function", "evaluate", "torch.os.mknod"), call("result", "function", path)
        add_nodes(program, builtins, evaluate, function, result)

    edit_program(change)(members, path)


def keyword_as_code(members: Members, path: str) -> None:
    edit_program(lambda program: add_nodes(program, call("first", None, path, keyword="torch.os.mknod, path")))(
        members, path
    )


def input_key_as_code(members: Members, path: str) -> None:
    """Name an input so that the message of a guard becomes an expression."""
    name = next(name for name in members if "sample_inputs" in name)
    members[name] = save((({f"%torch.os.mknod('{path}')or ": torch.randn(4, 1, 8, 8)},), {}))


@pytest.mark.parametrize(
    ("attack", "part"),
    [
        (write_file, "the operator 'torch.ops.aten.from_file.default'"),
        (guard, 'guards_code "open('),
        (guard_message, "guards_code '1 != b"),
        (guard_with_line_feed, "guards_code "),
        (evaluate_size, "expr_str 'eval("),
        (pickle_weight, "the pickled object 'linear.weight'"),
        (pickle_inputs, "pickled objects in data/sample_inputs/model.pt"),
        (parameter_as_code, "parameter_name '["),
        (parameter_as_globals, "parameter_name '__class__.named_parameters.__globals__'"),
        (keyword_as_code, "name 'torch.os.mknod, path'"),
        (input_key_as_code, "pickled objects in data/sample_inputs/model.pt"),
    ],
)
@pytest.mark.parametrize("with_effect", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_program_that_executes_code_is_detected(
    exported: Path, tmp_path: Path, attack: Callable[[Members, str], None], part: str, with_effect: bool
) -> None:
    """Each program creates a file when torch loads and calls it, and `find_code` describes the reason."""
    path, marker = exported / "data" / "model.pt2", tmp_path / "marker"
    rewrite(path, lambda members: attack(members, str(marker)))
    found = find_code(exported)
    assert found.startswith(part), found
    assert found.endswith(" in data/model.pt2")
    assert not marker.exists()
    if with_effect:
        code = f"import torch; torch.export.load({str(path)!r}).module()(torch.randn(4, 1, 8, 8))"
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
        assert marker.exists(), "the attack has no effect, so the test shows nothing"
