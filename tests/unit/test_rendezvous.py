"""How processes that know rank and size find each other; in threads here, in tests/system by real launchers."""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tfdist.cluster import ClusterError, barrier, connections, discover, discovery, ports, rendezvous, sockets
from tfdist.cluster.barrier import messages
from tfdist.cluster.connections import Connection
from tfdist.cluster.membership import Membership, own_share, roles, visible_devices
from tfdist.cluster.rendezvous import attend, endpoints, meet, server
from tfdist.cluster.rendezvous.pmi import PmiChannel
from tfdist.cluster.rendezvous.registration import Registration, agreed

SECRET = b"of this job"


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


def serve(pool: ThreadPoolExecutor, size: int, port: int, timeout: float = 20.0, **other) -> Future:
    """Rank 0, listening on return."""
    started = server.MeetingServer(registration(0, size, **other), [port], SECRET)
    return pool.submit(started.meet, timeout)


def come(pool: ThreadPoolExecutor, rank: int, size: int, at: int, timeout: float = 20.0, **other) -> Future:
    secret = other.pop("secret", SECRET)
    return pool.submit(attend, registration(rank, size, **other), [("127.0.0.1", at)], secret, timeout)


def authenticated(connected: socket.socket) -> Connection:
    """A connection over another descriptor, once both ends have proved that they know the secret."""
    connection = connections.framed(connected.dup())
    connections.authenticate(connection, SECRET, first=False)
    return connection


def test_all_get_the_same(pool, port):
    guests = [come(pool, rank, 4, port) for rank in (3, 1, 2)]
    time.sleep(0.3)  # they come before rank 0 does
    first = serve(pool, 4, port).result()
    assert first["addresses"] == ["127.0.0.1:2000", "127.0.0.1:2001", "127.0.0.1:2002", "127.0.0.1:2003"]
    assert [guest.result() for guest in guests] == [first] * 3


def test_who_is_missing_is_named_to_all(pool, port):
    started = time.monotonic()
    first, guest = serve(pool, 4, port, timeout=1.0), come(pool, 2, 4, port, timeout=1.0)
    messages = []
    for future in (first, guest):
        with pytest.raises(ClusterError) as caught:
            future.result()
        messages.append(str(caught.value))
    assert time.monotonic() - started < 5.0
    assert messages[0] == messages[1]
    assert messages[0].startswith(
        "Received: 2 of 4 processes in 1 s: rank 0 (node-0, process 70), rank 2 (node-2, process 72). "
        f"Expected: ranks 1, 3 as well, at port {port} of node-0."
    )


def test_no_rank_0(port):
    places_ = [("127.0.0.1", port), ("no.such.host.invalid", port)]
    with pytest.raises(ClusterError) as caught:
        attend(registration(1, 2), places_, SECRET, 0.5)
    message = str(caught.value)
    assert f"127.0.0.1:{port}: Connection refused" in message
    assert f"no.such.host.invalid:{port}: " in message
    assert "as rank 1 on node-1 saw it" in message and "TFDIST_TOKEN" in message


def test_another_secret(pool, port):
    first = serve(pool, 2, port, timeout=1.5)
    with pytest.raises(ClusterError, match="does not know the secret of this job") as caught:
        come(pool, 1, 2, port, timeout=0.5, secret=b"of another").result()
    assert "for this process the job has no name: TFDIST_JOB and TFDIST_TOKEN have to be the same" in str(caught.value)
    told = r"who does not know the secret of this job \(it has another secret\)"
    words = rf"turned away: somebody from 127\.0\.0\.1, {told} \(\d+ times\)\. Expected: rank 1"
    with pytest.raises(ClusterError, match=words):
        first.result()


def test_another_size(pool, port):
    first = serve(pool, 2, port, timeout=1.0)
    with pytest.raises(ClusterError, match=r"counts 3 processes, rank 0 .* counts 2"):
        come(pool, 1, 3, port).result()
    with pytest.raises(ClusterError, match=r"turned away: rank 1 .* counts 3 processes"):
        first.result()


def test_the_same_rank_twice(pool, port):
    first = serve(pool, 3, port, timeout=20.0)
    before = come(pool, 1, 3, port, pid=1)
    time.sleep(0.5)
    after = come(pool, 1, 3, port, pid=2)
    with pytest.raises(ClusterError, match=r"rank 1 \(node-1, process 1\) and rank 1 \(node-1, process 2\) have come"):
        before.result()
    come(pool, 2, 3, port).result()
    assert after.result() == first.result()


def test_a_rank_that_dies_and_comes_again(pool, port):
    first = serve(pool, 3, port)
    with socket.create_connection(("127.0.0.1", port)) as connected:
        guest = authenticated(connected)
        guest.send_bytes(registration(1, 3, port=9999).to_json())
        time.sleep(0.3)
        guest.close()
    come(pool, 2, 3, port)
    time.sleep(0.3)
    assert not first.done()  # the dead one does not count
    again = come(pool, 1, 3, port)
    assert again.result()["addresses"][1] == "127.0.0.1:2001"
    assert first.result() == again.result()


def test_rank_0_that_dies_and_comes_again(pool, port):
    with ports.reserve(1) as reservation:
        other = reservation.ports[0]
    lost = server.MeetingServer(registration(0, 2), [port], SECRET)
    candidates = [("127.0.0.1", port), ("127.0.0.1", other)]
    guest = pool.submit(attend, registration(1, 2), candidates, SECRET, 20.0)
    while not lost.guests:
        time.sleep(0.05)
    lost.end()
    # The port that it had may be in the system's hands for a while: it takes another one of the list.
    started = server.MeetingServer(registration(0, 2), [other], SECRET)
    assert started.meet(20.0) == guest.result()


RANK_1 = """
import socket, sys
from tfdist.cluster import discover, sockets
address = discover(timeout=20.0).address
with sockets.bind_everywhere(int(address.rpartition(":")[2]), reuse=True) as server:  # as TensorFlow does
    server.listen()
    print(address, flush=True)
    sys.stdin.read()
"""


def test_nobody_listens_when_all_have_met(pool, port):
    first, guest = serve(pool, 2, port), come(pool, 1, 2, port)
    assert guest.result() == first.result()
    with pytest.raises(ClusterError, match=r"Connection refused.* nobody listens any more: start all processes again"):
        come(pool, 1, 2, port, timeout=0.5).result()


def test_a_rank_that_comes_again_afterwards_has_its_former_place(pool, port):
    env = {"TFDIST_SIZE": "3", "TFDIST_PS": "1", "TFDIST_JOB": f"test-{port}", "TFDIST_MEETING": f"localhost:{port}"}
    first = pool.submit(discover, {**env, "TFDIST_RANK": "0"}, 20.0)
    pool.submit(discover, {**env, "TFDIST_RANK": "2"}, 20.0)
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
            talking = socket.create_connection(("127.0.0.1", int(found[0].rpartition(":")[2])), timeout=10)
            process.kill()
            process.wait()
    assert found == [first.result().with_task("worker", 0).address] * 2
    talking.close()
    with sockets.bind_everywhere(int(found[0].rpartition(":")[2]), reuse=True) as taken:
        taken.listen()
        with pytest.raises(ClusterError, match="which is not free here"):
            discover({**env, "TFDIST_RANK": "1"}, 20.0)


def test_no_free_port(port):
    with sockets.bind_everywhere(port, reuse=False) as taken:
        taken.listen()
        with pytest.raises(ClusterError, match=f"no free port among {port}, where the other processes look for rank 0"):
            server.MeetingServer(registration(0, 2), [port], SECRET)
    with ports.reserve(1, low=port, high=port + 1), ports.reserve(1) as other:
        free = other.ports[0]
        other.close()
        assert server.MeetingServer(registration(0, 2), [port, free], SECRET).port == free


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
    assert server.MeetingServer(registration(0, 2), [port], SECRET).port == port


def test_garbage_does_no_harm(pool, port):
    first = serve(pool, 2, port)
    with socket.create_connection(("127.0.0.1", port)) as connected:
        connected.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    for content in (b"not json", b"[1, 2]", json.dumps({"rank": 1}).encode()):
        with socket.create_connection(("127.0.0.1", port)) as connected:
            guest = authenticated(connected)
            guest.send_bytes(content)
    come(pool, 1, 2, port).result()
    assert len(first.result()["addresses"]) == 2


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


def test_over_ipv6(pool, port):
    if not socket.has_ipv6 or "::1" not in {place[4][0] for place in socket.getaddrinfo("::1", 1)}:
        pytest.skip("no IPv6 here")
    first = serve(pool, 2, port, address="::1")
    guest = pool.submit(attend, registration(1, 2), [("::1", port)], SECRET, 10.0)
    assert guest.result()["addresses"] == ["[::1]:2000", "[::1]:2001"] == first.result()["addresses"]


def test_interfaces():
    assert endpoints.own_host({"TFDIST_INTERFACE": "lo"}, "name") == "127.0.0.1"
    assert endpoints.own_host({"TFDIST_INTERFACE": "lo", "TFDIST_HOST": "given"}, "name") == "given"
    assert endpoints.own_host({}, "name") == "name"
    with pytest.raises(ClusterError, match=r"'eth99', which is none of this machine's, which are .*lo"):
        endpoints.own_host({"TFDIST_INTERFACE": "eth99"}, None)


def test_where_to_meet():
    slurm = Membership(1, 4, "test", "job", host="node-1", local_rank=0, local_size=2)
    alone = Membership(1, 2, "test", "job", host="node-1", local_rank=0, local_size=2)
    mpi = Membership(1, 2, "test", "job", channel="pmi", local_rank=0, local_size=2)
    assert endpoints.meeting_place(slurm, {}) == ("node-1", None)
    assert endpoints.meeting_place(alone, {}) == ("localhost", None)
    assert endpoints.meeting_place(mpi, {}) == (None, None)
    assert endpoints.meeting_place(mpi, {"TFDIST_MEETING": "[::1]:2222"}) == ("::1", 2222)
    assert endpoints.meeting_place(mpi, {"TFDIST_MEETING": "fd00::1"}) == ("fd00::1", None)
    with pytest.raises(ClusterError, match="TFDIST_MEETING: address 'a:b'"):
        endpoints.meeting_place(mpi, {"TFDIST_MEETING": "a:b"})


def test_where_to_meet_is_computed_alike(monkeypatch):
    one, other = Membership(1, 2, "test", "slurm-lab-17-0-0"), Membership(1, 2, "test", "slurm-lab-17-1-0")
    chosen = endpoints.meeting_ports(one, {})
    assert len(set(chosen)) == 8 and all(20000 <= port < 32768 for port in chosen)
    monkeypatch.setattr(ports, "ephemeral_low", lambda: 40000)  # as on another host
    assert endpoints.meeting_ports(one, {}) == chosen
    assert not set(chosen) & set(endpoints.meeting_ports(other, {}))
    assert not set(chosen) & set(endpoints.meeting_ports(one, {"TFDIST_JOB": "second"}))


@pytest.mark.parametrize("text", ["21000", "0-10", "5-4", "1-70000", "a-b"])
def test_wrong_port_ranges(text):
    with pytest.raises(ClusterError, match="Expected: two ports, such as 21000-21099"):
        endpoints.port_range({"TFDIST_PORTS": text})


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


def test_a_thousand_ranks(port):
    started = time.monotonic()
    first = server.MeetingServer(registration(0, 1000), [port], SECRET)
    met = []

    def one(rank: int) -> None:
        met.append(attend(registration(rank, 1000), [("127.0.0.1", port)], SECRET, 60.0)["addresses"])

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(1, 1000)]
    for thread in threads:
        thread.start()
    result = first.meet(60.0)
    for thread in threads:
        thread.join()
    print(f"a thousand ranks met in {time.monotonic() - started:.1f} s")
    assert len(met) == 999 and all(addresses == result["addresses"] for addresses in met)
    assert len(set(result["addresses"])) == 1000


def test_discovery_keeps_the_port_and_answers_again_without_meeting(pool, port):
    env = {"TFDIST_SIZE": "2", "TFDIST_JOB": f"test-{port}", "TFDIST_MEETING": f"localhost:{port}"}
    both = list(pool.map(lambda rank: discover({**env, "TFDIST_RANK": str(rank)}, 20.0), range(2)))
    assert both[0].with_task("worker", 1) == both[1]
    assert [config.local_size for config in both] == [2, 2] and [config.local_rank for config in both] == [0, 1]
    assert discover({**env, "TFDIST_RANK": "1"}, 0.0) is both[1]
    held = int(both[1].address.rpartition(":")[2])
    with pytest.raises(ClusterError, match="only 0 of the 1 ports"):
        ports.reserve(1, low=held, high=held + 1)


def test_roles_of_ranks(pool, port):
    env = {"TFDIST_SIZE": "4", "TFDIST_JOB": f"test-{port}", "TFDIST_MEETING": f"localhost:{port}", "TFDIST_PS": "1"}
    found = list(pool.map(lambda rank: discover({**env, "TFDIST_RANK": str(rank)}, 20.0), range(4)))
    tasks = [(config.task_type, config.task_index) for config in found]
    assert tasks == [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0)] == roles(4, servers=1)
    for size, servers in ((2, 1), (3, -1)):
        with pytest.raises(ClusterError, match=f"TFDIST_PS={servers} with {size} processes"):
            roles(size, servers)


def test_a_process_alone_needs_nobody():
    assert meet(Membership(0, 1, "test", "alone"), 1.0, {})["addresses"][0].startswith("127.0.0.1:")


def test_another_job(port):
    with ThreadPoolExecutor(2) as pool:
        both = [
            pool.submit(meet, Membership(rank, 2, "test", ""), 2.0, {"TFDIST_MEETING": f"localhost:{port}", **env})
            for rank, env in enumerate([{"TFDIST_JOB": "faces"}, {"TFDIST_JOB": "digits"}])
        ]
    with pytest.raises(ClusterError, match="turned away: somebody from "):
        both[0].result()
    with pytest.raises(ClusterError, match="; for this process the job is 'digits': TFDIST_JOB and TFDIST_TOKEN have"):
        both[1].result()


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("no.such.host.invalid", "Received: TFDIST_MEETING with the host 'no.such.host.invalid': "),
        # An address that is kept for documentation.
        ("192.0.2.7", "Received: TFDIST_MEETING with the host '192.0.2.7', which is none of the addresses of "),
    ],
)
def test_a_meeting_that_is_not_at_rank_0(host, said, port):
    began = time.monotonic()
    with pytest.raises(ClusterError) as caught:
        meet(Membership(0, 2, "test", "job"), 20.0, {"TFDIST_MEETING": f"{host}:{port}"})
    assert time.monotonic() - began < 10.0
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
    with pytest.raises(ClusterError, match="MPICH does not tell it here: PMI_FD is not set"):
        meet(Membership(1, 2, "MPICH", "job", channel="pmi"), 1.0, {})


def test_a_channel_that_carries_nothing_ends_the_meeting(monkeypatch):
    class Broken:
        def tell(self, text: str, seconds: float) -> None:
            raise ClusterError("rank 1 did not come")

    before = set(threading.enumerate())
    monkeypatch.setattr("tfdist.cluster.rendezvous.open_channel", lambda membership, env: Broken())
    with pytest.raises(ClusterError, match=r"^rank 1 did not come$"):
        meet(Membership(0, 2, "MPICH", "job", channel="pmi"), 20.0, {})
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("silent_one", [False, True])
def test_a_rank_0_that_is_busy_is_found_after_the_other_ports(monkeypatch, pool, port, silent_one):
    """At first each port gets a moment; one at which somebody listens gets more when its turn comes again."""
    monkeypatch.setattr(rendezvous, "_CONNECT_SECONDS", 0.2)
    introduction = server.MeetingServer.introduction

    def busy(self, connection: Connection):
        time.sleep(0.8)
        return introduction(self, connection)

    monkeypatch.setattr(server.MeetingServer, "introduction", busy)
    first = serve(pool, 2, port)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        others = [("127.0.0.1", silent.getsockname()[1])] if silent_one else []
        second = pool.submit(attend, registration(1, 2), [("127.0.0.1", port), *others], SECRET, 8.0)
        assert second.result(10.0) == first.result(10.0)


@pytest.mark.parametrize(
    ("env", "shared_home", "is_secret"),
    [({}, False, False), ({"TFDIST_TOKEN": "given"}, False, True), ({}, True, True)],
    ids=["name of the job", "token", "key at home"],
)
def test_the_secret_of_the_rendezvous_protects_the_barrier(
    monkeypatch, tmp_path, pool, port, env, shared_home, is_secret
):
    monkeypatch.setenv("HOME", str(tmp_path))
    env = {"TFDIST_MEETING": f"127.0.0.1:{port}", **env}
    members = [Membership(rank, 2, "test", f"job {port}", shared_home=shared_home) for rank in range(2)]
    met = [pool.submit(discovery._complete, member, 20.0, env) for member in members]
    first, second = (one.result(30.0) for one in met)
    assert (discovery.secret_of(first) is not None) == is_secret
    chief = pool.submit(barrier.meet, first, 10.0, env={})
    at = functools.partial(sockets.connect, sockets.split_address(first.chief_address))
    with connections.framed(connections.keep_trying({"": at}, time.monotonic() + 5.0, {})) as stranger:
        assert connections.receive(stranger)["token"] == is_secret
        connections.send(stranger, messages.hello(second, {"same.keras": "2"}, 1))
        # Without a secret, whoever comes from a host of the cluster can end the job.
        said = connections.receive(stranger)
        assert ("challenge" if is_secret else "error") in said
    if is_secret:
        assert barrier.meet(second, 20.0, env={}) == chief.result(30.0) == {0: {}, 1: {}}
    else:
        assert isinstance(chief.exception(30.0), ClusterError)


def test_shares_of_devices():
    assert own_share("abcd", 1, 2) == ["c", "d"]
    assert own_share("abcde", 1, 2) == ["c", "d"]
    assert own_share("ab", 2, 3) == ["a"]
    assert own_share("", 0, 2) == []
    assert visible_devices(0, {"CUDA_VISIBLE_DEVICES": "0"}) != visible_devices(1, {"CUDA_VISIBLE_DEVICES": "1"})
    for env, bound in (
        ({"SLURM_GPU_BIND": "none"}, False),
        ({"SLURM_GPUS_PER_TASK": "1"}, True),
        ({"SLURM_GPUS_PER_TASK": "1", "SLURM_GPU_BIND": "verbose,none"}, False),
        ({"SLURM_TRES_PER_TASK": "gres:gpu:1"}, True),
        ({"SLURM_GPU_BIND": "closest"}, True),
    ):
        assert (visible_devices(0, env, of_slurm=True) != visible_devices(1, env, of_slurm=True)) == bound
        assert visible_devices(0, env) == visible_devices(1, env)


def mpiexec(connection: socket.socket, store: dict[str, str]) -> None:
    """The part of mpiexec's proxy that is used here, for one process."""
    with connection, connection.makefile("rw") as lines:
        for line in lines:
            words = dict(word.split("=", 1) for word in line.split())
            command = words["cmd"]
            if command == "put":
                store[words["key"]] = words["value"]
            answer = {
                "init": "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
                "get_my_kvsname": "cmd=my_kvsname kvsname=kvs_1",
                "put": "cmd=put_result rc=0 msg=success",
                "barrier_in": "cmd=barrier_out rc=0",
                "get": f"cmd=get_result rc=0 msg=success value={store.get(words.get('key'))}",
                "finalize": "cmd=finalize_ack",
            }[command]
            lines.write(answer + "\n")
            lines.flush()
            if command == "finalize":
                return


@pytest.mark.parametrize("text", ["short", json.dumps({"hosts": ["10.0.0.1"] * 60, "secret": "=" * 64}), ""])
def test_texts_over_pmi(pool, text):
    store: dict[str, str] = {}
    heard = []
    for say in (lambda channel: channel.tell(text, 5.0), lambda channel: heard.append(channel.hear(5.0))):
        ours, theirs = socket.socketpair()
        answered = pool.submit(mpiexec, theirs, store)
        with ours:
            say(PmiChannel(ours.fileno()))
        answered.result()
    assert heard == [text]


def test_mpiexec_that_hangs_up_or_is_silent():
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises((ClusterError, OSError)):
        PmiChannel(os.dup(ours.fileno()))
    ours, theirs = socket.socketpair()
    theirs.sendall(b"cmd=response_to_init rc=0\ncmd=my_kvsname kvsname=k\n")
    with ours, theirs, pytest.raises(ClusterError, match=r"no answer of mpiexec to barrier_in within 0\.1 s"):
        PmiChannel(ours.fileno()).hear(0.1)
