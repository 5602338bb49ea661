"""`tfdist.launch`: what comes back, what is shown, and what is raised. Nothing here trains."""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import tfdist
from tfdist.launcher.function import launch as module
from tfdist.launcher.function.launch import CallOutput
from tfdist.launcher.operating_system import SignalInbox
from tfdist.launcher.plan import RunOptions
from tfdist.launcher.policy import RestartPolicy
from tfdist.launcher.process import start_unpinned
from tfdist.launcher.supervisor import Patience

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


def rank() -> int:
    import tfdist

    return tfdist.discover().rank


class TestReturns:
    def test_what_the_first_process_returns(self):
        secret = "of the closure"

        def function(text: str) -> tuple:
            import tfdist

            cluster = tfdist.discover()
            return cluster.rank, cluster.num_workers, text, secret, "tensorflow" in sys.modules

        assert tfdist.launch(function, ("argument",)) == (0, 2, "argument", secret, False)
        assert tfdist.launch(function, ["argument"], workers=3)[1] == 3

    def test_two_without_gpus_and_one_for_each_gpu(self, monkeypatch):
        def function() -> tuple:
            import tfdist

            return tfdist.discover().num_workers, os.environ["CUDA_VISIBLE_DEVICES"]

        assert tfdist.launch(function) == (2, "")
        assert tfdist.launch(function, env={"CUDA_VISIBLE_DEVICES": "4,5,6"}) == (3, "4")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        assert tfdist.launch(function) == (1, "1")
        assert tfdist.launch(function, env={"CUDA_VISIBLE_DEVICES": ""}) == (2, "")

    def test_functions_of_any_kind(self):
        def decorated(function):
            @functools.wraps(function)
            def wrapper(*args):
                return "wrapped", function(*args)

            return wrapper

        class Trainer:
            factor = 3

            def train(self, x: int) -> int:
                return self.factor * x

        @decorated
        def function(x: int) -> int:
            return helper(x)

        def helper(x: int) -> int:
            return x + 1

        assert tfdist.launch(function, (1,), workers=1) == ("wrapped", 2)
        assert tfdist.launch(Trainer().train, (2,), workers=1) == 6
        assert tfdist.launch(functools.partial(helper, x=4), workers=1) == 5
        assert tfdist.launch(lambda x: x, (7,), workers=1) == 7

    def test_an_object_has_the_class_of_the_caller(self):
        class Result:
            def __init__(self, value: int) -> None:
                self.value = value

        result = tfdist.launch(lambda: Result(4), workers=1)
        assert isinstance(result, Result)
        assert result.value == 4

    def test_a_class_of_the_caller_stays_as_it_is(self):
        """The worker has a copy, whose changes stay there, as those of variables do."""

        class Counter:
            runs = 0

            def where(self) -> str:
                return "here"

        def function() -> Counter:
            Counter.runs += 1
            Counter.where = lambda self: "there"
            return Counter()

        result = tfdist.launch(function, workers=1)
        assert (Counter.runs, result.where(), isinstance(result, Counter)) == (0, "here", True)

    def test_each_process_has_its_cores_and_variables(self, folder, monkeypatch):
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            pytest.skip("needs two cores")

        def function(path: str) -> None:
            here = (sorted(os.sched_getaffinity(0)), os.environ["MORE"], os.environ["AROUND"], sys.argv)
            Path(path, str(rank())).write_text(repr(here))

        monkeypatch.setenv("AROUND", "of the caller")
        monkeypatch.setattr(sys, "argv", ["script.py", "--epochs", "3"])
        tfdist.launch(function, (str(folder),), cpus_per_worker=1, env={"MORE": "yes"})
        for index in range(2):
            expected = ([cores[index]], "yes", "of the caller", ["script.py", "--epochs", "3"])
            assert (folder / str(index)).read_text() == repr(expected)

    @pytest.mark.nightly
    def test_in_another_thread(self):
        """As in asyncio.to_thread: only the main thread can hear signals."""
        results: list = []
        thread = threading.Thread(target=lambda: results.append(tfdist.launch(rank)))
        thread.start()
        thread.join(60)
        assert results == [0]


class TestOutput:
    @staticmethod
    def speak() -> None:
        print(f"1/2\r2/2 by {rank()}")

    def test_of_the_first(self, folder, capsys):
        tfdist.launch(self.speak)
        shown = capsys.readouterr()
        assert shown.out == "2/2 by 0\n"
        assert re.fullmatch(
            r"tfdist: 2 workers on this machine; output of worker 1 goes to (tfdist-logs/[-\d]+)/\n", shown.err
        )
        logs = [path.read_bytes().decode() for path in sorted(folder.glob("tfdist-logs/*/worker-*.log"))]
        assert logs == ["1/2\r2/2 by 0\n", "1/2\r2/2 by 1\n"]

    @pytest.mark.nightly
    def test_of_all(self, folder, capsys):
        tfdist.launch(self.speak, output="all", log_dir=folder / "logs")
        assert sorted(capsys.readouterr().out.splitlines()) == ["[worker 0] 2/2 by 0", "[worker 1] 2/2 by 1"]
        assert (folder / "logs" / "worker-1.log").exists()


class TestFailures:
    def test_an_exception(self, capsys):
        class OwnError(Exception):
            pass

        def inner(x: int) -> None:
            raise OwnError("of rank 1", x)

        def function(begun: str) -> None:
            print("begins")
            if rank() == 1:
                while not os.path.exists(begun):
                    time.sleep(0.01)
                inner(42)
            Path(begun).touch()
            time.sleep(1000)

        with pytest.raises(tfdist.LaunchError) as error:
            tfdist.launch(function, (os.path.abspath("begun"),))
        assert isinstance(error.value.__cause__, OwnError)
        assert error.value.__cause__.args == ("of rank 1", 42)
        assert error.value.ranks == (1,)
        lines = str(error.value).splitlines()
        assert lines[0].startswith("worker 1 raised ")
        assert lines[0].endswith("OwnError: ('of rank 1', 42)")
        assert lines[2] == "Traceback (most recent call last):"
        assert lines[3].endswith(", in function")  # nothing of tfdist's is above it
        assert "    inner(42)" in lines
        assert any(line.endswith(", in inner") for line in lines)
        assert lines[-2:-1] == ["begins"]  # worker 0 did something else
        assert lines[-1].startswith("Logs: /")
        assert "Traceback" not in capsys.readouterr().out

    def test_an_exception_of_a_class_that_only_the_worker_can_import(self, folder):
        (folder / "only_there.py").write_text("class Bad(Exception):\n    pass\n")

        def function(path: str) -> None:
            sys.path.insert(0, path)
            import only_there

            raise only_there.Bad("broken")

        with pytest.raises(tfdist.LaunchError) as error:
            tfdist.launch(function, (str(folder),), workers=1)
        lines = str(error.value).splitlines()
        assert lines[0].endswith("only_there.Bad: broken")
        assert '    raise only_there.Bad("broken")' in lines

    def test_an_exception_of_the_first_is_not_shown_twice(self, folder, capsys):
        def function() -> None:
            print("before")
            raise ValueError("same")

        with pytest.raises(tfdist.LaunchError, match=r"^worker 0 raised ValueError: same\n"):
            tfdist.launch(function, workers=1)
        assert capsys.readouterr().out == "before\n"
        (log,) = folder.glob("tfdist-logs/*/worker-0.log")
        assert log.read_text().startswith("before\n--- the function raised:\nTraceback")

    @pytest.mark.nightly
    def test_an_exception_that_cannot_be_read(self):
        class Needs(Exception):
            def __init__(self, one: int, two: int) -> None:
                super().__init__("both")

        def function() -> None:
            raise Needs(1, 2)

        with pytest.raises(tfdist.LaunchError, match=r"^worker 0 raised RuntimeError: .*Needs: both\n") as error:
            tfdist.launch(function, workers=1)
        assert "in function" in str(error.value)

    def test_a_process_that_is_killed(self):
        def function() -> None:
            print("last words of", rank())
            if rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1000)

        with pytest.raises(tfdist.LaunchError) as error:
            tfdist.launch(function)
        assert str(error.value).startswith("worker 1 was killed by SIGKILL (exit code 137; the kernel does that when ")
        assert "--- worker 1, last lines:\nlast words of 1\n" in str(error.value)
        assert error.value.__cause__ is None
        assert error.value.ranks == (1,)

    @pytest.mark.parametrize("code", [0, 7])
    def test_a_function_that_ends_its_process(self, code):
        with pytest.raises(tfdist.LaunchError, match=f"^worker 0 raised SystemExit: {code}\n") as error:
            tfdist.launch(lambda: sys.exit(code), workers=1)
        assert isinstance(error.value.__cause__, SystemExit)

    def test_a_process_that_ends_without_a_result(self):
        with pytest.raises(tfdist.LaunchError, match=r"^worker 0 ended without a result\n"):
            tfdist.launch(lambda: os._exit(0), workers=1)

    def test_time_limit(self, capsys):
        def function() -> None:
            print("waits")
            if rank() == 1:
                time.sleep(1000)

        # On a busy machine, worker 0 may not have begun either.
        says = r"^(worker 0 and )?worker 1 did not end within 3 s \(timeout\)\.\n--- worker \d, last lines:\n"
        with pytest.raises(tfdist.LaunchError, match=says):
            tfdist.launch(function, timeout=3)
        assert "3 s are over (timeout)" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("stopped", "running", "is_late"), [(False, True, True), (True, True, False), (False, False, False)]
    )
    def test_what_ends_anyway_is_not_late(self, folder, capsys, stopped, running, is_late):
        """Who has clicked on stop, or whose processes have all ended, hears of no time limit."""
        of_run = (RestartPolicy(0), folder, CallOutput("worker 0", False, {}), Patience(), start_unpinned)
        run = module._CallRun(RunOptions(), None, *of_run, timeout=1e-9)
        run._inbox, run.group = SignalInbox(), SimpleNamespace(running=["worker 0"] * running)
        if stopped:
            run._inbox.put(signal.SIGINT)
            run._inbox.take()
        run.note_progress({})
        assert (run.is_late, run._inbox.take()) == (is_late, [signal.SIGTERM] * is_late)
        run.note_progress({})
        assert not run._inbox.take()

    def test_a_result_that_cannot_travel(self, capsys):
        with pytest.raises(tfdist.LaunchError, match=r"could not be pickled: .*lock.*history\.history") as error:
            tfdist.launch(threading.Lock, workers=1)
        assert isinstance(error.value.__cause__, RuntimeError)
        assert tfdist.launch(lambda: threading.Lock() if rank() else "the first one's only") == "the first one's only"

    def test_restarts(self, folder, capsys):
        def function(path: str) -> str:
            from tfdist.supervision.progress import ProgressWriter

            writer = ProgressWriter.from_environment()
            writer.begin()
            for step in range(1, 4):
                writer.report("training", step)
            if rank() == 1 and not os.path.exists(path):
                Path(path).touch()
                raise ValueError("for the first time")
            return os.environ["TFDIST_RESTART"]

        def refused(path: str) -> None:
            from tfdist.checkpoint.store import is_final
            from tfdist.supervision.progress import ProgressWriter

            writer = ProgressWriter.from_environment()
            writer.begin()
            writer.report("training", 1)
            with open(path, "a") as file:
                file.write("started ")
            raise is_final(RuntimeError("it would fail again"))

        with pytest.raises(tfdist.LaunchError, match="it would fail again"):
            tfdist.launch(refused, (str(folder / "starts"),), workers=1, max_restarts=1)
        assert (folder / "starts").read_text() == "started "
        with pytest.raises(tfdist.LaunchError, match="for the first time"):
            tfdist.launch(function, (str(folder / "none"),))
        assert tfdist.launch(function, (str(folder / "one"),), max_restarts=1) == "1"
        said = capsys.readouterr().err
        assert "ValueError: for the first time) at step 3; restart 1 of 1" in said


class TestRefusals:
    def test_inside_of_a_worker(self):
        def nested() -> None:
            import tfdist

            tfdist.launch(print)

        with pytest.raises(
            tfdist.LaunchError, match=r"launch was called in a process of a cluster \(worker \d, rank \d"
        ):
            tfdist.launch(nested)

    def test_in_a_process_of_a_cluster(self, monkeypatch):
        one, two = (tfdist.ClusterConfig({"worker": w}, "worker", 0).to_json() for w in (["a:1"], ["a:1", "b:1"]))
        monkeypatch.setenv("TF_CONFIG", two)
        with pytest.raises(tfdist.LaunchError, match=r"process of a cluster .*del os\.environ\['TF_CONFIG'\]"):
            tfdist.launch(rank)
        monkeypatch.setenv("TF_CONFIG", one)
        assert tfdist.launch(lambda: tfdist.discover().num_workers) == 2

    @pytest.mark.parametrize(
        ("arguments", "options", "error", "says"),
        [
            ((None,), {}, TypeError, "received fn=None, expected a function. Pass it without calling it"),
            ((rank, "x.csv"), {}, TypeError, r"received args of type str, expected a tuple. .*launch\(train, \(x,\)\)"),
            ((rank,), {"workers": 0}, ValueError, "received workers=0, expected a whole number of at least 1"),
            ((rank,), {"timeout": 0}, ValueError, "received timeout=0, expected a positive number of seconds, or None"),
            ((rank,), {"timeout": float("nan")}, ValueError, "received timeout=nan, expected a positive number"),
            ((rank,), {"hang_timeout": "auto"}, ValueError, "received hang_timeout='auto', expected a positive number"),
            ((rank,), {"max_restarts": -1}, ValueError, "received max_restarts=-1, expected a whole number, 0 or more"),
            ((rank,), {"max_restarts": 1.5}, ValueError, "received max_restarts=1.5, expected a whole number"),
            ((rank,), {"output": "some"}, ValueError, 'received output=\'some\', expected "chief" or "all"'),
            ((rank,), {"cpus_per_worker": 999}, ValueError, "^cpus_per_worker=999: 2 processes need 1998 cores, but"),
            ((rank,), {"gpus_per_worker": 1}, ValueError, "^gpus_per_worker=1: 2 processes need 2 GPUs, but 0 were"),
            ((rank,), {"env": {"OMP_NUM_THREADS": 4}}, TypeError, "env={'OMP_NUM_THREADS': 4}, expected text: '4'"),
            ((rank,), {"env": {"TF_CONFIG": ""}}, ValueError, "^env=TF_CONFIG=...: tfdist run sets TF_CONFIG"),
        ],
    )
    def test_arguments(self, arguments, options, error, says):
        with pytest.raises(error, match=says):
            tfdist.launch(*arguments, **options)

    def test_what_cannot_travel_is_named(self):
        lock = threading.Lock()
        config = {"size": 3, "locks": [1, lock]}

        class Trainer:
            def __init__(self) -> None:
                self.lock = lock

            def train(self) -> None:
                pass

        def helper() -> object:
            return lock

        def calls() -> object:
            return helper()

        def reads() -> object:
            return config["size"]

        def early(given: object) -> object:
            return given, later

        why = "cannot pickle '_thread.lock' object$"
        for function, args, says in [
            (helper, (), f"`lock`, which `helper` uses: {why}"),
            (calls, (), f"`helper`, which `calls` uses: {why}"),
            (reads, (), f"`config`, which `reads` uses: {why}"),
            (Trainer().train, (), f"`self`, which `train` uses: {why}"),
            (functools.partial(print, lock), (), rf"`partial\.args\[0\]`, which `print` uses: {why}"),
            (print, (1, lock), rf"^launch: args\[1\]: {why}"),
            (early, (lock,), rf"^launch: args\[0\]: {why}"),
        ]:
            with pytest.raises(TypeError, match=says):
                tfdist.launch(function, args)
        later = 1  # has no value before

    @pytest.mark.parametrize(
        ("initialised", "gpus", "growth", "refused"),
        [(True, 1, False, True), (False, 1, False, False), (True, 0, False, False), (True, 1, True, False)],
    )
    def test_gpus_that_this_process_has_taken(self, monkeypatch, initialised, gpus, growth, refused):
        """With a stand-in for TensorFlow: a process that has initialised it on GPUs needs some."""
        config = SimpleNamespace(
            list_logical_devices=lambda kind: ["/GPU:0"] * gpus,
            get_visible_devices=lambda kind: ["/GPU:0"] * gpus,
            experimental=SimpleNamespace(get_memory_growth=lambda device: growth),
        )
        context = SimpleNamespace(context=lambda: SimpleNamespace(_initialized=initialised))
        monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(config=config))
        monkeypatch.setitem(sys.modules, "tfdist.compat.upstream", SimpleNamespace(context=context))
        if refused:
            with pytest.raises(tfdist.LaunchError, match=r"Restart the kernel.*set_visible_devices\(\[\], 'GPU'\)"):
                module._refuse_taken_gpus()
        else:
            module._refuse_taken_gpus()
