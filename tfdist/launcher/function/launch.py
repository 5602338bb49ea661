"""`tfdist.launch`: a function of a notebook or script, run by several new processes that form a cluster."""

from __future__ import annotations

import functools
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.discovery import find
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.ports import own_loopback
from tfdist.cluster.variables import RUN_ID
from tfdist.launcher.arguments import AUTO
from tfdist.launcher.local.calls import (
    RAISED,
    LaunchError,
    Outcome,
    SendingPickler,
    call_command,
    describe,
    read_outcome,
    write_call,
)
from tfdist.launcher.output import Terminal, hidden_lines, outlets, plain
from tfdist.launcher.plan import (
    Machine,
    PlanError,
    ProcessPlan,
    RunOptions,
    default_workers,
    plan_run,
    shares,
)
from tfdist.launcher.policy import Failure, RestartPolicy
from tfdist.launcher.process import StartProgram, start_unpinned
from tfdist.launcher.run import announce, log_folder, new_run_id, shortest
from tfdist.launcher.supervisor import ClusterRun, Patience
from tfdist.supervision.exit_codes import PREEMPTED
from tfdist.supervision.process_folders import process_folder
from tfdist.supervision.progress import Progress

_LAST_LINES, _LAST_LINES_OF_OTHERS, _OTHERS = 20, 5, 3
# TensorFlow writes as many lines at most that are left out.
_MOST_HIDDEN = 20

_numbers = itertools.count(1)


def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    workers: int | None = None,
    *,
    env: Mapping[str, str] | None = None,
    cpus_per_worker: int | str = AUTO,
    gpus_per_worker: int | str = AUTO,
    output: str = "chief",
    log_dir: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
    max_restarts: int = 0,
    hang_timeout: float | None = None,
) -> Any:
    """Runs `fn(*args)` in new processes on this machine that form a cluster, and returns what the first one returns.

    It is `tfdist run` for a function, which may be defined in the cell of a notebook. What the first process prints is
    shown live, the output of all goes to logs. `fn` makes its strategy, data and model itself: the processes share
    nothing with this one but copies of what `fn` uses, which travel by cloudpickle.

    Args:
        fn: any function: of a cell, a closure, a method, a `functools.partial`.
        args: its arguments, the same for every process.
        workers: number of processes; by default as many as there are GPUs, or 2 without GPUs.
        env: environment variables to set in every process.
        cpus_per_worker: cores of each process; "auto" shares them all out.
        gpus_per_worker: GPUs of each process; "auto" shares them all out.
        output: "chief" shows what the first process prints, "all" what any prints.
        log_dir: folder of the logs; by default `tfdist-logs/<date-time>-<number>-<call>`.
        timeout: seconds after which the processes are stopped, as by SIGTERM; None: never.
        max_restarts: how often to start all again after one failed while it trained; it pays if `fn` uses
            `tfdist.callbacks.BackupAndRestore`.
        hang_timeout: seconds without progress of `fit` that count as a hang; None: what is unusual for it, 30 at least.

    Returns:
        What `fn` returned in the first process. It travels by pickle: plain values, NumPy arrays, models. A `History`
        comes without its model.

    Raises:
        LaunchError: if a process raised, died, hung or did not end in time. The message has its traceback, and the
            exception is the `__cause__`. Also if this process is itself one of a cluster, or its TensorFlow has taken
            the GPUs.
        TypeError: if `fn` uses, or `args` hold, something that cannot travel; the message names it.
        ValueError: if an argument asks for what is not there.
        OSError: if the logs, or what travels, cannot be written.
        KeyboardInterrupt: once all processes have ended, if this one was interrupted.

    Example:
        >>> import tfdist
        >>> def rank_and_size():
        ...     cluster = tfdist.discover()
        ...     return cluster.rank, cluster.num_workers
        >>> tfdist.launch(rank_and_size, workers=2)
        (0, 2)
    """
    __tracebackhide__ = True
    _check_arguments(fn, args, workers, env, output, {"timeout": timeout, "hang_timeout": hang_timeout}, max_restarts)
    _refuse_in_cluster(os.environ)
    variables = dict(env or {})
    # Where the user names GPUs, these are shared out.
    environ = {**os.environ, **{name: variables.pop(name) for name in ("CUDA_VISIBLE_DEVICES",) if name in variables}}
    machine = Machine.this_one(environ)
    try:
        count = default_workers(machine, gpus_per_worker) if workers is None else workers
        options = RunOptions(
            count,
            cpus_per_worker=cpus_per_worker,
            gpus_per_worker=gpus_per_worker,
            env=variables,
            host=own_loopback(),
        )
        shares(options, machine)
    except PlanError as error:
        raise ValueError(in_words_of_python(str(error))) from None
    if machine.gpus and gpus_per_worker != 0:
        _refuse_taken_gpus()
    run_id = f"{new_run_id()}-{next(_numbers)}"
    folder = log_folder(log_dir, run_id)
    show_all = output == "all"
    with process_folder("launch") as private:
        call = private / "call"
        try:
            write_call(call, fn, args, quiet=True, pickler=SendingPickler)
        except OSError:
            raise  # a full disk, say
        except Exception as error:
            raise TypeError(f"launch: {describe(fn, args, error)}") from None
        folder.mkdir(parents=True, exist_ok=True)
        hidden = hidden_lines(show_all, {**environ, **variables})
        shown = CallOutput("worker 0", show_all, environ, hidden)
        announce(options, machine, shown, str(shortest(folder)), show_all)
        run = _CallRun(
            options,
            functools.partial(
                plan_run,
                command=call_command(call, call),  # each process gets one of its own
                machine=machine,
                environ=environ,
                run_id=run_id,
                log_dir=str(folder),
                show_all=show_all,
            ),
            RestartPolicy(max_restarts),
            folder,
            shown,
            Patience(hang_timeout=hang_timeout, start_timeout=max(Patience.start_timeout, hang_timeout or 0.0)),
            functools.partial(_start_call, call),
            timeout,
        )
        code = run.run()
        outcomes = {f"worker {rank}": read_outcome(_result(call, rank)) for rank in range(count)}
    chief = outcomes["worker 0"]
    if code == 0 and chief is not None and chief.succeeded and not run.is_late:
        return chief.value
    if run.ending.interrupt is not None and not run.is_late:
        # As if nobody had waited for the processes: KeyboardInterrupt, or the end of this process.
        signal.raise_signal(run.ending.interrupt)
    error, cause = _error(run, outcomes, folder)
    raise error from cause


class _CallRun(ClusterRun):
    """A run that has a time limit, and leaves its failure to be raised.

    Attributes:
        timeout: for how many seconds it may last, if there is a limit.
        is_late: whether its time was up.
    """

    def __init__(
        self,
        options: RunOptions,
        plan: Callable[..., list[ProcessPlan]],
        policy: RestartPolicy,
        log_dir: Path,
        output: CallOutput,
        patience: Patience,
        start_program: StartProgram,
        timeout: float | None,
    ) -> None:
        super().__init__(options, plan, policy, log_dir, output, patience, start_program)
        self.timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self.is_late = False

    def note_progress(self, progress: Mapping[str, Progress | None]) -> None:
        super().note_progress(progress)
        self.terminal.refresh()
        if self._inbox.is_stopping or not self.group.running:
            return  # it ends, or has ended, without that
        if self._deadline is not None and time.monotonic() > self._deadline:
            self.is_late = True
            self.terminal.message(f"{self.timeout:g} s are over (timeout): the processes are stopped")
            self._inbox.put(signal.SIGTERM)

    def _report(self, failure: Failure, reason: str) -> None:
        """Says nothing: `launch` raises it."""


def _start_call(call: Path, plan: ProcessPlan, output: int) -> subprocess.Popen[bytes]:
    """Starts a process with a file for its outcome, and with its cores, which it takes itself."""
    result = _result(call, plan.index)
    result.unlink(missing_ok=True)
    return start_unpinned(replace(plan, command=call_command(call, result, plan.cpus, plan.index == 0)), output)


def _result(call: Path, rank: int) -> Path:
    return call.with_name(f"result-{rank}")


def _check_arguments(
    fn: Any, args: Any, workers: Any, env: Any, output: Any, limits: Mapping[str, Any], max_restarts: Any
) -> None:
    __tracebackhide__ = True
    if not callable(fn):
        raise TypeError(
            f"launch: received fn={fn!r}, expected a function. Pass it without calling it: launch(train, (x, y))."
        )
    if not isinstance(args, (tuple, list)):
        raise TypeError(
            f"launch: received args of type {type(args).__name__}, expected a tuple. "
            "A single argument needs a comma: launch(train, (x,))."
        )
    for name, value in (env or {}).items():
        if not isinstance(value, str):
            raise TypeError(f"launch: received env={{{name!r}: {value!r}}}, expected text: {str(value)!r}.")
    if workers is not None and (not isinstance(workers, int) or workers < 1):
        raise ValueError(f"launch: received workers={workers!r}, expected a whole number of at least 1, or None.")
    if output not in ("chief", "all"):
        raise ValueError(f'launch: received output={output!r}, expected "chief" or "all".')
    for name, seconds in limits.items():
        if seconds is not None and not (isinstance(seconds, Real) and seconds > 0):
            raise ValueError(f"launch: received {name}={seconds!r}, expected a positive number of seconds, or None.")
    if not (isinstance(max_restarts, Integral) and max_restarts >= 0):
        raise ValueError(f"launch: received max_restarts={max_restarts!r}, expected a whole number, 0 or more.")


def _refuse_in_cluster(env: Mapping[str, str]) -> None:
    """Each process of a cluster would start a cluster of its own, and each of these, on importing the same module."""
    __tracebackhide__ = True
    try:
        found = find(env)
    except ClusterError:
        if RUN_ID not in env:
            return  # what is wrong is replaced
        found = None
    if RUN_ID in env or not (isinstance(found, ClusterConfig) and len(found.tasks()) <= 1):
        remedy = (
            "If the workers import the module that calls launch, put the call below `if __name__ == '__main__':`"
            if RUN_ID in env
            else "If the variables that say so are left over, delete them, such as by del os.environ['TF_CONFIG']"
        )
        raise LaunchError(
            f"launch was called in a process of a cluster ({found or 'TFDIST_RUN_ID is set'}). Expected: a notebook or "
            f"a script that is started once. In a cluster, call the function itself. {remedy}."
        )


def _refuse_taken_gpus() -> None:
    """TensorFlow takes the memory of all GPUs that it sees as soon as it is used, and keeps it."""
    __tracebackhide__ = True
    tf = sys.modules.get("tensorflow")
    if tf is None or os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH", "").lower() == "true":
        return
    from tfdist.compat.upstream import context

    if not context.context()._initialized or not tf.config.list_logical_devices("GPU"):
        return
    if all(tf.config.experimental.get_memory_growth(device) for device in tf.config.get_visible_devices("GPU")):
        return
    raise LaunchError(
        "TensorFlow in this process has taken the memory of the GPUs, so that nothing is left for the workers. Restart "
        "the kernel, and begin with this, before TensorFlow is used; this process then computes on its CPU, the "
        "workers on the GPUs: import tensorflow as tf; tf.config.set_visible_devices([], 'GPU')"
    )


def _error(
    run: _CallRun, outcomes: Mapping[str, Outcome | None], folder: Path
) -> tuple[LaunchError, BaseException | None]:
    """What to raise about a run that has failed or was stopped, and its cause."""
    code, failure, interrupt = run.ending.code, run.ending.failure, run.ending.interrupt
    failed = {name: outcome for name, outcome in outcomes.items() if outcome is not None and not outcome.succeeded}
    first = min(failed, key=lambda name: failed[name].moment, default="worker 0")
    blamed = failure.name if failure else first
    outcome = failed.get(blamed)
    if run.is_late:
        late = [name for name in outcomes if name in failed or outcomes[name] is None] or list(outcomes)
        blamed, outcome = late[0], None
        lines = [f"{' and '.join(late)} did not end within {run.timeout:g} s (timeout)."]
        lines += _quoted(blamed, _tail(run, blamed, _LAST_LINES_OF_OTHERS))
    elif interrupt is not None or code == PREEMPTED:
        sender = interrupt.name if interrupt else "a signal to one of them"
        saved = ", and have saved: call launch again to go on from there" if code == PREEMPTED else ""
        return LaunchError(f"the processes were stopped by {sender}{saved}. Logs: {folder}"), None
    elif outcome is not None and not (failure and failure.hang):
        lines = [f"{blamed} raised {outcome.text.splitlines()[0]}", "", outcome.traceback.rstrip()]
    else:
        what = str(failure or f"{blamed} ended without a result")
        lines = [in_words_of_python(what), *_quoted(blamed, _tail(run, blamed, _LAST_LINES))]
    if run.ending.reason:
        lines.append(in_words_of_python(run.ending.reason))
    own = lines[-1].strip() if outcome is None else outcome.text.splitlines()[-1]
    others = {name: _tail(run, name, _LAST_LINES_OF_OTHERS) for name in outcomes if name != blamed}
    for name in [name for name, tail in others.items() if tail and own not in tail][:_OTHERS]:
        lines += _quoted(name, others[name])
    ranks = [int(name.split()[1]) for name in [blamed, *(name for name in failed if name != blamed)]]
    return LaunchError("\n".join([*lines, f"Logs: {folder}"]), ranks), outcome.value if outcome else None


def _quoted(name: str, lines: Sequence[str]) -> list[str]:
    return [f"--- {name}, last lines:", *(lines or ["(it printed nothing)"])]


def _tail(run: _CallRun, name: str, count: int) -> tuple[str, ...]:
    """The last lines that a process has printed, without those that are not shown either."""
    lines = [line for one in run.group.processes if one.plan.name == name for line in one.tail(count + _MOST_HIDDEN)]
    return tuple(line for line in lines if not run.terminal.hides(line))[-count:]


# The stream of a cell has no file descriptor that processes could write to: their output is read and written again. A
# notebook obeys carriage returns, but not the sequences that erase a line, and sends each write to the browser. So a
# progress bar is drawn anew a few times a second, and ever less often in the course of hours.
# A write of the live line, after so many seconds; and after this part of the time that has gone by.
_INTERVAL, _PART = 0.25, 1 / 500


class CallOutput(Terminal):
    """Writes to `sys.stdout`, as it is when this is made.

    What the processes print about an exception is not shown: `launch` raises it.

    Args:
        live: name of the first process.
        prefixed: whether each line begins with the name of its process.
        env: environment variables.
        hidden: lines of the processes that begin like this are left out.

    Example:
        >>> output = CallOutput("worker 0", prefixed=False, env={})
        >>> output.feed("worker 0", b"loss: 0.9\\rloss: 0.5\\n")
        >>> output.finish()
        loss: 0.5
    """

    def __init__(
        self, live: str, prefixed: bool, env: Mapping[str, str], hidden: re.Pattern[str] | None = None
    ) -> None:
        shown, errors = outlets(sys.stdout, sys.stderr)
        is_tty = shown.isatty() and env.get("TERM") != "dumb"
        self._in_cell = _is_of_cell(sys.stdout)
        colour = (is_tty or self._in_cell) and not env.get("NO_COLOR")
        super().__init__(shown, is_tty, colour, live, hidden=hidden, errors=errors)
        self._prefixed = prefixed
        self._raised: set[str] = set()
        self._began_at = self._drawn_at = time.monotonic()

    def feed(self, name: str, data: bytes, final: bool = False) -> None:
        """Takes what a process printed; `final` says that nothing follows."""
        super().feed(name, data, final)
        if final:
            self._raised.discard(name)  # another one may be started in its place

    def message(self, text: str) -> None:
        """Writes a line of the launcher's own: in a cell between those of the processes, else to standard error."""
        text = in_words_of_python(text)
        if self._in_cell:
            self._put(f"tfdist: {text}\n")
            self._show()
        else:
            super().message(text)

    def refresh(self) -> None:
        """Draws what has become due meanwhile. To be called again and again."""
        if self._in_cell:
            self._show()

    def _leaves_out(self, name: str, line: str) -> bool:
        if RAISED in line and name not in self._raised:
            self._raised.add(name)
            # A progress bar may not have ended its row.
            if begun := line.partition(RAISED)[0]:
                self._put(f"{self._prefix(name)}{begun}\n")
        return name in self._raised or super()._leaves_out(name, line)

    def _label(self, name: str) -> str:
        return super()._label(name) if self._prefixed else ""

    def _erased(self) -> str:
        return f"\r{' ' * len(plain(self._drawn))}\r" if self._in_cell else super()._erased()

    def _live_row(self) -> str:
        if not self._in_cell:
            return super()._live_row()
        row = self._buffers[self._live].row if self._live in self._buffers else ""
        if not row or self._live in self._raised:
            return self._drawn
        row = self._prefix(self._live) + self._coloured(row)
        now = time.monotonic()
        if row == self._drawn or now - self._drawn_at < max(_INTERVAL, _PART * (now - self._began_at)):
            return self._drawn
        self._drawn_at = now
        return row


def in_words_of_python(text: str) -> str:
    """A message about options of `tfdist run`, for who has given arguments of a function.

    Example:
        >>> in_words_of_python("--cpus-per-worker 9: 2 are usable. Use -n 2 (--max-restarts is 0)")
        'cpus_per_worker=9: 2 are usable. Use workers=2 (max_restarts is 0)'
        >>> in_words_of_python("runs--old/a --b/logs")  # folders stay what they are
        'runs--old/a --b/logs'
    """
    text = re.sub(r"(?<!\S)-n (?=\d)", "workers=", text)
    return re.sub(
        r"(?<![\w/.-])--([a-z]+(?:-[a-z]+)*)(?![\w/-])( (?=\d|auto|\w+=))?",
        lambda match: match[1].replace("-", "_") + ("=" if match[2] else ""),
        text,
    )


def _is_of_cell(stream: Any) -> bool:
    """Whether it is what ipykernel, which Jupyter, VS Code and Colab have, puts in the place of `sys.stdout`."""
    module = sys.modules.get("ipykernel.iostream")
    return module is not None and isinstance(stream, module.OutStream)
