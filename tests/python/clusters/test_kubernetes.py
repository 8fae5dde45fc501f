"""``examples/kubernetes``: manifests against the published schemas, and their commands in pods on a network."""

import importlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from elastic_rs import _elastic_rs
from helpers.machines import Lan
from helpers.pods import Pod, Pods
from helpers.procs import Job

from .conftest import EXAMPLES, WORKER

FOLDER = EXAMPLES / "kubernetes"
KUBERNETES = "1.33"
# Kinds that Kubernetes does not know, by the models of Kubeflow Trainer's API, which has JobSet's too.
MODELS = {
    "JobSet": "JobsetV1alpha2JobSet",
    "ClusterTrainingRuntime": "TrainerV1alpha1ClusterTrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
}
# A silent pod is lost after three keep-alive intervals.
CONF = "last_call_timeout=5,join_timeout=3600,coordinator_timeout=3600,keep_alive_interval=1"
pytestmark = pytest.mark.usefixtures("engines")


def documents(name: str) -> dict[str, dict[str, Any]]:
    """Return the manifest's documents by their kind."""
    load = importlib.import_module("yaml").safe_load_all
    return {document["kind"]: document for document in load((FOLDER / name).read_text())}


def check(document: dict[str, Any]) -> None:
    """Raise unless the document agrees with the published schema of its kind, and has no field that is not in it."""
    kind = document["kind"]
    if kind not in MODELS:
        importlib.import_module("kubernetes_validate").validate(document, KUBERNETES, strict=True)
        return
    model = getattr(importlib.import_module("kubeflow_trainer_api.models"), MODELS[kind])
    unknown = list(lost(document, model.from_dict(document).to_dict()))
    assert not unknown, f"not in the schema: {unknown}"


def lost(written: Any, kept: Any, path: str = "") -> Iterator[str]:
    """Yield what a model has not kept, because it does not know the field. Defaults that it has added do not matter."""
    if isinstance(written, dict) and isinstance(kept, dict):
        for name, value in written.items():
            yield from lost(value, kept.get(name), f"{path}.{name}")
    elif isinstance(written, list) and isinstance(kept, list) and len(written) == len(kept):
        for index, values in enumerate(zip(written, kept, strict=True)):
            yield from lost(*values, f"{path}[{index}]")
    elif written != kept:
        yield path


def pod_templates(value: object) -> list[dict[str, Any]]:
    """Return every pod template in a document. Models of other APIs hold them too, and are less strict about them."""
    if isinstance(value, list):
        return [found for item in value for found in pod_templates(item)]
    if not isinstance(value, dict):
        return []
    own = [value] if "containers" in value.get("spec", {}) else []
    return own + [found for item in value.values() for found in pod_templates(item)]


def test_manifests_agree_with_the_published_schemas() -> None:
    # One test, because importing the models takes 5 s of a core.
    for name in sorted(path.name for path in FOLDER.glob("*.yaml")):
        for document in documents(name).values():
            check(document)
            for template in pod_templates(document):
                pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": template["spec"]}
                check(pod)
            # A misspelt field would be found.
            document["spec"]["replica"] = 3
            with pytest.raises(Exception, match="replica"):
                check(document)
        for job in [found["template"]["spec"] for found in replicated(name)]:
            check({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": job})


def replicated(name: str) -> list[dict[str, Any]]:
    found = documents(name)
    if job_set := found.get("JobSet"):
        return job_set["spec"]["replicatedJobs"]
    if runtime := found.get("ClusterTrainingRuntime"):
        return runtime["spec"]["template"]["spec"]["replicatedJobs"]
    return []


def test_the_rules_for_failed_pods_hold_for_the_container_that_there_is() -> None:
    for name in ("jobset.yaml", "trainer.yaml"):
        (job,) = replicated(name)
        fail, ignore = job["template"]["spec"]["podFailurePolicy"]["rules"]
        (template,) = pod_templates(job)
        (container,) = template["spec"]["containers"]
        assert fail["onExitCodes"]["containerName"] == container["name"]
        assert fail["onExitCodes"]["values"] == [1, 2, 92, 93]
        assert ignore["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
        # Agents give workers a grace that is shorter than the pod's.
        (grace,) = re.findall(r"--shutdown-timeout=(\d+)", str(container))
        assert int(grace) < template["spec"]["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("name", ["jobset.yaml", "statefulset.yaml", "trainer.yaml"])
def test_the_token_and_the_log_folder_are_mounted_where_the_agent_looks_for_them(name: str) -> None:
    (template,) = pod_templates(list(documents(name).values()))
    (container,) = template["spec"]["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    (token,) = [Path(known["value"]) for known in container["env"] if known["name"] == "ELASTIC_RS_TOKEN_FILE"]
    secret = volumes[mounts[str(token.parent)]]["secret"]
    assert token.name == "token", "the key of the Secret that the first lines of the file make"
    assert secret["defaultMode"] == 0o440, "others may not read a token's file"
    assert f"generic {secret['secretName']} --from-file=token=" in (FOLDER / name).read_text()
    (folder,) = re.findall(r"--log-dir=(\S+)", str(container))
    assert "emptyDir" in volumes[mounts[folder]]


def secured(tmp_path: Path) -> dict[str, str]:
    """Return the variables of a job whose Secret is a file here."""
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(f"{_elastic_rs.new_token()}\n")
    return {"ELASTIC_RS_TOKEN_FILE": str(token)}


def job_set(job: Job, lan: Lan, done: Path, more: Mapping[str, str] | None = None) -> Pods:
    (replicas,) = replicated("jobset.yaml")
    (template,) = pod_templates(replicas)
    instead = {"=gpu": "=1", "--nnodes=3:4": "--nnodes=2:3", "/workspace/train.py": f"{WORKER} --until {done}"}
    instead |= {"--log-dir=/logs": f"--log-dir={done.parent / 'logs'}", **(more or {})}
    # The Job's controller sets it.
    env = {"JOB_COMPLETION_INDEX": "{index}", "CONF": CONF, **secured(done.parent)}
    return Pods(job, lan, template, name="train-node-0", subdomain="train", env=env, instead=instead)


def trainer(job: Job, lan: Lan, done: Path) -> Pods:
    (template,) = pod_templates(replicated("trainer.yaml"))
    asked = documents("trainer.yaml")["TrainJob"]["spec"]["trainer"]
    assert asked["args"] == ["/workspace/train.py"]
    # What Trainer's torch plugin does with a TrainJob.
    (container,) = template["spec"]["containers"]
    container["args"] = [str(WORKER), "--until", str(done)]
    env = {
        **{variable["name"]: variable["value"] for variable in asked["env"]},
        "CONF": CONF,
        "MIN_NODES": "2",
        "PET_NNODES": "3",
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": "{index}",
        "PET_MASTER_ADDR": "train-node-0-0.train",
        "PET_MASTER_PORT": "29500",
        **secured(done.parent),
    }
    instead = {"--log-dir=/logs": f"--log-dir={done.parent / 'logs'}"}
    return Pods(job, lan, template, name="train-node-0", subdomain="train", env=env, instead=instead)


def place(pod: Pod, world: int, *, since: int = 0) -> int:
    """Wait until the pod's worker has met the others of a world of that size, and return its rank."""
    return int(pod.process.line(rf"SUM rank=(\d+) world={world}\b", since=since)[1])


@pytest.mark.parametrize("recipe", [job_set, pytest.param(trainer, marks=pytest.mark.long)])
def test_pods_are_lost_and_replaced_also_the_one_with_the_coordinator(
    job: Job, lan: Lan, tmp_path: Path, recipe: Any
) -> None:
    done = tmp_path / "done"
    pods = recipe(job, lan, done)
    # The others start first, and for the first pod there is no name yet.
    second, third = pods.start(1), pods.start(2)
    first = pods.start(0, known=False)
    first.process.line(r"this process hosts the coordinator")
    first.publish()
    assert [place(pod, 3) for pod in (first, second, third)] == [0, 1, 2], "ranks by completion index"

    marks = [pod.process.mark() for pod in (first, second)]
    third.lose()
    for pod, mark in zip((first, second), marks, strict=True):
        place(pod, 2, since=mark)
    marks = [pod.process.mark() for pod in (first, second)]
    third = pods.start(2)
    assert [place(pod, 3, since=mark) for pod, mark in zip((first, second), marks, strict=True)] == [0, 1]
    assert place(third, 3) == 2

    marks = [pod.process.mark() for pod in (second, third)]
    first.lose()
    first = pods.start(0, known=False)  # has another address, and name servers have the old one for a while
    first.process.line(r"this process hosts the coordinator")
    first.publish()
    for pod, mark in zip((second, third), marks, strict=True):
        place(pod, 3, since=mark)
    place(first, 3)
    done.touch()
    assert [pod.process.wait() for pod in (first, second, third)] == [0, 0, 0]


@pytest.mark.long
def test_the_first_pod_is_drained_and_the_others_wait_for_it(job: Job, lan: Lan, tmp_path: Path) -> None:
    done = tmp_path / "done"
    pods = job_set(job, lan, done)
    running = [pods.start(index) for index in range(3)]
    first, *others = running
    for pod in running:
        place(pod, 3)
    marks = [pod.process.mark() for pod in others]
    first.terminate()
    assert first.process.wait() == 91, "not one of those that fail the Job"
    for pod, mark in zip(others, marks, strict=True):
        pod.process.line(r"restarting all workers|coordinator", since=mark)
    first = pods.start(0)
    for pod, mark in zip(others, marks, strict=True):
        place(pod, 3, since=mark)
    place(first, 3)
    done.touch()
    assert [pod.process.wait() for pod in (first, *others)] == [0, 0, 0]


@pytest.mark.long
def test_a_job_that_fails_ends_all_pods_with_the_code_that_fails_the_job(job: Job, lan: Lan, tmp_path: Path) -> None:
    never = tmp_path / "never"
    pods = job_set(job, lan, never, {f"--until {never}": "--fail 1:7", "--max-restarts=3": "--max-restarts=0"})
    running = [pods.start(index) for index in range(3)]
    assert [pod.process.wait() for pod in running] == [92, 92, 92]


def test_a_stateful_set_is_scaled_while_it_trains(job: Job, lan: Lan, tmp_path: Path) -> None:
    done = tmp_path / "done"
    stateful_set = documents("statefulset.yaml")["StatefulSet"]
    (template,) = pod_templates(stateful_set)
    instead = {"=gpu": "=1", "/workspace/train.py": f"{WORKER} --until {done}"}
    instead |= {"--log-dir=/logs": f"--log-dir={tmp_path / 'logs'}"}
    env = {"CONF": CONF.replace("last_call_timeout=5", "last_call_timeout=1"), **secured(tmp_path)}
    service = stateful_set["spec"]["serviceName"]
    pods = Pods(
        job,
        lan,
        template,
        name=stateful_set["metadata"]["name"],
        subdomain=service,
        env=env,
        instead=instead,
    )
    first = pods.start(0)
    place(first, 1)
    mark = first.process.mark()
    second = pods.start(1)
    place(second, 2)
    place(first, 2, since=mark)
    mark = first.process.mark()
    second.terminate()
    assert second.process.wait() == 143
    place(first, 1, since=mark)
    done.touch()
    first.process.line(r"elastic-run has ended with 0; this pod sleeps until it is deleted")
    first.terminate()
    assert first.process.wait() == 0
