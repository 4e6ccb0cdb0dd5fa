"""Runs untrusted Python under limits; a script of its own, started by python_process.py as

    python -Iu python_child.py BYTES CPU_SECONDS BLOCK < code

It imports nothing of ours, so that it starts in some 20 ms. BLOCK is 1 where no namespace keeps the network away.
"""

import resource
import sys
import traceback


def _refuse(event: str, _: tuple) -> None:
    """An audit hook, which Python code cannot take out again: no sockets, and no process that would be without it."""
    if event.startswith(("socket.", "subprocess.", "os.exec", "os.fork", "os.posix_spawn", "os.system", "ctypes.")):
        raise PermissionError(f"{event} is not allowed here")


def _report(kind: type, error: BaseException, trace: object) -> None:
    """An uncaught error as if the code had been started by itself."""
    while trace is not None and trace.tb_frame.f_code.co_filename != "<code>":
        trace = trace.tb_next
    traceback.print_exception(kind, error, trace)


def main() -> None:
    size, seconds, block = (int(argument) for argument in sys.argv[1:])
    code = sys.stdin.read()
    for limit, value in (
        (resource.RLIMIT_AS, size),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 16 * 2**20),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(limit, (value, value))
    if block:
        sys.addaudithook(_refuse)
    sys.excepthook = _report
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
