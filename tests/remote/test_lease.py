from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.remote.storages import Disturbed, MemoryStorage
from tfdist.checkpoint import lock as module
from tfdist.checkpoint.lock import FolderInUseError, FolderLease, FolderLostError
from tfdist.storage import base
from tfdist.supervision.identity import Identity, own_place

FOLDER = "test://bucket/run"
PATH = f"{FOLDER}/.lease"
# Nobody waits for it here: a test that does fails by its own time limit.
LONG = 10_000.0


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(base, "PAUSES", (0.001, 0.001))
    monkeypatch.setattr(module, "_SETTLES", 0.05)
    yield
    for held in _made:
        held.release()
    _made.clear()


_made: list[FolderLease] = []
ELSEWHERE = {
    "token": "b" * 32,
    "process": "process 7 on another",
    "place": "other",
    "pid": 7,
    "start": 70,
    "renewals": 0,
}


def lease(storage: MemoryStorage, renewal: float = LONG, expiry: float = LONG) -> FolderLease:
    _made.append(FolderLease(storage, FOLDER, renewal, expiry))
    return _made[-1]


def encoded(owner: dict, **changes: Any) -> bytes:
    return json.dumps({**owner, **changes}).encode()


def owner_in(storage: MemoryStorage) -> dict:
    return json.loads(storage.read(PATH))


def test_it_gives_signs_of_life_until_it_is_left() -> None:
    storage = MemoryStorage()
    held = lease(storage, renewal=0.02)
    held.check()
    first = owner_in(storage)
    assert first["process"].startswith(f"process {os.getpid()} on ")
    end = time.monotonic() + 60
    while owner_in(storage)["renewals"] < 3:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert {**owner_in(storage), "renewals": 0} == first
    held.release()
    assert storage.objects == {}


def test_an_owner_that_gives_signs_of_life_is_left_alone() -> None:
    storage = MemoryStorage({PATH: encoded(ELSEWHERE)})
    ended = threading.Event()

    def renew() -> None:
        number = 0
        while not ended.wait(0.05):
            number += 1
            storage.write(PATH, encoded(ELSEWHERE, renewals=number))

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(FolderInUseError) as caught:
            lease(storage, renewal=0.1)
    finally:
        ended.set()
        thread.join()
    assert str(caught.value).startswith(f"Received: backup_dir '{FOLDER}', to which process 7 on another writes")
    assert owner_in(storage) == {**ELSEWHERE, "renewals": owner_in(storage)["renewals"]}


@pytest.mark.parametrize("content", [encoded(ELSEWHERE), b"[" * 5000])
def test_a_silent_owner_is_followed(content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    storage = MemoryStorage({PATH: content})
    began = time.monotonic()
    held = lease(storage, renewal=0.05, expiry=0.5)
    assert time.monotonic() - began >= 0.5
    name = "process 7 on another" if content == encoded(ELSEWHERE) else "another process"
    assert f"Taking over the folder {FOLDER}: {name} gives no sign of life" in caplog.text
    held.check()


@pytest.fixture
def process() -> Iterator[subprocess.Popen]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    yield child
    child.kill()
    child.wait()


def owner_of(child: subprocess.Popen, **changes: Any) -> bytes:
    identity = Identity.of(child.pid)
    assert identity is not None
    return encoded({**ELSEWHERE, "place": own_place(), "pid": child.pid, "start": identity.start, **changes})


def test_a_dead_process_of_this_machine_is_followed_at_once(process: subprocess.Popen) -> None:
    storage = MemoryStorage({PATH: owner_of(process)})
    process.send_signal(signal.SIGKILL)
    process.wait()
    lease(storage).check()


def test_a_stopped_process_of_this_machine_is_not_followed(process: subprocess.Popen) -> None:
    storage = MemoryStorage({PATH: owner_of(process)})
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(FolderInUseError, match="process 7 on another"):
        lease(storage, renewal=0.05, expiry=0.3)


def test_what_cannot_be_seen_from_here_may_be_alive(process: subprocess.Popen) -> None:
    """A container has numbers of its own for processes: that of another one means nothing here."""
    storage = MemoryStorage({PATH: owner_of(process, place="another")})
    process.kill()
    process.wait()
    began = time.monotonic()
    lease(storage, renewal=0.05, expiry=0.3)
    assert time.monotonic() - began > 0.3


def test_who_was_silent_for_too_long_is_told() -> None:
    storage = MemoryStorage()
    held = lease(storage)
    storage.write(PATH, encoded(ELSEWHERE))
    for _ in range(2):
        with pytest.raises(FolderLostError, match=f"process 7 on another has taken over the folder {FOLDER}, since"):
            held.check()
    held.release()
    assert owner_in(storage) == ELSEWHERE


def test_of_two_at_once_one_has_it() -> None:
    storage = Disturbed({})
    storage.after = lambda number, what, path: storage.objects.update({PATH: encoded(ELSEWHERE)})
    with pytest.raises(FolderInUseError, match="process 7 on another writes"):
        lease(storage)


def test_a_removed_lease_is_made_again() -> None:
    storage = MemoryStorage()
    held = lease(storage)
    first = storage.objects.pop(PATH)
    held.check()
    assert storage.objects == {PATH: first}


def test_who_stood_still_takes_no_free_folder_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another training may have begun there, saved, and ended."""
    storage = MemoryStorage()
    held = lease(storage, expiry=60.0)
    del storage.objects[PATH]
    now = module._now()
    monkeypatch.setattr(module, "_now", lambda: now + 100.0)
    with pytest.raises(FolderLostError, match=rf"taken over the folder {FOLDER}, since .* sign of life for 60 s"):
        held.check()
    held.release()
    assert storage.objects == {}


def test_all_leases_have_one_length() -> None:
    """TensorFlow would read a part of a longer one: it keeps lengths for some seconds."""
    storage = MemoryStorage()
    held = lease(storage)
    held._own["renewals"] = 10**9
    lengths = {len(storage.read(PATH))}
    held._write()
    assert {*lengths, len(storage.read(PATH))} == {512}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_lease_with_other_types_names_nobody(name: str) -> None:
    assert module._decoded(encoded(ELSEWHERE, **{name: [1]})) == {}
