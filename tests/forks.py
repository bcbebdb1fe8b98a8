"""subprocess.Popen and subprocess.run for Python commands, forked from a server process that has imported torch.

A new Python process imports torch and torch._dynamo, which takes two seconds; a fork of the server takes milliseconds.
The server imports third-party packages only: each fork imports samplewise itself, with its own working directory,
environment variables, standard streams and `sys.argv`. It is a child of the calling process and ends as a Python
process does. Tests of imports and of the start of the interpreter need subprocess itself.
"""

import atexit
import contextlib
import ctypes
import gc
import io
import os
import pickle
import runpy
import signal
import socket
import struct
import subprocess
import sys
import warnings

PRELOADED = "torch", "torch._dynamo", "torch.utils.data", "numpy", "rich.progress", "typer", "matplotlib.figure"
SET_CHILD_SUBREAPER = 36  # of prctl
LENGTH = struct.Struct("!I")
PID = struct.Struct("!i")

# --- the calling process ---------------------------------------------------------------------------------------------

_server: tuple[int, socket.socket, subprocess.Popen] | None = None


def _connection() -> socket.socket:
    """Connection to the server of this process; a fork of this process starts its own."""
    global _server
    if _server is None or _server[0] != os.getpid():
        ours, theirs = socket.socketpair()
        command = [sys.executable, __file__, str(theirs.fileno())]
        _server = os.getpid(), ours, subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        atexit.register(_stop, os.getpid())
    return _server[1]


def _stop(caller: int) -> None:
    """Close the connection, which ends the server."""
    if _server is not None and _server[0] == caller == os.getpid():
        _server[1].close()
        _server[2].wait()


def _set_subreaper(on: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(SET_CHILD_SUBREAPER, int(on), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl failed")


class Popen(subprocess.Popen):
    """subprocess.Popen([sys.executable, ...]) as a fork of the server; options of the start other than these fail."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        (_, _, shell, *pipes), (_, _, _, _, _, start_new_session, *_) = rest[:9], rest[9:]
        stdin, _, _, stdout, _, stderr = pipes
        assert args[0] == sys.executable and not (shell or pass_fds or preexec_fn)
        request = {
            "arguments": [os.fsdecode(argument) for argument in args[1:]],
            "cwd": os.fspath(cwd or os.getcwd()),
            "environment": dict(os.environ if env is None else env),
            "session": start_new_session,
        }
        content = pickle.dumps(request)
        streams = [ours if given == -1 else given for ours, given in enumerate((stdin, stdout, stderr))]
        connection = _connection()
        _set_subreaper(True)  # the process is an orphan at once, and this process becomes its parent
        try:
            socket.send_fds(connection, [LENGTH.pack(len(content))], streams)
            connection.sendall(content)
            (self.pid,) = PID.unpack(_received(connection, PID.size))
        finally:
            _set_subreaper(False)
        self._child_created = True
        self._close_pipe_fds(*pipes)


def run(command, *, timeout=600, **options):
    """subprocess.run(command, **options) as a fork of the server."""
    if options.pop("capture_output", False):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    check = options.pop("check", False)
    with Popen(command, **options) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
    if check:
        done.check_returncode()
    return done


def kill(process):
    """Kill a process that was started with start_new_session=True, and its workers."""
    with contextlib.suppress(ProcessLookupError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:  # Windows, where workers end with their parent
            process.kill()


if sys.platform != "linux":
    Popen, run = subprocess.Popen, subprocess.run


# --- the server ------------------------------------------------------------------------------------------------------


def _received(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        more = connection.recv(size - len(found))
        if not more:
            raise EOFError("the other end of the connection is closed")
        found += more
    return found


def _serve(connection: socket.socket) -> dict:
    """Fork a process for each request. Returns the request, in the forked process only."""
    while True:
        header, streams, _, _ = socket.recv_fds(connection, LENGTH.size, 3)
        if not header:
            os._exit(0)
        request = pickle.loads(_received(connection, *LENGTH.unpack(header)))
        reader, writer = os.pipe()
        between = os.fork()
        if not between:
            if os.fork():
                os._exit(0)
            if request["session"]:
                os.setsid()
            os.write(writer, PID.pack(os.getpid()))
            for ours, given in enumerate(streams):
                os.dup2(given, ours)
            os.closerange(3, max(connection.detach(), reader, writer, *streams) + 1)
            return request
        os.waitpid(between, 0)  # then the process is an orphan
        connection.sendall(os.read(reader, PID.size))
        for given in (reader, writer, *streams):
            os.close(given)


def _open_streams(unbuffered: bool) -> None:
    """Standard streams as Python opens them at its start."""
    encoding = sys.stdout.encoding
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    for descriptor, name, errors in ((1, "stdout", sys.stdout.errors), (2, "stderr", "backslashreplace")):
        raw = io.FileIO(descriptor, "w", closefd=False)
        stream = io.TextIOWrapper(
            raw if unbuffered else io.BufferedWriter(raw),
            encoding,
            errors,
            line_buffering=name == "stderr" or raw.isatty(),
            write_through=unbuffered,
        )
        stream.mode = "w"
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _become(request: dict) -> None:
    """Run the command of the request as the main program of this process."""
    if "triton" in sys.modules:  # it reports objects that are not collected when the process ends
        atexit.register(gc.unfreeze)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    _open_streams(bool(os.environ.get("PYTHONUNBUFFERED")))
    arguments = request["arguments"]
    while arguments[0] == "-W":
        warnings.simplefilter(arguments[1])
        sys.warnoptions.append(arguments[1])
        arguments = arguments[2:]
    del sys.path[0]
    if arguments[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = arguments[1:]
        runpy._run_module_as_main(arguments[1])
    elif arguments[0] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            __import__(name)
    gc.collect()
    gc.freeze()  # what was imported is not traversed again, which would copy its pages into each fork
    _become(_serve(socket.socket(fileno=int(sys.argv[1]))))
