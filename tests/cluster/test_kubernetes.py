"""deploy/kubernetes and deploy/docker: schemas, flags that exist, probes that are served, rights and keys."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvloom.arguments import Parser
from kvloom.cluster.router import command as route_command
from kvloom.serve import serve_command
from kvloom.tiers.registry import check_tiers

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "deploy" / "kubernetes"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ENCODE = FOLDER / "encode"
VERSIONS = ("1.34", "1.37")
VALUES = {"POD_IP": "10.1.2.3", "POD_NAME": "kvloom-prefill-0", "POD_NAMESPACE": "kvloom", "MODEL": "m"}


def documents() -> list[dict[str, Any]]:
    return [
        one
        for path in sorted(FOLDER.rglob("*.yaml"))
        if path.name != "kustomization.yaml"
        for one in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    ]


def named(one: dict[str, Any]) -> str:
    return f"{one['kind']}/{one['metadata']['name']}"


def workloads() -> list[dict[str, Any]]:
    return [one for one in documents() if one["kind"] in ("Deployment", "StatefulSet")]


def containers() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for one in workloads():
        for container in one["spec"]["template"]["spec"]["containers"]:
            yield one, container


def arguments_of(container: dict[str, Any]) -> list[str]:
    given = {one["name"] for one in container["env"]}
    words = []
    for word in container["args"]:
        for name in re.findall(r"\$\((\w+)\)", word):
            assert name in given, f"{name} is not in env"
        words.append(re.sub(r"\$\((\w+)\)", lambda found: VALUES[found[1]], word))
    return words


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("one", documents(), ids=named)
def test_every_document_matches_the_schema_of_kubernetes(one: dict[str, Any], version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="extra dev has kubernetes-validate")
    validate.validate(one, version, strict=True)


def test_a_mistake_is_found() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="extra dev has kubernetes-validate")
    one = next(one for one in documents() if one["kind"] == "Deployment")
    one["spec"]["template"]["spec"]["containers"][0]["redinessProbe"] = {}
    with pytest.raises(validate.ValidationError):
        validate.validate(one, VERSIONS[0], strict=True)


@pytest.mark.parametrize("folder", [FOLDER, ENCODE], ids=lambda folder: folder.name)
def test_kustomize_lists_every_file(folder: Path) -> None:
    found = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    assert sorted(found["resources"]) == sorted(
        path.name for path in folder.glob("*.yaml") if path.name != "kustomization.yaml"
    )


def test_kustomize_sets_the_version() -> None:
    found = yaml.safe_load((FOLDER / "kustomization.yaml").read_text(encoding="utf-8"))
    assert found["images"] == [{"name": "kvloom", "newTag": PROJECT["version"]}]
    assert {container["image"] for _, container in containers()} == {"kvloom"}


def patched() -> list[dict[str, Any]]:
    """The workloads with the patches of the component `encode`."""
    component = yaml.safe_load((ENCODE / "kustomization.yaml").read_text(encoding="utf-8"))
    found = workloads()
    for patch in component["patches"]:
        kind, name = patch["target"]["kind"], patch["target"]["name"]
        targets = [
            one for one in found if one["kind"] == kind and re.fullmatch(name, one["metadata"]["name"])
        ]
        assert targets, name
        for one in targets:
            for step in yaml.safe_load(patch["patch"]):
                *above, last = step["path"].strip("/").split("/")
                place: Any = one
                for word in above:
                    place = place[int(word) if isinstance(place, list) else word]
                if step["op"] == "add":
                    assert last == "-", "added at the end"
                    place.append(step["value"])
                elif step["op"] == "test":
                    assert place[last] == step["value"]
                else:
                    assert step["op"] == "replace"
                    assert last in place
                    place[last] = step["value"]
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_patched_workloads_match_the_schema_of_kubernetes(version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="extra dev has kubernetes-validate")
    for one in patched():
        validate.validate(one, version, strict=True)


def test_workers_ask_every_encode_worker() -> None:
    found = {one["metadata"]["name"]: one for one in patched()}
    pods = {name: one["spec"]["template"]["spec"]["containers"][0] for name, one in found.items()}
    (shared,) = (word for word in arguments_of(pods["kvloom-encode"]) if "share=" in word)
    address = re.search(r"share=([^&]+)", shared.replace("kvloom-prefill-0", "kvloom-encode-0"))
    assert address is not None
    for name in ("kvloom-prefill", "kvloom-decode"):
        asked = [word for word in arguments_of(pods[name]) if word.startswith("--encoder=")]
        assert len(asked) == found["kvloom-encode"]["spec"]["replicas"]
        for number, word in enumerate(asked):
            place = address[1].replace("encode-0", f"encode-{number}")
            assert word == f"--encoder=peer://{place}?secret=/etc/kvloom/peer-secret"
        assert pods[name]["env"][0] == pods["kvloom-encode"]["env"][0], "the model is the same"
    assert "--discover=http://kvloom-encode:8000" in arguments_of(pods["kvloom-router"])


@pytest.mark.parametrize("one", [*workloads(), *patched()], ids=named)
def test_the_commands_accept_their_arguments(one: dict[str, Any]) -> None:
    (container,) = one["spec"]["template"]["spec"]["containers"]
    command, *words = arguments_of(container)
    parser = Parser(prog=command)
    {"route": route_command, "serve": serve_command}[command].arguments(parser)
    args = parser.parse_intermixed_args(words)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert args.port == ports["http"]
    if command == "serve":
        if args.role != "encode":
            assert args.kv_events.endswith(f":{ports['events']}")
            assert args.kv_events_replay.endswith(f":{ports['replay']}")
        grace = one["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        assert grace >= args.drain_seconds + container["lifecycle"]["preStop"]["sleep"]["seconds"] + 10
        # Without a secret a name that is not loopback is refused; the file of the secret is not here.
        check_tiers(
            re.sub(r"&secret=\S+", "", re.sub(r"share=[^:&]+", "share=127.0.0.1", tier))
            for tier in args.tiers
        )
        for tier in args.tiers:
            assert f":{ports['pages']}" in tier or tier == "host:64GiB"


def test_decode_workers_read_from_every_prefill_worker() -> None:
    found = {one["metadata"]["name"]: one for one in workloads()}
    prefill, decode = found["kvloom-prefill"], found["kvloom-decode"]
    shared = [
        word
        for word in arguments_of(prefill["spec"]["template"]["spec"]["containers"][0])
        if "share=" in word
    ]
    address = re.search(r"share=([^&]+)", shared[0])
    assert address is not None
    peers = [
        word
        for word in arguments_of(decode["spec"]["template"]["spec"]["containers"][0])
        if "peer://" in word
    ]
    assert len(peers) == prefill["spec"]["replicas"]
    for number, peer in enumerate(peers):
        assert f"peer://{address[1].replace('prefill-0', f'prefill-{number}')}?" in peer
    services = {one["metadata"]["name"]: one for one in documents() if one["kind"] == "Service"}
    for name in ("kvloom-prefill", "kvloom-decode", "kvloom-encode"):
        assert found[name]["spec"]["serviceName"] == name
        assert services[name]["spec"]["clusterIP"] == "None"
    router = arguments_of(found["kvloom-router"]["spec"]["template"]["spec"]["containers"][0])
    assert [word for word in router if "--discover" in word] == [
        f"--discover=http://{name}:8000" for name in ("kvloom-prefill", "kvloom-decode")
    ]


@pytest.mark.parametrize("one", workloads(), ids=named)
def test_pods_have_no_rights_and_are_probed_and_drained(one: dict[str, Any]) -> None:
    template = one["spec"]["template"]
    spec = template["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False, "KVLOOM_PORT of the service would become an argument"
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] >= 10_000
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    source = "".join(
        (ROOT / "src/kvloom" / path).read_text(encoding="utf-8")
        for path in (
            ("cluster/router/application.py",) if "router" in named(one) else ("serve/application.py",)
        )
    )
    for container in spec["containers"]:
        rights = container["securityContext"]
        assert rights["allowPrivilegeEscalation"] is False
        assert rights["readOnlyRootFilesystem"] is True
        assert rights["capabilities"] == {"drop": ["ALL"]}
        assert container["lifecycle"]["preStop"]
        for probe in ("readinessProbe", "livenessProbe"):
            assert f'"{container[probe]["httpGet"]["path"]}"' in source
        assert container["readinessProbe"]["httpGet"]["path"] == "/health"
        assert container["livenessProbe"]["httpGet"]["path"] == "/version", (
            "a draining or idle process is alive"
        )
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        notes = template["metadata"]["annotations"]
        assert notes["prometheus.io/scrape"] == "true"
        assert int(notes["prometheus.io/port"]) == ports["http"]
        assert f'"{notes["prometheus.io/path"]}"' in source
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}


def test_keys_come_from_one_secret() -> None:
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text(encoding="utf-8"))
    (secret,) = kustomization["secretGenerator"]
    keys = {file.partition("=")[0] for file in secret["files"]}
    used = set()
    for one, container in containers():
        for variable in container["env"]:
            if ref := variable.get("valueFrom", {}).get("secretKeyRef"):
                assert ref["name"] == secret["name"]
                used.add(ref["key"])
        for volume in one["spec"]["template"]["spec"]["volumes"]:
            if "secret" in volume:
                assert volume["secret"]["secretName"] == secret["name"]
                assert volume["secret"]["defaultMode"] == 0o440, (
                    "a secret of peers may not be readable by others"
                )
                used.update(item["key"] for item in volume["secret"]["items"])
    assert used == keys
    assert (FOLDER / ".gitignore").read_text() == "secrets/\n"


def test_the_network_policy_covers_every_pod() -> None:
    policies = [one for one in documents() if one["kind"] == "NetworkPolicy"]
    assert any(one["spec"]["podSelector"] == {} and "ingress" not in one["spec"] for one in policies)
    for one in workloads():
        labels = one["spec"]["template"]["metadata"]["labels"]
        (container,) = one["spec"]["template"]["spec"]["containers"]
        mine = [
            policy["spec"] for policy in policies
            if (chosen := policy["spec"]["podSelector"].get("matchLabels")) and chosen.items() <= labels.items()
        ]  # fmt: skip
        assert len(mine) == 1
        opened = {port["port"] for rule in mine[0]["ingress"] for port in rule["ports"]}
        assert opened == {port["name"] for port in container["ports"]}


def test_the_dockerfile_installs_this_repository() -> None:
    text = (ROOT / "deploy/docker/Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [
        line.split(maxsplit=1) for line in text.splitlines() if line.strip() and not line.startswith("#")
    ]
    known = {
        "FROM",
        "ARG",
        "RUN",
        "ENV",
        "WORKDIR",
        "COPY",
        "USER",
        "EXPOSE",
        "HEALTHCHECK",
        "ENTRYPOINT",
        "CMD",
    }
    assert {word for word, _ in lines} <= known
    for word, rest in lines:
        if word == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert f"!{source}" in (ROOT / ".dockerignore").read_text().splitlines()
    extras = re.search(r"'\.\[([a-z,]+)\]'", text)
    assert extras is not None
    assert set(extras[1].split(",")) <= set(PROJECT["optional-dependencies"])
    assert {"engine", "serve", "cluster"} <= set(extras[1].split(","))
    assert ["ENTRYPOINT", '["kvloom"]'] in lines
    assert "kvloom" in PROJECT["scripts"]
    assert ["USER", "10001"] in lines
    assert "TORCH ?= torch==2.13.0" in (ROOT / "Makefile").read_text()
    assert "ARG TORCH=torch==2.13.0" in text
