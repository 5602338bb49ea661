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
        old="relative_weight = rows * context.num_replicas_in_sync / tf.maximum(global_rows, 1)",
        new="relative_weight = tf.constant(1.0, tf.float64)",
        tests=(
            "tests/logical/test_features.py::test_equals_one_process[batches of 5 and of 3 rows, plain SGD]",
            "tests/cluster/test_features.py::test_equals_one_process[batches of 5 and of 3 rows, plain SGD]",
        ),
    ),
    Mutation(
        name="sum of gradients",
        effect="gradients are averaged once more, after they were weighted",
        file="tfdist/steps/reduce.py",
        old="batch_reduce_to(tf.distribute.ReduceOp.SUM, ",
        new="batch_reduce_to(tf.distribute.ReduceOp.MEAN, ",
        tests=(
            "tests/logical/test_features.py::test_equals_one_process[batches of 5 and of 3 rows, plain SGD]",
            "tests/cluster/test_features.py::test_equals_one_process[batches of 5 and of 3 rows, plain SGD]",
        ),
    ),
    Mutation(
        name="weights of sparse gradients",
        effect="every replica's gradient of an embedding counts the same, however few rows it has",
        file="tfdist/steps/gradients.py",
        old="(rows,) = weighted(weight, [value.values])",
        new="rows = value.values / tf.distribute.get_replica_context().num_replicas_in_sync",
        tests=(
            "tests/logical/test_features.py::test_equals_one_process[Embedding and SGD (sparse gradients), uneven]",
            "tests/cluster/test_features.py::test_equals_one_process[Embedding and SGD (sparse gradients), uneven]",
        ),
    ),
    Mutation(
        name="sum of sparse gradients",
        effect="gradients of embeddings are averaged once more, after they were weighted",
        file="tfdist/steps/reduce.py",
        old="context.all_reduce(tf.distribute.ReduceOp.SUM, value)",
        new="context.all_reduce(tf.distribute.ReduceOp.MEAN, value)",
        tests=(
            "tests/logical/test_features.py::test_equals_one_process[Embedding and SGD (sparse gradients), uneven]",
            "tests/cluster/test_features.py::test_equals_one_process[Embedding and SGD (sparse gradients), uneven]",
        ),
    ),
    Mutation(
        name="weights of shards",
        effect="synchronous parameter servers: every worker's gradient counts the same",
        file="tfdist/strategies/parameter_server/synchronous.py",
        old="return scale_loss(loss * tf.cast(step.weight, loss.dtype))",
        new="return scale_loss(loss / 2)",
        tests=(
            "tests/parameter_server/test_features.py::test_synchronous_training_equals_one_process["
            "batches of 5 and of 3 rows, plain SGD]",
        ),
    ),
    Mutation(
        name="counts that are assigned",
        effect="whole numbers that are assigned to a sum over the replicas are divided, and cut off",
        file="tfdist/strategies/data_parallel/replica_step.py",
        old="            if is_sum and is_whole and not ",
        new="            if False and not ",
        tests=("tests/logical/test_metric_sums.py::test_no_count_is_lost[assigned]",),
    ),
    Mutation(
        name="logs after each batch",
        effect="callbacks get the mean of the devices' results, as if all had equally many rows",
        file="tfdist/strategies/data_parallel/strategy.py",
        old="            if len(values) == 1 or origin is None:",
        new="            if True:",
        tests=("tests/logical/test_metric_sums.py::test_callbacks_see_all_rows_after_each_batch[options0]",),
    ),
    Mutation(
        name="sums in shared memory",
        effect="each process adds up its own numbers only",
        file="tfdist/runtime/exchange.py",
        old="np.add(first, second, out=out)",
        new="np.add(own, own, out=out)",
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
        file="tfdist/runtime/exchange.py",
        old="places = slice(None) if order == sorted(order) else order",
        new="places = slice(None)",
        tests=("tests/unit/test_direct_exchange.py::test_rows",),
    ),
    Mutation(
        name="seeds of replicas",
        effect="Dropout draws the same masks on every process",
        file="tfdist/steps/in_step.py",
        old="return global_replica() + hooks_of",
        new="return tf.distribute.get_replica_context()._replica_id + hooks_of",
        tests=("tests/cluster/test_randomness.py::test_dropout_masks_differ_between_replicas",),
    ),
    Mutation(
        name="checksums of backups",
        effect="a backup with an altered byte is taken for a good one",
        file="tfdist/checkpoint/manifest.py",
        old='if (crc32 := found["crc32"]) != expected["crc32"]:',
        new='if (crc32 := found["crc32"]) != crc32:',
        tests=(
            "tests/unit/test_manifest.py",
            "tests/fault_tolerance/test_store_damage.py",
        ),
    ),
    Mutation(
        name="lock of a folder",
        effect="two trainings write their backups into one folder",
        file="tfdist/checkpoint/lock.py",
        old="fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        new="fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        tests=("tests/fault_tolerance/test_folder_lock.py::test_another_process_holds_it",),
    ),
    Mutation(
        name="types of what is read",
        effect="a manifest, a record of a job or an answer of another process may hold values of any type",
        file="tfdist/json_schema.py",
        old="is_right = type(value) is schema or is_whole",
        new="is_right = True",
        tests=("tests/unit/test_foreign_bytes.py::test_what_fits_and_what_does_not",),
    ),
    Mutation(
        name="steps done again",
        effect="tfdist goodput takes steps that a failure has lost for new ones",
        file="tfdist/jobs/goodput.py",
        old="again = min(known[1], to) - since if fit == known[0] else to - since",
        new="again = 0 if fit == known[0] else to - since",
        tests=("tests/unit/test_goodput.py::test_what_the_time_of_a_run_went_into",),
    ),
    Mutation(
        name="limit of restarts",
        effect="a run is restarted once more often than --max-restarts says",
        file="tfdist/launcher/policy.py",
        old="if self.used >= self.limit and not incident.asked:\n            return f",
        new="if self.used > self.limit and not incident.asked:\n            return f",
        tests=(
            "tests/unit/test_launch_restarts.py",
            "tests/launcher/policy/test_restarts.py::test_restarts_are_limited",
        ),
    ),
    Mutation(
        name="token check",
        effect="whoever does not know the secret of a job is let in",
        file="tfdist/cluster/server.py",
        old='if not guest.is_proof(said, "client", other):',
        new='if "proof" not in said:',
        tests=("tests/unit/test_server.py::test_another_secret_is_refused_and_counted",),
    ),
    Mutation(
        name="order of a schedule",
        effect="1F1B keeps one micro-batch more in memory on each stage",
        file="tfdist/strategies/pipeline/schedule.py",
        old='"1f1b": lambda k, d, v, visits: k - 1 - d,',
        new='"1f1b": lambda k, d, v, visits: k - d,',
        tests=(
            "tests/unit/test_pipeline_schedule.py",
            "tests/logical/test_pipeline_memory.py::test_small_tensors_and_what_is_needed_soon_stay",
        ),
    ),
    Mutation(
        name="deadline of the barrier",
        effect="start_timeout begins anew whenever a task has come",
        file="tfdist/cluster/server.py",
        old="if now >= deadline:",
        new="if now >= (told_at or now) + timeout:",
        tests=("tests/unit/test_server.py::test_who_comes_late_gives_the_others_no_more_time",),
    ),
    Mutation(
        name="messages in between",
        effect="a process in between can alter what processes tell each other",
        file="tfdist/cluster/server.py",
        old="if not hmac.compare_digest(code, self._code(1, line)):",
        new="if len(code) < len(self._code(1, line)):",
        tests=("tests/unit/test_server.py::test_who_sits_in_between_can_alter_nothing",),
    ),
    Mutation(
        name="word of a stranger",
        effect="a process from a host that is not in the cluster ends a job that has no secret",
        file="tfdist/cluster/server.py",
        old="        return place in self._found\n",
        new="        return True\n",
        tests=("tests/unit/test_server.py::test_the_word_of_a_stranger_ends_no_job",),
    ),
    Mutation(
        name="shards of slots",
        effect="ShardedOptimizer updates a variable with rows of another shard's gradient",
        file="tfdist/steps/flat_bucket.py",
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
        file="tfdist/checkpoint/position.py",
        old='else state["taken"])',
        new='else state["taken"] - 1)',
        tests=("tests/fault_tolerance/test_resume_data.py::test_kill[shuffle]",),
    ),
    Mutation(
        name="identity of a fit",
        effect="with more epochs, the backups of another optimizer are taken for those of this one",
        file="tfdist/checkpoint/training_state.py",
        old='(scaled or (more_epochs and f"{_RATE}." in path))',
        new="(scaled or more_epochs)",
        tests=("tests/fault_tolerance/test_other_fits.py::test_differences",),
    ),
    Mutation(
        name="weights of micro-batches",
        effect="every micro-batch counts the same, however few rows it has",
        file="tfdist/strategies/pipeline/engine.py",
        old="return tf.cast(self.size(index) / self.rows, tf.float64)",
        new="return tf.constant(1 / self.count, tf.float64)",
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
        file="tfdist/memory/kinds.py",
        old="gate = keeping.order.fetch_after(keeping.prefetch) if gate is None else gate",
        new="gate = gate or ()",
        tests=("tests/logical/test_memory_report.py::test_what_is_on_the_host",),
    ),
    Mutation(
        name="a restart that is lost",
        effect="a worker that is killed ends the run, although it may be started again",
        file="tfdist/launcher/policy.py",
        old="        self.used += 1\n        self._in_vain = 0 if incident.progressed",
        new='        return GiveUp("")\n        self._in_vain = 0 if incident.progressed',
        tests=("tests/launcher/policy/test_restarts.py::test_a_failed_worker_is_replaced",),
    ),
    Mutation(
        name="rank of a process",
        effect="every process takes itself for the first of its job",
        file="tfdist/launcher/plan.py",
        old="task_type=task[0], task_index=task[1]",
        new="task_type=task[0], task_index=0",
        tests=("tests/unit/test_launch_plan.py::test_two_workers_know_the_cluster_and_themselves",),
    ),
    Mutation(
        name="size of a grown job",
        effect="a run that grows starts with as many workers as before",
        file="tfdist/launcher/policy.py",
        old="        return Restart(self.used + self._grown, workers, 0.0)\n\n    def replace",
        new="        return Restart(self.used + self._grown, workers - 1, 0.0)\n\n    def replace",
        tests=("tests/launcher/policy/test_elastic.py::test_it_grows_again",),
    ),
    Mutation(
        name="growing without a backup",
        effect="a run that has never resumed grows, and begins again",
        file="tfdist/launcher/policy.py",
        old="one.resumed_step and one.has_trained",
        new="one.has_trained",
        tests=("tests/launcher/policy/test_elastic.py::test_when_it_does_not_grow",),
    ),
    Mutation(
        name="limit of a hang",
        effect="a process that stands still is waited for ten times as long",
        file="tfdist/launcher/policy.py",
        old="if waited > self.limit(progress.phase):",
        new="if waited > 10 * self.limit(progress.phase):",
        tests=("tests/launcher/policy/test_hangs.py::test_who_stands_still_is_named",),
    ),
    Mutation(
        name="who is to blame",
        effect="the process that fails first is blamed, a mere consequence too",
        file="tfdist/launcher/policy.py",
        old="next((failure for failure in failures if not failure.is_consequence), failures[0])",
        new="failures[0]",
        tests=("tests/unit/test_launch_restarts.py::test_choice",),
    ),
    Mutation(
        name="end of the grace period",
        effect="a process that ignores a signal is never killed",
        file="tfdist/launcher/supervisor.py",
        old="        self._kill_at = deadline if self._kill_at is None else min(self._kill_at, deadline)",
        new="        self._kill_at = self._kill_at",
        tests=("tests/launcher/policy/test_signals.py::test_the_grace_period_ends_with_sigkill",),
    ),
    Mutation(
        name="saved by all",
        effect="the others are killed as soon as one process has saved",
        file="tfdist/launcher/supervisor.py",
        old="            self._kill_at = time.monotonic() + self._grace\n        if self._incident is None:",
        new="            self._kill_at = time.monotonic()\n        if self._incident is None:",
        tests=("tests/launcher/policy/test_preemption.py::test_the_others_have_the_grace_period_to_save",),
    ),
    Mutation(
        name="silence of a launcher",
        effect="an agent goes on when its launcher has fallen silent",
        file="tfdist/launcher/hosts/agent.py",
        old="time.monotonic() - self._channel.heard > SILENCE",
        new="time.monotonic() - self._channel.heard > 100 * SILENCE",
        tests=("tests/launcher/hosts/test_connections.py::test_an_agent_ends_all_when_its_launcher_falls_silent",),
    ),
    Mutation(
        name="word of an agent",
        effect="whatever an agent says is taken, of any kind and type",
        file="tfdist/launcher/hosts/connection.py",
        old="                check_said(told)\n",
        new="                pass\n",
        tests=("tests/launcher/hosts/test_connections.py::test_what_no_agent_says_ends_the_connection",),
    ),
)
