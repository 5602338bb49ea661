"""The oracle that tuners share: every answer survives a crash, and is given once. Tuners are threads here, or turns."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras_tuner
import pytest
from keras_tuner.engine.base_tuner import BaseTuner
from keras_tuner.engine.trial import Trial

from tfdist.supervision.events import EventStream
from tfdist.tuning import client as client_module
from tfdist.tuning import service as service_module
from tfdist.tuning.client import OracleClient, Remote
from tfdist.tuning.member import MEETING, Meeting, Member
from tfdist.tuning.patches import GRID_PATCHES
from tfdist.tuning.service import OracleService
from tfdist.tuning.shared_oracle import ProjectMark, SearchFailedError, SharedOracle

Make = Callable[[], keras_tuner.Oracle]


def space() -> keras_tuner.HyperParameters:
    found = keras_tuner.HyperParameters()
    found.Int("a", 0, 1)
    found.Choice("b", ["x", "y"])
    return found


def random_search(**more: Any) -> keras_tuner.Oracle:
    return keras_tuner.oracles.RandomSearchOracle(
        keras_tuner.Objective("score", "min"), **{"max_trials": 5, "seed": 3, "hyperparameters": wide(), **more}
    )


def grid_search() -> keras_tuner.Oracle:
    return keras_tuner.oracles.GridSearchOracle(keras_tuner.Objective("score", "min"), hyperparameters=space())


def hyperband() -> keras_tuner.Oracle:
    objective = keras_tuner.Objective("score", "min")
    return keras_tuner.oracles.HyperbandOracle(objective, max_epochs=2, factor=2, seed=3, hyperparameters=wide())


def wide() -> keras_tuner.HyperParameters:
    found = keras_tuner.HyperParameters()
    found.Float("x", 0.0, 1.0)
    return found


def member_of(folder: Path, tuner: int = 0, rank: int = 0, processes: int = 1, attempt: str = "first") -> Member:
    return Member(tuner, rank, 2, processes, attempt, "this search", str(folder), 1, True)


class Keeper:
    """A process that keeps an oracle, after a start in a folder."""

    def __init__(
        self,
        folder: Path,
        make: Make = random_search,
        attempt: str = "first",
        processes: int = 1,
        number: int = 1,
        **more: Any,
    ) -> None:
        self.folder = folder
        self.oracle = make()
        self.tuner = BaseTuner(self.oracle, directory=str(folder), project_name="p")
        self.member = dataclasses.replace(member_of(folder, processes=processes, attempt=attempt), **more)
        self.shared = SharedOracle(self.oracle, self.member, number, folder / "p")
        self.tuner.save()

    def states(self) -> dict[str, str]:
        return {name: trial.status for name, trial in sorted(self.oracle.trials.items())}

    def values(self) -> dict[str, dict]:
        return {name: trial.hyperparameters.values for name, trial in sorted(self.oracle.trials.items())}


def complete(shared: SharedOracle, tuner: int, trial: Trial) -> None:
    """What a tuner does that has run a trial."""
    score = sum(ord(letter) for letter in str(sorted(trial.hyperparameters.values.items()))) / 1000
    shared.update_trial(trial.trial_id, {"score": score}, 0)
    trial.status = "COMPLETED"
    shared.end_trial(tuner, trial.get_state())


def search(shared: SharedOracle, attempt: str = "first") -> list[str]:
    """Two tuners, in turns: each asks before the other one has ended. Returns the trials that have ended."""
    at_work: dict[int, Trial] = {}
    ended: list[str] = []
    stopped: set[int] = set()
    while len(stopped) < 2 or at_work:
        for tuner in (0, 1):
            if tuner not in at_work:
                trial = shared.create_trial(tuner, attempt)
                if trial.status == "RUNNING":
                    at_work[tuner] = Trial.from_state(trial.get_state())
                elif trial.status == "STOPPED":
                    stopped.add(tuner)
        for tuner in list(at_work)[:1] if len(at_work) < 2 else (1, 0):
            trial = at_work.pop(tuner)
            complete(shared, tuner, trial)
            ended.append(trial.trial_id)
    return ended


@pytest.fixture(autouse=True)
def grid_saved() -> Iterator[None]:
    """A grid search that saves its place, for this test."""
    for patch in GRID_PATCHES:
        patch.install()
    yield
    for name in ("get_state", "set_state"):
        delattr(keras_tuner.oracles.GridSearchOracle, name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "search").mkdir()
    return tmp_path / "search"


class TestCrashes:
    @pytest.mark.parametrize("make", [random_search, grid_search, hyperband])
    def test_at_every_file_that_is_written(
        self, make: Make, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The keeper is killed after each file; what is started again goes on, and loses and repeats no trial."""
        copies: list[Path] = []

        def copied(original: Callable) -> Callable:
            def write(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                copies.append(tmp_path / f"copy-{len(copies)}")
                shutil.copytree(folder, copies[-1])
                return result

            return write

        with monkeypatch.context() as patched:
            for owner, name in ((Trial, "save"), (type(make()), "save"), (ProjectMark, "write")):
                patched.setattr(owner, name, copied(getattr(owner, name)))
            undisturbed = Keeper(folder, make)
            ended = search(undisturbed.shared)
        assert sorted(ended) == sorted(undisturbed.oracle.trials)
        assert set(undisturbed.states().values()) == {"COMPLETED"}
        assert len(copies) > 3 * len(ended)
        for saved in copies[:: 3 if make is hyperband else 1]:
            before = {
                name
                for path in saved.glob("p/trial_*/trial.json")
                for name, status in [(lambda found: (found["trial_id"], found["status"]))(json.loads(path.read_text()))]
                if status == "COMPLETED"
            }
            again = Keeper(saved, make, attempt="second")
            ended = search(again.shared, attempt="second")
            assert set(again.states().values()) == {"COMPLETED"}, saved
            assert sorted(again.oracle.trials) == sorted(undisturbed.oracle.trials), saved
            assert len(ended) == len(set(ended)), saved
            # What had ended is not run again; but for the one whose end was not written down completely.
            assert len(set(ended) & before) <= 1, saved
            if make in (random_search, grid_search):
                assert again.values() == undisturbed.values(), saved

    def test_keras_tuner_alone_repeats_trials(self, folder: Path) -> None:
        """The negative control: the trial that a tuner runs is given to another one as well."""
        first = Keeper(folder)
        running = first.oracle.create_trial("tuner1")
        shutil.copytree(folder, folder.parent / "copy")
        second = random_search()
        BaseTuner(second, directory=str(folder), project_name="p")
        assert second.create_trial("tuner0").trial_id == running.trial_id
        # And with tfdist, it is the tuner's that runs it.
        third = Keeper(folder.parent / "copy", attempt="second")
        assert third.shared.create_trial(0, "second").trial_id != running.trial_id
        assert third.shared.create_trial(1, "first").trial_id == running.trial_id

    def test_fewer_tuners_go_on(self, folder: Path) -> None:
        first = Keeper(folder)
        lost = first.oracle.create_trial("tuner7")
        second = Keeper(folder, attempt="second")
        assert second.shared.create_trial(1, "first").trial_id == lost.trial_id
        assert len(search(second.shared, "third")) == 5


class TestTwoSearches:
    """Both in one project; a script that is started again begins with the first one."""

    @staticmethod
    def first_search(folder: Path) -> Keeper:
        keeper = Keeper(folder, lambda: random_search(max_trials=1))
        assert search(keeper.shared) == ["0"]
        keeper.shared.close()
        return keeper

    def test_the_first_process_is_killed_in_the_second(self, folder: Path) -> None:
        self.first_search(folder)
        second = Keeper(folder, number=2)
        running = second.shared.create_trial(1, "first")
        assert running.status == "RUNNING"
        again = Keeper(folder, lambda: random_search(max_trials=1), attempt="second")
        assert [again.shared.create_trial(tuner, "second").status for tuner in (0, 1)] == ["STOPPED", "STOPPED"]
        again.shared.close()
        assert again.shared.failure is None
        assert ProjectMark(folder / "p").content["number"] == 2
        found = json.loads((folder / "tfdist-search-1.json").read_text())
        assert found["over"] and [trial["trial"] for trial in found["trials"]] == ["0"]
        third = Keeper(folder, attempt="second", number=2)
        assert third.shared.create_trial(1, "first").trial_id == running.trial_id
        assert len(search(third.shared, "first")) == 4

    @pytest.mark.parametrize("is_new", [True, False])
    def test_another_one_is_killed_in_the_second(self, folder: Path, is_new: bool) -> None:
        first = self.first_search(folder)
        if is_new:
            second = Keeper(folder, number=2)
        else:
            second = first
            second.oracle.max_trials = 5
            second.shared, ended = SharedOracle(first.oracle, first.member, 2, folder / "p"), first.shared
        ended = first.shared if is_new else ended
        running = second.shared.create_trial(1, "first")
        assert ended.create_trial(1, "second").status == "STOPPED"
        assert second.shared.create_trial(1, "second").trial_id == running.trial_id

    def test_the_first_search_goes_on_in_another_run(self, folder: Path) -> None:
        """The negative control: only of the same run is a search past."""
        self.first_search(folder)
        Keeper(folder, number=2)
        other = Keeper(folder, search_id="another run")
        assert other.shared.create_trial(1, "first").status == "RUNNING"


class TestRunAgain:
    def test_metrics_of_the_killed_run_do_not_count(self, folder: Path) -> None:
        keeper = Keeper(folder)
        trial = keeper.shared.create_trial(1, "first")
        keeper.shared.update_trial(trial.trial_id, {"score": 9.0}, 0)
        # Not killed, but it has not heard the answer: they count.
        assert keeper.shared.create_trial(1, "first").metrics.get_history("score")
        again = Trial.from_state(keeper.shared.create_trial(1, "second").get_state())
        assert not again.metrics.metrics
        # The oracle's process is killed as well, and finds the same.
        keeper = Keeper(folder, attempt="third")
        keeper.shared.update_trial(trial.trial_id, {"score": 1.0}, 0)
        again.status = "COMPLETED"
        keeper.shared.end_trial(1, again.get_state())
        assert keeper.oracle.get_trial(trial.trial_id).score == 1.0

    def test_nor_do_those_of_a_tuner_that_is_gone(self, folder: Path) -> None:
        first = Keeper(folder)
        lost = first.oracle.create_trial("tuner7")
        first.shared.update_trial(lost.trial_id, {"score": 9.0}, 0)
        second = Keeper(folder, attempt="second")
        given = second.shared.create_trial(1, "second")
        assert given.trial_id == lost.trial_id and not given.metrics.metrics

    def test_an_interrupted_search_costs_no_chance(self, folder: Path) -> None:
        first = Keeper(folder, max_restarts=0)
        trial = first.shared.create_trial(1, "first")
        second = Keeper(folder, attempt="second", max_restarts=0, search_id="the same command again")
        assert second.shared.create_trial(1, "second").trial_id == trial.trial_id
        assert second.states() == {trial.trial_id: "RUNNING"}
        # A tuner that is killed then does.
        assert second.shared.create_trial(1, "third").trial_id != trial.trial_id
        assert second.states()[trial.trial_id] == "FAILED"

    @pytest.mark.parametrize("taken_up", [True, False])
    def test_it_may_be_shown_now(self, folder: Path, taken_up: bool, capsys: pytest.CaptureFixture) -> None:
        """`search(verbose=0)` has begun it, and the script is changed."""
        first = Keeper(folder)
        first.oracle.verbose = 0
        first.oracle.create_trial("tuner1" if taken_up else "tuner7")
        assert "Running Trial" not in capsys.readouterr().out
        second = Keeper(folder, search_id="the same command again")
        second.oracle.verbose = 1
        trial = Trial.from_state(second.shared.create_trial(1, "second").get_state())
        assert "Running Trial #1" in capsys.readouterr().out
        complete(second.shared, 1, trial)
        assert second.states() == {"0": "COMPLETED"}


class TestAnswers:
    def test_a_tuner_that_asks_again_gets_the_same(self, folder: Path) -> None:
        keeper = Keeper(folder)
        trial = keeper.shared.create_trial(1, "first")
        assert keeper.shared.create_trial(1, "first").trial_id == trial.trial_id
        other = keeper.shared.create_trial(0, "first")
        assert other.trial_id != trial.trial_id

    def test_an_end_that_is_said_twice_counts_once(self, folder: Path) -> None:
        keeper = Keeper(folder)
        trial = Trial.from_state(keeper.shared.create_trial(1, "first").get_state())
        complete(keeper.shared, 1, trial)
        keeper.shared.end_trial(1, trial.get_state())
        assert keeper.oracle.end_order == [trial.trial_id]
        following = keeper.shared.create_trial(1, "first")
        keeper.shared.end_trial(1, trial.get_state())
        assert keeper.oracle.ongoing_trials["tuner1"].trial_id == following.trial_id

    def test_a_trial_that_kills_its_tuner_too_often_fails(self, folder: Path) -> None:
        keeper = Keeper(folder)
        trial = keeper.shared.create_trial(1, "first")
        assert keeper.shared.create_trial(1, "second").trial_id == trial.trial_id
        # Over a start of the oracle's process, which is killed as well.
        keeper = Keeper(folder, attempt="second")
        assert keeper.shared.create_trial(1, "third").trial_id != trial.trial_id
        assert keeper.states()[trial.trial_id] == "FAILED"
        assert "killed or lost 2 times" in keeper.oracle.get_trial(trial.trial_id).message

    def test_who_finds_no_hyperparameters_yet_waits(self, folder: Path) -> None:
        """A trial may declare its hyperparameters itself: until one has ended, nobody knows any other."""
        keeper = Keeper(folder, lambda: random_search(hyperparameters=None))
        trial = Trial.from_state(keeper.shared.create_trial(0, "first").get_state())
        assert keeper.shared.create_trial(1, "first").status == "IDLE"
        assert not keeper.shared.is_over
        trial.hyperparameters.Int("a", 0, 100)
        complete(keeper.shared, 0, trial)
        assert keeper.shared.create_trial(1, "first").status == "RUNNING"
        assert len(search(keeper.shared)) == 4

    def test_an_oracle_that_fails_ends_the_search(self, folder: Path) -> None:
        keeper = Keeper(folder, lambda: random_search(max_consecutive_failed_trials=1))
        trial = Trial.from_state(keeper.shared.create_trial(1, "first").get_state())
        trial.status, trial.message = "FAILED", "no luck"
        with pytest.raises(SearchFailedError, match="exceeded the limit of 1"):
            keeper.shared.end_trial(1, trial.get_state())
        with pytest.raises(SearchFailedError):
            keeper.shared.create_trial(0, "first")
        assert isinstance(keeper.shared.failure, RuntimeError)

    @pytest.mark.parametrize("score", [float("nan"), float("inf")])
    def test_scores_that_are_not_finite(self, folder: Path, score: float) -> None:
        keeper = Keeper(folder)
        trial = Trial.from_state(keeper.shared.create_trial(1, "first").get_state())
        keeper.shared.update_trial(trial.trial_id, {"score": score}, 0)
        trial.status = "COMPLETED"
        keeper.shared.end_trial(1, trial.get_state())

        def refuse(text: str) -> None:
            raise AssertionError(text)

        found = json.loads((folder / "tfdist-search-1.json").read_text(), parse_constant=refuse)
        (row,) = found["trials"]
        assert row["score"] is None and row["error"] == f"the score is {score}"
        lines = (folder / "events.jsonl").read_text().splitlines()
        event = [json.loads(line, parse_constant=refuse) for line in lines][-1]
        assert event["event"] == "trial-ended" and event["score"] is None and event["error"] == row["error"]
        assert event["counts"]["best"] is None

    def test_who_waits_writes_nothing(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        keeper = Keeper(folder)
        keeper.shared.create_trial(0, "first")
        saved: list[str] = []
        with monkeypatch.context() as patched:
            patched.setattr(type(keeper.oracle), "save", lambda self: saved.append("oracle"))
            patched.setattr(keeper.oracle, "populate_space", lambda trial_id: {"status": "IDLE"})
            assert keeper.shared.create_trial(1, "first").status == "IDLE"
            assert not saved
            patched.undo()
            patched.setattr(type(keeper.oracle), "save", lambda self: saved.append("oracle"))
            assert keeper.shared.create_trial(1, "first").status == "RUNNING"
            assert saved == ["oracle"]

    def test_events_and_results(self, folder: Path) -> None:
        keeper = Keeper(folder)
        search(keeper.shared)
        keeper.shared.close()
        events = EventStream(folder).read()
        kinds = ["search", "trial", *(["trial", "trial-ended"] * 4), "trial-ended", "searched"]
        assert sorted(event["event"] for event in events) == sorted(kinds)
        assert (events[0]["event"], events[-1]["event"]) == ("search", "searched")
        assert events[-1]["counts"]["done"] == 5 and events[-1]["counts"]["running"] == 0
        found = json.loads((folder / "tfdist-search-1.json").read_text())
        scores = [trial["score"] for trial in found["trials"]]
        assert found["over"] and len(scores) == 5 and scores == sorted(scores)


@pytest.fixture
def served(folder: Path) -> Iterator[Callable[..., tuple[Keeper, OracleService]]]:
    services: list[OracleService] = []

    def start(processes: int = 1, make: Make = random_search, attempt: str = "first") -> tuple[Keeper, OracleService]:
        keeper = Keeper(folder, make, attempt, processes)
        services.append(OracleService(keeper.member))
        services[-1].open(keeper.shared)
        return keeper, services[-1]

    yield start
    for service in services:
        service._listener.end()


def client_of(folder: Path, tuner: int, rank: int = 0, processes: int = 1) -> OracleClient:
    member = member_of(folder, tuner, rank, processes)
    return OracleClient(random_search(), member, 1, Remote(member))


def run(client: OracleClient, ran: list[str]) -> None:
    """The loop of a tuner."""
    while (trial := client.create_trial("")).status == "RUNNING":
        ran.append(trial.trial_id)
        client.update_trial(trial.trial_id, {"score": 1.0}, 0)
        trial.status = "COMPLETED"
        client.end_trial(trial)


def together(*calls: Callable[[], Any], seconds: float = 60.0) -> None:
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    assert not any(thread.is_alive() for thread in threads), "it hangs"


class TestService:
    def test_tuners_share_the_trials(self, served: Callable, folder: Path) -> None:
        keeper, _ = served()
        ran: list[str] = []
        together(*(functools.partial(run, client_of(folder, tuner), ran) for tuner in (0, 1)))
        assert sorted(ran) == ["0", "1", "2", "3", "4"]
        assert set(keeper.states().values()) == {"COMPLETED"}

    def test_tuners_wait_for_an_oracle_that_is_away(self, served: Callable, folder: Path) -> None:
        _, service = served()
        client = client_of(folder, 1)
        trial = client.create_trial("")
        service._listener.end()
        trial.status = "COMPLETED"
        answers: list[Any] = []

        def report() -> None:
            client.update_trial(trial.trial_id, {"score": 1.0})
            answers.append(client.end_trial(trial))

        waiting = threading.Thread(target=report, daemon=True)
        waiting.start()
        waiting.join(1.0)
        assert waiting.is_alive()
        keeper, _ = served(attempt="second")
        waiting.join(60.0)
        assert answers == [None]
        assert keeper.states() == {trial.trial_id: "COMPLETED"}

    def test_nobody_without_the_key_is_answered(self, served: Callable, folder: Path) -> None:
        served()
        assert (folder / MEETING).stat().st_mode & 0o777 == 0o600
        meeting = json.loads((folder / MEETING).read_text())
        Meeting(**{**meeting, "hosts": tuple(meeting["hosts"]), "key": "another"}).write(folder)
        waiting = threading.Thread(target=client_of(folder, 1).get_space, daemon=True)
        waiting.start()
        waiting.join(1.5)
        assert waiting.is_alive()
        Meeting(**{**meeting, "hosts": tuple(meeting["hosts"])}).write(folder)
        waiting.join(60.0)
        assert not waiting.is_alive()

    def test_a_large_answer_arrives_whole(
        self, served: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """More than a socket takes at once."""
        _, service = served()
        monkeypatch.setattr(service, "answer", lambda request: {"value": "x" * 1_000_000})
        client = client_of(folder, 1)
        exchange, asked = client_module._exchange, []

        def counted(*args: Any) -> dict[str, Any]:
            asked.append(args)
            return exchange(*args)

        monkeypatch.setattr(client_module, "_exchange", counted)
        for _ in range(20):
            assert len(client.state()) == 1_000_000
        assert len(asked) == 20

    def test_a_callback_that_holds_the_tuner_is_copied(self, served: Callable, folder: Path) -> None:
        """KerasTuner copies the callbacks of each trial; a lock cannot be copied."""
        keeper, service = served()
        client = OracleClient(keeper.oracle, keeper.member, 1, service.answer)
        assert copy.deepcopy({"tuner": [client]})["tuner"][0] is client
        with pytest.raises(TypeError, match="pickle"):
            copy.deepcopy(service)

    def test_the_address_that_has_answered_is_asked_first(
        self, served: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        served()
        meeting = Meeting.read(folder, "this search")
        dataclasses.replace(meeting, hosts=("no-such-host.invalid", *meeting.hosts)).write(folder)
        client, asked, exchange = client_of(folder, 1), [], client_module._exchange

        def noted(place: tuple[str, int], *args: Any) -> dict[str, Any]:
            asked.append(place[0])
            return exchange(place, *args)

        monkeypatch.setattr(client_module, "_exchange", noted)
        client.get_space()
        client.get_space()
        assert asked == ["no-such-host.invalid", "127.0.0.1", "127.0.0.1"]

    def test_errors_arrive_with_their_type(self, served: Callable, folder: Path) -> None:
        served()
        client = client_of(folder, 1)
        trial = client.create_trial("")
        with pytest.raises(ValueError, match="Objective value missing"):
            client.update_trial(trial.trial_id, {"accuracy": 1.0})
        client.update_trial(trial.trial_id, {"score": 1.0})


class TestSeveralProcesses:
    @pytest.fixture(autouse=True)
    def joined(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tfdist.tuning.client._trains_together", lambda: True)

    @pytest.fixture
    def again(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """What processes that have to start again say; here their thread ends."""
        said: list[str] = []

        def note(why: str) -> None:
            said.append(why)
            raise SystemExit

        monkeypatch.setattr("tfdist.tuning.client._start_again", note)
        return said

    def test_they_run_the_same_trials(self, served: Callable, folder: Path) -> None:
        keeper, _ = served(processes=2)
        ran: dict[int, list[str]] = {0: [], 1: []}
        together(*(functools.partial(run, client_of(folder, 1, rank, 2), ran[rank]) for rank in (0, 1)))
        assert ran[0] == ran[1] == ["0", "1", "2", "3", "4"]
        assert keeper.oracle.end_order == ran[0]

    def test_the_keeper_stays_until_the_others_have_left(self, served: Callable, folder: Path) -> None:
        _, service = served(processes=2)
        client = client_of(folder, 0, 1, 2)
        waiting = threading.Thread(target=service.wait_for_processes, daemon=True)
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive()
        assert client.state()["trials"] == []
        client.leave()
        waiting.join(60.0)
        assert not waiting.is_alive()

    def test_a_trial_has_failed_if_it_has_in_one(self, served: Callable, folder: Path) -> None:
        keeper, _ = served(processes=2, make=lambda: random_search(max_trials=1))

        def tune(rank: int) -> None:
            client = client_of(folder, 1, rank, 2)
            trial = client.create_trial("")
            trial.status = "INVALID" if rank else "COMPLETED"
            trial.message = "no luck" if rank else None
            client.end_trial(trial)
            assert client.create_trial("").status == "STOPPED"

        together(lambda: tune(0), lambda: tune(1))
        assert keeper.states() == {"0": "FAILED"}
        assert keeper.oracle.get_trial("0").message == "no luck"

    def test_one_that_fails_alone_starts_all_again(
        self, served: Callable, folder: Path, again: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The other one waits in a collective: it never says how its trial has ended."""
        monkeypatch.setattr(service_module, "_PATIENCE", 0.2)
        keeper, _ = served(processes=2, make=lambda: random_search(max_trials=1))

        def tune() -> None:
            client_of(folder, 1, 0, 2).create_trial("")
            client = client_of(folder, 1, 1, 2)
            trial = client.create_trial("")
            trial.status = "INVALID"
            client.end_trial(trial)

        together(tune)
        assert again == ["a process has failed in the trial, and others have not"]
        assert keeper.states() == {"0": "FAILED"}

    def test_who_is_out_of_step_starts_again(self, served: Callable, folder: Path, again: list[str]) -> None:
        served(processes=2)

        def tune() -> None:
            client_of(folder, 1, 0, 2).create_trial("")
            client_of(folder, 1, 1, 2).get_space()

        together(tune)
        assert again == ["the first process has called create_trial, and process 1 calls get_space"]
