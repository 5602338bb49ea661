"""The GPUs that CUDA shows to a process, found without TensorFlow, and whether processes share one."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

from tfdist.cluster.programs import output_of

_GPU_LINE = re.compile(r"^GPU (\d+):.*\(UUID: (GPU-[^)]+)\)")
_MIG_LINE = re.compile(r"^\s+MIG .*\(UUID: (MIG-[^)]+)\)")


def visible_gpus(env: Mapping[str, str]) -> tuple[str, ...]:
    """What `CUDA_VISIBLE_DEVICES` calls the GPUs that CUDA would show to a process with this environment.

    `CUDA_VISIBLE_DEVICES` decides where it is set; otherwise `nvidia-smi -L` is asked, and a machine without that
    command has none.
    """
    listed = env.get("CUDA_VISIBLE_DEVICES")
    return parse_nvidia_smi(_nvidia_smi(env)) if listed is None else parse_visible_devices(listed)


def unique_names(env: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs of `visible_gpus` by names that no other GPU has; "" for one that `nvidia-smi -L` does not list.

    Numbers are not enough: where Slurm or a container hides the others, each process calls its own GPU 0. A MIG slice
    has the name of its GPU.
    """
    listing, listed = _nvidia_smi(env), env.get("CUDA_VISIBLE_DEVICES")
    visible = parse_nvidia_smi(listing) if listed is None else parse_visible_devices(listed)
    return tuple(parse_unique_name(listing, name) for name in visible)


def _nvidia_smi(env: Mapping[str, str]) -> str:
    return output_of(["nvidia-smi", "-L"], env.get("PATH"), seconds=20.0) or ""


def parse_visible_devices(text: str) -> tuple[str, ...]:
    """Splits `CUDA_VISIBLE_DEVICES`. As in CUDA, an invalid entry such as -1 hides itself and all that follow.

    Example:
        >>> parse_visible_devices("1,3")
        ('1', '3')
    """
    entries = (entry.strip() for entry in text.split(","))
    return tuple(itertools.takewhile(lambda entry: entry and not entry.startswith("-"), entries))


def parse_nvidia_smi(listing: str) -> tuple[str, ...]:
    """Reads `nvidia-smi -L`: one name per GPU, or per MIG slice of a GPU that is partitioned."""
    return tuple(name for number, _, slices in _parsed(listing) for name in (slices or [number]))


def parse_unique_name(listing: str, name: str) -> str:
    """The unique name of a GPU, or of that of a MIG slice, in `nvidia-smi -L`; "" if it is not there.

    Args:
        listing: what the command prints.
        name: what CUDA_VISIBLE_DEVICES has: a number, or a unique name or its beginning.

    Example:
        >>> listing = "GPU 0: NVIDIA L4 (UUID: GPU-1b)\\nGPU 1: NVIDIA L4 (UUID: GPU-7c)"
        >>> parse_unique_name(listing, "1"), parse_unique_name(listing, "GPU-1")
        ('GPU-7c', 'GPU-1b')
    """
    for number, unique, slices in _parsed(listing):
        if name == number or any(known.startswith(name) for known in (unique, *slices)):
            return unique
    return ""


def _parsed(listing: str) -> list[tuple[str, str, list[str]]]:
    """Number, unique name, and MIG slices of each GPU."""
    found: list[tuple[str, str, list[str]]] = []
    for line in listing.splitlines():
        if match := _GPU_LINE.match(line):
            found.append((match.group(1), match.group(2), []))
        elif found and (match := _MIG_LINE.match(line)):
            found[-1][2].append(match.group(1))
    return found


def are_shared(of_processes: Sequence[Sequence[str]]) -> bool:
    """Whether two devices are the same GPU.

    Args:
        of_processes: for each process the unique name of the GPU of each of its devices.

    Example:
        >>> are_shared([["GPU-1b", "GPU-7c"], ["GPU-f0"]]), are_shared([["GPU-1b"], ["GPU-1b"]])
        (False, True)
    """
    names = [name for names in of_processes for name in names]
    return len(set(names)) < len(names)
