"""Mistakes that `tools/mutation_check.py` makes on purpose, each in one place, with the tests that must notice them.

Each is one that reviewers could overlook: the package can still be imported, and nothing raises an error by itself.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One mistake.

    Attributes:
        name: of what is broken.
        effect: what goes wrong then.
        file: relative to the root of the repository.
        old: what is replaced; it is in the file once.
        new: what replaces it.
        tests: node ids of tests that `make test` runs; of each kind one that must fail, the quickest first.
    """

    name: str
    effect: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """The text of the file with the mistake.

        Raises:
            ValueError: if what is to be replaced is not there, or there more than once.
        """
        if (count := text.count(self.old)) != 1:
            raise ValueError(
                f"Received: {self.file}, which has the old text of mutation {self.name!r} {count} times. Expected: "
                "once; bring the record in tools/mutations.py up to date."
            )
        return text.replace(self.old, self.new)


MUTATIONS = (
    Mutation(
        name="weights of rows",
        effect="every replica's gradient counts the same, however few rows it has",
        file="tfdist/steps/keras_step.py",
        old="relative_weight = tf.cast(relative_weight, tf.float32)",
        new="relative_weight = tf.ones_like(relative_weight, tf.float32)",
        tests=(
            "tests/logical/test_features.py::test_equals_one_process[one row in all]",
            "tests/cluster/test_features.py::test_equals_one_process[last batch of one row (81 rows)]",
        ),
    ),
    Mutation(
        name="sum of gradients",
        effect="gradients are averaged once more, after they were weighted",
        file="tfdist/steps/collectives.py",
        old="all_reduce(tf.distribute.ReduceOp.SUM, value)",
        new="all_reduce(tf.distribute.ReduceOp.MEAN, value)",
        tests=(
            "tests/logical/test_features.py::test_equals_one_process[numpy arrays]",
            "tests/cluster/test_features.py::test_equals_one_process[numpy arrays]",
        ),
    ),
    Mutation(
        name="sums in shared memory",
        effect="each process adds up its own numbers only",
        file="tfdist/runtime/direct/exchange.py",
        old="np.add(addends[0][mine], addends[1][mine], out=total[mine])",
        new="np.add(own[mine], own[mine], out=total[mine])",
        tests=(
            "tests/unit/test_direct_exchange.py::test_sums[aa]",
            "tests/cluster/test_direct.py::test_equals_one_process[as it is]",
        ),
    ),
    Mutation(
        name="order of buckets",
        effect="the first bucket waits for the last gradient",
        file="tfdist/steps/gradients.py",
        old="for i in reversed(indices):",
        new="for i in indices:",
        tests=(
            "tests/unit/test_buckets.py::test_buckets_begin_with_the_last",
            "tests/cluster/test_communication.py::test_the_first_bucket_is_sent_before_the_last_gradient_exists",
        ),
    ),
    Mutation(
        name="rests of gradients",
        effect="what PowerSGD leaves out of a step is lost",
        file="tfdist/compression/power_sgd.py",
        old='"rest": matrix - tf.matmul(left, of_matrix, transpose_b=True),',
        new='"rest": tf.zeros_like(matrix),',
        tests=(
            "tests/logical/test_compression.py::test_power_sgd_is_that_of_the_whole_gradient",
            "tests/logical/test_compression.py::test_nothing_is_lost",
        ),
    ),
    Mutation(
        name="velocity of what is sent",
        effect="TopK's momentum goes on pushing elements that were sent",
        file="tfdist/compression/top_k.py",
        old='one["velocity"] = tf.tensor_scatter_nd_update(velocities[i], where, zeros)',
        new='one["velocity"] = velocities[i]',
        tests=("tests/logical/test_compression.py::test_top_k_equals_by_hand",),
    ),
    Mutation(
        name="threshold of the sample",
        effect="TopK leaves out the largest elements that a sample did not have",
        file="tfdist/compression/top_k.py",
        old="candidates = tf.where(values >= enough)[:, 0]",
        new="candidates = tf.where(values <= enough)[:, 0]",
        tests=("tests/logical/test_compression.py::test_the_largest",),
    ),
    Mutation(
        name="rows of other hosts",
        effect="what is gathered between hosts stands at other places",
        file="tfdist/runtime/direct/exchange.py",
        old="rows[order, piece] =",
        new="rows[:, piece] =",
        tests=("tests/unit/test_direct_exchange.py::test_rows",),
    ),
    Mutation(
        name="seeds of replicas",
        effect="Dropout draws the same masks on every process",
        file="tfdist/steps/step_overrides.py",
        old="offset = global_replica() * SEED_STRIDE % 2**32",
        new="offset = local_replica() * SEED_STRIDE % 2**32",
        tests=("tests/cluster/test_randomness.py::TestRandomness::test_dropout_masks_differ_between_replicas",),
    ),
    Mutation(
        name="checksums of backups",
        effect="a backup with an altered byte is taken for a good one",
        file="tfdist/checkpoint/manifest.py",
        old="if found.crc32 != expected.crc32:",
        new="if found.crc32 != found.crc32:",
        tests=(
            "tests/unit/test_manifest.py",
            "tests/fault_tolerance/test_store_damage.py",
        ),
    ),
    Mutation(
        name="limit of restarts",
        effect="a run is restarted once more often than --max-restarts says",
        file="tfdist/launcher/restarts.py",
        old="if self.used >= self.limit:\n            return f",
        new="if self.used > self.limit:\n            return f",
        tests=(
            "tests/unit/test_launch_restarts.py",
            "tests/launcher/policy/test_restarts.py::test_restarts_are_limited",
        ),
    ),
    Mutation(
        name="token check",
        effect="whoever does not know the secret of a job is let in",
        file="tfdist/cluster/connections/handshake.py",
        old='_check(said, _code(secret, "client", challenges, seal))',
        new='_text(said, "proof")',
        tests=("tests/unit/test_connections.py",),
    ),
    Mutation(
        name="order of a schedule",
        effect="1F1B keeps one micro-batch more in memory on each stage",
        file="tfdist/strategies/pipeline/schedule.py",
        old="1, [devices - 1 - device for device in range(devices)])",
        new="1, [devices - device for device in range(devices)])",
        tests=(
            "tests/unit/test_pipeline_schedule.py",
            "tests/logical/test_pipeline_memory.py::test_small_tensors_and_what_is_needed_soon_stay",
        ),
    ),
    Mutation(
        name="deadline of the barrier",
        effect="start_timeout begins anew whenever a task has come",
        file="tfdist/cluster/barrier/chief.py",
        old="if now >= self._deadline:",
        new="if now >= announced + self._timeout:",
        tests=("tests/unit/test_barrier.py",),
    ),
    Mutation(
        name="shards of slots",
        effect="ShardedOptimizer updates a variable with rows of another shard's gradient",
        file="tfdist/optimizers/flat_bucket.py",
        old="skipped = max(shard * self.shard_rows - self.begins[parts[0][0]], 0)",
        new="skipped = 0",
        tests=(
            "tests/logical/test_sharded_optimizer.py::test_buckets",
            "tests/logical/test_sharded_optimizer.py::test_equals_the_optimizer_inside",
        ),
    ),
    Mutation(
        name="position in the data",
        effect="a resumed fit does the last batch before the backup again",
        file="tfdist/checkpoint/position/data.py",
        old='else state["taken"])',
        new='else state["taken"] - 1)',
        tests=("tests/fault_tolerance/test_resume_data.py::test_kill[shuffle]",),
    ),
    Mutation(
        name="identity of a fit",
        effect="with more epochs, the backups of another optimizer are taken for those of this one",
        file="tfdist/checkpoint/fit_identity.py",
        old='return scaled or (more_epochs and f"{_RATE}." in path)',
        new="return scaled or more_epochs",
        tests=("tests/fault_tolerance/test_other_fits.py::test_differences",),
    ),
    Mutation(
        name="weights of micro-batches",
        effect="every micro-batch counts the same, however few rows it has",
        file="tfdist/strategies/pipeline/replicas.py",
        old="return tf.cast(self.size(index) / self.rows, tf.float32)",
        new="return tf.constant(1 / self.count, tf.float32)",
        tests=("tests/logical/test_pipeline_fit.py::test_equals_one_process",),
    ),
    Mutation(
        name="steps of parameter servers",
        effect="an epoch has fewer steps if a worker's part of the data ends within an execution of several",
        file="tfdist/strategies/parameter_server/runner.py",
        old="self._missing += steps - done",
        new="self._missing += 0 if done else steps",
        tests=("tests/parameter_server/test_worker_input.py::test_steps_per_epoch",),
    ),
    Mutation(
        name="copies on the host",
        effect="what waits on the host is sent back as soon as the first gradient is there, and fills the device",
        file="tfdist/memory/offload.py",
        old="gate = keeping.order.fetch_after(keeping.prefetch) if gate is None else gate",
        new="gate = gate or ()",
        tests=("tests/logical/test_memory_report.py::test_what_is_on_the_host",),
    ),
)
