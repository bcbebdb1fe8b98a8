"""Processes that tests run functions in: gloo ranks on this machine, started once and used many times.

    team = Ranks(2)
    team.run(function, argument)      # what it returned on each rank; function is defined at the top of a module
    team.errors(function, argument)   # the errors it raised on each rank, as "Type: message"
    team.close()

A function that leaves the ranks out of step (a rank that waits in vain, or is gone) needs a team of its own.
"""

import contextlib
import datetime
import multiprocessing
import os
import tempfile
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

WAIT = 240.0  # seconds a test waits for its ranks, on a busy machine
TIMEOUT = 180.0  # seconds that ranks wait for each other


class Ranks:
    def __init__(self, size):
        self._size = size
        self._start()

    def _start(self):
        self._directory = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn" if os.name == "nt" else "forkserver")
        self._pipes, self.processes = [], []
        for rank in range(self._size):
            here, there = context.Pipe()
            arguments = rank, self._size, str(Path(self._directory.name) / "store"), there
            self.processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            self.processes[-1].start()
            there.close()
            self._pipes.append(here)

    def run(self, function, *arguments):
        answers = self._ask(function, arguments)
        failed = [f"rank {rank}:\n{trace}" for rank, (_, trace, _) in enumerate(answers) if trace is not None]
        if failed:  # the ranks may be out of step: the next test needs new ones
            self.close()
            self._start()
        assert not failed, "\n".join(failed)
        return [value for value, _, _ in answers]

    def errors(self, function, *arguments):
        """ "" for a rank that went well."""
        return [message for _, _, message in self._ask(function, arguments)]

    def close(self):
        for pipe in self._pipes:
            pipe.close()  # the end of their loop
        for process in self.processes:
            process.join(5)
            process.kill()
            process.join()
        self._directory.cleanup()

    def _ask(self, function, arguments):
        for pipe in self._pipes:
            pipe.send((function, arguments))
        return [self._answer(rank, pipe) for rank, pipe in enumerate(self._pipes)]

    def _answer(self, rank, pipe):
        assert pipe.poll(WAIT), f"rank {rank} did not answer for {WAIT:.0f} seconds"
        try:
            return pipe.recv()
        except EOFError:
            return None, "the process is gone", "EOFError: the process is gone"


def _serve(rank, size, store, pipe):
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    patience = datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=patience)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            function, arguments = pipe.recv()
            pipe.send(_answer(function, arguments))
    os._exit(0)  # the others may be gone: nobody is waited for


def give_up_after(seconds):
    """Shorten the time limit of collectives, on each rank, when all ranks have come here: the next one will fail."""
    dist.barrier()
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # newer, older torch
    set_timeout(datetime.timedelta(seconds=seconds))


def _answer(function, arguments):
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    try:
        return function(*arguments), None, ""
    except Exception as error:
        return None, traceback.format_exc(), f"{type(error).__name__}: {error}"
    finally:
        torch.set_default_dtype(dtype)


@contextlib.contextmanager
def single_process():
    """Hide the process group from samplewise inside the block, as before init_process_group."""
    initialized = dist.is_initialized
    dist.is_initialized = lambda: False
    try:
        yield
    finally:
        dist.is_initialized = initialized
