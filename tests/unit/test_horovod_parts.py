"""What can be decided about Horovod without it: places, environment, installation, and how it is built."""

from __future__ import annotations

import json
import sys
import zipfile

import pytest

from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.variables import chosen_transport
from tfdist.launcher.horovod import build
from tfdist.launcher.horovod.build import Toolchain, cuda_version, existing, has_mpi
from tfdist.strategies.horovod import environment, installation
from tfdist.strategies.horovod.topology import groups_of, places


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
        assert (environment.launcher(env), environment.size(env)) == (launcher, size)

    def test_what_horovodrun_would_set(self, monkeypatch):
        values: dict[str, str] = {}
        monkeypatch.setattr(environment.os, "environ", values)
        environment.describe(ClusterConfig({"worker": ["127.0.0.1:2222", "127.0.0.1:2223"]}, "worker", 1), 4444)
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
            **({} if environment.interface_of("127.0.0.1") is None else {"HOROVOD_GLOO_IFACE": "lo"}),
        }

    def test_a_chief_without_an_address(self, monkeypatch):
        monkeypatch.setattr(environment.os, "environ", {})
        cluster = ClusterConfig({"worker": ["[::1]:2222", "127.0.0.1:2223"]}, "worker", 1)
        with pytest.raises(ClusterError, match=r"Received: ::1 as the host of the chief, which has no IPv4 address"):
            environment.describe(cluster, 4444)


class TestProcessSets:
    def test_groups(self):
        assert groups_of([None, None]) == []
        assert groups_of([(0, 2), (1,), (0, 2)]) == [(0, 2), (1,)]

    @pytest.mark.parametrize(
        ("wanted", "text"),
        [
            ([(0, 1), (1,)], "process_set=[0, 1], but rank 1 has process_set=[1]"),
            ([(0,), None], "no process_set on rank 1, and [0] on others"),
            ([(0, 1, 2), (0, 1, 2)], "there is no rank 2 (of 2)"),
            ([(1,), (0,)], "process_set=[1] on rank 0. Expected: a process set with the rank itself"),
        ],
    )
    def test_groups_that_do_not_fit(self, wanted, text):
        with pytest.raises(ClusterError) as error:
            groups_of(wanted)
        assert text in str(error.value)


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

    def test_what_fits(self, built_for):
        built_for('{"tensorflow": "2.21.0"}')
        assert installation.problem("2.21.0") is None

    def test_nothing_there(self, monkeypatch):
        monkeypatch.setattr(installation.importlib.util, "find_spec", lambda name: None)
        assert installation.problem("2.21.0").startswith("Horovod is not installed. `tfdist horovod build`")


class TestBuild:
    def test_the_change_must_fit(self):
        with pytest.raises(build.BuildError, match=r"with 0 lines about xla_mpi_ops\.cc\. Expected: one"):
            build.without_xla("list(APPEND TF_SOURCES a.cc)\n")

    def test_mpi_and_nccl_where_they_are(self):
        tools = Toolchain((), mpi=True, nccl="/opt/nccl", cuda="12", path="/bin")
        with_cuda, without = tools.settings(tensorflow_cuda="12.5.1"), tools.settings(tensorflow_cuda="")
        assert with_cuda["HOROVOD_WITH_MPI"] == without["HOROVOD_WITH_MPI"] == "1"
        assert "HOROVOD_WITHOUT_MPI" not in with_cuda
        assert (with_cuda["HOROVOD_GPU_OPERATIONS"], with_cuda["HOROVOD_NCCL_HOME"]) == ("NCCL", "/opt/nccl")
        assert "HOROVOD_GPU_OPERATIONS" not in without

    @pytest.mark.parametrize("cuda", ["", "1", "13"])
    def test_a_cuda_that_is_not_tensorflows_is_left_out(self, cuda):
        tools = Toolchain((), mpi=False, nccl="/opt/nccl", cuda=cuda, path="/bin")
        assert "HOROVOD_GPU_OPERATIONS" not in tools.settings(tensorflow_cuda="12.5.1")

    @pytest.mark.parametrize(
        ("told", "version"), [("Cuda compilation tools, release 13.0, V13.0.88", "13"), ("cannot execute", "")]
    )
    def test_the_version_of_cuda(self, tmp_path, told, version):
        compiler = tmp_path / "nvcc"
        compiler.write_text(f"#!/bin/sh\necho '{told}'\n")
        compiler.chmod(0o755)
        assert cuda_version(str(tmp_path)) == version
        assert cuda_version(str(tmp_path / "other")) == ""

    def test_what_is_missing_is_named_with_its_remedy(self, monkeypatch, tmp_path):
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        missing = Toolchain.found({"PATH": str(tmp_path)}).missing
        assert any("a C++ compiler: apt install g++" in line for line in missing)
        assert any("CMake: pip install" in line for line in missing)

    @pytest.mark.parametrize("has_header", [True, False])
    def test_a_compiler_of_mpi_without_its_header_is_none(self, tmp_path, has_header):
        compiler = tmp_path / "mpicxx"
        compiler.write_text(f"#!/bin/sh\nexit {int(not has_header)}\n")
        compiler.chmod(0o755)
        assert has_mpi(str(tmp_path)) is has_header

    def test_a_wheel_is_used_again_only_for_its_tensorflow(self, tmp_path):
        tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
        wheel = tmp_path / f"horovod-{build.VERSION}-{tag}-{tag}-linux_x86_64.whl"
        with zipfile.ZipFile(wheel, "w") as packed:
            packed.writestr("horovod/metadata.json", json.dumps({"tensorflow": "2.21.0"}))
        assert existing(tmp_path, "2.21.0") == wheel
        assert existing(tmp_path, "2.20.0") is None
        wheel.write_bytes(b"no wheel")
        assert existing(tmp_path, "2.21.0") is None


def test_an_unknown_transport():
    with pytest.raises(
        ValueError, match=r"Received: TFDIST_TRANSPORT='mpi'\. Expected one of auto, tensorflow, direct, horovod"
    ):
        chosen_transport({"TFDIST_TRANSPORT": "mpi"})
