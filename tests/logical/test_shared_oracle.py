"""The oracle that tuners share: every answer survives a crash, and is given once. Tuners are threads here, or turns."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras_tuner
import pytest
from keras_tuner.engine.base_tuner import BaseTuner
from keras_tuner.engine.trial import Trial

from tests.tiers import daily
from tfdist.supervision.events import EventStream
from tfdist.supervision.exit_codes import PREEMPTED
from tfdist.tuning.files import MARK, ProjectMark
from tfdist.tuning.member import Member
from tfdist.tuning.patches import GRID_PATCHES, Searches, patches
from tfdist.tuning.shared_oracle import SharedOracle

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


def bayesian() -> keras_tuner.Oracle:
    return keras_tuner.oracles.BayesianOptimizationOracle(
        keras_tuner.Objective("score", "min"), num_initial_points=3, max_trials=9, seed=3, hyperparameters=wide()
    )


def wide() -> keras_tuner.HyperParameters:
    found = keras_tuner.HyperParameters()
    found.Float("x", 0.0, 1.0)
    return found


def member_of(folder: Path, tuner: int = 0) -> Member:
    return Member(tuner, 2, "this search", str(folder), 1)


class Keeper:
    """The first process of a search, after a start in a folder."""

    def __init__(self, folder: Path, make: Make = random_search, number: int = 1, **more: Any) -> None:
        self.folder = folder
        self.make = make
        self.oracle = make()
        self.tuner = BaseTuner(self.oracle, directory=str(folder), project_name="p")
        self.shared = SharedOracle(self.oracle, dataclasses.replace(member_of(folder), **more), number, folder / "p")
        self.shared.begin(self.tuner.save)

    def states(self) -> dict[str, str]:
        return {name: trial.status for name, trial in sorted(self.oracle.trials.items())}

    def values(self) -> dict[str, dict]:
        return {name: trial.hyperparameters.values for name, trial in sorted(self.oracle.trials.items())}

    def search(self) -> list[str]:
        """Two tuners, in turns: each asks before the other one has ended. Returns the trials that have ended."""
        tuners = self.shared, another(self.folder, 1, self.make, self.shared._number)
        at_work: dict[int, Trial] = {}
        ended: list[str] = []
        stopped: set[int] = set()
        while len(stopped) < 2 or at_work:
            for number, tuner in enumerate(tuners):
                if number not in at_work:
                    trial = tuner.create_trial("")
                    if trial.status == "RUNNING":
                        at_work[number] = trial
                    elif trial.status == "STOPPED":
                        stopped.add(number)
            for number in list(at_work)[:1] if len(at_work) < 2 else (1, 0):
                trial = at_work.pop(number)
                complete(tuners[number], trial)
                ended.append(trial.trial_id)
        self.shared.get_best_trials()
        return ended


def another(folder: Path, tuner: int, make: Make = random_search, number: int = 1) -> SharedOracle:
    """A process that has come to the search of a keeper."""
    oracle = make()
    oracle._set_project_dir(str(folder), "p")
    return SharedOracle(oracle, member_of(folder, tuner), number, folder / "p")


def complete(shared: SharedOracle, trial: Trial) -> None:
    """What a tuner does that has run a trial."""
    score = sum(ord(letter) for letter in str(sorted(trial.hyperparameters.values.items()))) / 1000
    shared.update_trial(trial.trial_id, {"score": score}, 0)
    trial.status = "COMPLETED"
    shared.end_trial(trial)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pause between two questions."""
    monkeypatch.setattr("tfdist.tuning.shared_oracle.PAUSE", 0.0)


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
    @pytest.mark.parametrize("make", daily([random_search, grid_search, hyperband], str(random_search), str(hyperband)))
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
            ended = undisturbed.search()
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
            again = Keeper(saved, make)
            ended = again.search()
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
        third = Keeper(folder.parent / "copy")
        assert third.shared.create_trial("").trial_id != running.trial_id
        assert another(folder.parent / "copy", 1).create_trial("").trial_id == running.trial_id


class TestTwoSearches:
    """Both in one project; a script that is started again begins with the first one."""

    @staticmethod
    def one() -> keras_tuner.Oracle:
        return random_search(max_trials=1)

    def first_search(self, folder: Path) -> None:
        keeper = Keeper(folder, self.one)
        assert keeper.search() == ["0"]
        keeper.shared.close()

    def test_the_first_process_is_killed_in_the_second(self, folder: Path) -> None:
        self.first_search(folder)
        Keeper(folder, number=2)
        running = another(folder, 1, number=2).create_trial("")
        assert running.status == "RUNNING"
        saved = (folder / "p" / "oracle.json").read_bytes()
        again = Keeper(folder, self.one)
        assert again.search() == []
        again.shared.close()
        assert (folder / "p" / "oracle.json").read_bytes() == saved
        assert "failure" not in ProjectMark(folder / "p").content
        assert ProjectMark(folder / "p").content["number"] == 2
        found = json.loads((folder / "tfdist-search-1.json").read_text())
        assert found["over"] and [trial["trial"] for trial in found["trials"]] == ["0"]
        ended = Keeper(folder, number=2).search()
        assert len(ended) == 4 and running.trial_id in ended

    def test_the_first_search_goes_on_in_another_run(self, folder: Path) -> None:
        """The negative control: only of the same run is a search past."""
        self.first_search(folder)
        Keeper(folder, number=2)
        other = Keeper(folder, search_id="another run")
        assert other.shared.create_trial("").status == "RUNNING"


class TestDamage:
    @pytest.mark.parametrize(
        "content", ["[]", '"x"', '{"handed": []}', '{"number": "1", "search_id": "this search"}', "{"]
    )
    def test_a_mark_in_which_something_else_stands_counts_as_none(self, folder: Path, content: str) -> None:
        (folder / "p").mkdir()
        (folder / "p" / MARK).write_text(content)
        assert len(Keeper(folder).search()) == 5
        assert ProjectMark(folder / "p").content["number"] == 1

    @pytest.mark.parametrize("name", ["oracle.json", "tuner0.json"])
    @pytest.mark.parametrize("part", [0.0, 0.5])
    def test_half_a_file_of_keras_tuner(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, part: float
    ) -> None:
        Keeper(folder).search()
        path = folder / "p" / name
        path.write_text(path.read_text()[: int(part * path.stat().st_size)])
        monkeypatch.setattr(BaseTuner, "reload", BaseTuner.reload)  # put back at the end
        next(one for one in patches(Searches(member_of(folder))) if one.target.endswith(".reload")).install()
        with pytest.raises(RuntimeError, match=rf"Received: the project folder {folder}/p, in which a file"):
            Keeper(folder)


OTHER_SEARCH = """
import sys, time
from pathlib import Path
from tfdist.tuning.files import claim
claim(Path(sys.argv[1]), sys.argv[2], "", "")
print("holds it", flush=True)
time.sleep(600)
"""


def test_two_searches_in_one_folder(folder: Path) -> None:
    (folder / "p").mkdir()
    other = subprocess.Popen([sys.executable, "-c", OTHER_SEARCH, folder / "p", ".search.lock"], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None and other.stdout.readline() == b"holds it\n"
        with pytest.raises(OSError, match=rf"Received: the project folder {folder}/p, in which another search is at"):
            Keeper(folder)
    finally:
        other.kill()
        other.wait(60)
        other.stdout.close()
    assert len(Keeper(folder).search()) == 5  # what a killed one has held is free


class TestRunAgain:
    def test_metrics_of_the_killed_run_do_not_count(self, folder: Path) -> None:
        keeper = Keeper(folder)
        killed = another(folder, 1)
        trial = killed.create_trial("")
        killed.update_trial(trial.trial_id, {"score": 9.0}, 0)
        # The first process is killed as well, and finds the same.
        keeper, tuner = Keeper(folder), another(folder, 1)
        again = tuner.create_trial("")
        assert again.trial_id == trial.trial_id and not again.metrics.metrics
        tuner.update_trial(trial.trial_id, {"score": 1.0}, 0)
        again.status = "COMPLETED"
        tuner.end_trial(again)
        assert keeper.shared.get_trial(trial.trial_id).score == 1.0


class TestAnswers:
    def test_an_end_that_is_said_twice_counts_once(self, folder: Path) -> None:
        keeper, tuner = Keeper(folder), another(folder, 1)
        trial = tuner.create_trial("")
        complete(tuner, trial)
        tuner.end_trial(trial)
        keeper.shared.get_best_trials()
        assert keeper.oracle.end_order == [trial.trial_id]
        following = tuner.create_trial("")
        tuner.end_trial(trial)
        keeper.shared.get_best_trials()
        assert keeper.oracle.ongoing_trials["tuner1"].trial_id == following.trial_id

    def test_a_trial_that_kills_its_tuner_too_often_fails(self, folder: Path) -> None:
        keeper = Keeper(folder)
        trial = another(folder, 1).create_trial("")
        assert another(folder, 1).create_trial("").trial_id == trial.trial_id
        # Over a start of the first process, which is killed as well.
        keeper = Keeper(folder)
        assert another(folder, 1).create_trial("").trial_id != trial.trial_id
        assert keeper.shared.get_trial(trial.trial_id).status == "FAILED"
        assert "killed or lost 2 times" in keeper.oracle.get_trial(trial.trial_id).message

    def test_a_trial_that_was_saved_when_its_tuner_was_asked_to_stop_keeps_its_chances(self, folder: Path) -> None:
        ran = []
        for _ in range(3):
            tuner = BaseTuner(random_search(), directory=str(folder), project_name="p")
            with pytest.raises(SystemExit), Searches(member_of(folder)).search(tuner):
                ran.append(tuner.oracle.create_trial("").trial_id)
                raise SystemExit(PREEMPTED)
        assert len(set(ran)) == 1

    def test_who_finds_no_hyperparameters_yet_waits(self, folder: Path) -> None:
        """A trial may declare its hyperparameters itself: until one has ended, nobody knows any other."""
        keeper = Keeper(folder, lambda: random_search(hyperparameters=None))
        trial, tuner = keeper.shared.create_trial(""), another(folder, 1, keeper.make)
        assert tuner.create_trial("").status == "IDLE"
        trial.hyperparameters.Int("a", 0, 100)
        complete(keeper.shared, trial)
        assert tuner.create_trial("").status == "RUNNING"
        assert len(keeper.search()) == 4

    def test_an_oracle_that_fails_ends_the_search(self, folder: Path) -> None:
        keeper = Keeper(folder, lambda: random_search(max_consecutive_failed_trials=1))
        tuner = another(folder, 1, keeper.make)
        trial = tuner.create_trial("")
        trial.status, trial.message = "FAILED", "no luck"
        with pytest.raises(RuntimeError, match="exceeded the limit of 1"):
            tuner.end_trial(trial)
        with pytest.raises(RuntimeError, match="exceeded the limit of 1"):
            keeper.shared.create_trial("")

    def test_scores_that_are_not_finite(self, folder: Path) -> None:
        keeper, score = Keeper(folder), float("nan")
        trial = keeper.shared.create_trial("")
        keeper.shared.update_trial(trial.trial_id, {"score": score}, 0)
        trial.status = "COMPLETED"
        keeper.shared.end_trial(trial)

        def refuse(text: str) -> None:
            raise AssertionError(text)

        found = json.loads((folder / "tfdist-search-1.json").read_text(), parse_constant=refuse)
        (row,) = found["trials"]
        assert row["score"] is None and row["error"] == f"the score is {score}"
        lines = (folder / "events.jsonl").read_text().splitlines()
        event = [json.loads(line, parse_constant=refuse) for line in lines][-1]
        assert event["event"] == "trial-ended" and event["score"] is None and event["error"] == row["error"]
        assert event["counts"]["best"] is None

    def test_events_and_results(self, folder: Path) -> None:
        keeper = Keeper(folder)
        keeper.search()
        keeper.shared.close()
        events = EventStream(folder).read()
        kinds = ["search", "trial", *(["trial", "trial-ended"] * 4), "trial-ended", "searched"]
        assert sorted(event["event"] for event in events) == sorted(kinds)
        assert (events[0]["event"], events[-1]["event"]) == ("search", "searched")
        assert events[-1]["counts"]["done"] == 5 and events[-1]["counts"]["running"] == 0
        found = json.loads((folder / "tfdist-search-1.json").read_text())
        scores = [trial["score"] for trial in found["trials"]]
        assert found["over"] and len(scores) == 5 and scores == sorted(scores)


def run(tuner: SharedOracle, ran: list[str]) -> None:
    """The loop of a tuner."""
    while (trial := tuner.create_trial("")).status != "STOPPED":
        if trial.status == "RUNNING":
            ran.append(trial.trial_id)
            complete(tuner, trial)


# None ends a trial before the other one has begun one.
TUNER = """
import sys, time
from pathlib import Path
from tests.logical.test_shared_oracle import another, random_search, run
folder, tuner = Path(sys.argv[1]), int(sys.argv[2])
client = another(folder, tuner, lambda: random_search(max_trials=30))
class Ran(list):
    def append(self, trial):
        super().append(trial)
        (folder / f"runs-{tuner}").touch()
        while not (folder / f"runs-{1 - tuner}").exists():
            time.sleep(0.01)
ran = Ran()
run(client, ran)
(folder / f"ran-{tuner}").write_text(" ".join(ran))
"""


class TestSeveralTuners:
    @pytest.mark.nightly
    @pytest.mark.timeout(700)
    def test_they_share_the_trials(self, folder: Path) -> None:
        keeper = Keeper(folder, lambda: random_search(max_trials=30))
        command = [sys.executable, "-c", TUNER, folder]
        tuners = [subprocess.Popen([*command, name]) for name in "01"]
        assert [one.wait(600) for one in tuners] == [0, 0]
        ran = [(folder / f"ran-{name}").read_text().split() for name in "01"]
        assert sorted(ran[0] + ran[1]) == [f"{i:02}" for i in range(30)] and all(ran), ran
        keeper.shared.close()
        assert set(keeper.states().values()) == {"COMPLETED"}
        assert EventStream(folder).read()[-1]["counts"]["done"] == 30
        alone = Keeper(folder / "alone", lambda: random_search(max_trials=30))
        alone.search()
        assert keeper.values() == alone.values()


def test_a_bayesian_search_guesses_the_trials_at_work_from_those_that_have_ended(tmp_path: Path) -> None:
    """A score that has nothing to do with them would draw the search to that trial, or away from it."""
    keeper = Keeper(tmp_path, bayesian)
    for number in range(3):
        trial = keeper.shared.create_trial("")
        keeper.shared.update_trial(trial.trial_id, {"score": 50.0 + number})
        keeper.shared.end_trial(Trial.from_state({**trial.get_state(), "status": "COMPLETED"}))
    assert keeper.shared.create_trial("").status == "RUNNING"
    other, seen = another(tmp_path, 1, bayesian), []
    vectorize = other._oracle._vectorize_trials
    other._oracle._vectorize_trials = lambda: seen.append(vectorize()) or seen[-1]
    assert other.create_trial("").status == "RUNNING"
    _, scores = seen[-1]
    assert len(scores) == 4 and min(scores) > 45
