from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.unit.environment_dumps import DUMPS
from tfdist.launcher import report
from tfdist.launcher.command import main

TF_CONFIG = json.dumps({"cluster": {"worker": ["localhost:1", "localhost:2"]}, "task": {"type": "worker", "index": 1}})


def test_a_rank_whose_peers_are_not_known_yet() -> None:
    env = {**DUMPS["Slurm"].env, "PATH": "p"}
    facts = report.gather(with_devices=False, env=env)
    assert (facts["cluster"], facts["environment"]) == ("rank 3 of 4, from Slurm step 9.0", "Slurm step 9.0")
    assert (facts["rank"], facts["tf_config"], facts["problems"]) == (3, None, [])
    assert facts["variables"]["SLURM_STEP_NODELIST"] == "n[9-11]" and "PATH" not in facts["variables"]
    facts = report.gather(with_devices=False, env={**env, "WORLD_SIZE": "8"})
    assert facts["cluster"] == "invalid" and "WORLD_SIZE=8, but Slurm step 9.0" in facts["problems"][0]
    assert "environment:" not in report.as_text(facts)
    assert "environment:" in report.as_text({**facts, "environment": "Slurm step 9.0"})


def test_problems_make_the_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "{'cluster': {}}")
    result = CliRunner().invoke(main, ["env", "--no-devices", "--json"])
    facts = json.loads(result.output)
    assert result.exit_code == 1
    assert facts["cluster"] == "invalid"
    assert "TF_CONFIG" in facts["problems"][0]


def test_secrets_are_hidden() -> None:
    env = {"TFDIST_API_KEY": "a", "TF_PASSWORD": "b", "NCCL_x_secret": "c", "KERAS_BACKEND": "d", "PATH": "e"}
    assert report.relevant_variables(env) == {
        "KERAS_BACKEND": "d",
        "NCCL_x_secret": "(hidden)",
        "TFDIST_API_KEY": "(hidden)",
        "TF_PASSWORD": "(hidden)",
    }


@pytest.mark.parametrize("name", ["Vertex AI", "HTCondor's parallel universe", "AWS Batch, a multi-node parallel job"])
def test_what_describes_the_cluster_is_shown(name: str) -> None:
    described = {key for key in DUMPS[name].env if key not in ("CLOUD_ML_PROJECT_ID", "_CONDOR_SCRATCH_DIR")}
    assert report.relevant_variables(DUMPS[name].env).keys() == described


def stub_tensorflow(folder: Path, text: str) -> dict[str, str]:
    (folder / "tensorflow.py").write_text(text)
    return {"PYTHONPATH": str(folder)}


def test_devices(tmp_path: Path) -> None:
    env = stub_tensorflow(
        tmp_path,
        "from types import SimpleNamespace as N\n"
        "config = N(list_physical_devices=lambda: [N(name='/physical_device:GPU:0')],\n"
        "           experimental=N(get_device_details=lambda device: {'device_name': 'Some GPU'}))\n"
        "print('noise')\n",
    )
    found = report.devices(env)
    assert found == [{"name": "/physical_device:GPU:0", "description": "Some GPU"}]
    text = report.as_text({**report.gather(with_devices=False, env={}), "devices": found})
    assert "  /physical_device:GPU:0  Some GPU\n" in text


def test_devices_of_a_broken_tensorflow(tmp_path: Path) -> None:
    env = stub_tensorflow(tmp_path, "raise ImportError('no libfoo')")
    assert report.devices(env) == "unknown: TensorFlow could not list its devices (ImportError: no libfoo)"
