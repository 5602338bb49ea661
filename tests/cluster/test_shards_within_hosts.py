"""`FullyShardedStrategy(shard_within="host")` on four processes of two hosts, which are made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.cluster.test_fully_sharded import fit_with_backup, of_many_blocks, some_rows
from tfdist.testing import run_local

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(420)]

WIDTH = 90  # some sums are small, and others are not; 90 * 90 numbers split evenly, and 90 do not


def strategy_on(hosts: str, **arguments: Any) -> Any:
    """A strategy of processes on hosts of these names, by rank."""
    import tfdist
    from tfdist.runtime import exchange

    host = hosts[tfdist.discover().task_index]
    with mock.patch.object(exchange, "_machine", lambda: host):
        return tfdist.FullyShardedStrategy(start_timeout=60, peer_timeout=300, **arguments)


def of_some_blocks() -> Any:
    return of_many_blocks(WIDTH, clip=0.05)


def compared_with_one_process(hosts: str, mistake: str) -> float:
    """Runs on every process; the mistakes: a host's sums are its own; a norm counts each part on every host."""
    import keras
    import numpy as np

    import tfdist
    from tfdist.runtime.exchange import Exchange

    def of_host_only(self: Exchange, tables: Any, narrow: Any = None, purpose: Any = None, **_: Any) -> list:
        sums = [one.sum(0) for one in self.all_gather(tables, purpose, within_host=True)]
        return [np.split(one, 2)[strategy.first_part] for one in sums]

    keras.config.set_floatx("float64")
    strategy = strategy_on(hosts, shard_within="host")
    assert (strategy.num_replicas_in_sync, strategy.number_of_parts) == (4, 2)
    if mistake == "sums":
        mock.patch.object(Exchange, "reduce_scatter", of_host_only).start()
    if mistake == "norms":
        strategy.is_first_copy = True
    gaps = tfdist.testing.assert_transparent(strategy, of_some_blocks, some_rows(), batch_size=16, tolerance=1e-12)
    assert len(gaps) > 20
    return max(gaps.values())


@pytest.mark.nightly
def test_equals_one_process() -> None:
    assert max(run_local(compared_with_one_process, workers=4, timeout=300, args=("abab", ""))) < 1e-12


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mistake", "said"), [("sums", "differ|other weights"), ("norms", "with 4 replicas does not equal one process")]
)
def test_mistakes_are_seen(mistake: str, said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        run_local(compared_with_one_process, workers=4, timeout=300, args=("aabb", mistake))


def counted() -> dict[str, Any]:
    """Bytes that this process sends to other hosts, for each byte of weights. Runs on every process."""
    import numpy as np

    from tfdist.runtime.exchange import Link

    found: dict[str, Any] = {}
    sent: list[int] = []
    move = Link.move

    def counting(self: Link, sends: bool, data: memoryview) -> int:
        count = move(self, sends, data)
        if sends and self in between:
            sent.append(count)
        return count

    halved = {"shard_within": "host", "compression": "bf16"}
    for name, arguments in [("host", {"shard_within": "host"}), ("halved", halved), ("all", {})]:
        strategy = strategy_on("aabb", **arguments)
        with strategy.scope():
            model = of_some_blocks()
        model.fit(*some_rows(), batch_size=15, verbose=0)
        exchange = strategy.extended._cross_device_ops._exchange
        between = [*exchange._root, *exchange._heads, *exchange._neighbours]
        with mock.patch.object(Link, "move", counting):
            model.fit(*some_rows(), batch_size=15, verbose=0)
            size = 4 * model.count_params()
            found[name] = sum(sent) / (3 * size)
            sent.clear()
            weights = model.get_weights()
            found[f"{name}, read"] = sum(sent)
            sent.clear()
        kept = [v.value._values[0].shape.num_elements() for v in model.trainable_variables]
        found[f"{name}, kept"] = sum(kept) / sum(np.size(weight) for weight in weights)
        found[f"{name}, weights"] = weights
    return found


@pytest.mark.nightly
def test_what_goes_between_hosts_and_what_is_kept() -> None:
    """The sums of gradients, once each way, as in plain data parallelism; no weights. All hosts have the same bits."""
    import numpy as np

    processes = run_local(counted, workers=4, timeout=300)
    for found in processes:
        print({name: value for name, value in found.items() if "weights" not in name})
        assert found["host, read"] == 0
        assert 0.48 < found["host, kept"] < 0.56
        assert 0.24 < found["all, kept"] < 0.3
        for one, other in zip(found["host, weights"], processes[0]["host, weights"], strict=True):
            np.testing.assert_array_equal(one, other)
    for head, other in (processes[:2], processes[2:]):
        assert other["host"] == other["all"] == 0
        assert 1 <= head["host"] < 1.25
        assert head["halved"] < 0.7 * head["host"]
        assert 1.3 < head["all"] < 1.8


def trained_on(folder: str, epochs: int, hosts: str) -> dict[str, Any]:
    """Runs on every process."""
    within = "host" if hosts == "abab" else None
    return fit_with_backup(lambda: strategy_on(hosts, shard_within=within), folder, epochs, of_some_blocks)


@pytest.mark.nightly
def test_a_backup_has_each_part_once_and_goes_on_anywhere(tmp_path: Path) -> None:
    import keras
    import numpy as np

    (alone,) = run_local(trained_on, workers=1, timeout=200, args=(f"{tmp_path}/alone", 6, "a"))
    before: list[Any] = []
    for epochs, hosts in [(2, "abab"), (4, "abab"), (6, "aa")]:
        found = run_local(trained_on, workers=len(hosts), timeout=300, args=(str(tmp_path), epochs, hosts))
        for one in found:
            assert one["first epoch"] == epochs - 2
            for name, expected in (("begin", before or found[0]["begin"]), ("end", found[0]["end"])):
                for value, other in zip(one[name], expected, strict=True):
                    np.testing.assert_array_equal(value, other)
        before = found[0]["end"]
        # The second process of the first host has rank 2.
        writers = {name.split(".")[0] for name in found[0]["files"] if name.endswith(".index")}
        assert writers == ({"state", "rank-2"} if hosts == "abab" else {"state", "rank-1"})
    for value, other in zip(before, alone["end"], strict=True):
        np.testing.assert_allclose(value, other, atol=1e-12)
    keras.config.set_floatx("float64")
    try:
        back = keras.models.load_model(tmp_path / "model.keras")
    finally:
        keras.config.set_floatx("float32")
    for value, other in zip(back.variables, before, strict=False):
        np.testing.assert_array_equal(value, other)


def refused(hosts: str, transport: str) -> str:
    """Runs on every process."""
    from tfdist.runtime.job import joined

    with pytest.raises(ValueError) as caught:
        strategy_on(hosts, shard_within="host", transport=transport)
    joined().peers.acknowledge("refused", "end together: who is gone is another error")
    return str(caught.value)


@pytest.mark.parametrize(
    ("hosts", "transport", "said"),
    [
        ("aab", "direct", "shard_within='host' on hosts with 2, 1 processes that share memory. Expected: equally many"),
        pytest.param(
            "ab",
            "auto",
            "with one, each would keep all weights, as under MultiWorkerMirroredStrategy",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "aa",
            "tensorflow",
            "shard_within='host' with TensorFlow's collectives, or with several devices in a process",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_where_parts_cannot_be_shared(hosts: str, transport: str, said: str) -> None:
    for text in run_local(refused, workers=len(hosts), timeout=100, args=(hosts, transport)):
        assert said in text
