"""What may be asked for, and how times and names are read."""

from __future__ import annotations

import click
import pytest

from tfdist.jobs.request import Request, SubmitError, default_name, seconds_of
from tfdist.jobs.status import in_words
from tfdist.launcher.arguments import Target

TARGET = Target("script", ("train.py",))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *[("30s", 30), ("90m", 5400), ("2h", 7200), ("1d12h", 129600), ("1h30m", 5400), ("01:30:00", 5400)],
        *[("1-12:00:00", 129600), ("1d1h1m1s", 90061)],
    ],
)
def test_times(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "120", "2 h", "h", "0s", "-1h", "1m1h", "2w", "1:30", "two hours"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"Received: .* Expected: a time such as 2h, 90m"):
        seconds_of(text)


def test_the_number_of_processes() -> None:
    assert Request("local", TARGET, workers=3).tasks == 3
    assert Request("local", TARGET, workers=3, ps=2).tasks == 6


def test_times_in_words() -> None:
    assert [in_words(seconds) for seconds in (0, 89, 90, 5399, 5400, 172800)] == [
        *("0 s", "89 s", "2 min", "90 min", "1.5 h", "2.0 days"),
    ]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"target": Target("script", ())}, ["no program", "tfdist submit --scheduler slurm -n 4 train.py"]),
        ({"scheduler": "kubernetes"}, ["--scheduler kubernetes and no --image"]),
        ({"image": "x"}, ["--image and --scheduler slurm", "--image for Kubernetes only"]),
        ({"volumes": {"a": "/b"}, "scheduler": "local"}, ["--volume and --scheduler local"]),
        ({"name": "a b"}, ["--name 'a b'", "at most 63 letters"]),
        ({"name": "-a"}, ["a letter or a digit first"]),
        ({"env": {"TFDIST_TOKEN": "x"}}, ["--env TFDIST_TOKEN=...", "tfdist sets this one itself"]),
        ({"env": {"TFDIST_TRANSPORT": "x"}}, ["--env TFDIST_TRANSPORT=...", "--transport"]),
        ({"transport": "horovod", "ps": 1}, ["--transport horovod and --ps 1"]),
        ({"env": {"A B": "x"}}, ["--env A B=...", "the name of an environment variable"]),
    ],
)
def test_what_is_refused(more: dict, words: list[str]) -> None:
    with pytest.raises(SubmitError) as caught:
        Request(**{"scheduler": "slurm", "target": TARGET, **more})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (Target("script", ("a/train digits.v2.py", "x.py")), "train-digits.v2"),
        (Target("module", ("package.train",)), "train"),
        (Target("command", ("/usr/bin/env", "x")), "env"),
        (Target("script", ("..",)), "job"),
    ],
)
def test_the_name_of_a_job_is_that_of_its_program(target: Target, name: str) -> None:
    assert default_name(target) == Request("local", target).name == name


def test_thread_counts_only_where_cores_are_known() -> None:
    assert set(Request("slurm", TARGET).runtime_defaults) == {"TF_CPP_MIN_LOG_LEVEL", "MALLOC_TOP_PAD_"}
    known = Request("slurm", TARGET, cpus_per_worker=3, ps=1).runtime_defaults
    assert (known["TF_NUM_INTRAOP_THREADS"], known["TF_NUM_INTEROP_THREADS"], known["OMP_NUM_THREADS"]) == (
        *("3", "4", "3"),
    )
