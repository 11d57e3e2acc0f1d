"""The manifests against published schemas: Kubernetes's own, and those of JobSet and of Kubeflow's trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

reason = "there are no schemas here; make test-engines installs them"
validate = pytest.importorskip("kubernetes_validate", reason=reason).validate
models = pytest.importorskip("kubeflow_trainer_api.models", reason=reason)

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
VERSION = "1.34"
MODELS = {"TrainJob": "TrainerV1alpha1TrainJob", "JobSet": "JobsetV1alpha2JobSet"}
BUILT_IN = {"Job", "NetworkPolicy", "Service"}
DOCUMENTS = [
    pytest.param(document, id=f"{path.stem} {document['kind']}")
    for path in sorted(FOLDER.glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_schema_takes_it(document: dict[str, Any]):
    kind = document["kind"]
    if kind == "PyTorchJob":  # its package wants an older Kubernetes client; its pods are Kubernetes's own
        for replicas in document["spec"]["pytorchReplicaSpecs"].values():
            assert set(replicas) == {"replicas", "restartPolicy", "template"}
            assert replicas["restartPolicy"] == "ExitCode"
            pod = {"apiVersion": "v1", "kind": "Pod", **replicas["template"]}
            pod["metadata"] = {"name": "flowers", **pod["metadata"]}
            validate(pod, VERSION, strict=True)
    elif kind in BUILT_IN:
        validate(document, VERSION, strict=True)
    else:
        model = getattr(models, MODELS[kind]).from_dict(document)
        assert without_defaults(model.to_dict(), document) == document  # fields that it does not know are left out


def without_defaults(read: Any, written: Any) -> Any:
    """What was read, less what the schema adds by itself."""
    if isinstance(read, dict) and isinstance(written, dict):
        return {name: without_defaults(value, written[name]) for name, value in read.items() if name in written}
    if isinstance(read, list) and isinstance(written, list):
        return [without_defaults(*pair) for pair in zip(read, written, strict=True)]
    return read


def test_the_schemas_bite():
    (service, job) = yaml.safe_load_all((FOLDER / "indexed-job.yaml").read_text())
    del service
    job["spec"]["completionsMode"] = job["spec"].pop("completionMode")
    with pytest.raises(Exception, match="completionsMode"):
        validate(job, VERSION, strict=True)
