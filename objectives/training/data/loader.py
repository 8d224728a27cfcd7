"""Load batches in background processes."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from multiprocessing import queues
from typing import Any

import torch
from torch import Tensor
from torch._utils import ExceptionWrapper
from torch.utils import data as torch_data

from hpsearch.objectives.errors import ObjectiveError, get_first_line, wrap_user_errors
from hpsearch.objectives.training.data.dataset import Batch, Dataset
from hpsearch.objectives.training.data.tree import Tree
from hpsearch.objectives.training.reproducibility.seeds import derive_seed, seed_cpu_libraries, set_seed

_PR_SET_PDEATHSIG = 1


def make_parent_death_hook() -> Callable[[], None]:
    """Return a function that a child process calls so that the kernel kills the process when its parent ends.

    The function has an effect only on Linux and if the main thread forks, because the kernel sends the signal when the
    forking thread ends. DataLoader's workers check every five seconds whether their parent is alive, but not while they
    load a batch.
    """
    return partial(_bind_to_parent, threading.main_thread().ident)  # a partial can be pickled for spawned processes


def _bind_to_parent(main: int | None) -> None:
    parent = multiprocessing.parent_process()
    if sys.platform != "linux" or threading.get_ident() != main or parent is None:
        return
    kill_with_parent(parent.pid)


def kill_with_parent(pid: int | None) -> None:
    """Let the kernel kill this process when its parent, the process `pid`, ends. This function needs Linux."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != pid:  # the parent has already ended
        os.kill(os.getpid(), signal.SIGKILL)


# A random augmentation of a batch of training inputs, which keeps its structure.
Augment = Callable[[Tree], Tree]


class _Batches(torch_data.Dataset[Batch]):
    """Dataset whose items are batches, because collating rows one by one would take longer than a training step."""

    def __init__(self, dataset: Dataset, batches: Sequence[Tensor], augment: Augment | None, seed: int) -> None:
        self._dataset, self._batches, self._augment, self._seed = dataset, batches, augment, seed
        self.draws = augment is not None or not dataset.in_memory
        self.is_stream = dataset.is_stream

    def __getitem__(self, index: int) -> Batch:
        generators = _seeded_generators(self._seed, index) if self.draws else nullcontext()
        with wrap_user_errors("loading a batch"), generators:
            batch = self._dataset.batch(self._batches[index])
            return batch if self._augment is None else batch._replace(x=self._augment(batch.x))


@contextmanager
def _seeded_generators(seed: int, index: int) -> Iterator[None]:
    """Return a context seeded by the batch index, so that results do not depend on the number of loader processes."""
    torch_state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed_cpu_libraries(seed, "augment", index))  # a worker must not use the GPU
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)


def load_batches(
    dataset: Dataset,
    batches: Sequence[Tensor],
    *,
    device: torch.device,
    num_workers: int = 0,
    augment: Augment | None = None,
    seed: int = 0,
    first: int = 0,
) -> Iterator[Batch]:
    """Iterate over batches in CPU memory, in the given order; in pinned memory if `device` is a GPU.

    Args:
        dataset: dataset on the CPU.
        batches: rows [n] of each batch.
        device: device to which the caller moves the batches.
        num_workers: number of processes that prefetch batches; 0 loads them in this process.
        augment: random augmentation of the inputs.
        seed: seed of the random numbers of `augment`, `Dataset.load`, samples and `collate`.
        first: index of the first batch to load. Skipped batches do not change the random numbers of later ones.

    Raises:
        ObjectiveError: `augment`, or the dataset's `samples`, `load` or `collate`, raised an error.
    """
    source = _Batches(dataset, batches, augment, seed)
    begin = 0 if source.is_stream else first  # a stream can only be read from its beginning
    wanted = range(begin, len(batches))
    # Without workers, a DataLoader would only add 0.2 ms per batch.
    in_process = num_workers == 0 and device.type != "cuda"
    found = map(source.__getitem__, wanted) if in_process else _load_ahead(source, wanted, seed, device, num_workers)
    try:
        for index, batch in enumerate(found, begin):
            if index < first:
                continue
            if source.draws:
                seed_cpu_libraries(seed, "after", index)  # independent of which process loaded the batch
            yield batch
    except ObjectiveError as error:
        # The text of a worker's error is its traceback; the last line is the message.
        last = str(error).strip().splitlines()[-1]
        raise ObjectiveError(last.removeprefix("hpsearch.objectives.errors.ObjectiveError: ")) from error


def _load_ahead(
    source: _Batches, wanted: range, seed: int, device: torch.device, num_workers: int
) -> torch_data.DataLoader[Batch]:
    # Python 3.14 no longer forks by default; objectives and their closures cannot be pickled.
    forks = sys.platform == "linux" and multiprocessing.get_start_method(allow_none=True) != "spawn"
    return torch_data.DataLoader(
        source,
        sampler=wanted,
        batch_size=None,
        num_workers=min(num_workers, 1) if source.is_stream else num_workers,
        pin_memory=device.type == "cuda",
        generator=torch.Generator().manual_seed(derive_seed(seed, "loader")),
        worker_init_fn=partial(_start_worker, make_parent_death_hook(), seed),
        multiprocessing_context="fork" if num_workers and forks else None,
        # Persistent workers would keep their generators for the next epoch, which a resumed run cannot reproduce.
        persistent_workers=False,
    )


def _start_worker(bind: Callable[[], None], seed: int, worker: int) -> None:
    bind()
    set_seed(seed, "worker", worker)
    if (queue := sys._getframe(1).f_locals.get("data_queue")) is not None:  # of the caller, torch's `_worker_loop`
        queue._on_queue_feeder_error = partial(_send_error, queue)


def _send_error(queue: queues.Queue[Any], error: Exception, item: tuple[int, Any]) -> None:
    """Send an error instead of a batch that cannot be sent, for which the training would wait forever."""
    index, _ = item
    try:
        text = get_first_line(error)
        remedies = {
            os.strerror(errno.ENOSPC): "enlarge /dev/shm, such as with docker run --shm-size 2g, or use num_workers=0",
            os.strerror(errno.EMFILE): "raise the limit of open files (ulimit -n), or use a smaller num_workers",
        }
        text += "".join(f"; {remedy}" for cause, remedy in remedies.items() if cause in text)
        raise ObjectiveError(f"a batch cannot be sent from a loader process: {text}")
    except ObjectiveError:
        queue.put((index, ExceptionWrapper(where="in a loader process")))  # type: ignore[no-untyped-call]
