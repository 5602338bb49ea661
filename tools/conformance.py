"""Runs Keras' own tests in the scope of every strategy, prints a table, and compares it with what is known.

    python tools/conformance.py                    # Mirrored and MultiWorker, as `make conformance`
    python tools/conformance.py --all --write      # all strategies; renews the file and the table in docs/features.md

What fails under a strategy but not without one has to stand in tests/conformance/known.json, with its reason. It is an
error if a test that is not in there fails, or one that is passes, or if the tests cannot be run without a strategy.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.data_parallel.table import fill  # noqa: E402
from tests.conformance.in_scope import KERAS_DISTRIBUTION, STRATEGIES  # noqa: E402
from tests.conformance.keras_tests import DISTRIBUTION, Outcomes, files, keras_directory, run_file  # noqa: E402

KNOWN = ROOT / "tests/conformance/known.json"
PAGE = ROOT / "docs/features.md"
# Compared each time; the others when the table is renewed.
COMPARED = ("none", "Mirrored", "MultiWorker")
STOCK = "tf.distribute's Mirrored"


def run(strategies: list[str], jobs: int, only: str) -> dict[str, Outcomes]:
    """Runs all files under strategies, so many at a time."""
    found: dict[str, Outcomes] = {strategy: {} for strategy in strategies}
    paths = [path for path in files() if only in path.name]
    with ThreadPoolExecutor(jobs) as pool:
        runs = [(s, path, pool.submit(run_file, path, s)) for path in paths for s in strategies]
        for strategy, path, future in runs:
            outcomes = future.result()
            found[strategy].update(outcomes)
            counted = collections.Counter(outcome for outcome, _ in outcomes.values())
            print(f"{strategy:26s} {path.name:40s} {dict(counted)}", flush=True)
    return found


def failures(found: dict[str, Outcomes]) -> dict[str, dict[str, str]]:
    """By strategy and test, why it fails; tests that fail without a strategy, too, are left out."""
    without = sorted(test for test, (outcome, _) in found["none"].items() if outcome == "passed")
    missing = ("failed", "did not run: the file ended before")
    failed = {}
    for strategy in [strategy for strategy in found if strategy != "none"]:
        outcomes = {test: found[strategy].get(test, missing) for test in without}
        failed[strategy] = {test: reason for test, (outcome, reason) in outcomes.items() if outcome != "passed"}
    return failed


def table(found: dict[str, Outcomes]) -> str:
    """How many pass, as Markdown."""
    total = sum(outcome == "passed" for outcome, _ in found["none"].values())
    lines = ["| Strategy | Keras' own tests that pass |", "|---|--:|", f"| none | {total} |"]
    for strategy, failed in failures(found).items():
        lines.append(f"| {strategy} | {total - len(failed)} |")
    return "\n".join(lines)


def compare(failed: dict[str, dict[str, str]], known: dict[str, dict[str, str]], ran: set[str]) -> list[str]:
    """What is worse, or better, than what is known.

    Args:
        failed: by strategy and test, why it fails.
        known: likewise, what is known.
        ran: tests that passed without a strategy.
    """
    found = []
    for strategy, tests in failed.items():
        expected = known.get(strategy, {}).keys() & ran
        found += [f"worse: {strategy}: {test}: {reason}" for test, reason in tests.items() if test not in expected]
        found += [f"better: {strategy}: {test} passes; take it out of {KNOWN.name}" for test in expected - set(tests)]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every strategy, Horovod too if it is installed")
    parser.add_argument("--write", action="store_true", help="renew known.json and the table")
    parser.add_argument("--jobs", type=int, default=2, help="how many files run at a time")
    parser.add_argument("--only", default="", help="files whose name contains this")
    arguments = parser.parse_args()
    if arguments.write and (arguments.only or not arguments.all):
        parser.error("--write renews the whole table: give --all as well, and not --only")
    left_out = {KERAS_DISTRIBUTION, "" if find_spec("horovod") else "Horovod"}
    strategies = [s for s in STRATEGIES if s not in left_out] if arguments.all else list(COMPARED)
    found = run(strategies, arguments.jobs, arguments.only)
    of_distribution = run_file(keras_directory() / DISTRIBUTION, KERAS_DISTRIBUTION) if not arguments.only else {}
    print(table(found))
    passed = {test for test, (outcome, _) in found["none"].items() if outcome == "passed"}
    broken = [f"{test}: {reason}" for test, (_, reason) in found["none"].items() if test.endswith("::(all)")]
    if broken or not passed:
        print("Without a strategy Keras' tests could not be run.", *broken, sep="\n")
        return 1
    failed, known = failures(found), json.loads(KNOWN.read_text()) if KNOWN.exists() else {}
    # Without tfdist, most of these cannot run.
    failed[KERAS_DISTRIBUTION] = {test: why for test, (outcome, why) in of_distribution.items() if outcome != "passed"}
    if arguments.write:
        # A reason that somebody has written stays.
        new = {
            strategy: {
                test: known.get(strategy, {}).get(test, reason.splitlines()[0][:200]) for test, reason in tests.items()
            }
            for strategy, tests in failed.items()
            if strategy != STOCK
        }
        KNOWN.write_text(json.dumps({**known, **new}, indent=2) + "\n")
        PAGE.write_text(fill(PAGE.read_text(), f"\n{table(found)}\n", "<!-- conformance -->", "<!-- /conformance -->"))
        return 0
    compared = {strategy: tests for strategy, tests in failed.items() if strategy in (*COMPARED, KERAS_DISTRIBUTION)}
    differences = compare(compared, known, passed | of_distribution.keys())
    print("\n".join(differences) or "as in tests/conformance/known.json")
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main())
