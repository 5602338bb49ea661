"""Starts that wait until a process has its imports behind it from which they are quicker."""

from __future__ import annotations

import pytest

from tests.launcher.policy.simulation import FOREVER, TICK, Life, SimulatedProcess
from tfdist.launcher.warm.zygote import WarmStarts


@pytest.mark.parametrize(("worth", "waited"), [(0.0, 1.0), (0.5, 1.0), (3.0, 3.0)])
def test_a_restart_waits_for_imports_under_way(
    simulate, monkeypatch: pytest.MonkeyPatch, worth: float, waited: float
) -> None:
    def program(process: SimulatedProcess) -> Life:
        process.writer.begin()
        process.writer.resumed(process.restart)
        yield 0.0 if process.restart else 1.0 if process.index else FOREVER
        return 0 if process.restart else -9

    monkeypatch.setattr(WarmStarts, "worth_waiting", lambda starts: worth)
    run = simulate(program)
    assert run.of_kind("restart")[0]["delay"] == 1.0
    assert run.of_kind("start")[1]["time"] == 1.0 + 2 * TICK + waited


@pytest.mark.parametrize("worth", [0.0, 3.0])
def test_a_replacement_waits_for_imports_under_way(simulate, monkeypatch: pytest.MonkeyPatch, worth: float) -> None:
    starts = []

    def program(process: SimulatedProcess) -> Life:
        if process.job == "chief":
            return (yield from process.train(40))
        if process.name == "worker 1":
            starts.append(process.world.clock.seconds)
            if not process.replacement:
                yield 1.0
                return -9
        return (yield from process.serve())

    monkeypatch.setattr(WarmStarts, "worth_waiting", lambda starts: worth)
    assert simulate(program, "--ps", "1").code == 0
    assert starts == [0.0, 1.0 + max(worth, TICK)]
