"""The manifest of the page on clusters: what Kubernetes and JobSet know, and what flaxfit reads."""

import copy
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "clusters.md"
POD = ("replicatedJobs", 0, "template", "spec", "template", "spec")

pytestmark = pytest.mark.slow  # Kubernetes' models take a second to import.


@pytest.fixture(scope="module")
def schema():
    return pytest.importorskip("kubeflow_trainer_api.models.jobset_v1alpha2_job_set")


@pytest.fixture
def manifest():
    text = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.M | re.S)[0]
    return pytest.importorskip("yaml").safe_load(text)


def is_valid(manifest, schema):
    """Whether each field of it has a value of its type, and none is unknown."""
    try:
        known = schema.JobsetV1alpha2JobSet.from_dict(copy.deepcopy(manifest))
    except ValueError:
        return False
    return known.to_dict() == manifest  # It leaves out fields that it does not know.


def part(tree, path):
    for key in path:
        tree = tree[key]
    return tree


def test_it_follows_the_schema(manifest, schema):
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert is_valid(manifest, schema)


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        (("failurePolicy",), "maxRestarts", "3"),
        (("failurePolicy",), "restarts", 3),
        (POD, "restartPolicies", "Never"),
        ((*POD, "containers", 0), "command", "python train.py"),
        ((*POD, "containers", 0, "env", 0), "values", "4"),
        ((*POD, "volumes", 0, "persistentVolumeClaim"), "claimName", None),
    ],
)
def test_the_schema_would_find_a_mistake(path, name, value, manifest, schema):
    part(manifest["spec"], path)[name] = value
    assert not is_valid(manifest, schema)


def test_each_pod_is_told_its_number_and_the_address_of_the_first(manifest):
    job = manifest["spec"]["replicatedJobs"][0]
    spec = job["template"]["spec"]
    variables = {each["name"]: each for each in part(manifest["spec"], POD)["containers"][0]["env"]}
    # JobSet's names of pods, "SET-JOB-number of the job-number of the pod", in a network "SET".
    name = manifest["metadata"]["name"]
    first = f"{name}-{job['name']}-0-0.{name}"
    assert variables["FLAXFIT_COORDINATOR_ADDRESS"]["value"].split(":")[0] == first
    assert job["replicas"] == 1
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    assert variables["FLAXFIT_NUM_PROCESSES"]["value"] == str(spec["completions"])
    number = variables["FLAXFIT_PROCESS_ID"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert number == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
