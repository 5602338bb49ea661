"""What can be decided about Horovod without it: places, installation, job, and how it is built."""

from __future__ import annotations

import json
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from tfdist.cluster import sockets
from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.server import Client, Server, hello
from tfdist.launcher.horovod import build
from tfdist.launcher.horovod.build import existing, settings
from tfdist.runtime.peers import Peers, ProcessLeftError
from tfdist.strategies.horovod import extended, installation, job
from tfdist.strategies.horovod.job import places


class TestPlaces:
    def test_cyclic_and_uneven(self):
        found = places(["a", "b", "a", "c", "b", "a"])
        assert [place.rank for place in found] == list(range(6))
        assert [place.local_rank for place in found] == [0, 0, 1, 0, 1, 2]
        assert [place.local_size for place in found] == [3, 2, 3, 1, 2, 3]
        assert [place.cross_rank for place in found] == [0, 1, 0, 2, 1, 0]
        assert [place.cross_size for place in found] == [3, 3, 2, 3, 2, 1]
        assert {place.size for place in found} == {6}


class TestEnvironment:
    @pytest.mark.parametrize(
        ("env", "launcher", "size"),
        [
            ({}, None, 1),
            ({"HOROVOD_SIZE": "3", "HOROVOD_RANK": "1"}, "horovodrun", 3),
            ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun", 2),
            ({"PMI_SIZE": "4"}, "mpiexec", 4),
            ({"OMPI_COMM_WORLD_SIZE": "1"}, None, 1),
            ({"HOROVOD_SIZE": "2", "HOROVOD_GLOO_RENDEZVOUS_PORT": "44", "TFDIST_HOROVOD": "44"}, None, 2),
            # horovodrun in a process that tfdist has started
            (
                {
                    "HOROVOD_SIZE": "3",
                    "HOROVOD_RANK": "0",
                    "HOROVOD_GLOO_RENDEZVOUS_PORT": "55",
                    "TFDIST_HOROVOD": "44",
                },
                "horovodrun",
                3,
            ),
        ],
    )
    def test_launcher(self, env, launcher, size):
        assert (job.launcher_of(env), job.size_of(env)) == (launcher, size)

    def test_what_horovodrun_would_set(self, monkeypatch):
        values: dict[str, str] = {}
        monkeypatch.setattr(job.os, "environ", values)
        job.describe(ClusterConfig({"worker": ["127.0.0.1:2222", "127.0.0.1:2223"]}, "worker", 1), 4444)
        assert values == {
            "HOROVOD_HOSTNAME": "127.0.0.1",
            "HOROVOD_RANK": "1",
            "HOROVOD_SIZE": "2",
            "HOROVOD_LOCAL_RANK": "1",
            "HOROVOD_LOCAL_SIZE": "2",
            "HOROVOD_CROSS_RANK": "0",
            "HOROVOD_CROSS_SIZE": "1",
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": "4444",
            "TFDIST_HOROVOD": "4444",
            **({} if job.interface_of("127.0.0.1") is None else {"HOROVOD_GLOO_IFACE": "lo"}),
        }

    def test_a_chief_without_an_address(self, monkeypatch):
        monkeypatch.setattr(job.os, "environ", {})
        cluster = ClusterConfig({"worker": ["[::1]:2222", "127.0.0.1:2223"]}, "worker", 1)
        with pytest.raises(ClusterError, match=r"Received: ::1 as the host of the chief, which has no IPv4 address"):
            job.describe(cluster, 4444)


class OfTwo:
    """In place of `horovod.tensorflow`: both processes have the same values."""

    Sum = "sum"
    # What Horovod has operations for.
    carried = (tf.uint8, tf.int8, tf.uint16, tf.int16, tf.int32, tf.int64, tf.float16, tf.float32, tf.float64, tf.bool)

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0

    def allreduce(self, matrix: tf.Tensor, op: str) -> tf.Tensor:
        assert matrix.dtype in self.carried[:2] + self.carried[4:-1] and op == self.Sum
        return matrix + matrix

    def allgather(self, matrix: tf.Tensor) -> tf.Tensor:
        assert matrix.dtype in self.carried
        return tf.concat([matrix, matrix], 0)

    def broadcast(self, matrix: tf.Tensor, root_rank: int) -> tf.Tensor:
        assert matrix.dtype in self.carried and root_rank == 0
        return tf.identity(matrix)


class TestCollectives:
    FLOATS = ("float16", "bfloat16", "float32", "float64")
    NUMBERS = (*FLOATS, "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64")

    @pytest.mark.parametrize("name", [*NUMBERS, "bool", "uint64", "complex64", "complex128"])
    def test_all_dtypes(self, name):
        collectives, dtype = extended.Collectives(OfTwo()), tf.as_dtype(name)
        value = tf.cast([[0, 1], [1, 0], [1, 1]], dtype)
        gathered = collectives.all_gather(value)
        assert gathered.dtype == dtype and np.array_equal(gathered, np.tile(value, [2, 1]))
        one = SimpleNamespace(_collectives=collectives)
        variable = {"initial_value": lambda: value, "dtype": dtype, "name": "a"}
        first = extended.HorovodExtended._get_variable_creator_initial_value(one, 0, "CPU:0", None, **variable)()
        assert first.dtype == dtype and np.array_equal(first, value)
        if name in self.NUMBERS:
            for op, factor in (("SUM", 2), ("MEAN", 1)):
                found = collectives.all_reduce(getattr(tf.distribute.ReduceOp, op), value)
                assert found.dtype == dtype and np.array_equal(found, np.asarray(value) * factor)

    @pytest.mark.parametrize(("value", "name"), [("text", "string"), (1j, "complex128")])
    def test_what_has_no_sum(self, value, name):
        with pytest.raises(TypeError, match=rf"dtype {name}, to be added up by Horovod\. Expected: one of bfloat16, "):
            extended.Collectives(OfTwo()).all_reduce(tf.distribute.ReduceOp.SUM, tf.constant(value))


class TestEnd:
    @pytest.mark.parametrize("fails", [False, True])
    def test_nobody_ends_before_the_others_unless_it_has_failed(self, fails):
        """Who waits for one that has come to its end hears it at once."""
        first = Server(sockets.bind_host("127.0.0.1", 0), b"a", 2, hello(0, ""))
        stores = [first, Client(("127.0.0.1", first.port), b"a", hello(1, ""), 60.0)]
        ended: list[int] = []
        jobs = []
        for rank, store in enumerate(stores):
            horovod = SimpleNamespace(is_initialized=lambda: True, shutdown=lambda rank=rank: ended.append(rank))
            peers = Peers(["rank 0", "rank 1"], rank, 60.0, store)
            jobs.append(job.HorovodJob(None, peers, None, 0, False, horovod=horovod, store=store))
        with ThreadPoolExecutor(2) as pool:
            waits = pool.submit(jobs[1].leave)
            with pytest.raises(ProcessLeftError, match=r"rank 1 to train, and that program has ended\."):
                jobs[0].peers.hear("step", 1, "train")
            assert not waits.done() and not ended
            jobs[0].failed = fails
            jobs[0].leave()
            waits.result(60.0)
        assert sorted(ended) == [0, 1]


class TestInstallation:
    @pytest.fixture
    def built_for(self, tmp_path, monkeypatch):
        """Makes a package `horovod` that was built for some version."""

        def build(metadata: str | None) -> None:
            package = tmp_path / "horovod"
            package.mkdir()
            (package / "__init__.py").write_text("raise AssertionError('imported')")
            if metadata is not None:
                (package / "metadata.json").write_text(metadata)
            monkeypatch.delitem(sys.modules, "horovod", raising=False)
            monkeypatch.syspath_prepend(str(tmp_path))

        return build

    @pytest.mark.parametrize(
        ("metadata", "text"),
        [
            ('{"tensorflow": "2.20.0"}', "built for TensorFlow 2.20.0, and TensorFlow 2.21.0. Expected: the same."),
            ('{"pytorch": "2.0"}', "built without TensorFlow"),
            (None, "cannot be read"),
        ],
    )
    def test_what_does_not_fit(self, built_for, metadata, text):
        built_for(metadata)
        problem = installation.problem("2.21.0")
        assert problem.startswith("Received: a Horovod ")
        assert text in problem
        assert "`tfdist horovod build`" in problem


class TestBuild:
    @pytest.fixture
    def compilers(self, tmp_path, monkeypatch):
        """Makes programs with these names and texts of a shell, the only ones in the PATH that it returns."""

        def make(**programs: str) -> str:
            for name, text in programs.items():
                (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
                (tmp_path / name).chmod(0o755)
            (tmp_path / "include").mkdir()
            (tmp_path / "include" / "nccl.h").touch()
            monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
            return str(tmp_path)

        return make

    @pytest.mark.parametrize("said", ["release 12.9, V12.9.86", "release 13.0, V13.0.88", "release 1.0", "nothing"])
    def test_nccl_only_with_the_cuda_of_tensorflow(self, compilers, said):
        folder = compilers(nvcc=f"echo 'Cuda compilation tools, {said}'", python="echo 12.5.1")
        found = settings(folder, {"NCCL_HOME": folder})
        assert ("HOROVOD_GPU_OPERATIONS" in found) == said.startswith("release 12")
        assert found.get("HOROVOD_NCCL_HOME", folder) == folder and "HOROVOD_WITHOUT_MPI" in found

    def test_what_is_missing_is_named_with_its_remedy(self, tmp_path):
        missing = build.what_is_missing(str(tmp_path))
        assert "a C++ compiler: apt install g++" in missing
        assert any(line.startswith("CMake: pip install") for line in missing)

    def test_a_wheel_is_used_again_only_for_its_tensorflow(self, tmp_path):
        tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
        wheel = tmp_path / f"horovod-{build.VERSION}-{tag}-{tag}-linux_x86_64.whl"
        with zipfile.ZipFile(wheel, "w") as packed:
            packed.writestr("horovod/metadata.json", json.dumps({"tensorflow": "2.21.0"}))
        assert existing(tmp_path, "2.21.0") == wheel
        assert existing(tmp_path, "2.20.0") is None
        wheel.write_bytes(b"no wheel")
        assert existing(tmp_path, "2.21.0") is None
