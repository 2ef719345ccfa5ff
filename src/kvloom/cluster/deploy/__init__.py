"""`kvloom deploy` runs a cluster on Ray Serve. Ray places, restarts and scales the processes of the cluster: workers
(`kvloom serve`) and routers (`kvloom route`).

    cluster_file.py    ClusterFile: reads and checks cluster.toml
    command.py         `kvloom deploy`
    replicas.py        Replica: runs one process in Ray, and reports its health and its load
    members.py         Members: the list of running workers and routers. The Ray replica of a router
                       reads the workers from it and registers them with the router
    supervised.py      runs a command and ends it when its parent is gone

The modules `replicas` and `members` need Ray and are imported on first use.
"""

from .cluster_file import ClusterFile, Group

__all__ = ["ClusterFile", "Group"]
