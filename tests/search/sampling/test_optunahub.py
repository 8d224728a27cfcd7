"""An OptunaHub sampler is the registry's code at one commit; a missing one is an error before the study exists."""

from __future__ import annotations

import subprocess
from pathlib import Path

import optuna
import pytest
from optuna.study import StudyDirection

from hpsearch.search.cli import run_command
from hpsearch.search.samplers import SamplerSpec
from hpsearch.search.samplers.optunahub import _load_module
from hpsearch.search.study.study import load_study
from hpsearch.storage.attributes import CHECKPOINT_URL, FOLDER_NAME, RESTORED, SPEC
from hpsearch.storage.study_storage.storage import open_storage
from tests.factories import spec_of

REF = "0123456789abcdef0123456789abcdef01234567"
CODE = """
from optuna.samplers import BaseSampler, RandomSampler
import optunahub

class Half(RandomSampler):
    def __init__(self, share: float = 0.5, seed: int | None = None) -> None:
        super().__init__(seed)
        self.share, self.seed = share, seed
    def sample_independent(self, study, trial, param_name, param_distribution):
        low, high = param_distribution.low, param_distribution.high
        return low + self.share * (high - low)
"""


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a package into OptunaHub's cache."""
    monkeypatch.setenv("OPTUNAHUB_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "github.com/optuna/optunahub-registry" / REF / "package/samplers/half"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(CODE)
    _load_module.cache_clear()
    yield folder
    _load_module.cache_clear()


def parsed(**options: object) -> SamplerSpec:
    return SamplerSpec.parse({"name": "optunahub", "package": "samplers/half", "ref": REF, **options})


def test_the_sampler_is_the_registered_class_with_the_seed_of_the_trial(cached: Path) -> None:
    spec = parsed(arguments={"share": 0.25})
    spec.prepare()
    sampler = spec.build(seed=7, common_seed=0, epochs=1)
    assert sampler.seed == 7
    study = optuna.create_study(sampler=sampler)
    assert study.ask().suggest_float("x", 0.0, 4.0) == 1.0
    assert SamplerSpec.parse(spec.model_dump()) == spec


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"arguments": {"shear": 1}}, "sampler.arguments: Half rejects these arguments"),
        ({"sampler_class": "Third"}, "sampler.sampler_class is 'Third'; choose from Half"),
    ],
)
def test_incompatible_samplers_are_an_error(cached: Path, options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parsed(**options).prepare()


def test_an_unavailable_package_is_an_error(cached: Path) -> None:
    (cached / "__init__.py").write_text("import nothing_of_this_name")
    with pytest.raises(ValueError, match=f"'samplers/half' at {REF} cannot be loaded from OptunaHub: No module"):
        parsed().prepare()


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a registry with the package, from which git fetches instead of GitHub."""
    folder = tmp_path / "github/optuna/optunahub-registry"
    package = folder / "package/samplers/half"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(CODE)
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -qm half"):
        subprocess.run(["git", *command.split()], cwd=folder, check=True)
    reach(monkeypatch, f"file://{tmp_path}/github/")
    monkeypatch.setenv("OPTUNAHUB_CACHE_HOME", str(tmp_path / "cache"))
    _load_module.cache_clear()
    yield folder
    _load_module.cache_clear()


def reach(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Redirect git from GitHub to this folder."""
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.{url}.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "https://github.com/")


def test_a_package_is_downloaded_once(registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=registry, check=True, capture_output=True, text=True)
    parsed(ref=head.stdout.strip()).prepare()
    _load_module.cache_clear()
    reach(monkeypatch, "https://127.0.0.1:1/")
    parsed(ref=head.stdout.strip()).prepare()


def test_without_a_network_the_error_has_a_remedy(registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reach(monkeypatch, "https://127.0.0.1:1/")
    with pytest.raises(ValueError, match=f"'samplers/half' at {REF} cannot be downloaded from OptunaHub") as refused:
        parsed().prepare()
    said = str(refused.value)
    assert "unable to access 'https://127.0.0.1:1/optuna/optunahub-registry/'" in said
    assert f"connect this machine to github.com, or copy {registry.parents[2] / 'cache'}" in said
    assert not [word for word in ("\n", "Cmd(", "cmdline", "stderr", "exit code", "fatal") if word in said], said


@pytest.mark.parametrize("package", ["samplers/half", "samplers/whole"])
def test_a_missing_commit_or_package_is_an_error(registry: Path, package: str) -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=registry, check=True, capture_output=True, text=True)
    ref = REF if package == "samplers/half" else head.stdout.strip()
    with pytest.raises(ValueError, match=f"'{package}' at {ref} is not in OptunaHub's registry; give"):
        parsed(package=package, ref=ref).prepare()


@pytest.mark.parametrize(("key", "value"), [("ref", "main"), ("package", "../../etc"), ("package", "pruners/x")])
def test_branches_and_paths_are_rejected_as_commit_or_package(key: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"sampler.{key}"):
        parsed(**{key: value})


@pytest.mark.parametrize("setting", ["sampler", "tensorboard", "wandb", "checkpoint-url"])
def test_workers_of_a_restored_study_use_external_settings_only_after_a_confirmation(
    cached: Path, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], setting: str,
) -> None:  # fmt: skip
    (cached / "__init__.py").write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()\n" + CODE)
    monkeypatch.setenv("HPSEARCH_STORAGE_URL", database_url)
    monkeypatch.setenv("HPSEARCH_HOME", str(tmp_path / "home"))
    storage = open_storage(database_url, application_name="test")
    values = {"sampler": parsed().model_dump(), "tensorboard": str(tmp_path / "logs"), "wandb": "team/project"}
    values["checkpoint-url"] = str(tmp_path / "victim")
    spec = {**spec_of(name="none").model_dump(), "objective": "digits"}
    attrs = {SPEC: spec, RESTORED: True, FOLDER_NAME: "s-1"}
    if setting == "checkpoint-url":
        attrs[CHECKPOINT_URL] = values[setting]
    else:
        spec[setting] = values[setting]
    storage.create_filled_study([StudyDirection.MAXIMIZE], "s", user_attrs=attrs, trials=[])
    shown = (
        f"the sampler samplers/half of OptunaHub at {REF}" if setting == "sampler" else f"--{setting} {values[setting]}"
    )
    assert run_command(["worker", "--study", "s", "--tracking-uri", "http://127.0.0.1:1"]) == 2
    assert (
        f"study 's' was restored from a backup and uses {shown}; if you trust this, confirm" in capsys.readouterr().err
    )
    for command in ("sync s", "run digits --name s --workers 0", "finalists s --workers 0", "promote s --refit"):
        assert run_command([*command.split(), "--tracking-uri", "http://127.0.0.1:1"]) == 2
        assert f"and uses {shown}; if you trust" in capsys.readouterr().err, command
    if setting == "checkpoint-url":
        assert run_command(["doctor", "s"]) != 0
        assert f"and uses {shown}; if you trust" in capsys.readouterr().out
    assert not (cached / "ran").exists()
    assert not (tmp_path / "logs").exists()
    assert run_command(["trust", "s", "--yes"]) == 0
    assert f"digits.py and {shown}" in capsys.readouterr().out
    load_study(storage, "s").check_restored()
