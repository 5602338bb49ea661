"""What a plan predicts and recommends, for models and hardware whose numbers are known."""

from __future__ import annotations

import dataclasses

import click
import pytest

from tfdist.memory.budget import BlockCost
from tfdist.planning import calibration
from tfdist.planning.command import numbers
from tfdist.planning.hardware import Device, Hardware, Link, all_reduce_seconds, ring_bytes
from tfdist.planning.plan import plan_for, recommend, too_large
from tfdist.planning.prediction import Prediction, cut, pipeline
from tfdist.planning.profile import LayerProfile, ModelProfile, Sample, StepCost

GB = 10**9
# A step on it takes as many seconds as its teraflops.
CARD = Device(flops=1e12, bandwidth=1e15, operation=0.0, memory=16 * GB)
FAST, SLOW = Link(0.0, 1e15), Link(0.0, 1e8)


def hardware(**changes: object) -> Hardware:
    """Hosts of 4 cards that are connected by links without latency."""
    fields = {"name": "cards", "kind": "GPU", "devices": {1: CARD}, "per_host": 4, "inside": FAST, "between": FAST}
    return Hardware(**{**fields, "step": 0.0, "cluster_step": 0.0, **changes})


def profile(
    rows: int = 64,
    flops: float = 6.4e12,
    weights: float = 1e6,
    slots: float = 0.0,
    activations: float = 1e6,
    layers: int = 8,
    arrives: float = 0.0,
    blocks: int = 4,
) -> ModelProfile:
    """A model whose layers are all the same; everything is in proportion to the rows."""

    def sample(share: float) -> Sample:
        kept = share * activations / blocks
        of_blocks = [BlockCost(str(i), kept, kept / 10, share * flops / 3 / blocks) for i in range(blocks)]
        cost = StepCost(share * flops, 0.0, 0.0)
        return Sample(round(share * rows), cost, StepCost(0.0, 0.0, 0.0), 0.0, share * activations, of_blocks)

    each = LayerProfile(
        "layer",
        flops / 3 / rows / max(layers, 1),
        weights / max(layers, 1),
        activations / rows / max(layers, 1),
        arrives,
    )
    samples, gathered = (sample(0.25), sample(1.0)), [weights / blocks] * blocks
    return ModelProfile("model", rows, weights, weights, slots, samples, [each] * layers, 0, gathered)


def row(name: str, **fields: object) -> Prediction:
    values = {"strategy": "", "options": {}, "start": "", "devices": 1, "seconds": 1.0, "compute": 1.0}
    return Prediction(name, **{**values, "communication": 0.0, "memory": 1.0, "available": 2.0, **fields})


def candidates(model: ModelProfile, where: Hardware, devices: list[int]) -> list[Prediction]:
    return list(plan_for(model, where, devices).rows)


class TestArithmetic:
    @pytest.mark.parametrize("devices", [2, 3, 8])
    def test_bytes_of_a_ring(self, devices):
        # Each device sends N - 1 parts of size / N twice.
        assert ring_bytes(1000, devices) == pytest.approx(2 * (devices - 1) * 1000 / devices)
        link = Link(latency=0.25, bandwidth=100.0)
        assert all_reduce_seconds(1000, devices, link) == pytest.approx(
            2 * (devices - 1) * (0.25 + 1000 / devices / 100)
        )

    @pytest.mark.parametrize("name", ["gpipe", "1f1b"])
    @pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (2, 8), (4, 4), (4, 32), (8, 8)])
    def test_the_bubble_of_gpipe(self, name, stages, microbatches):
        found = pipeline(profile(rows=64, flops=6.4e12), hardware(per_host=8), stages, microbatches, name)
        assert found.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))
        assert found.seconds == pytest.approx(6.4 * (microbatches + stages - 1) / (microbatches * stages))

    def test_recomputation_in_a_pipeline(self):
        plain = pipeline(profile(), hardware(), 2, 8, "gpipe")
        again = pipeline(profile(), hardware(), 2, 8, "gpipe", recompute=True)
        # Three products instead of two in each backward pass.
        assert again.seconds == pytest.approx(plain.seconds * 4 / 3)

    def test_what_stages_send(self):
        found = pipeline(profile(rows=64, arrives=1000.0), hardware(inside=Link(1.0, 1e12)), 2, 4, "gpipe")
        # The first stage sends what it computes, the second one as many gradients.
        assert found.sent == 64 * 1000
        # Those between two others send both.
        assert pipeline(profile(rows=64, arrives=1000.0), hardware(), 4, 4, "gpipe").sent == 2 * 64 * 1000
        # Of four pieces in turns, each device sends two ways at one border, and one way at another.
        assert pipeline(profile(rows=64, arrives=1000.0), hardware(), 2, 4, "interleaved").sent == 3 * 64 * 1000
        # F0 - 1 s - F0 ... B3 - 1 s - B3: both ways once, for the first and the last micro-batch.
        without = pipeline(profile(rows=64, arrives=1000.0), hardware(), 2, 4, "gpipe")
        assert found.seconds == pytest.approx(without.seconds + 2.0)

    def test_processes_on_cores_carry_their_messages_themselves(self):
        link = Link(0.0, 1000.0)
        cores = hardware(kind="CPU", devices={1: CARD, 2: CARD}, inside=link)
        found = pipeline(profile(rows=64, arrives=1.0), cores, 2, 4, "gpipe")
        # 16 bytes for each of four micro-batches, forward and back: 5 steps one after the other each way.
        assert found.seconds == pytest.approx(6.4 * 5 / 8 + 2 * 5 * 0.016)

    def test_memory_of_stages(self):
        each = profile(weights=8e6, slots=16e6, activations=64e6)
        found = pipeline(each, hardware(), 4, 8, "gpipe")
        # A quarter of weights, gradients and slots; all of the stage's activations are in flight at once.
        assert found.memory == pytest.approx((8e6 + 16e6 + 8e6) / 4 + 1.1 * 64e6 / 4)
        ordered = pipeline(each, hardware(), 4, 8, "1f1b")
        # The first stage has four of the eight micro-batches in flight.
        assert ordered.memory == pytest.approx((8e6 + 16e6 + 8e6) / 4 + 1.1 * 64e6 / 4 / 2)

    def test_replicas(self):
        one, *_ = candidates(profile(), hardware(), [1])
        assert (one.seconds, one.sent, one.memory) == (pytest.approx(6.4), 0.0, pytest.approx(1e6 + 1.1e6))
        link = Link(0.001, 1e9)
        rows = {found.name: found for found in candidates(profile(weights=4e6), hardware(inside=link), [4])}
        mirrored = rows["Mirrored"]
        assert mirrored.sent == pytest.approx(6e6)
        assert mirrored.seconds == pytest.approx(6.4 / 4 + 6 * 0.001 + 6e6 / 1e9)
        # Weights, gradients packed, and a quarter of the activations.
        assert mirrored.memory == pytest.approx(4e6 + 4e6 + 1.1e6 / 4)
        assert rows["Mirrored, recompute"].seconds == pytest.approx(mirrored.seconds + 6.4 / 4 / 3)

    def test_shards_of_slots(self):
        rows = {found.name: found for found in candidates(profile(slots=8e6), hardware(), [4])}
        assert rows["MultiWorker"].memory - rows["MultiWorker, ZeRO-1"].memory == pytest.approx(6e6)
        assert rows["MultiWorker, ZeRO-1"].sent == rows["MultiWorker"].sent

    def test_parts_of_weights(self):
        link = Link(0.001, 1e9)
        model = profile(weights=8e6, slots=16e6, activations=64e6)
        cores = hardware(kind="CPU", devices={1: CARD, 4: CARD}, inside=link)
        rows = {found.name: found for found in candidates(model, cores, [4])}
        # Four blocks of 2 MB. One unit, a gather or a reduction, is half of what gradients send under MultiWorker.
        sharded, kept, plain = rows["FullySharded"], rows["FullySharded, kept"], rows["MultiWorker"]
        assert kept.sent == plain.sent == pytest.approx(2 * 3 / 4 * 8e6)
        assert sharded.sent == pytest.approx((3 - 1 / 4) / 2 * plain.sent)
        # NCCL reduces whole gradients.
        (cards,) = [row for row in candidates(model, hardware(), [4]) if row.name == "FullySharded"]
        assert cards.sent == pytest.approx((4 - 1 / 4) / 2 * plain.sent)
        # Each block sends 3 messages to be gathered, and 3 to be reduced.
        assert kept.communication == pytest.approx(4 * 2 * 3 * 0.001 + kept.sent / 1e9)
        assert sharded.communication == pytest.approx((4 * 3 - 1) * 3 * 0.001 + sharded.sent / 1e9)
        assert sharded.resident == kept.resident == pytest.approx((8e6 + 16e6) / 4)
        assert (sharded.gathered, kept.gathered) == (4 * 2e6, 8e6 + 2 * 2e6)
        # A quarter of the activations, which are more than a quarter of the gradients and one block's activations.
        assert sharded.memory == pytest.approx(6e6 + 8e6 + 1.1 * 64e6 / 4)
        assert rows["FullySharded, recompute"].memory == pytest.approx(6e6 + 8e6 + 1.1 * (8e6 / 4 + 64e6 / 4 / 4))
        assert rows["FullySharded, recompute"].code == "tfdist.FullyShardedStrategy(memory='recompute')"

    def test_parts_of_weights_within_hosts(self):
        model = profile(weights=8e6, slots=16e6, activations=64e6)
        cores = {"kind": "CPU", "devices": {1: CARD, 2: CARD}, "per_host": 2, "inside": Link(0.001, 1e9)}
        where = hardware(**cores, between=Link(0.01, 1e8))
        rows = {found.name: found for found in candidates(model, where, [4])}
        found = rows["FullySharded, within hosts"]
        assert found.code == "tfdist.FullyShardedStrategy(shard_within='host')"
        # As on one host of two; then two hosts sum all gradients, of which each device sends a half.
        (alone,) = [row for row in candidates(model, where, [2]) if row.name == "FullySharded"]
        assert found.resident == alone.resident == pytest.approx((8e6 + 16e6) / 2)
        assert found.sent == pytest.approx(alone.sent + 8e6 / 2)
        assert found.communication == pytest.approx(alone.communication + 4 * 2 * 0.01 + 8e6 / 1e8)
        assert found.communication < rows["FullySharded"].communication
        for other, devices in ((where, 3), (where, 2), (hardware(**{**cores, "per_host": 1}), 4), (hardware(), 8)):
            assert "FullySharded, within hosts" not in {row.name for row in candidates(model, other, [devices])}

    def test_replicas_of_several_hosts_share_the_network(self):
        network = Link(0.0, 1e6)
        rows = {found.name: found for found in candidates(profile(), hardware(between=network), [8])}
        assert "Mirrored" not in rows
        assert rows["MultiWorker"].communication == pytest.approx(2 * 7 / 8)

    def test_a_step_between_two_sizes(self):
        few, many = profile().samples
        assert profile().at(16) == few
        assert profile().at(64) == many
        assert profile().at(40).compute.flops == pytest.approx(4e12)
        # A part that does not depend on the rows stays.
        fixed = few._replace(peak=5e5)
        assert dataclasses.replace(profile(), samples=(fixed, many)).at(0).peak == pytest.approx(1e6 / 3)

    def test_cores_are_shared(self):
        cores = Device(flops=1e11, bandwidth=1e10, operation=1e-6, memory=8 * GB)
        both = hardware(kind="CPU", devices={1: cores, 4: Device(2e10, 2e9, 1e-6, 2 * GB)}, per_host=8)
        assert both.device(1) == cores
        assert both.device(2) == Device(flops=5e10, bandwidth=5e9, operation=1e-6, memory=4 * GB)
        assert both.device(8) == Device(flops=1e10, bandwidth=1e9, operation=1e-6, memory=GB)
        assert hardware().device(4) == CARD

    def test_models_that_cannot_be_cut(self):
        assert cut([], 2) is None
        layers = [LayerProfile(str(i), 1.0, 1.0, 1.0, 1.0, cuttable=i != 2) for i in range(4)]
        assert [len(piece) for piece in cut(layers, 2)] in ([1, 3], [3, 1])
        assert not any(found.bubble is not None for found in candidates(profile(layers=0), hardware(), [2]))


class TestRecommendation:
    @pytest.mark.parametrize(
        ("model", "where", "devices", "expected"),
        [
            # Much to compute, on one host and on several.
            (profile(), hardware(), 4, "Mirrored"),
            (profile(), hardware(), 8, "MultiWorker"),
            # A small model behind a slow link.
            (profile(flops=6.4e9, weights=4e6, layers=0), hardware(inside=SLOW), 4, "one device"),
            # 4 GB of gradients a step, but 6 kB between stages.
            (profile(weights=4 * GB, arrives=100.0), hardware(inside=Link(0.0, 1e9)), 4, "Pipeline"),
            # What does not fit: weights, activations, slots (16 GB, beside weights and packed gradients of 2 GB each).
            (profile(weights=12 * GB, slots=24 * GB), hardware(), 4, "Pipeline"),
            (profile(activations=40 * GB, blocks=16, layers=0), hardware(), 1, "one device, recompute"),
            (profile(weights=2 * GB, slots=16 * GB, layers=0), hardware(), 4, "MultiWorker, ZeRO-1"),
            # Weights and gradients as well, and no graph that could be cut: a quarter of 48 GB, and four blocks.
            (profile(weights=12 * GB, slots=24 * GB, layers=0, blocks=24), hardware(), 4, "FullySharded"),
        ],
    )
    def test_what_is_recommended(self, model, where, devices, expected):
        best = plan_for(model, where, [devices]).best
        assert (best.name if expected != "Pipeline" else best.name.split()[0]) == expected
        assert best.memory <= best.available

    def test_nothing_fits(self):
        found = plan_for(profile(weights=400 * GB, layers=0), hardware(), [2])
        assert found.best is None
        assert found.reason == too_large(found.rows)
        assert found.reason.startswith("Nothing fits. The least is one device")
        assert "of 16 GB on a device): take a smaller batch" in found.reason

    def test_what_is_as_fast_with_one_device(self):
        rows = [row("one device", seconds=1.19), row("two", devices=2, strategy="MirroredStrategy")]
        assert recommend(rows).name == "one device"
        assert recommend([dataclasses.replace(rows[0], seconds=1.21), rows[1]]).name == "two"


class TestPlan:
    def test_the_table(self):
        text = str(plan_for(profile(), hardware(), [2]))
        assert text.startswith("A step of 'model' on 64 rows, predicted for cards\n")
        (line,) = [line for line in text.splitlines() if line.startswith(" * ")]
        assert line.split() == ["*", "Mirrored", "2", "3200", "3200", "1e-06", "1", "0.00", "2.00"]

    def test_memory_modes_are_shown_where_they_are_needed(self):
        made = plan_for(profile(), hardware(), [2, 4])
        assert "recompute" in {found.mode for found in made.rows} and "recompute" not in str(made)
        assert "one device, recompute" in str(plan_for(profile(activations=100 * GB), hardware(), [2, 4]))

    def test_the_program_in_commands(self):
        made = plan_for(profile(), hardware(), [8], "src/fit.py --epochs 3")
        assert {found.start for found in made.rows} == {
            "python src/fit.py --epochs 3",
            "tfdist submit --scheduler slurm -n 8 --gpus-per-worker 1 src/fit.py --epochs 3",
        }
        submitted = "tfdist submit --scheduler slurm -n 8 --gpus-per-worker 1 src/fit.py --epochs 3"
        assert f"started by `{submitted}`" in made.reason

    def test_some_of_the_gpus_of_a_host(self):
        rows = {found.name: found for found in plan_for(profile(), hardware(), [2]).rows}
        assert rows["one device, recompute"].code == "tfdist.MirroredStrategy(devices=['GPU:0'], memory='recompute')"
        assert rows["Mirrored"].code == "tfdist.MirroredStrategy(devices=['GPU:0', 'GPU:1'])"
        assert rows["Pipeline gpipe, M=16"].options["devices"] == ["GPU:0", "GPU:1"]
        every = {found.name: found for found in plan_for(profile(), hardware(), [4]).rows}
        assert every["Mirrored"].code == "tfdist.MirroredStrategy()"

    def test_some_of_the_gpus_of_this_machine(self, monkeypatch, tmp_path):
        fields = (*dataclasses.fields(Device), *dataclasses.fields(Link))
        measured = {**{field.name: 1e9 for field in fields}, "link": 1e9, "step": 0.0}
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(calibration, "count_gpus", lambda: 8)
        monkeypatch.setattr(calibration, "_slowest", lambda cores, processes: measured)
        for _ in ("measured", "kept"):
            rows = {row.name: row for row in plan_for(profile(), calibration.this_machine(2), [2]).rows}
            assert rows["Mirrored"].code == "tfdist.MirroredStrategy(devices=['GPU:0', 'GPU:1'])"
            assert rows["MultiWorker"].start == "tfdist run -n 2 --gpus-per-worker 1 train.py"

    def test_the_numbers_that_a_user_types(self):
        for text in ("0", "4..2", "a", "2,", "-1"):
            with pytest.raises(click.ClickException, match="expected a number, or several"):
                numbers(text)


class TestHardware:
    def test_to_a_file_and_back(self):
        for each in (hardware(), hardware(kind="CPU", between=SLOW)):
            assert Hardware.from_json(each.to_json()) == each

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"devices": {"1": {}}}'])
    def test_what_is_no_description(self, text):
        with pytest.raises(ValueError, match="Received: a description of hardware that cannot be read"):
            Hardware.from_json(text)

    def test_what_there_cannot_be(self):
        for changes in ({"kind": "TPU"}, {"devices": {2: CARD}}, {"per_host": 0}):
            with pytest.raises(ValueError, match="Received: "):
                hardware(**changes)
