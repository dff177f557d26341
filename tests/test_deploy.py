"""Manifests of deploy/kubernetes: they fit the published schemas to the last key, and docs/kubernetes.md."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tessera.utils.config import TrainConfig
from tessera.utils.errors import ConfigError, UserError
from tests.data.make import write_dataset
from tests.system.launch import run_python

trainer = pytest.importorskip("kubeflow_trainer_api.models", reason="needs the dev group (uv sync --group dev)")
client = pytest.importorskip("kubernetes.client", reason="needs the dev group (uv sync --group dev)")

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
DOCUMENTS = [document for file in FILES for document in yaml.safe_load_all(file.read_text())]
each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: f"{d['kind']}-{d['metadata']['name']}")


def jobs() -> list[dict[str, Any]]:
    by_kind = {document["kind"]: document["spec"] for document in DOCUMENTS}
    (replicated,) = by_kind["TrainingRuntime"]["template"]["spec"]["replicatedJobs"]
    return [by_kind["Job"], replicated["template"]["spec"]]


each_job = pytest.mark.parametrize("job", jobs(), ids=["Job", "TrainingRuntime"])


def understood(document: dict[str, Any]) -> Any:
    """Return a document as the models of the client, or of the trainer, read it: without keys that they do not know."""
    kind = document["kind"]
    if model := getattr(trainer, f"TrainerV1alpha1{kind}", None):
        return model.from_dict(document).to_dict()
    return as_kubernetes(document, f"V1{kind}")


def as_kubernetes(value: dict[str, Any], model: str) -> Any:
    """`value` through a model of the Kubernetes client and back."""
    api, answer = client.ApiClient(), SimpleNamespace(data=json.dumps(value))
    return api.sanitize_for_serialization(api.deserialize(answer, model))


@each_document
def test_a_document_fits_its_schema(document: dict[str, Any]) -> None:
    assert understood(document) == document


@each_job
def test_a_job_is_what_the_page_promises(job: dict[str, Any]) -> None:
    assert as_kubernetes(job, "V1JobSpec") == job
    pod = job["template"]["spec"]
    (check,), (node,) = pod["initContainers"], pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    patience = {variable["name"]: variable["value"] for variable in node["env"]}["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    assert 60 <= int(patience) < pod["terminationGracePeriodSeconds"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in (check, node):
        confined = container["securityContext"]
        assert confined["readOnlyRootFilesystem"] and not confined["allowPrivilegeEscalation"]
        assert confined["capabilities"] == {"drop": ["ALL"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        assert set(mounts) == {"/dev/shm", "/tmp", "/cache", "/tessera/datasets", "/tessera/runs"}
        assert "limits" in container["resources"]
        assert not {"livenessProbe", "readinessProbe", "startupProbe"} & set(container)
    assert "TESSERA_CACHE=/cache/" in (ROOT / "Dockerfile").read_text()
    assert check["args"] == node["args"]
    TrainConfig(**TrainConfig.from_args(node["args"]))
    assert any(flag.startswith("--name=") for flag in node["args"])
    assert node["command"][-4:] == ["-m", "tessera", "train", "--resume=auto"]


@each_job
def test_mistakes_are_not_tried_again_and_disruptions_are_not_counted(job: dict[str, Any]) -> None:
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    mistake, option, disruption = job["podFailurePolicy"]["rules"]
    assert (mistake["action"], option["action"], disruption["action"]) == ("FailJob", "FailJob", "Ignore")
    assert mistake["onExitCodes"] == {"containerName": "check", "operator": "In", "values": [1, 2]}
    assert mistake["onExitCodes"]["values"] == [UserError.exit_code, ConfigError.exit_code]
    assert option["onExitCodes"] == {"containerName": "node", "operator": "In", "values": [2]}
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    ends = re.findall(r"^\| (\d+) \| `(check|node)` \| .* \| no \|$", page, flags=re.MULTILINE)
    assert ends == [("0", "node"), ("1", "check"), ("2", "check"), ("2", "node")]
    assert [condition["type"] for condition in disruption["onPodConditions"]] == ["DisruptionTarget"]


@pytest.mark.slow
@each_job
def test_problems_of_a_dataset_let_the_training_begin_and_errors_do_not(job: dict[str, Any], tmp_path: Path) -> None:
    (check,) = job["template"]["spec"]["initContainers"]
    python, *command = check["command"]
    assert python == "python"
    box = "0 0.5 0.5 0.5 0.5\n"
    for name, text, code in (("problem", "0 0.5 0.5 0.1\n", 0), ("error", "7 0.5 0.5 0.5 0.5\n", 1)):
        data = write_dataset(tmp_path / name, {"train/a": box, "train/b": text, "val/c": box})
        outcome = run_python(*command, "--data", str(data))
        assert outcome.code == code, outcome.said
