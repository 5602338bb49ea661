"""`tfdist check`: whether the processes of a job, started as the training will be, could train together."""

from __future__ import annotations
