"""Hands tasks to the workers, one at a time each; when a worker dies, another one does its task."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.compat.upstream import context, coordinator_context, executor


@dataclasses.dataclass(eq=False)
class Worker:
    """A worker as the coordinator sees it.

    Attributes:
        index: its task index.
        device: the device that it computes on.
        lives: how often it was lost, or a task on it broke off. What is from an earlier life must not be used.
        is_lost: whether it is lost and not back yet.
        done: how many tasks it has done.
    """

    index: int
    device: str
    lives: int = 0
    is_lost: bool = False
    done: int = 0


@dataclasses.dataclass(eq=False)
class Task:
    """A task for a worker.

    Attributes:
        run: computes the result; called in the worker's thread of the coordinator, with the worker's device entered.
            If a worker dies, it is called again, for another worker.
        deliver: called once with the result, in the worker's thread.
        home: the worker that should do it; others only do it while that one is lost.
    """

    run: Callable[[Worker], Any]
    deliver: Callable[[Any], Any]
    home: Worker | None = None


class Dispatcher:
    """Hands out tasks to the workers, one at a time each, in any order.

    The coordinator has a thread for each worker. It takes a task, runs its operations on the worker's device and
    waits for the result:

        main thread: submit ──> waiting tasks ──┬─> thread of worker 0: run on /job:worker/task:0 ──> deliver
                                                └─> thread of worker 1: run on /job:worker/task:1 ──> deliver

    When a worker dies, its task goes back to the front of the waiting tasks.

    All methods are for one thread, the main thread of the coordinator.

    Args:
        coordinator: TensorFlow's coordinator, whose handling of lost workers is used.
        devices: the devices of the workers.

    Attributes:
        workers: the workers.

    Example:
        >>> dispatcher = Dispatcher(tf.distribute.coordinator.ClusterCoordinator(strategy), devices)  # doctest: +SKIP
        >>> results = []
        >>> dispatcher.submit(Task(lambda worker: worker.device, results.append))  # doctest: +SKIP
        >>> dispatcher.join()  # doctest: +SKIP
    """

    def __init__(self, coordinator: tf.distribute.coordinator.ClusterCoordinator, devices: list[str]):
        self.workers = [Worker(index, device) for index, device in enumerate(devices)]
        self._cluster = coordinator._cluster
        self._changed = threading.Condition()
        self._waiting: collections.deque[Task] = collections.deque()
        self._running = 0
        self._error: BaseException | None = None
        for worker in self.workers:
            threading.Thread(target=self._serve, args=(worker,), name=f"tfdist-{worker.device}", daemon=True).start()

    def submit(self, task: Task) -> None:
        """Adds a task."""
        with self._changed:
            self._waiting.append(task)
            self._changed.notify_all()

    def wait_below(self, limit: int) -> None:
        """Waits until fewer than `limit` tasks are waiting or being done; raises as `wait_until`."""
        self.wait_until(lambda: len(self._waiting) + self._running < limit)

    def wait_until(self, condition: Callable[[], Any]) -> None:
        """Waits until a condition holds, or no task is left. The condition is checked whenever a task is done.

        Raises:
            Exception: what a task has raised, once; all other tasks are dropped then.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._error is not None or condition() or not (self._waiting or self._running)
            )
        if self._error is not None:
            error = self._error
            self.abandon()
            raise error

    def join(self) -> None:
        """Waits until all tasks are done; raises as `wait_below`."""
        self.wait_below(1)

    def abandon(self) -> None:
        """Drops the waiting tasks of all models and the last error, and waits until no task is being done."""
        with self._changed:
            self._waiting.clear()
            self._changed.wait_for(lambda: not self._running)
            self._waiting.clear()
            self._error = None

    def _serve(self, worker: Worker) -> None:
        # This thread runs the worker's operations itself, one after the other, so it needs no asynchronous executor.
        own_executor = executor.new_executor(enable_async=False)
        upstream = self._cluster.workers[worker.index]
        with (
            tf.device(worker.device),
            context.executor_scope(own_executor),
            coordinator_context.with_dispatch_context(upstream),
        ):
            while True:
                self._do(self._take(worker), worker)

    def _do(self, task: Task, worker: Worker) -> None:
        is_mine = True
        upstream = self._cluster.workers[worker.index]

        def make_again() -> None:
            # Tables, say, that the worker's earlier life has taken with it. TensorFlow's own thread of the worker does
            # not notice a loss that it has not met itself.
            with upstream._resource_tracking_lock:
                resources = [reference() for reference in upstream._resource_remote_value_refs]
            for resource in resources:
                if resource is not None:
                    resource._rebuild_on(upstream)

        def give_back(error: BaseException | None = None) -> None:
            nonlocal is_mine
            if not is_mine:
                return  # while the worker's resources are made again
            with self._changed:
                self._waiting.appendleft(task)
                self._running -= 1
                is_mine = False
                worker.lives += 1
                worker.is_lost = error is not None
                self._changed.notify_all()

        try:
            # It returns after the worker has come back, or raises if a parameter server is lost as well.
            with self._cluster.failure_handler.wait_on_failure(
                on_failure_fn=give_back,
                on_transient_failure_fn=give_back,
                on_recovery_fn=make_again,
                worker_device_name=worker.device,
            ):
                result = task.run(worker)
                with self._changed:
                    task.deliver(result)
                    worker.done += 1
            worker.is_lost = False
        except StopIteration as error:
            # Keras would take a StopIteration for the end of the data.
            self._keep_error(RuntimeError(f"a step has raised {error!r}"))
        except BaseException as error:
            self._keep_error(error)
        finally:
            with self._changed:
                self._running -= is_mine
                self._changed.notify_all()

    def _keep_error(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error

    def _take(self, worker: Worker) -> Task:
        with self._changed:
            while (task := self._next(worker)) is None:
                self._changed.wait()
            self._waiting.remove(task)
            self._running += 1
            return task

    def _next(self, worker: Worker) -> Task | None:
        if self._error is not None:
            return None
        return next((t for t in self._waiting if t.home in (None, worker) or t.home.is_lost), None)
