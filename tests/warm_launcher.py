"""`tfdist` in a process forked from one that has imported TensorFlow: `warm_launcher.py OUT ERR ARGUMENT…`.

The processes that it starts are forked, too, so that a test of a training on two workers does not import TensorFlow
twice. A zygote of the launcher's own does it, as after a restart of a run: the launcher never imports TensorFlow.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from tfdist.launcher import process
from tfdist.launcher.operating_system import die_with_parent
from tfdist.launcher.run_plan import ProcessPlan
from tfdist.launcher.warm import zygote as warm_starts
from tfdist.launcher.warm import zygote_program
from tfdist.launcher.warm.preloaded import changed_for_import, first_path, run_as_main, shared_part
from tfdist.launcher.warm.zygote import ForkedProcess, Zygote, can_fork


class HeldZygote(Zygote):
    """A zygote that somebody else has started."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection = connection
        self._process = ForkedProcess(pid)


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
    ours, theirs = socket.socketpair()
    if (pid := os.fork()) == 0:
        ours.close()
        os.setsid()
        die_with_parent(launcher)()
        import tensorflow  # noqa: F401  # has been imported, but is hidden

        command = zygote_program.serve(theirs.detach(), (sys.executable, "-u"))
        sys.path[0] = first_path(command[2:])
        run_as_main(command[2:], command, hidden_files=[__file__])
        return
    theirs.close()
    assert ours.recv(2**16)  # it is ready
    zygote = HeldZygote(ours, pid)
    afresh = process.start_afresh

    def start(plan: ProcessPlan, output: int) -> process.Program:
        if not can_fork(plan.command) or changed_for_import(shared_part(os.environ), shared_part(plan.env)):
            return afresh(plan, output)
        return zygote.spawn(plan.env, plan.cpus, output, plan.command[2:])

    process.start_afresh = warm_starts.start_afresh = start
    from tfdist.launcher.command import main as tfdist

    tfdist(arguments, prog_name="python -m tfdist")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
