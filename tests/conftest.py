"""What all tests share: a clean environment, and skipping what this machine cannot run."""

from __future__ import annotations

import collections
import functools
import gc
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import hypothesis
import pytest

from tests.features import reference
from tests.processes import preloaded

# Made by `make durations`.
_DURATIONS = Path(__file__).with_name("durations.tsv")
# Set by launchers and schedulers: a test run inside a job must not take itself for one of the job's tasks.
CLUSTER_VARIABLES = ("TF_CONFIG", "TFDIST_", "SLURM_", "OMPI_", "PMI_", "PMIX_")

# The gate tries the same examples each time, and no example has a deadline; others: --hypothesis-profile=random.
hypothesis.settings.register_profile("random", deadline=None)
hypothesis.settings.register_profile("gate", deadline=None, derandomize=True)
hypothesis.settings.load_profile("gate")


def pytest_configure() -> None:
    """Lets the Python processes that tests start find this tree, wherever they work."""
    paths = [str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))
    # Before other processes share the tests: they share it as well.
    reference.folder()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes what describes a cluster from the environment of the test and of the processes it starts."""
    for name in list(os.environ):
        if name.startswith(CLUSTER_VARIABLES):
            monkeypatch.delenv(name)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several processes share the tests, files that take long come first: nobody is left with one at the end."""
    if not hasattr(config, "workerinput"):
        return
    seconds: dict[str, float] = collections.defaultdict(float)
    for line in _DURATIONS.read_text().splitlines()[1:]:
        _, took, _, name = line.split("\t")
        seconds[name.split("::")[0]] += float(took)
    items.sort(key=lambda item: -seconds[item.nodeid.split("::")[0]])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Makes logical CPU devices if a test of this run needs them: later, another test may have used TensorFlow."""
    used = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    if used & {"mirrored", "four_devices"} and not session.config.option.collectonly:
        import tensorflow as tf

        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
    if any(item.get_closest_marker("cluster") for item in session.items) and not session.config.option.collectonly:
        # The processes of `run_local` are forked: importing TensorFlow takes longer than most of them do anything.
        preloaded()
    # Python looks for garbage by the number of new objects, and a graph has many: it takes a twentieth of the time.
    gc.set_threshold(20_000, 10, 10)


@pytest.fixture(autouse=True, scope="module")
def no_long_pauses() -> None:
    """Spares what is there from the search for garbage: in a process of 2 GB, it stops all threads for seconds."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests whose marker needs something that is not on this machine."""
    for marker, (present, reason) in REQUIREMENTS.items():
        if item.get_closest_marker(marker) and not present():
            pytest.skip(reason)


def _has_slurm() -> bool:
    return all(shutil.which(command) for command in ("srun", "sbatch", "slurmctld", "slurmd"))


def _has_mpi() -> bool:
    return shutil.which("mpirun") is not None


@functools.cache
def _can_make_network_namespaces() -> bool:
    if not (shutil.which("unshare") and shutil.which("ip")):
        return False
    return subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0


@functools.cache
def _can_mount() -> bool:
    if not shutil.which("mount"):
        return False
    with tempfile.TemporaryDirectory() as folder:
        if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True).returncode != 0:
            return False
        return subprocess.run(["umount", folder], capture_output=True).returncode == 0


REQUIREMENTS = {
    "slurm": (_has_slurm, "the Slurm commands are not installed"),
    "mpi": (_has_mpi, "mpirun is not installed"),
    "netns": (_can_make_network_namespaces, "this user may not make network namespaces here"),
    "mount": (_can_mount, "this user may not mount file systems here"),
}
