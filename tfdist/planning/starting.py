"""How a script is started, for a row of a plan. Pure."""

from __future__ import annotations

from tfdist.planning.hardware import Hardware

# Stands for the program until it is known.
PROGRAM = "train.py"
IN_ONE_PROCESS = f"python {PROGRAM}"


def start_of(hardware: Hardware, devices: int, how: str = "", by_mpi: bool = False) -> str:
    """The command; on several hosts that of Slurm or MPI, beside which there are others.

    Args:
        hardware: what it runs on.
        devices: how many it uses, each in a process of its own.
        how: options that say so; empty: as many workers.
        by_mpi: whether it can be started by MPI, but not by `tfdist submit`.

    Example:
        >>> from tfdist.planning.presets import PRESETS
        >>> start_of(PRESETS["v100-nvlink"], 8), start_of(PRESETS["v100-nvlink"], 16)
        ('tfdist run -n 8 train.py', 'tfdist submit --backend slurm -n 16 train.py')
    """
    how = how or f"-n {devices}"
    if devices <= hardware.per_host:
        return f"tfdist run {how} {PROGRAM}"
    return f"mpirun -n {devices} python {PROGRAM}" if by_mpi else f"tfdist submit --backend slurm {how} {PROGRAM}"


def gpus(hardware: Hardware, devices: int) -> dict[str, list[str]]:
    """The argument that names so many GPUs of this process; empty where it would take just these anyway.

    Example:
        >>> from tfdist.planning.presets import PRESETS
        >>> gpus(PRESETS["v100-nvlink"], 2), gpus(PRESETS["v100-nvlink"], 8)
        ({'devices': ['GPU:0', 'GPU:1']}, {})
    """
    if hardware.kind != "GPU" or devices >= hardware.per_host:
        return {}
    return {"devices": [f"GPU:{number}" for number in range(devices)]}
