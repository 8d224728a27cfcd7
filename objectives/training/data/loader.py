"""Load batches in background processes."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.utils import data as torch_data

from hpsearch.objectives.errors import ObjectiveError, users_code
from hpsearch.objectives.training.data.dataset import Batch, Dataset
from hpsearch.objectives.training.data.tree import Tree
from hpsearch.objectives.training.reproducibility.seeds import derive_seed, seed_host, set_seed

_PR_SET_PDEATHSIG = 1


def ending_with_parent() -> Callable[[], None]:
    """Return what a process of `multiprocessing` that this one forks calls, for the kernel to kill it with its parent.

    On Linux, and for a child of the main thread: the kernel takes the end of the thread that forked for the process's.
    Torch's own loaders look every five seconds whether their parent lives, but not while they load.
    """
    return partial(_bind, threading.main_thread().ident)  # can be pickled, for processes that are spawned


def _bind(main: int | None) -> None:
    parent = multiprocessing.parent_process()
    if sys.platform != "linux" or threading.get_ident() != main or parent is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it ended before
        os.kill(os.getpid(), signal.SIGKILL)


# A batch of inputs -> inputs, changed at random, of the same structure; for training alone.
Augment = Callable[[Tree], Tree]


class _Batches(torch_data.Dataset[Batch]):
    """Item i is a whole batch: gathering it row by row costs more than the step that it is for."""

    def __init__(self, dataset: Dataset, batches: Sequence[Tensor], augment: Augment | None, seed: int) -> None:
        self._dataset, self._batches, self._augment, self._seed = dataset, batches, augment, seed
        self.draws = augment is not None or not dataset.in_memory
        self.is_stream = dataset.is_stream

    def __getitem__(self, index: int) -> Batch:
        with users_code("loading a batch"), _drawing(self._seed, index) if self.draws else nullcontext():
            batch = self._dataset.batch(self._batches[index])
            return batch if self._augment is None else batch._replace(x=self._augment(batch.x))


@contextmanager
def _drawing(seed: int, index: int) -> Iterator[None]:
    """Generators seeded by the batch, not by the process that makes it: their number changes nothing."""
    torch_state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed_host(seed, "augment", index))  # a process that loads has no GPU to touch
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)


def loaded(
    dataset: Dataset,
    batches: Sequence[Tensor],
    *,
    device: torch.device,
    num_workers: int = 0,
    augment: Augment | None = None,
    seed: int = 0,
    first: int = 0,
) -> Iterator[Batch]:
    """Load batches on the CPU in their order, in pinned memory if `device`, their destination, is a GPU.

    Args:
        dataset: on the CPU.
        batches: rows [n] of each batch.
        device: where the batches will go.
        num_workers: processes that prepare batches ahead; 0 prepares each in this process on demand.
        augment: changes the inputs at random.
        seed: of the draws of `augment`, `Dataset.load`, samples and `collate`.
        first: the first batch to load. Earlier batches do not change what later ones draw.

    Raises:
        ObjectiveError: the dataset's samples, `load` or `collate`, or `augment`, raised an error.
    """
    source = _Batches(dataset, batches, augment, seed)
    begin = 0 if source.is_stream else first  # a stream has to be read from its beginning to be where it was
    wanted = range(begin, len(batches))
    # In this process a DataLoader would only add its own time, a fifth of a millisecond a batch.
    alone = num_workers == 0 and device.type != "cuda"
    found = map(source.__getitem__, wanted) if alone else _ahead(source, wanted, seed, device, num_workers)
    try:
        for index, batch in enumerate(found, begin):
            if index < first:
                continue
            if source.draws:
                seed_host(seed, "after", index)  # what comes next draws the same, whoever loaded the batch
            yield batch
    except ObjectiveError as error:
        # A worker's error comes with its traceback, whose last line is the error itself.
        last = str(error).strip().splitlines()[-1]
        raise ObjectiveError(last.removeprefix("hpsearch.objectives.errors.ObjectiveError: ")) from error


def _ahead(
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
        worker_init_fn=partial(_start, ending_with_parent(), seed),
        multiprocessing_context="fork" if num_workers and forks else None,
        # Those that live on would carry their generators into the next epoch, and a resumed run has none to carry.
        persistent_workers=False,
    )


def _start(bind: Callable[[], None], seed: int, worker: int) -> None:
    bind()
    set_seed(seed, "worker", worker)
