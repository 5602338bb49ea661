"""What a plan predicts and recommends, for models and hardware whose numbers are known."""

from __future__ import annotations

import dataclasses
import re

import pytest

from tfdist.memory.estimation.block_options import BlockCost
from tfdist.planning.command import PlanningError, numbers
from tfdist.planning.hardware import Device, Hardware, Link, all_reduce_seconds, ring_bytes
from tfdist.planning.pipelines import cut, pipeline
from tfdist.planning.plan import candidates, plan_for, points, recommend, scaling
from tfdist.planning.prediction import Prediction
from tfdist.planning.profile import LayerProfile, ModelProfile, Sample, StepCost

GB = 10**9
# A step on it takes as many seconds as its teraflops.
CARD = Device(flops=1e12, bandwidth=1e15, operation=0.0, memory=16 * GB, host_link=1e10)
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
    return ModelProfile("model", rows, weights, weights, slots, (sample(0.25), sample(1.0)), [each] * layers)


def row(name: str, **fields: object) -> Prediction:
    values = {"strategy": "", "options": {}, "start": "", "devices": 1, "seconds": 1.0, "compute": 1.0}
    return Prediction(name, **{**values, "communication": 0.0, "memory": 1.0, "available": 2.0, **fields})


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
        one = dataclasses.replace(CARD, host_link=0.0)
        cores = hardware(kind="CPU", devices={1: one, 2: one}, inside=link)
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

    def test_what_others_send(self):
        rows = {found.family: found for found in candidates(profile(weights=4e6), hardware(), [4])}
        assert (rows["ParameterServer"].sent, rows["HostOffload"].sent) == (4e6, 4e6)

    def test_shards_of_slots(self):
        rows = {found.name: found for found in candidates(profile(slots=8e6), hardware(), [4])}
        assert rows["MultiWorker"].memory - rows["MultiWorker, ZeRO-1"].memory == pytest.approx(6e6)
        assert rows["MultiWorker, ZeRO-1"].sent == 2 * rows["MultiWorker"].sent

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
        fixed = dataclasses.replace(few, peak=5e5)
        assert dataclasses.replace(profile(), samples=(fixed, many)).at(0).peak == pytest.approx(1e6 / 3)

    def test_cores_are_shared(self):
        cores = Device(flops=1e11, bandwidth=1e10, operation=1e-6, memory=8 * GB)
        both = hardware(kind="CPU", devices={1: cores, 4: cores.scaled(0.2)}, per_host=8)
        assert both.device(1) == cores
        assert both.device(2) == cores.scaled(0.5)
        assert both.device(8) == cores.scaled(0.2).scaled(0.5)
        assert hardware().device(4) == CARD

    def test_nothing_is_gained_by_having_the_host_update(self):
        update = StepCost(0.0, 1e9, 0.0)
        each = profile()
        samples = [dataclasses.replace(sample, update=update) for sample in each.samples]
        one, *others = candidates(dataclasses.replace(each, samples=tuple(samples)), hardware(), [1])
        (offload,) = [found for found in others if found.family == "HostOffload"]
        # Everything once more forward, and a gigabyte at ten a second.
        assert offload.seconds == pytest.approx(6.4 * 4 / 3 + 0.1)
        assert one.seconds == pytest.approx(6.4, abs=1e-3)

    def test_models_that_cannot_be_cut(self):
        assert cut([], 2) is None
        layers = [LayerProfile(str(i), 1.0, 1.0, 1.0, 1.0, cuttable=i != 2) for i in range(4)]
        assert [len(piece) for piece in cut(layers, 2)] in ([1, 3], [3, 1])
        assert not any(found.bubble is not None for found in candidates(profile(layers=0), hardware(), [2]))


def best(model: ModelProfile, where: Hardware, devices: int) -> str | None:
    found = recommend(candidates(model, where, [devices])).best
    return found.name if found else None


class TestRecommendation:
    def test_much_to_compute_on_one_host(self):
        assert best(profile(), hardware(), 4) == "Mirrored"

    def test_on_several_hosts(self):
        assert best(profile(), hardware(), 8) == "MultiWorker"

    def test_a_small_model_behind_a_slow_link(self):
        small = profile(flops=6.4e9, weights=4e6, layers=0)
        found = recommend(candidates(small, hardware(inside=SLOW), [4]))
        assert found.best.name == "one device"
        assert (
            "More devices do not pay: Mirrored on 4 would take 61.6 ms: 97 % of that would be waiting" in found.reason
        )

    def test_weights_that_are_slow_to_send(self):
        # 4 GB of gradients a step, but 6 kB between stages.
        heavy = profile(weights=4 * GB, arrives=100.0)
        assert best(heavy, hardware(inside=Link(0.0, 1e9)), 4).startswith("Pipeline")

    def test_weights_that_do_not_fit(self):
        assert best(profile(weights=12 * GB, slots=24 * GB), hardware(), 4).startswith("Pipeline")

    def test_activations_that_do_not_fit(self):
        found = recommend(candidates(profile(activations=40 * GB, blocks=16, layers=0), hardware(), [1]))
        assert found.best.name in ("one device, recompute", "one device, recompute+swap", "one device, swap")
        assert found.best.memory < 16 * GB < 40 * GB
        assert "One device would need 44 GB." in found.reason

    def test_slots_that_do_not_fit(self):
        # 2 GB of weights, as much of packed gradients, and 16 GB of slots.
        assert best(profile(weights=2 * GB, slots=16 * GB, layers=0), hardware(), 4) == "MultiWorker, ZeRO-1"

    def test_weights_that_only_the_host_can_hold(self):
        assert best(profile(weights=40 * GB, layers=100), hardware(), 1) == "HostOffload"

    def test_nothing_fits(self):
        found = recommend(candidates(profile(weights=400 * GB, layers=0), hardware(), [2]))
        assert found.best is None
        assert found.reason.startswith("Nothing fits. one device")
        assert "GB of 16 GB on a device. Take a smaller batch" in found.reason

    def test_horovod_where_it_was_measured_to_be_faster(self):
        cores = Device(flops=1e12, bandwidth=1e15, operation=0.0, memory=16 * GB)
        both = hardware(kind="CPU", devices={1: cores.scaled(0.7), 4: cores}, inside=SLOW, horovod=FAST)
        assert best(profile(weights=1e8, layers=0), both, 4) == "Horovod"
        assert not any("recompute+swap" in found.name for found in candidates(profile(), both, [4]))

    def test_processes_that_are_slower_than_one_alone(self):
        one, several = row("one device"), row("Pipeline", devices=2, strategy="PipelineStrategy", seconds=3.0)
        found = recommend([several], one, how_to_start=False)
        assert found.reason == (
            "Take Pipeline: tfdist.PipelineStrategy(): 3e+03 ms a step, 1e-09 of 2e-09 GB on a device. One process "
            "alone, with everything that these processes share, would need 1e+03 ms."
        )

    def test_a_coordinator_hands_out_one_step_at_a_time(self):
        rows = candidates(profile(flops=1e6), hardware(step=2e-3), [64])
        (servers,) = [found for found in rows if found.family == "ParameterServer"]
        assert servers.seconds == pytest.approx(2e-3, rel=0.01)

    def test_what_is_as_fast_with_one_device(self):
        rows = [row("one device", seconds=1.19), row("two", devices=2, strategy="MirroredStrategy")]
        assert recommend(rows).best.name == "one device"
        assert recommend([dataclasses.replace(rows[0], seconds=1.21), rows[1]]).best.name == "two"

    def test_no_other_training_than_that_of_one_process(self):
        rows = [row("one device", seconds=4.0), row("ParameterServer", devices=2, is_exact=False)]
        assert recommend(rows).best.name == "one device"

    def test_what_would_be_faster_with_more_memory_is_told(self):
        rows = [row("one device", seconds=4.0), row("Mirrored", devices=2, memory=3e9, available=2e9)]
        assert recommend(rows).reason.endswith("Mirrored would be faster (1e+03 ms), but needs 3 GB.")


class TestPlan:
    def test_the_table(self):
        text = str(plan_for(profile(), hardware(), 2))
        assert text.startswith("A step of 'model' on 64 rows, predicted for cards\n")
        (line,) = [line for line in text.splitlines() if line.startswith(" * ")]
        assert line.split() == ["*", "Mirrored", "2", "3200", "3200", "1e-06", "1", "0.00", "2.00"]

    def test_several_numbers_of_devices_without_what_is_not_needed(self):
        made = plan_for(profile(), hardware(), [2, 4])
        assert {found.mode for found in made.shown} == {"none"}
        assert len(made.shown) < len(made.rows)
        left_out = len(made.rows) - len(made.shown)
        assert f"{left_out} rows with a memory mode are left out: the memory suffices" in str(made)
        crowded = plan_for(profile(activations=100 * GB), hardware(), [2, 4])
        assert "one device, recompute" in [found.name for found in crowded.shown]

    def test_where_more_devices_stop_paying(self):
        slow = hardware(inside=Link(0.0, 4e5), between=Link(0.0, 4e5))
        # 6.4 s, 5.7 s, and more: a quarter of a step is computed, and 2.5 s and more pass for the sums.
        assert plan_for(profile(layers=0), slow, [2, 4, 8]).pays_up_to == 1
        assert "More devices do not make a step 1.5 times as fast" in str(plan_for(profile(layers=0), slow, [2, 4, 8]))
        some = hardware(between=Link(0.0, 4e5))
        assert plan_for(profile(layers=0), some, [2, 4, 8]).pays_up_to == 4
        assert "1.5 times as fast up to 4, and less beyond." in str(plan_for(profile(layers=0), some, [2, 4, 8]))
        assert "1.5 times as fast up to 4, the most that were" in str(plan_for(profile(layers=0), some, [2, 4]))
        assert plan_for(profile(), hardware(), 2).pays_up_to is None

    def test_the_program_in_commands(self):
        made = plan_for(profile(), hardware(), 8, "src/fit.py --epochs 3")
        assert {found.start for found in made.rows} == {
            "python src/fit.py --epochs 3",
            "tfdist submit --scheduler slurm -n 8 src/fit.py --epochs 3",
            "tfdist submit --scheduler slurm -n 8 --ps 2 src/fit.py --epochs 3",
        }
        assert "started by `tfdist submit --scheduler slurm -n 8 src/fit.py --epochs 3`" in made.recommendation.reason

    def test_some_of_the_gpus_of_a_host(self):
        rows = {found.name: found for found in plan_for(profile(), hardware(), 2).rows}
        assert rows["one device, recompute"].code == "tfdist.MirroredStrategy(devices=['GPU:0'], memory='recompute')"
        assert rows["Mirrored"].code == "tfdist.MirroredStrategy(devices=['GPU:0', 'GPU:1'])"
        assert rows["Pipeline gpipe, M=16"].options["devices"] == ["GPU:0", "GPU:1"]
        every = {found.name: found for found in plan_for(profile(), hardware(), 4).rows}
        assert every["Mirrored"].code == "tfdist.MirroredStrategy()"

    @pytest.mark.parametrize("devices", [0, -1, True, 1.5, [2, 0], []])
    def test_numbers_that_make_no_sense(self, devices):
        with pytest.raises(ValueError, match="Expected: whole numbers of at least 1"):
            plan_for(profile(), hardware(), devices)

    def test_the_numbers_that_a_user_types(self):
        assert numbers("8..1024") == [8, 16, 32, 64, 128, 256, 512, 1024]
        for text in ("0", "4..2", "a", "2,", "-1"):
            with pytest.raises(PlanningError, match="expected a number, several"):
                numbers(text)


class TestScaling:
    def test_where_more_devices_stop_paying(self):
        # 0.1 s for all to send, however many there are; a step of 6.4 s.
        model, link = profile(layers=0, weights=5e7), Link(0.0, 1e9)
        counts = [2, 4, 8, 16, 32, 64, 128]
        found = scaling(candidates(model, hardware(inside=link, between=link), counts), counts)
        times = {count: round(best.seconds, 3) for count, best in found.best.items()}
        assert times[2] == 3.25 and times[64] == pytest.approx(0.198, abs=1e-3)
        # From 16 to 32, 0.494 s become 0.297 s: a factor of 1.66; from 32 to 64 0.198 s, which is 1.496.
        assert found.pays_up_to == 32
        drawn = points(found)
        assert [count for count, _ in drawn["Mirrored"]] == [2, 4]
        assert [count for count, _ in drawn["MultiWorker"]] == [8, 16, 32, 64, 128]
        assert dict(drawn["Mirrored"])[2] == pytest.approx(6.4 / 3.25)

    def test_what_does_not_fit_is_left_out(self):
        found = scaling(candidates(profile(weights=400 * GB, layers=0), hardware(), [2, 4]), [2, 4])
        assert found.best == {2: None, 4: None} and points(found) == {} and found.pays_up_to == 1


class TestHardware:
    def test_to_a_file_and_back(self):
        for each in (hardware(), hardware(kind="CPU", horovod=SLOW)):
            assert Hardware.from_json(each.to_json()) == each

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"devices": {"1": {}}}'])
    def test_what_is_no_description(self, text):
        with pytest.raises(ValueError, match="Received: a description of hardware that cannot be read"):
            Hardware.from_json(text)

    def test_what_there_cannot_be(self):
        for changes in ({"kind": "TPU"}, {"devices": {2: CARD}}, {"per_host": 0}, {"inside": Link(0.0, 0.0)}):
            with pytest.raises(ValueError, match="Received: "):
                hardware(**changes)


class TestCompression:
    """Weights of 1 million numbers, 100 MB in all, on two hosts."""

    SHAPES = ((1000, 1000),) * 25

    def said(self, between: Link, **changes: object) -> str:
        card = dataclasses.replace(CARD, bandwidth=1e11)
        each = dataclasses.replace(profile(weights=1e8, flops=1e11), shapes=self.SHAPES)
        return plan_for(each, hardware(devices={1: card}, per_host=1, between=between, **changes), 2).compression

    def test_over_a_slow_link_it_pays(self):
        # A ring of two sends 100 MB in a second; PowerSGD 25 * 4 * 2000 numbers.
        text = self.said(Link(0.0, 1e8))
        assert text.startswith("Compression would pay: with compression=tfdist.compression.PowerSGD(rank=4), ")
        assert "on 2 would send 0.8 MB instead of 100 MB, and take " in text
        seconds = float(text.partition("and take ")[2].partition(" ms")[0]) / 1e3
        # Half of the arithmetic, the factors, twelve passes over 100 MB, four products with thin matrices.
        assert seconds == pytest.approx(0.05 + 0.008 + 0.012 + 8 * 4 * 25e6 / 1e12, rel=0.01)
        assert text.endswith("instead of 1.05e+03 ms. It is another training than that of one process.")

    @pytest.mark.parametrize("link", [Link(0.0, 1e12), Link(1.0, 1e9)])
    def test_over_a_fast_or_a_very_far_one_it_does_not(self, link):
        assert self.said(link).startswith("Compression would not pay: with compression=")

    def test_where_one_device_is_faster_it_does_not(self):
        each = dataclasses.replace(profile(weights=1e8, flops=1e9), shapes=self.SHAPES)
        card = dataclasses.replace(CARD, bandwidth=1e11)
        text = plan_for(each, hardware(devices={1: card}, per_host=1, between=Link(0.0, 1e8)), 2).compression
        assert text.startswith("Compression would not pay: with compression=")
        assert re.search(r"instead of [\d.e+]+ ms\. Without, one device takes [\d.]+ ms\.$", text)

    def test_without_a_network_nothing_is_said(self):
        each = dataclasses.replace(profile(), shapes=self.SHAPES)
        assert plan_for(each, hardware(), 1).compression == ""
        assert plan_for(profile(), hardware(), 2).compression == ""
