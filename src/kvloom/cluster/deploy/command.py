"""`kvloom deploy` runs the processes of a cluster on Ray Serve."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from .cluster_file import ClusterFile, Group

__all__ = ["arguments", "deploy", "run"]


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", metavar="FILE", help="cluster.toml: routers and workers (see docs/deployment.md)")
    add("--restart", action="store_true", help="restart all processes, some at a time; without it only changed groups restart")  # fmt: skip
    add("--stop", action="store_true", help="end the cluster: its processes finish their requests")
    add("--status", action="store_true", help="show what runs, and exit")
    add("--dry-run", action="store_true", help="check the file and print the commands, without Ray")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    cluster = ClusterFile.read(args.file)
    if args.dry_run:
        commands = {group.name: _example(cluster, group) for group in cluster.groups}
        lines = "\n".join(f"{name}: {' '.join(words)}" for name, words in commands.items())
        print(json.dumps(commands, indent=2) if args.json else lines)
        return 0
    try:
        import ray
        from ray import serve
    except ImportError:
        raise ValueError("kvloom deploy needs Ray: pip install 'kvloom[ray]'") from None
    is_local = cluster.ray == "local"
    ray.init(
        None if is_local else cluster.ray,
        namespace="kvloom",
        log_to_driver=is_local,
        ignore_reinit_error=True,
    )
    if args.stop:
        stop(cluster)
        return 0
    if not args.status:
        serve.start(proxy_location="Disabled")
        deploy(cluster, args.restart)
    found = status(cluster)
    print(json.dumps(found, indent=2) if args.json else _table(found), flush=True)
    if is_local and not args.status:
        print("Ray ends with this command: Ctrl-C ends the cluster", file=sys.stderr)
        try:
            while True:
                time.sleep(3600)
        finally:
            stop(cluster)
    return 0


def deploy(cluster: ClusterFile, restart: bool = False) -> None:
    """Start the groups of a cluster, restart changed groups, and delete groups that the file no longer has. With
    `restart`, restart all groups. Return when all replicas are ready. Ray must be connected.
    """
    import ray
    from ray import serve

    from .members import members_of

    members = members_of(cluster.name)
    before: dict[str, str] = ray.get(members.digests.remote())
    now = {group.name: cluster.digest(group) for group in cluster.groups}
    for name in before.keys() - now.keys():
        serve.delete(_app(cluster, name))
    running = serve.status().applications
    for group in cluster.groups:
        name = _app(cluster, group.name)
        if not restart and before.get(group.name) == now[group.name] and name in running:
            continue
        serve.run(_deployment(cluster, group), name=name, route_prefix=None)
    ray.get(members.digests.remote(now))


def _deployment(cluster: ClusterFile, group: Group) -> Any:
    from ray import serve

    from .replicas import Replica

    options: dict[str, Any] = {"num_replicas": group.replicas}
    if group.max_replicas > group.replicas:
        options = {
            "autoscaling_config": {
                "min_replicas": group.replicas,
                "max_replicas": group.max_replicas,
                "target_ongoing_requests": group.target_requests,
                "upscale_delay_s": group.scale_seconds,
                "downscale_delay_s": 10 * group.scale_seconds,
                "metrics_interval_s": 1.0,
                "look_back_period_s": max(2.0, min(30.0, group.scale_seconds)),
                "policy": {"policy_function": "kvloom.cluster.deploy.replicas:by_load"},
            }
        }
    deployment = serve.deployment(
        Replica,
        name=group.name,
        ray_actor_options={"num_cpus": group.cpus, "num_gpus": group.gpus},
        health_check_period_s=2.0,
        health_check_timeout_s=15.0,
        graceful_shutdown_timeout_s=group.drain_seconds + 10.0,
        graceful_shutdown_wait_loop_s=0.1,
        **options,
    )
    return deployment.bind(cluster, group)


def stop(cluster: ClusterFile) -> None:
    """End the processes of a cluster, and its list of members."""
    import ray
    from ray import serve

    from .members import members_of

    for name in list(serve.status().applications):
        if name.startswith(_app(cluster, "")):
            serve.delete(name)
    ray.kill(members_of(cluster.name))


def status(cluster: ClusterFile) -> list[dict[str, Any]]:
    """Return one entry for each group: its number of replicas by state, and the URLs of its running processes."""
    import ray
    from ray import serve

    from .members import members_of

    members = members_of(cluster.name)
    applications = serve.status().applications
    found = []
    for group in (cluster.router, *cluster.workers):
        app = applications.get(_app(cluster, group.name))
        states = (
            {} if app is None else {str(k): v for k, v in app.deployments[group.name].replica_states.items()}
        )
        living = ray.get(members.living.remote(group.command))
        urls = sorted(url for url, about in living.items() if about["group"] == group.name)
        status_ = "NOT_STARTED" if app is None else app.status.value
        role = "router" if group.command == "route" else group.role
        found.append({"group": group.name, "role": role, "status": status_, "replicas": states, "urls": urls})
    return found


def _app(cluster: ClusterFile, group: str) -> str:
    return f"{cluster.name}-{group}"


def _example(cluster: ClusterFile, group: Group) -> list[str]:
    """Return the command line of a group's first replica. Ports that are chosen at the start are shown as 0."""
    from .replicas import command_of

    host = "NODE" if cluster.bind == "node" else cluster.bind
    peers, encoders = (
        [f"{host}:{port}" for one in groups for port in one.share_ports]
        for groups in (cluster.page_sources(group), cluster.encoders(group))
    )
    ports = [group.port, 0, 0, group.share_port]
    return command_of(cluster, group, host, ports, peers, encoders)[2:]


def _table(found: list[dict[str, Any]]) -> str:
    return "\n".join(
        f"{one['group']:12} {one['role']:8} {one['status']:12} {' '.join(f'{n} {state}' for state, n in one['replicas'].items()):20} {' '.join(one['urls'])}"
        for one in found
    )
