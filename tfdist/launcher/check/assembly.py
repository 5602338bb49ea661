"""How the processes of a job meet before TensorFlow starts, and exchange texts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence

from tfdist.cluster import ports, sockets
from tfdist.cluster.barrier import meet
from tfdist.cluster.barrier.messages import members as tasks_of
from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.gpus import visible_gpus
from tfdist.cluster.key_value import KeyValueClient, KeyValueServer
from tfdist.cluster.rendezvous.endpoints import host_name
from tfdist.launcher.check.answers import Answer
from tfdist.launcher.machine import public_addresses, usable_cores, versions

# With other versions of these, processes cannot train together, or would not compute the same.
COMPARED = ("tfdist", "tensorflow", "keras", "python")
_LAST_WORDS_SECONDS = 5.0
# Of a name, or a list, that another process tells; of cores; of a text that it leaves for the others.
_LONGEST, _MOST, _LARGEST = 100, 10**6, 10**6


@dataclasses.dataclass(frozen=True)
class Member:
    """One process of the job.

    Attributes:
        task: its job and index.
        address: its `host:port`.
        host: the name of its host.
        cores: how many cores it may use.
        gpus: how many GPUs it sees.
        versions: by name.
        public: addresses of its host at which anyone in the Internet could reach it.
    """

    task: str
    address: str
    host: str
    cores: int
    gpus: int
    versions: dict[str, str]
    public: Sequence[str] = ()

    @classmethod
    def this_one(cls, task: str, address: str, env: Mapping[str, str]) -> Member:
        """This process."""
        found = (len(usable_cores()), len(visible_gpus(env)), versions(), public_addresses())
        return cls(task, address, host_name(env), *found)

    @classmethod
    def read(cls, answer: Answer, task: str, address: str) -> Member:
        """What another process tells of itself."""
        told = answer.part("versions")
        versions = {name: told.text(name, _LONGEST) for name in COMPARED if name in told}
        cores, gpus = (answer.whole(name, 0, _MOST) for name in ("cores", "gpus"))
        return cls(
            task, address, answer.text("host", _LONGEST), cores, gpus, versions, answer.texts("public", _LONGEST)
        )


def exposed(hosts: Mapping[str, Sequence[str]]) -> list[str]:
    """A line for each host with public addresses: TensorFlow checks nobody who connects.

    Example:
        >>> exposed({"node-1": ["8.8.8.8"], "node-2": []})[0].partition(":")[0]
        'node-1 has the public address 8.8.8.8'
    """
    return [
        f"{host} has the public address {', '.join(addresses)}: TensorFlow listens on all addresses and asks nobody "
        "for a password, so whoever reaches its ports can read and change the training, and run code. Expected: a "
        "firewall that keeps others from ports 20000 to 32767, or those of TFDIST_PORTS; or, for `tfdist run`, a "
        "network of its own: unshare --net --map-root-user sh -c 'ip link set lo up; exec tfdist run ...'"
        for host, addresses in hosts.items()
        if addresses
    ]


def differing_versions(members: list[Member]) -> list[str]:
    """A line for each version that is not the same everywhere.

    Example:
        >>> one = Member("worker 0", "a:1", "a", 4, 0, {"tensorflow": "2.21.0"})
        >>> other = dataclasses.replace(one, task="worker 1", versions={"tensorflow": "2.20.0"})
        >>> differing_versions([one, other])[0].partition(".")[0]
        'tensorflow is 2'
    """
    problems = []
    for name in COMPARED:
        ranks: dict[str, list[str]] = {}
        for member in members:
            ranks.setdefault(member.versions.get(name, "not installed"), []).append(member.task)
        if len(ranks) > 1:
            listing = ", ".join(f"{version} on {', '.join(tasks[:8])}" for version, tasks in ranks.items())
            problems.append(f"{name} is {listing}. Expected: the same everywhere; install it on those that differ")
    return problems


@dataclasses.dataclass(frozen=True)
class Assembly:
    """The connection of one process to all others.

    Attributes:
        rank: this one among the members.
        members: those that train, then the parameter servers.
        measuring: the port at which each of them can be measured.
        token: a secret of this meeting.
        store: where they leave texts.
        timeout: how long each of them waits for another, in seconds.
    """

    rank: int
    members: list[Member]
    measuring: list[int]
    token: bytes
    store: KeyValueServer | KeyValueClient
    timeout: float

    def publish(self, topic: str, found: dict) -> None:
        """Leaves something for the others, JSON values.

        Raises:
            ClusterError: if rank 0, which keeps them, is gone.
        """
        try:
            self.store.set(f"{topic} of {self.rank}", json.dumps(found))
        except ConnectionError:
            raise self._gone(0, "answer") from None

    def receive(self, topic: str, rank: int, more: float = 0.0) -> Answer:
        """What another process has left.

        Args:
            topic: what it is about.
            rank: whose it is.
            more: how much longer than `timeout` it may take, in seconds.

        Raises:
            ClusterError: if there is none in time, or the process is gone, or it is too long or no JSON object.
        """
        try:
            text = self.store.get(f"{topic} of {rank}", self.timeout + more, rank)
        except ConnectionError:
            text = None
        if text is None:
            raise self._gone(rank, topic, more)
        return Answer.parsed(text, self.members[rank].task, topic, _LARGEST)

    def receive_all(self, topic: str, more: float = 0.0) -> list[Answer]:
        """What each process has left, for rank 0."""
        return [self.receive(topic, rank, more) for rank in range(len(self.members))]

    def _gone(self, rank: int, topic: str, more: float = 0.0) -> ClusterError:
        member = self.members[rank]
        return ClusterError(
            f"Received: nothing from {member.task} on {member.host} ({member.address}), which came to the meeting, "
            f"within {self.timeout + more:g} s. Expected: its {topic}; see what it has printed"
        )


@contextlib.contextmanager
def assembled(config: ClusterConfig, timeout: float) -> Iterator[Assembly]:
    """Meets the other processes.

    Args:
        config: the cluster.
        timeout: how long to wait for them, in seconds.

    Raises:
        ClusterError: if one does not come.
    """
    servers = "ps" in config.jobs
    tasks = tasks_of(config, servers)
    rank, size = tasks.index((config.task_type, config.task_index)), len(tasks)
    own = Member.this_one(f"{config.task_type} {config.task_index}", str(config.address), os.environ)
    token = secrets.token_hex(32).encode()
    server = KeyValueServer(token, size) if rank == 0 else None
    with ports.reserve(1) as reservation:
        info = {"member": dataclasses.asdict(own), "measuring": reservation.ports[0]}
        if server is not None:
            info |= {"store": server.port, "token": token.decode()}
        met = meet(config, timeout, info, servers=servers)
        # Task and address are those of the cluster, which is the same for all.
        named = [(f"{job} {index}", config.jobs[job][index]) for job, index in tasks]
        answers = [Answer(met[other], task, "introduction") for other, (task, _) in enumerate(named)]
        members = [Member.read(one.part("member"), *who) for one, who in zip(answers, named, strict=True)]
        measuring = [one.whole("measuring", 1, 65535) for one in answers]
        token = answers[0].text("token", 2 * len(token)).encode()
        place = sockets.split_address(members[0].address)[0], answers[0].whole("store", 1, 65535)
        store = server or KeyValueClient(place, token, rank, timeout)
        try:
            yield Assembly(rank, members, measuring, token, store, timeout)
            if server is not None:
                server.wait_until_left(_LAST_WORDS_SECONDS)
        finally:
            store.close()
