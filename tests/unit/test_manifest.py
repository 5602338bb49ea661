from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from tfdist.checkpoint.manifest import (
    DamagedCheckpointError,
    Manifest,
    checkpoint_name,
    checkpoint_names,
    committed_checkpoints,
    decode_manifest,
    encode_manifest,
    verify_checkpoint,
)

DATA = b"0123456789" * 1_000_000  # more than one chunk of reading
META = {"epoch": 3, "done": False, "loss": 0.1 + 0.2, "best": float("inf"), "name": "é", "history": [[1], None]}
MANIFEST = Manifest(
    META,
    {"state.data": {"size": len(DATA), "crc32": zlib.crc32(DATA)}},
    {"kernel": {"dtype": "bfloat16", "shape": [2, 0]}},
)


def write_checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "state.data").write_bytes(DATA)
    (folder / "manifest.json").write_bytes(encode_manifest(MANIFEST))
    return folder


def test_manifest_comes_back_equal() -> None:
    assert decode_manifest(encode_manifest(MANIFEST)) == MANIFEST


def test_every_flipped_bit_of_a_manifest_is_noticed() -> None:
    content = encode_manifest(MANIFEST)
    for position in range(8 * len(content)):
        altered = bytearray(content)
        altered[position // 8] ^= 1 << position % 8
        with pytest.raises(ValueError, match=r"manifest\.json"):
            decode_manifest(bytes(altered))


def test_every_truncated_or_extended_manifest_is_noticed() -> None:
    content = encode_manifest(MANIFEST)
    for altered in [content[:length] for length in range(len(content))] + [content + b" ", content + content]:
        with pytest.raises(ValueError, match=r"manifest\.json"):
            decode_manifest(altered)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "state.data has 0 bytes instead of 10000000"),
        (DATA[:-1], "state.data has 9999999 bytes instead of 10000000"),
        (DATA + b"x", "state.data has 10000001 bytes instead of 10000000"),
        (b"1" + DATA[1:], f"state.data has the checksum {zlib.crc32(b'1' + DATA[1:]):08x} instead of "),
        (None, "state.data is missing"),
    ],
)
def test_altered_file_is_named(tmp_path: Path, content: bytes | None, reason: str) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint")
    (folder / "state.data").unlink()
    if content is not None:
        (folder / "state.data").write_bytes(content)
    with pytest.raises(DamagedCheckpointError) as caught:
        verify_checkpoint(str(folder))
    assert caught.value.reason.startswith(reason)
    assert str(caught.value).startswith(f"The checkpoint {folder} is damaged: {reason}")


def test_unaltered_checkpoint_verifies(tmp_path: Path) -> None:
    assert verify_checkpoint(str(write_checkpoint(tmp_path / "checkpoint"))) == MANIFEST


def test_unreadable_file_is_damage(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint")
    (folder / "state.data").unlink()
    (folder / "state.data").mkdir()
    with pytest.raises(DamagedCheckpointError, match=r"state.data cannot be read: .*Is a directory"):
        verify_checkpoint(str(folder))


def test_names_are_sorted_by_number() -> None:
    assert checkpoint_name(123456789) == "checkpoint-123456789"
    entries = ["checkpoint-123456789", "checkpoint-00000010/", "checkpoint-1", "logs", "checkpoint-00000009"]
    assert checkpoint_names(entries) == ["checkpoint-00000009", "checkpoint-00000010", "checkpoint-123456789"]


def test_committed_checkpoints_have_a_manifest(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint-00000002")
    write_checkpoint(tmp_path / "checkpoint-00000001")
    (tmp_path / "checkpoint-00000003").mkdir()
    assert committed_checkpoints(str(tmp_path)) == ["checkpoint-00000001", "checkpoint-00000002"]
    assert committed_checkpoints(str(tmp_path / "absent")) == []


def test_verifying_imports_no_tensorflow() -> None:
    code = "import sys, tfdist.checkpoint.manifest\nprint(sorted({'tensorflow', 'keras', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
