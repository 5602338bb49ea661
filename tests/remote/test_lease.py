from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest

from tests.remote.storages import Disturbed, MemoryStorage
from tfdist.checkpoint.folder_lock import FolderInUseError
from tfdist.checkpoint.remote import lease as module
from tfdist.checkpoint.remote.lease import FolderLease, LeaseLostError, Owner
from tfdist.storage import patience
from tfdist.supervision.identity import Identity

FOLDER = "test://bucket/run"
PATH = f"{FOLDER}/.lease"
# Nobody waits for it here: a test that does fails by its own time limit.
LONG = 10_000.0


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(patience, "PAUSES", (0.001, 0.001))
    monkeypatch.setattr("tfdist.checkpoint.remote.lease._SETTLES", 0.05)
    yield
    for lease in list(FolderLease._held.values()):
        lease.release()


ELSEWHERE = Owner("b" * 32, "process 7 on another", 7, 70, "another boot", "pid:[1]")


def lease(storage: MemoryStorage, renewal: float = LONG, expiry: float = LONG) -> FolderLease:
    return FolderLease(storage, FOLDER, renewal, expiry)


def owner_in(storage: MemoryStorage) -> Owner:
    owner = Owner.decode(storage.read(PATH))
    assert owner is not None
    return owner


def test_a_free_folder_is_taken_and_left() -> None:
    storage = MemoryStorage()
    held = lease(storage)
    held.check()
    assert owner_in(storage).process.startswith(f"process {os.getpid()} on ")
    held.release()
    held.release()
    assert storage.objects == {}


def test_it_gives_signs_of_life() -> None:
    storage = MemoryStorage()
    held = lease(storage, renewal=0.02)
    first = owner_in(storage)
    end = time.monotonic() + 60
    while owner_in(storage).renewals < 3:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert replace(owner_in(storage), renewals=0) == first
    held.release()
    assert storage.objects == {}


def test_an_owner_that_gives_signs_of_life_is_left_alone() -> None:
    storage = MemoryStorage({PATH: ELSEWHERE.encode()})
    ended = threading.Event()

    def renew() -> None:
        number = 0
        while not ended.wait(0.05):
            number += 1
            storage.write(PATH, replace(ELSEWHERE, renewals=number).encode())

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(FolderInUseError) as caught:
            lease(storage, renewal=0.1)
    finally:
        ended.set()
        thread.join()
    assert str(caught.value).startswith(f"Received: backup_dir '{FOLDER}', to which process 7 on another writes")
    assert owner_in(storage).token == ELSEWHERE.token


@pytest.mark.parametrize("content", [ELSEWHERE.encode(), b"", b"\xff\0", b'{"token": 1}', b"[" * 5000])
def test_a_silent_owner_is_followed(content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    storage = MemoryStorage({PATH: content})
    began = time.monotonic()
    held = lease(storage, renewal=0.05, expiry=0.5)
    assert time.monotonic() - began >= 0.5
    name = "process 7 on another" if content == ELSEWHERE.encode() else "another process"
    assert f"Taking over the folder {FOLDER}: {name} gives no sign of life" in caplog.text
    held.check()


@pytest.fixture
def process() -> Iterator[subprocess.Popen]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    yield child
    child.kill()
    child.wait()


def owner_of(child: subprocess.Popen) -> Owner:
    identity = Identity.of(child.pid)
    assert identity is not None
    return replace(Owner.this_process(), pid=child.pid, start=identity.start, boot=identity.boot)


def test_a_dead_process_of_this_machine_is_followed_at_once(process: subprocess.Popen) -> None:
    storage = MemoryStorage({PATH: owner_of(process).encode()})
    process.send_signal(signal.SIGKILL)
    process.wait()
    lease(storage).check()


def test_a_stopped_process_of_this_machine_is_not_followed(process: subprocess.Popen) -> None:
    storage = MemoryStorage({PATH: owner_of(process).encode()})
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(FolderInUseError, match=f"process {os.getpid()} on "):
        lease(storage, renewal=0.05, expiry=0.3)


@pytest.mark.parametrize("field", ["namespace", "boot"])
def test_what_cannot_be_seen_from_here_may_be_alive(process: subprocess.Popen, field: str) -> None:
    """A container has numbers of its own for processes: that of another one means nothing here."""
    owner = owner_of(process)
    process.kill()
    process.wait()
    assert owner.is_dead_here
    assert not replace(owner, **{field: "another"}).is_dead_here
    assert not replace(owner, **{field: ""}).is_dead_here


def test_who_was_silent_for_too_long_is_told() -> None:
    storage = MemoryStorage()
    held = lease(storage)
    storage.write(PATH, ELSEWHERE.encode())
    for _ in range(2):
        with pytest.raises(LeaseLostError, match=f"process 7 on another has taken over the folder {FOLDER}, since"):
            held.check()
    held.release()
    assert owner_in(storage) == ELSEWHERE


def test_it_is_not_renewed_over_another_one() -> None:
    storage = MemoryStorage()
    held = lease(storage, renewal=0.02)
    storage.write(PATH, ELSEWHERE.encode())
    end = time.monotonic() + 60
    while held._lost is None:  # a renewal that was under way may have the last word once
        storage.write(PATH, ELSEWHERE.encode())
        time.sleep(0.1)
        assert time.monotonic() < end
    time.sleep(0.1)
    assert owner_in(storage) == ELSEWHERE


def test_of_two_at_once_one_has_it() -> None:
    storage = Disturbed({})
    storage.after = lambda number, what, path: storage.objects.update({PATH: ELSEWHERE.encode()})
    with pytest.raises(FolderInUseError, match="process 7 on another writes"):
        lease(storage)


def test_a_removed_lease_is_made_again() -> None:
    storage = MemoryStorage()
    held = lease(storage)
    first = storage.objects.pop(PATH)
    held.check()
    assert storage.objects == {PATH: first}


@pytest.mark.parametrize("again", [False, True], ids=["the same fit", "the next fit"])
def test_who_stood_still_takes_no_free_folder_back(monkeypatch: pytest.MonkeyPatch, again: bool) -> None:
    """Another training may have begun there, saved, and ended."""
    storage = MemoryStorage()
    held = lease(storage, expiry=60.0)
    del storage.objects[PATH]
    now = module._now()
    monkeypatch.setattr(module, "_now", lambda: now + 100.0)
    with pytest.raises(LeaseLostError, match=rf"has taken over the folder {FOLDER}, since .* sign of life for 60 s"):
        lease(storage, expiry=60.0) if again else held.check()
    held.release()
    assert storage.objects == {}


def test_signs_of_life_are_counted_from_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemoryStorage()
    held = lease(storage, renewal=0.02, expiry=60.0)
    began = module._now()
    monkeypatch.setattr(module, "_now", lambda: began + 100.0)
    number, end = owner_in(storage).renewals, time.monotonic() + 60
    while owner_in(storage).renewals < number + 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    held._ended.set()
    with held._lock:
        del storage.objects[PATH]
    held.check()
    assert owner_in(storage).token == held._own.token


class Creating(MemoryStorage):
    """Of two that create an object at once, one fails."""

    def __init__(self, *errors: OSError) -> None:
        super().__init__()
        self.errors, self.tried = list(errors), 0

    def create(self, path: str, content: bytes) -> bool:
        self.tried += 1
        if path in self.objects:
            return False
        if self.errors and isinstance(self.errors[0], TimeoutError):
            self.objects[path] = content  # the answer alone was lost
        if self.errors:
            raise self.errors.pop(0)
        self.objects[path] = content
        return True


@pytest.mark.parametrize(
    ("errors", "tried"),
    [((), 1), ((OSError("503"),), 2), ((TimeoutError(),), 2), ((OSError("501 Not Implemented"),) * 9, 3)],
)
def test_a_lease_is_created(errors: tuple[OSError, ...], tried: int) -> None:
    storage = Creating(*errors)
    lease(storage).check()
    assert (owner_in(storage).pid, storage.tried) == (os.getpid(), tried)


def test_a_lease_that_may_not_be_created_is_told() -> None:
    storage = Creating(PermissionError("403"))
    with pytest.raises(PermissionError, match="403"):
        lease(storage)
    assert storage.tried == 1


def test_another_fit_of_the_process_goes_on_with_it() -> None:
    storage = MemoryStorage()
    first = lease(storage)
    token = owner_in(storage).token
    second = lease(storage)
    assert owner_in(storage).token == token
    first.release()
    assert PATH in storage.objects
    second.release()
    assert storage.objects == {}


def test_another_fit_does_not_go_on_with_what_was_lost() -> None:
    storage = MemoryStorage()
    lease(storage)
    storage.write(PATH, ELSEWHERE.encode())
    with pytest.raises(LeaseLostError):
        lease(storage)


def test_a_moments_failure_is_endured_and_a_lasting_one_told() -> None:
    storage = Disturbed({})
    left = [2]

    def fail(number: int, what: str, path: str) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError("503")

    storage.before = fail
    held = lease(storage)
    held.release()
    left[0] = 10**6
    with pytest.raises(OSError, match="503"):
        lease(storage)


def test_all_leases_have_one_length() -> None:
    """TensorFlow would read a part of a longer one: it keeps lengths for some seconds."""
    owners = [ELSEWHERE, Owner.this_process(), replace(ELSEWHERE, renewals=10**9, process="p" * 130)]
    assert {len(owner.encode()) for owner in owners} == {512}
    for owner in owners:
        assert Owner.decode(owner.encode()) == owner
        assert Owner.decode(owner.encode()[:100]) is None


@pytest.mark.parametrize("name", asdict(ELSEWHERE))
def test_a_lease_with_other_types_names_nobody(name: str) -> None:
    assert Owner.decode(json.dumps({**asdict(ELSEWHERE), name: [1]}).encode()) is None
