"""The kinds of time that a run consists of, and figures that others have published."""

from __future__ import annotations

from dataclasses import dataclass

TRAINING = "training"
REDONE = "redone"
DATA = "data"
SAVING = "saving"
VALIDATION = "validation"
START = "start"
RESTART = "restart"
STOPPED = "stopped"
OTHER = "other"

# In the order in which they are shown, with what users read.
KINDS = {
    TRAINING: "new training steps",
    DATA: "waiting for data",
    SAVING: "saving (BackupAndRestore)",
    VALIDATION: "validation",
    REDONE: "steps done again",
    RESTART: "restarts, up to the first step",
    START: "start, up to the first step",
    STOPPED: "not running",
    OTHER: "other",
}


@dataclass(frozen=True)
class Published:
    """What somebody has reached, and what they call it.

    Attributes:
        who: the training.
        figure: as it is published.
        definition: of the figure, in the words of the source.
        source: where it is published.
        compares: the kinds of a run that are the same by that definition.
    """

    who: str
    figure: str
    definition: str
    source: str
    compares: tuple[str, ...]


PUBLISHED = (
    Published(
        "Llama 3 405B",
        "> 90 %",
        '"the time spent on useful training over the elapsed time"',
        "arXiv:2407.21783, section 3.3.4",
        (TRAINING, DATA),
    ),
    Published(
        "MegaScale",
        "> 90 %",
        '"the number of iterations multiplied by the iteration training time, divided by the total training time"',
        "arXiv:2402.15627, section 6.3",
        (TRAINING, DATA),
    ),
    Published(
        "Gemini, its largest job",
        "97 %",
        '"the time spent computing useful new steps over the elapsed time of the training job"',
        "arXiv:2312.11805, section 3",
        (TRAINING,),
    ),
)
