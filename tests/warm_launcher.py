"""`tfdist` in a process forked from one that has imported TensorFlow: `warm_launcher.py OUT ERR ARGUMENT…`.

The processes that it starts are forked, too, so that a test of a training on two workers does not import TensorFlow
twice.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

from tfdist.launcher import run
from tfdist.launcher.local import fork_program
from tfdist.launcher.local.fork_server import ForkedProcess, ForkServer
from tfdist.launcher.main_program import run_as_main
from tfdist.launcher.operating_system import die_with_parent
from tfdist.launcher.plan import ProcessPlan


class HeldServer(ForkServer):
    """A server that was started before."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self.set_by_import = connection, None
        self._env = dict(os.environ)


def main(out: str, err: str, arguments: list[str]) -> None:
    """The launcher. Returns in the processes that it starts."""
    for path, descriptor in ((out, 1), (err, 2)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    # The tests may run below nohup; the launcher would then ignore SIGHUP, as it should.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    sys.path[0] = os.getcwd()  # as for python -m tfdist; the folder of this file would hide the package horovod
    launcher = os.getpid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        os.setsid()
        die_with_parent(launcher)()
        fork_program.serve(theirs.detach())
        run_as_main(sys.argv[:], (sys.executable, "-u", *sys.argv), hidden_files=[__file__])
        return
    theirs.close()
    server, afresh = HeldServer(ours), run.start_afresh

    def start(plan: ProcessPlan, output: int) -> ForkedProcess | subprocess.Popen[bytes]:
        command = plan.command
        is_python = command[:2] == (sys.executable, "-u") and (command[2].endswith(".py") or command[2] == "-m")
        process = server.start(command[2:], plan.env, output, cpus=plan.cpus) if is_python else None
        return process or afresh(plan, output)

    run.start_afresh = start
    from tfdist.launcher.command import main as tfdist

    tfdist(arguments, prog_name="python -m tfdist")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
