"""A generator of misbehaving objectives, and of signals to the commands that run them."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from random import Random

# Statements of user code. Each either harms the process, or leaves something behind in it.
PARTS = {
    "exit 0": "os._exit(0)",
    "exit 143": "os._exit(143)",
    "sys.exit": "sys.exit(5)",
    "segfault": "os.kill(os.getpid(), signal.SIGSEGV)",
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
    "own SIGTERM": "os.kill(os.getpid(), signal.SIGTERM)",
    "error": "raise ValueError('x' * 100_000 + '\\x1b[31m')",
    "error without text": "raise type('Mute', (Exception,), {'__str__': lambda _: 1 / 0})()",
    "error of itself": "exec('try: 1 / 0\\nexcept Exception as error: raise error from error')",
    "interrupt": "raise KeyboardInterrupt",
    "recursion": "(lambda f: f(f))(lambda f: f(f))",
    "thread": "threading.Thread(target=time.sleep, args=(1000,)).start()",
    "fork": "os.fork() or time.sleep(1000)",
    "child": "subprocess.Popen(['sleep', '1000'])",
    "sleep": "time.sleep(0.5)",
    "print": "print('\\x1b[2J' + 'y' * 100_000)",
    "close": "os.close(1)",
    "no stdout": "sys.stdout = None",
    "ignore signals": "[signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT)]",
    "block signals": "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])",
    "alarm": "signal.alarm(1)",
    "chdir": "os.chdir('/')",
    "environment": "os.environ.clear()",
    "umask": "os.umask(0o777)",
    "path": "sys.path.clear()",
    "clock": "setattr(time, 'time', lambda: 0.0)",
    "frozen clock": "setattr(time, 'monotonic', lambda: 0.0)",
    "print patched": "setattr(builtins, 'print', None)",
    "recursion limit": "sys.setrecursionlimit(90)",
    "logging": "logging.disable(logging.CRITICAL)",
    "warnings": "warnings.simplefilter('error')",
    "socket timeout": "socket.setdefaulttimeout(0.001)",
    "no sockets": "socket.socket = socket.getaddrinfo = socket.create_connection = None",
    "files": "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))",
    "session": "os.getpid() == os.getsid(0) or os.setsid()",
    "exit hook": "atexit.register(time.sleep, 1000)",
    "no gradients": "torch.set_grad_enabled(False)",
    "locale": "locale.setlocale(locale.LC_ALL, 'C')",
    "close files": "os.closerange(3, 4096)",
    "no child signals": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "start method": "multiprocessing.set_start_method('spawn', force=True)",
}
_INT, _TERM, _HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
SIGNALS = ((_INT,), (_TERM,), (_HUP,), (_INT, _INT), (_TERM, _TERM), (_INT, _TERM))
PLACES = ("import", "init", "suggest", "first report", "last report", "end")

_SOURCE = """
import atexit, builtins, locale, logging, multiprocessing, os, resource, signal, socket, subprocess, sys, threading
import time, torch, warnings
from hpsearch import LoopObjective

{import_}
class Hostile(LoopObjective):
    metric, direction, epochs = "score", "maximize", 3

    def __init__(self):
        {init}

    def suggest(self, trial):
        lr = trial.suggest_float("lr", 0.01, 1.0)
        {suggest}
        return {{"lr": lr}}

    def run(self, trial):
        for epoch in trial.epochs():
            time.sleep(0.02)
            if epoch == 0:
                {first_report}
            if epoch == 2:
                {last_report}
            trial.report({{"score": 1.0}})
        {end}
"""


@dataclass(frozen=True)
class Misbehaviour:
    """Objective made of hostile parts, and the signals to the command that searches it.

    Attributes:
        parts: place and part of each hostile statement.
        signals: signals to send.
        moment: share of the command's usual time after which the first signal is sent.
    """

    parts: tuple[tuple[str, str], ...]
    signals: tuple[signal.Signals, ...]
    moment: float

    @property
    def source(self) -> str:
        """Python code of the objective."""
        code = {place.replace(" ", "_").replace("import", "import_"): "pass" for place in PLACES}
        for place, part in self.parts:
            code[place.replace(" ", "_").replace("import", "import_")] = PARTS[part]
        return _SOURCE.format(**code)


def make_misbehaviour(random: Random) -> Misbehaviour:
    """Return the next case: up to two hostile parts, and mostly a signal at a random moment."""
    places = random.sample(PLACES, random.choice([0, 1, 1, 2]))
    parts = tuple((place, random.choice(sorted(PARTS))) for place in places)
    return Misbehaviour(parts, random.choice([(), *SIGNALS]), random.random())
