"""How processes that know rank and size find each other; in threads here, in tests/system by real launchers."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.launcher.conftest import wait_until
from tfdist.cluster import ClusterError, discover, meeting, ports, server, sockets
from tfdist.cluster.membership import Membership, own_share, roles, visible_devices
from tfdist.cluster.rendezvous import HomeFile, Registration, agreed, attend, endpoints, listen, meet, receive

SECRET = b"of this job"
# For who comes. Nothing waits longer than until that has come.
DEADLINE = 60.0


@pytest.fixture
def port():
    with ports.reserve(1) as reservation:
        free = reservation.ports[0]
    return free


@pytest.fixture
def pool():
    with ThreadPoolExecutor(16) as started:
        yield started


def registration(rank: int, size: int, **other) -> Registration:
    fields = {"port": 2000 + rank, "host": None, "address": "127.0.0.1", "name": f"node-{rank}", "pid": 70 + rank}
    return Registration(rank, size, **{**fields, **other})


def serve(pool: ThreadPoolExecutor, size: int, port: int, timeout: float = DEADLINE, **other) -> Future:
    """Rank 0, listening on return."""
    own = registration(0, size, **other)
    return pool.submit(receive, own, listen(own, [port], SECRET), timeout)


def come(pool: ThreadPoolExecutor, rank: int, size: int, at: int, timeout: float = DEADLINE, **other) -> Future:
    """Where all are, as another rank hears it."""
    secret, host = other.pop("secret", SECRET), other.pop("at_host", "127.0.0.1")
    return pool.submit(lambda: attend(registration(rank, size, **other), [(host, at)], secret, timeout)[0])


def test_all_get_the_same(pool, port):
    guests = [come(pool, rank, 4, port) for rank in (3, 1, 2)]
    time.sleep(0.3)  # they come before rank 0 does
    first = serve(pool, 4, port).result()
    assert first["addresses"] == ["127.0.0.1:2000", "127.0.0.1:2001", "127.0.0.1:2002", "127.0.0.1:2003"]
    assert [guest.result() for guest in guests] == [first] * 3


RANK_1 = """
import socket, sys
from tfdist.cluster import discover, sockets
address = discover(timeout=60.0).address
with sockets.bind_everywhere(int(address.rpartition(":")[2]), reuse=True) as server:  # as TensorFlow does
    server.listen()
    print(address, flush=True)
    sys.stdin.read()
"""


def test_a_rank_that_comes_again_afterwards_has_its_former_place(pool, port):
    env = {"TFDIST_SIZE": "3", "TFDIST_PS": "1", "TFDIST_JOB": f"test-{port}", "TFDIST_MEETING": f"localhost:{port}"}
    first = pool.submit(discover, {**env, "TFDIST_RANK": "0"}, DEADLINE)
    pool.submit(discover, {**env, "TFDIST_RANK": "2"}, DEADLINE)
    found = []
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", RANK_1],
            env={**os.environ, **env, "TFDIST_RANK": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            found.append(process.stdout.readline().strip())
            # A connection to its server, as the others have: what is left of it is not in the way.
            talking = socket.create_connection(("127.0.0.1", int(found[0].rpartition(":")[2])), timeout=DEADLINE)
            process.kill()
            process.wait()
    assert found == [first.result().with_task("worker", 0).address] * 2
    talking.close()
    with sockets.bind_everywhere(int(found[0].rpartition(":")[2]), reuse=True) as taken:
        taken.listen()
        with pytest.raises(ClusterError, match="which is not free here"):
            discover({**env, "TFDIST_RANK": "1"}, DEADLINE)


def test_no_rank_0(port):
    with pytest.raises(ClusterError) as caught:
        attend(registration(1, 2), [("127.0.0.1", port), ("no.such.host.invalid", port)], SECRET, 0.5)
    message = str(caught.value)
    assert f"127.0.0.1:{port}: connection refused" in message
    assert f"no.such.host.invalid:{port}: its name cannot be resolved" in message
    assert "as rank 1 on node-1 saw it" in message and "TFDIST_TOKEN" in message
    assert "nobody listens there: start all processes again" in message


def test_another_secret(clock, pool, port, caplog):
    first = serve(pool, 2, port, timeout=2000.0)
    other = come(pool, 1, 2, port, timeout=1000.0, secret=b"of another")
    wait_until(lambda: "turned away" in caplog.text, DEADLINE, "the first attempt")
    clock.ahead += 1000.0
    said = str(other.exception(DEADLINE))
    assert "for this process the job has no name: TFDIST_JOB and TFDIST_TOKEN have to be the same" in said
    clock.ahead += 1000.0
    assert "it does not know the secret of this job" in str(first.exception(DEADLINE))


def test_another_size(pool, port):
    first, other = serve(pool, 2, port), come(pool, 1, 3, port)
    for one in (first, other):
        assert re.search(r"rank 1 .* counts 3 processes, rank 0 .* counts 2\. Exp", str(one.exception(DEADLINE)))


def test_a_port_where_another_service_waits_is_tried_again_later(monkeypatch, pool, port):
    monkeypatch.setattr(server, "CONNECT_SECONDS", 0.2)
    made, tried = server.Client, []

    def client(place, *arguments):
        tried.append((place, arguments[-1]))
        return made(place, *arguments[:-1], 0.2 if place == places[0] else DEADLINE)  # rank 0 may be slow

    monkeypatch.setattr(server, "Client", client)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        places = [("127.0.0.1", silent.getsockname()[1]), ("127.0.0.1", port)]
        first = serve(pool, 2, port)
        assert pool.submit(attend, registration(1, 2), places, SECRET, DEADLINE).result()[0] == first.result(DEADLINE)
    assert tried == [(place, 0.2) for place in places]


def test_no_free_port(port):
    with sockets.bind_everywhere(port, reuse=False) as taken:
        taken.listen()
        with pytest.raises(ClusterError, match=f"no free port among {port}, where the other processes look for rank 0"):
            listen(registration(0, 2), [port], SECRET)
    with ports.reserve(1, low=port, high=port + 1), ports.reserve(1) as other:
        free = other.ports[0]
        other.close()
        started = listen(registration(0, 2), [port, free], SECRET)
        assert started.port == free
        started.leave()


def test_a_given_port_is_taken_again_at_once(port):
    with sockets.bind_everywhere(port, reuse=True) as lost:
        lost.listen()
        guest = socket.create_connection(("127.0.0.1", port))
        accepted, _ = lost.accept()
    # A process that is killed closes first, and its end of the connection is kept for a minute.
    accepted.close()
    guest.close()
    with pytest.raises(OSError):
        sockets.bind_everywhere(port, reuse=False)
    started = listen(registration(0, 2), [port], SECRET)
    assert started.port == port
    started.leave()


def test_names_that_nobody_knows_are_replaced(pool, port):
    first = serve(pool, 3, port, host="localhost")
    come(pool, 1, 3, port, host="no.such.host.invalid")
    come(pool, 2, 3, port, host="127.0.0.2")
    assert first.result()["addresses"] == ["localhost:2000", "127.0.0.1:2001", "127.0.0.2:2002"]


@pytest.mark.parametrize(
    ("guests", "expected"),
    [
        ([("127.0.0.1", "127.0.0.1")], ["127.0.0.1", "127.0.0.1"]),
        ([("::1", "::1")], ["::1", "::1"]),
        ([("::1", "::1"), ("127.0.0.1", "127.0.1.1")], ["127.0.0.1"] * 3),
        # By its own name, on one host.
        ([("10.0.0.1", "10.0.0.1")], ["127.0.0.1", "127.0.0.1"]),
        ([("127.0.0.1", "127.0.1.1"), ("10.0.0.2", "10.0.0.1")], ["10.0.0.1", "10.0.0.1", "10.0.0.2"]),
        # Rank 1 has tried the first of the addresses of its host, of which the others reach the second.
        ([("10.0.0.1", "10.0.0.1"), ("10.9.0.2", "10.9.0.1")], ["10.9.0.1", "10.9.0.1", "10.9.0.2"]),
        ([("10.0.0.2", "10.0.0.1"), *[("10.9.0.2", "10.9.0.1")] * 2], ["10.9.0.1", "10.0.0.2", "10.9.0.2", "10.9.0.2"]),
        ([("127.0.0.1", "127.0.0.1"), ("fd00::2", "fd00::1")], ["fd00::1", "fd00::1", "fd00::2"]),
    ],
)
def test_addresses_that_all_can_use(guests, expected):
    assert list(agreed("127.0.0.1", dict(enumerate(guests, start=1))).values()) == expected


def test_interfaces():
    assert endpoints.own_host({"TFDIST_INTERFACE": "lo"}, "name") == "127.0.0.1"
    assert endpoints.own_host({"TFDIST_INTERFACE": "lo", "TFDIST_HOST": "given"}, "name") == "given"
    assert endpoints.own_host({}, "name") == "name"
    with pytest.raises(ClusterError, match=r"'eth99', which has no IP address here\. .* share, of .*lo"):
        endpoints.own_host({"TFDIST_INTERFACE": "eth99"}, None)


def test_where_to_meet():
    slurm = Membership(1, 4, "test", "job", host="node-1", local_rank=0, local_size=2)
    alone = Membership(1, 2, "test", "job", host="node-1", local_rank=0, local_size=2)
    mpi = Membership(1, 2, "test", "job", has_channel=True, local_rank=0, local_size=2)
    assert endpoints.meeting_place(slurm, {}) == ("node-1", None)
    assert endpoints.meeting_place(alone, {}) == ("localhost", None)
    assert endpoints.meeting_place(mpi, {}) == (None, None)
    assert endpoints.meeting_place(mpi, {"TFDIST_MEETING": "[::1]:2222"}) == ("::1", 2222)
    assert endpoints.meeting_place(mpi, {"TFDIST_MEETING": "fd00::1"}) == ("fd00::1", None)
    with pytest.raises(ClusterError, match="TFDIST_MEETING: address 'a:b'"):
        endpoints.meeting_place(mpi, {"TFDIST_MEETING": "a:b"})


def test_where_to_meet_is_computed_alike(monkeypatch):
    with pytest.raises(ClusterError, match="Expected: two ports, such as 21000-21099"):
        endpoints.port_range({"TFDIST_PORTS": "5-4"})
    one, other = Membership(1, 2, "test", "slurm-lab-17-0-0"), Membership(1, 2, "test", "slurm-lab-17-1-0")
    chosen = endpoints.meeting_ports(one, {})
    assert len(set(chosen)) == 8 and all(20000 <= port < 32768 for port in chosen)
    monkeypatch.setattr(ports, "ephemeral_low", lambda: 40000)  # as on another host
    assert endpoints.meeting_ports(one, {}) == chosen
    assert not set(chosen) & set(endpoints.meeting_ports(other, {}))
    assert not set(chosen) & set(endpoints.meeting_ports(one, {"TFDIST_JOB": "second"}))


def test_secrets(tmp_path):
    member, other = Membership(1, 2, "test", "job 1"), Membership(1, 2, "test", "job 2")
    shared = Membership(1, 2, "test", "job 1", shared_home=True)
    token = {"TFDIST_TOKEN": "given"}
    assert endpoints.secret_of(member, token) == endpoints.secret_of(shared, token, tmp_path)
    assert endpoints.secret_of(member, token) != endpoints.secret_of(member, {"TFDIST_TOKEN": "another"})
    assert endpoints.secret_of(member, token) != endpoints.secret_of(other, token)
    assert not list(tmp_path.iterdir())
    with ThreadPoolExecutor(16) as pool:
        keys = set(pool.map(lambda _: endpoints.secret_of(shared, {}, tmp_path), range(32)))
    assert len(keys) == 1 and keys != {endpoints.secret_of(member, {})}
    with pytest.raises(ClusterError, match=r"no key can be kept .* Expected: TFDIST_TOKEN"):
        endpoints.secret_of(shared, {}, Path("/proc/none"))
    (key,) = Path(tmp_path, ".config", "tfdist").iterdir()
    assert key.stat().st_mode & 0o777 == 0o600 and len(key.read_text()) == 64


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 64, b"0" * 63, b"\xff" * 64], ids=["empty", "zeros", "short", "bytes"]
)
def test_a_key_that_can_be_computed_is_refused(tmp_path, content):
    """A power cut leaves an empty file, or zeros."""
    shared = Membership(1, 2, "test", "job 1", shared_home=True)
    key = Path(tmp_path, ".config", "tfdist", "key")
    key.parent.mkdir(parents=True)
    key.write_bytes(content)
    refused = f"{re.escape(str(key))} has {len(content)} bytes, not the 64 hexadecimal digits of a key: remove it"
    with pytest.raises(ClusterError, match=rf"\({refused}\)\. Expected: TFDIST_TOKEN"):
        endpoints.secret_of(shared, {}, tmp_path)
    key.unlink()
    assert endpoints.secret_of(shared, {}, tmp_path) == endpoints.secret_of(shared, {}, tmp_path)


def test_discovery(pool, port):
    env = {"TFDIST_SIZE": "4", "TFDIST_JOB": f"test-{port}", "TFDIST_MEETING": f"localhost:{port}", "TFDIST_PS": "1"}
    found = list(pool.map(lambda rank: discover({**env, "TFDIST_RANK": str(rank)}, DEADLINE), range(4)))
    assert discover({**env, "TFDIST_RANK": "1"}, 0.0) is found[1], "it answers again without a meeting"
    assert [(config.local_rank, config.local_size) for config in found] == [(rank, 4) for rank in range(4)]
    # The barrier and all else go through the connections that are there.
    assert len({str(one) for one in pool.map(lambda one: meeting.meet(one, DEADLINE, servers=True), found)}) == 1
    held = int(found[1].address.rpartition(":")[2])
    with pytest.raises(ClusterError, match="only 0 of the 1 ports"):
        ports.reserve(1, low=held, high=held + 1)
    tasks = [(config.task_type, config.task_index) for config in found]
    assert tasks == [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0)] == roles(4, servers=1)
    for size, servers in ((2, 1), (3, -1)):
        with pytest.raises(ClusterError, match=f"TFDIST_PS={servers} with {size} processes"):
            roles(size, servers)


@pytest.mark.parametrize(
    ("host", "said"),
    [
        (
            "no.such.host.invalid",
            "Received: TFDIST_MEETING with the host 'no.such.host.invalid', which is none of the addresses of ",
        ),
        # An address that is kept for documentation.
        ("192.0.2.7", "Received: TFDIST_MEETING with the host '192.0.2.7', which is none of the addresses of "),
    ],
)
def test_a_meeting_that_is_not_at_rank_0(host, said, port):
    with pytest.raises(ClusterError) as caught:
        meet(Membership(0, 2, "test", "job"), DEADLINE, {"TFDIST_MEETING": f"{host}:{port}"})
    assert said in str(caught.value)
    assert "Expected: the name or an address of the host of rank 0, on all processes" in str(caught.value)
    for env in ({"TFDIST_SKIP_ADDRESS_CHECK": "1"}, {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}):
        endpoints.check_own(host, env)
    endpoints.check_own("localhost", {})


def test_without_host_and_channel():
    with pytest.raises(
        ClusterError, match=r"without the host of rank 0: test has no means to tell it\. Expected: TFD"
    ) as caught:
        meet(Membership(1, 2, "test", "job"), 1.0, {})
    assert "mpirun" not in str(caught.value)
    with pytest.raises(ClusterError, match=r"MPICH has no means to tell it\. .* \(`mpirun -x TFDIST_MEETING=node-1 "):
        meet(Membership(1, 2, "MPICH", "", has_channel=True), 1.0, {})


@pytest.mark.parametrize("with_a_name", [True, False])
def test_processes_meet_by_a_file_in_the_home_folder(monkeypatch, tmp_path, pool, with_a_name):
    """Without a name of the job, Hydra's daemons tell it from others by where they reach mpiexec."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    folder = tmp_path / ".config" / "tfdist" / "meetings"
    daemon = SimpleNamespace(cmdline=lambda: ["hydra_pmi_proxy", "--control-port", "node-1:45123", "--rmk", "user"])
    monkeypatch.setattr(psutil.Process, "parents", lambda self: [daemon])
    members = [Membership(rank, 2, "MPI", "mpi-77" if with_a_name else "", has_channel=True) for rank in range(2)]
    second = pool.submit(meet, members[1], DEADLINE, {})
    time.sleep(0.3)
    first = meet(members[0], DEADLINE, {})
    assert first["addresses"] == second.result(DEADLINE)["addresses"]
    assert list(folder.iterdir()) == [], "it is removed when all have met"
    for met in (first, second.result()):
        met["store"].leave()
    HomeFile("job", tmp_path).tell("secret", 1.0)
    (file,) = folder.iterdir()
    assert (file.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o600, 0o700)
    assert HomeFile("job", tmp_path).hear(DEADLINE) == "secret"
    with pytest.raises(
        ClusterError, match=r"nothing from rank 0 within 0\.1 s, in .* share their home folders, set TFD"
    ):
        HomeFile("another", tmp_path).hear(0.1)
    with pytest.raises(ClusterError, match="which cannot be written"):
        HomeFile("job", Path("/proc/none")).tell("", 1.0)


# What is the same in both of two processes, and what each has besides, that with rank 0 first.
_BATCH = {"AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_MAIN_NODE_INDEX": "1"}
_SKY = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "127.0.0.1\n192.0.2.7"}
_AZURE = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "AZ_BATCH_MASTER_NODE": "127.0.0.1:6000"}
_HET = {
    **{"SLURM_JOB_ID": "9", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_HET_SIZE": "2"},
    **{"SLURM_JOB_NODELIST_HET_GROUP_0": "localhost", "SLURM_JOB_NODELIST_HET_GROUP_1": "elsewhere.invalid"},
    "SLURM_STEP_NODELIST": "elsewhere.invalid,localhost",
}
SYSTEMS = {
    "AWS Batch, whose main node knows no address": (
        _BATCH,
        {"AWS_BATCH_JOB_NODE_INDEX": "1"},
        {"AWS_BATCH_JOB_NODE_INDEX": "0", "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "127.0.0.1"},
    ),
    "SkyPilot": (_SKY, {"SKYPILOT_NODE_RANK": "0"}, {"SKYPILOT_NODE_RANK": "1"}),
    "Azure ML": (_AZURE, {"OMPI_COMM_WORLD_RANK": "0"}, {"OMPI_COMM_WORLD_RANK": "1"}),
    "a heterogeneous job of Slurm, whose list of nodes begins with another node": (
        _HET,
        {"SLURM_PROCID": "0", "SLURM_NODEID": "0"},
        {"SLURM_PROCID": "1", "SLURM_NODEID": "1"},
    ),
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_two_processes_meet_by_what_their_system_says(system, monkeypatch, tmp_path, pool, port):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    common, *own = SYSTEMS[system]
    envs = [{**common, **one, "TFDIST_JOB": f"test-{port}"} for one in own]
    found = list(pool.map(lambda env: discover(env, DEADLINE), envs))
    assert [config.rank for config in found] == [0, 1] and found[0].jobs == found[1].jobs


def test_a_channel_that_carries_nothing_ends_the_meeting(monkeypatch):
    class Broken:
        def tell(self, text: str, seconds: float) -> None:
            raise ClusterError("rank 1 did not come")

        def close(self) -> None:
            pass

    started: list[server.Server] = []
    leave = server.Server.leave
    monkeypatch.setattr(server.Server, "leave", lambda self: started.append(self))
    monkeypatch.setattr("tfdist.cluster.rendezvous.open_channel", lambda membership, env: Broken())
    with pytest.raises(ClusterError, match=r"^rank 1 did not come$"):
        meet(Membership(0, 2, "MPICH", "job", has_channel=True), DEADLINE, {})
    assert [leave(one) for one in started] == [None], "its server ends"


def test_shares_of_devices():
    assert own_share("abcd", 1, 2) == ["c", "d"]
    assert own_share("abcde", 1, 2) == ["c", "d"]
    assert own_share("ab", 2, 3) == ["a"]
    assert own_share("", 0, 2) == []
    assert visible_devices(0, {"CUDA_VISIBLE_DEVICES": "0"}) != visible_devices(1, {"CUDA_VISIBLE_DEVICES": "1"})
    assert visible_devices(0, {"ROCR_VISIBLE_DEVICES": "0,1"}) != visible_devices(1, {"ROCR_VISIBLE_DEVICES": "2,3"})
    for env, bound in (
        ({"SLURM_GPU_BIND": "none"}, False),
        ({"SLURM_GPUS_PER_TASK": "1"}, True),
        ({"SLURM_GPUS_PER_TASK": "1", "SLURM_GPU_BIND": "verbose,none"}, False),
        ({"SLURM_TRES_PER_TASK": "gres:gpu:1"}, True),
        ({"SLURM_GPU_BIND": "closest"}, True),
        ({"SLURMD_TRES_BIND": "gres/gpu:per_task:2", "CUDA_VISIBLE_DEVICES": "0,1"}, True),
        ({"SLURMD_TRES_BIND": "gres/gpu:verbose,none", "SLURM_GPUS_PER_TASK": "1"}, False),
    ):
        assert (visible_devices(0, env, of_slurm=True) != visible_devices(1, env, of_slurm=True)) == bound
        assert visible_devices(0, env) == visible_devices(1, env)
