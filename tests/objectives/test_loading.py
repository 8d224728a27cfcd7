import bdb
import hashlib
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpsearch import BUILTIN, BaseObjective, Objective, ObjectiveError, load_objective, objective_reference, source_hash
from hpsearch.objectives.errors import format_traceback, format_user_error
from tests.factories import LOOP_OBJECTIVE

GOOD = """
from hpsearch import Objective, TrainConfig

class {name}(Objective):
    def suggest(self, trial): return TrainConfig()
    def data(self, seed): ...
    def model(self, config, train): ...
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes a module into a new current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)

    def make(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    yield make
    for name in set(sys.modules) - before:
        del sys.modules[name]


def _refused(reference):
    with pytest.raises(ObjectiveError) as caught:
        load_objective(reference)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("result", ["b''", "original(*_, **{**__, 'indent': 2})"])
def test_a_replacement_of_json_dumps_with_other_results_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: str
) -> None:
    """Later commands could not read what the command stores."""
    monkeypatch.setattr(json, "dumps", json.dumps)  # restores it
    source = f"import json\noriginal = json.dumps\njson.dumps = lambda *_, **__: {result}\n"
    (file := tmp_path / "mine.py").write_text(source)
    with pytest.raises(ObjectiveError, match=r"^json\.dumps was replaced by a function that does not"):
        load_objective(str(file))


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_a_built_in_objective_loads_and_keeps_its_name(name):
    objective = load_objective(name)
    assert isinstance(objective, BaseObjective)
    assert objective.name == name == objective_reference(name)


def test_generators_that_hpsearch_iterates_and_overridden_ones_are_accepted(write):
    body = """
    def parameter_groups(self, model, config):
        yield {"params": model.parameters()}
"""
    base = "from hpsearch import Objective\nclass Base(Objective):\n    def data(self, seed): yield\n"
    text = base + GOOD.format(name="Mine").replace("(Objective)", "(Base)") + body
    assert type(load_objective(str(write("mine.py", text)) + ":Mine")).__name__ == "Mine"


def test_a_file_loads_with_and_without_its_class(write):
    path = write("mine.py", GOOD.format(name="Mine"))
    for reference in ("mine.py", "mine.py:Mine", "./mine.py", str(path), f"{path}:Mine"):
        objective = load_objective(reference)
        assert (type(objective).__name__, objective.name) == ("Mine", "Mine")
        assert objective_reference(reference) == f"{path}:Mine"
    assert source_hash(objective) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_stored_reference_loads_from_another_directory(write, tmp_path, monkeypatch):
    write("a folder/mine.py", GOOD.format(name="Mine"))
    stored = objective_reference("a folder/mine.py")
    monkeypatch.chdir("/")
    assert type(load_objective(stored)).__name__ == "Mine"


def test_an_objective_may_change_the_working_directory(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("mine.py", "import os; os.chdir('/')\n" + GOOD.format(name="Mine"))
    assert objective_reference("mine.py") == f"{tmp_path / 'mine.py'}:Mine"


def test_an_objective_that_ignores_the_ends_of_processes_hides_no_exit_code(write):
    write("mine.py", "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n" + GOOD.format(name="Mine"))
    load_objective("mine.py")
    assert subprocess.run(["false"], check=False).returncode == 1


def test_an_error_of_an_objective_that_closes_files_is_reported(write):
    code = "import os; os.closerange(3, 4096); raise {error}\n"
    write("mine.py", code.format(error="ValueError"))
    program = "from hpsearch import load_objective; load_objective('mine.py')"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "mine.py:1: ValueError" in ended.stderr.splitlines()[-1]


def test_a_module_of_the_current_directory_loads(write):
    write("pack/__init__.py", "")
    write("pack/inner.py", GOOD.format(name="Inner"))
    assert type(load_objective("pack.inner:Inner")).__name__ == "Inner"
    assert objective_reference("pack.inner:Inner") == "pack.inner:Inner"


def test_a_file_may_import_a_file_in_its_folder_without_hiding_packages(write):
    write("helper_of_mine.py", "WIDTH = 7")
    write("numpy.py", "raise RuntimeError('this is not numpy')")
    write("mine.py", "import numpy, helper_of_mine\nassert helper_of_mine.WIDTH == 7\n" + GOOD.format(name="Mine"))
    assert type(load_objective("mine.py")).__name__ == "Mine"
    write("torch.py", GOOD.format(name="Torch"))  # the objective's own file may have any name
    assert type(load_objective("torch.py")).__name__ == "Torch"
    assert "nn" in vars(sys.modules["torch"])


def test_the_folder_of_a_file_has_precedence_over_the_working_folder(write, monkeypatch):
    write("common_name/__init__.py", "raise RuntimeError('of the working folder, such as a clone')")
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path.cwd())])
    write("project/common_name/__init__.py", "WIDTH = 7")
    write("project/mine.py", "import common_name\nassert common_name.WIDTH == 7\n" + GOOD.format(name="Mine"))
    assert type(load_objective("project/mine.py")).__name__ == "Mine"


def test_a_working_folder_of_others_is_not_searched(write, open_folder, monkeypatch):
    path = write("own/mine.py", GOOD.format(name="Mine"))
    (open_folder / "shared").mkdir()
    monkeypatch.chdir(open_folder / "shared")
    monkeypatch.setattr(sys, "path", [*sys.path])
    if os.geteuid() == 0:
        os.chown(Path.cwd(), -1, 65534)
    for mode in (0o1777, 0o2775):
        Path.cwd().chmod(mode)
        for reference in (str(path), "digits"):
            load_objective(reference)
            assert str(Path.cwd()) not in sys.path
    Path.cwd().chmod(0o755)
    load_objective("digits")
    assert str(Path.cwd()) not in sys.path
    load_objective(str(path))
    assert str(Path.cwd()) in sys.path, "the user's own folder, such as that of a project"


def test_a_working_folder_of_others_is_searched_only_for_a_module_that_is_not_installed(
    write, open_folder, monkeypatch
):
    write("installed_objective.py", GOOD.format(name="Mine"))
    write("installed_space/mine.py", GOOD.format(name="Mine"))
    monkeypatch.syspath_prepend(Path.cwd())
    monkeypatch.chdir(open_folder)
    open_folder.chmod(0o1777)
    for module in ("installed_objective", "installed_space.mine"):
        load_objective(f"{module}:Mine")
        assert str(open_folder) not in sys.path
    (open_folder / "installed_space").mkdir()
    for name in ("objective_in_place.py", "installed_space/in_place.py"):
        (open_folder / name).write_text(GOOD.format(name="Mine"))
    for module in ("objective_in_place", "installed_space.in_place"):
        monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(open_folder)])
        load_objective(f"{module}:Mine")
        assert str(open_folder) in sys.path


def test_a_working_folder_of_a_group_is_searched_for_a_file_in_it(write, open_folder, monkeypatch):
    """The members of another group may be able to change the file, so that its path alone does not tell."""
    own, shared = write("own/mine.py", GOOD.format(name="Mine")), open_folder / "shared"
    (shared / "objectives").mkdir(parents=True)
    inside = shared / "objectives" / "mine.py"
    inside.write_text(GOOD.format(name="Mine"))
    monkeypatch.chdir(shared)
    monkeypatch.setattr(sys, "path", [*sys.path])
    groups = {shared: 65534, own.parent: 65533} if os.geteuid() == 0 else dict.fromkeys((shared, own.parent), -1)
    for folder, group in groups.items():
        os.chown(folder, -1, group)
    own.parent.chmod(0o2775)
    for path, mode, is_searched in ((own, 0o2775, False), (inside, 0o3775, False), (inside, 0o2775, True)):
        shared.chmod(mode)
        load_objective(str(path))
        assert (str(shared) in sys.path) is is_searched


def test_each_objective_imports_packages_of_its_own_folder(write):
    data = "import common_pack.inner as inner; return inner.WIDTH"
    text = "import common_pack, common_pack.inner\n" + GOOD.format(name="Mine").replace("...", data, 1)
    for number, folder in enumerate(("first", "second")):
        write(f"{folder}/common_pack/__init__.py", "")
        write(f"{folder}/common_pack/inner.py", f"WIDTH = {number}")
        write(f"{folder}/mine.py", text)
    first, second = (load_objective(f"{folder}/mine.py") for folder in ("first", "second"))
    found = [vars(sys.modules[type(one).__module__])["common_pack"].inner.WIDTH for one in (first, second)]
    assert found == [0, 1]
    assert second.data(0) == 1, "also where it is imported later"
    assert load_objective("first/mine.py").data(0) == 0


def test_an_imported_objective_does_not_belong_to_the_file(write):
    write("mine.py", "from hpsearch.objectives.builtin.digits import Digits\n" + GOOD.format(name="Mine"))
    assert type(load_objective("mine.py")).__name__ == "Mine"


def test_a_base_class_with_an_underscore_is_skipped(write):
    write("mine.py", GOOD.format(name="_Base") + "\nclass Mine(_Base): pass\n")
    assert type(load_objective("mine.py")).__name__ == "Mine"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("digit", "unknown objective 'digit'; did you mean 'digits'?"),
        (
            "qqqq",
            f"unknown objective 'qqqq'; known: {', '.join(sorted(BUILTIN))}",
        ),
        ("", "unknown objective ''"),
        ("mine", "did you mean the file mine.py?"),
        ("hpsearch.objectives.builtin.digits", "write package.module:Class"),
        ("nowhere.py", "file nowhere.py does not exist; create it with: hpsearch init nowhere.py"),
        ("some/nowhere.py:Mine", "file some/nowhere.py does not exist; create it with: hpsearch init some/nowhere.py"),
        ("https://example.com/mine.py", "does not exist; give the path of a file on this machine"),
        ("loop.py", "loop.py is a link to a missing file or to itself; correct the link"),
        ("no_such_pack.inner:Mine", "no module 'no_such_pack'"),
        ("hpsearch.nothing:Mine", "module 'hpsearch.nothing' not found"),
        ("..:Mine", "is not a module name"),
        ("__main__:Mine", "workers cannot import '__main__'"),
        (
            "hpsearch.objectives.builtin.digits:Digit",
            "hpsearch.objectives.builtin.digits has no 'Digit'; did you mean 'Digits'?",
        ),
        (
            "hpsearch.objectives.builtin.digits:CLASSES",
            "hpsearch.objectives.builtin.digits:CLASSES is not an objective",
        ),
        ("hpsearch.objectives.builtin.digits:nn.Module", "hpsearch.objectives.builtin.digits has no 'nn.Module'"),
        ("mine.py:Yours", "mine.py has no 'Yours'; known: Mine"),
        ("two.py", "two.py defines objectives First, Second; select one, as in two.py:First"),
        ("none.py", "none.py defines no Objective; add a subclass of hpsearch.Objective"),
        ("none.py:Mine", "none.py has no 'Mine'; it defines no objective class"),
    ],
)
def test_an_objective_that_is_not_found_is_an_error_with_a_remedy(write, reference, message):
    write("mine.py", GOOD.format(name="Mine"))
    write("two.py", GOOD.format(name="First") + GOOD.format(name="Second"))
    write("none.py", "x = 1")
    Path("loop.py").symlink_to("loop.py")
    assert message in _refused(reference)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import os\n\nx\n", "mine.py:3: NameError: name 'x' is not defined"),
        ("def f():\n    return 1 / 0\n\nf()\n", "mine.py:2: ZeroDivisionError: division by zero"),
        ("x = 1\nclass Mine(:\n", "mine.py:2: SyntaxError: invalid syntax"),
        ("if True:\nx = 1\n", "mine.py:2: IndentationError: expected an indented block"),
        ("import json\njson.loads('{')\n", "mine.py:2: JSONDecodeError: Expecting property name"),
        ("\nimport no_such_module\n", "mine.py:2: ModuleNotFoundError: No module named 'no_such_module'"),
        ("from torch import no_such_thing\n", "mine.py:1: ImportError: cannot import name 'no_such_thing'"),
        ("import sys\nsys.exit(3)\n", "mine.py:2: SystemExit: 3"),
        ("import asyncio\nraise asyncio.CancelledError\n", "mine.py:2: CancelledError"),
        ("raise type('Mute', (Exception,), {'__str__': lambda _: 1 / 0})\n", "mine.py:1: Mute"),
        ("raise RuntimeError('two\\nlines')\n", "mine.py:1: RuntimeError: two"),
        ("import wrong_neighbour\n", "wrong_neighbour.py:2: SyntaxError"),
        ("from hpsearch import TrainConfig\nTrainConfig(lr=-1)\n", "lr must be above 0, not -1"),
    ],
)
@pytest.mark.parametrize("reference", ["mine.py", "mine:Mine"])
def test_an_error_in_a_file_of_the_user_has_file_and_line(write, text, message, reference):
    write("wrong_neighbour.py", "\nx = = 1\n")
    write("mine.py", text)
    assert _refused(reference).startswith(message)
    assert _refused(reference).startswith(message), "a second try has the same message"


def test_an_objective_may_neither_end_the_process_nor_lower_the_recursion_limit(write):
    before = sys.getrecursionlimit()
    write("mine.py", f"import sys\nsys.setrecursionlimit({before} - 100)\n{LOOP_OBJECTIVE}")
    load_objective("mine.py")
    assert sys.getrecursionlimit() == before
    write("other.py", f"{LOOP_OBJECTIVE}\n    def __init__(self):\n        raise SystemExit(3)\n")
    assert _refused("other.py") == "Loop() failed: other.py:15: SystemExit: 3"


@pytest.mark.parametrize(
    ("text", "package"),
    [
        ("import no_such_module.deeper\n", "no_such_module"),
        ("from cv2 import imread\n", "opencv-python-headless"),
        ("import torch.no_such_thing\n", None),
        ("from . import sibling\n", None),
    ],
)
@pytest.mark.parametrize("wrapper", ["./hpsearch", None])
def test_a_module_that_is_not_installed_is_reported_with_its_package(write, monkeypatch, text, package, wrapper):
    if wrapper:
        monkeypatch.setenv("HPSEARCH_COMMAND", wrapper)
    else:
        monkeypatch.delenv("HPSEARCH_COMMAND", raising=False)
    monkeypatch.setitem(sys.modules, "cv2", None)  # not in this folder, even if it is installed
    write("mine.py", text)
    error = _refused("mine.py")
    assert error.startswith("mine.py:1: ")
    remedy = f"(if it is a package, run `{f'{wrapper} add' if wrapper else 'pip install'} {package}`)"
    assert error.endswith(remedy) if package else "a package," not in error


@pytest.mark.parametrize("in_clone", [True, False])
@pytest.mark.parametrize("name", ["search", "objectives", "storage"])
def test_a_package_with_a_name_of_hpsearch_is_reported_with_both_remedies(write, monkeypatch, in_clone, name):
    """The import can mean hpsearch's package or one of the user's project."""
    path = write("project/mine.py", f"import {name}\n" + GOOD.format(name="Mine"))
    clone = Path(__file__).parents[2]
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in ("", str(clone))])
    if in_clone:
        monkeypatch.chdir(clone)
        sys.path.append(str(clone))
    error = _refused(str(path))
    assert "hpsearch" in error.partition(":1: ")[2]
    assert "your own package" in error
    assert "in the folder of your objective file" in error
    write(f"project/{name}/__init__.py", "")
    assert type(load_objective(str(path))).__name__ == "Mine"


def test_an_error_in_an_installed_objective_has_its_line(write, tmp_path, monkeypatch):
    monkeypatch.setattr("hpsearch.objectives.errors._LIBRARY_FOLDERS", (tmp_path,))
    write("deeper.py", "def f():\n    raise KeyError('x')\n")
    write("mine.py", "import deeper\n\ndeeper.f()\n")
    assert _refused("mine:Mine") == "mine.py:3: KeyError: 'x'"


def test_an_error_in_a_file_elsewhere_has_the_full_path(write, monkeypatch):
    path = write("mine.py", "x\n")
    monkeypatch.chdir("/usr")
    assert _refused(str(path)) == f"{path}:1: NameError: name 'x' is not defined"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("pass", "Mine does not define data, model, suggest; an Objective needs"),
        ("def __init__(self, path): ...", r"Mine\(\) failed: "),
        (None, r"Mine\(\) failed: mine.py:5: KeyError: 'HOME_OF_DATA'"),
        ("metric = 'val_loss'", "metric 'val_loss' has the prefix val_, which is reserved .*; use 'loss'"),
        ("direction = 'max'", "Mine.direction must be 'maximize' or 'minimize', not 'max'"),
        ("metric = None", "Mine.metric must be a non-empty string, not None"),
        ("name = ''", "Mine.name must be a non-empty string, not ''"),
        (r"metric = 'a\n\x1b[31m'", r"Mine.metric is 'a\\n\\x1b\[31m', which contains control characters; use another"),
        (r"directions = {'a\n': 'maximize'}", r"Mine.directions: 'a\\n' contains control characters"),
        ("epochs = 0", "Mine.epochs must be an integer of at least 1, not 0"),
        ("defaults = [{'lr': 1}]", r"Mine.defaults must be a dict such as \{'lr': 0.01\}, not \[\{'lr': 1\}\]"),
        ("loss_floor = 'low'", "Mine.loss_floor must be a number or None, not 'low'"),
        ("n_trials = 2.5", "Mine.n_trials must be an integer of at least 1, not 2.5"),
        (
            "async def on_epoch(self, *_): ...",
            "Mine.on_epoch is a coroutine or a generator, which hpsearch does not execute",
        ),
        (
            "def prepare(self, folder): yield",
            "Mine.prepare is a coroutine or a generator, which hpsearch does not execute",
        ),
        ("async def evaluate(self, *_): yield", "Mine.evaluate is a coroutine or a generator, which hpsearch"),
        ("@staticmethod\n    async def evaluate(*_): ...", "Mine.evaluate is a coroutine or a generator"),
        ("@classmethod\n    def prepare(cls, folder): yield", "Mine.prepare is a coroutine or a generator"),
        ("n_trials = property(lambda self: {}['TRIALS'])", r"Mine: mine.py:\d+: KeyError: 'TRIALS'"),
    ],
)
def test_an_unusable_objective_is_reported(write, body, message):
    text = GOOD.format(name="Mine")
    if body == "pass":
        text = "from hpsearch import Objective\nclass Mine(Objective):\n    pass\n"
    elif body is None:
        text = text.replace("    def suggest", "    def __init__(self): {}['HOME_OF_DATA']\n    def suggest")
    else:
        text += f"    {body}\n"
    write("mine.py", text)
    assert re.match(message, _refused("mine.py"))


@pytest.mark.parametrize(
    "statement",
    ["sys.stdout = sys.stderr = type('Tee', (), {'write': print})()", "sys.stdout.close(); sys.stderr.close()"],
    ids=["replaced", "closed"],
)
def test_an_objective_that_breaks_the_standard_streams_is_loaded(write, statement):
    write("mine.py", f"import sys\n{statement}\n" + GOOD.format(name="Mine"))
    code = "import sys, hpsearch; hpsearch.load_objective('mine.py'); print(1); print(2, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "2\n")


def test_finding_a_name_needs_no_torch():
    code = (
        "import sys; from hpsearch import load_objective; sys.exit('torch' in sys.modules or 'sklearn' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_training_imports_neither_torchmetrics_nor_matplotlib():
    code = (
        "import sys, hpsearch.objectives.training, hpsearch.objectives.builtin.digits;"
        "sys.exit(bool({'torchmetrics', 'matplotlib', 'yaml', 'sklearn'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_class_without_a_file_has_no_hash():
    made = type("Made", (Objective,), {"__module__": "nowhere", "suggest": 1, "data": 1, "model": 1})
    with pytest.raises(ObjectiveError, match="Made has no source file"):
        source_hash(made())


def test_paths_in_messages_are_short_below_the_current_directory(write):
    assert isinstance(write("deep/er/mine.py", "x"), Path)
    assert _refused("deep/er/mine.py").startswith("deep/er/mine.py:1: NameError")


class _SilentError(Exception):
    def __str__(self) -> str:
        raise ValueError


def test_a_file_that_starts_a_search_while_it_is_imported_is_rejected(write):
    """Each worker would import it, and so start another search."""
    code = (
        "from hpsearch import Objective, Study\nclass Mine(Objective):\n    pass\nStudy.create('mine.py', name='s')\n"
    )
    write("mine.py", code)
    assert _refused("mine.py") == (
        "mine.py calls Study.create while it is imported, and each worker imports it; "
        'move the call below: if __name__ == "__main__":'
    )


def test_threads_load_a_file_once(write):
    code = "import time\ntime.sleep(0.2)\n" + LOOP_OBJECTIVE
    path = write("mine.py", code)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(load_objective, [str(path)] * 4))
    assert len({type(objective) for objective in found}) == 1


def test_messages_of_user_errors_are_short_and_never_fail() -> None:
    assert format_user_error(_SilentError()) == "_SilentError: (its __str__ raises ValueError)"
    assert format_user_error(bdb.BdbQuit()) == "BdbQuit (breakpoint() and input() need a terminal; remove them)"
    assert format_user_error(EOFError("EOF when reading a line")).endswith(
        "line (breakpoint() and input() need a terminal; remove them)"
    )
    assert format_user_error(ValueError("x" * 5_000_000)) == f"ValueError: {'x' * 1000}..."


def test_long_tracebacks_are_cut() -> None:
    text = format_traceback(ValueError(f"begin{'x' * 5_000_000}end"))
    assert len(text) < 21_000
    assert text.startswith("ValueError: beginx")
    assert "\n... (498" in text
    assert text.endswith("xend\n")
