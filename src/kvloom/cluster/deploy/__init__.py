"""`kvloom deploy`: a cluster on Ray Serve. Ray places, restarts and scales; the processes are those of `kvloom serve` and
`kvloom route`.

    cluster_file.py    ClusterFile: reads and checks cluster.toml
    command.py         `kvloom deploy`
    replicas.py        what runs in Ray: one process per replica, its health, its load
    members.py         Members: which workers exist; routers register them
    supervised.py      runs a command and ends it when its parent is gone

Names of replicas and members are imported where Ray is installed only.
"""

from .cluster_file import ClusterFile, Group

__all__ = ["ClusterFile", "Group"]
