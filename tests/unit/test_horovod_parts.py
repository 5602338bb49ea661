"""What can be decided about Horovod without it: places, installation, job, and how it is built."""

from __future__ import annotations

import json
import sys
import zipfile

import pytest

from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.errors import ClusterError
from tfdist.launcher.horovod import build
from tfdist.launcher.horovod.build import existing, settings
from tfdist.strategies.horovod import installation, job
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
