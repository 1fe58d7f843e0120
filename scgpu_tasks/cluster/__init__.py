"""Dask clusters that notebooks, the library and the flows run on.

`start_cluster` returns a ``distributed.Client`` of a new cluster for this machine, or of one
that somebody else runs; `make_cluster` the cluster alone.
"""

from scgpu_tasks.cluster.adopt import (
    cluster_facts,
    connect,
    lost_workers,
    require_reach,
    stop_work,
)
from scgpu_tasks.cluster.plan import ClusterPlan, plan_cluster, resolve_device
from scgpu_tasks.cluster.start import make_cluster, start_cluster

__all__ = [
    "ClusterPlan",
    "cluster_facts",
    "connect",
    "lost_workers",
    "make_cluster",
    "plan_cluster",
    "require_reach",
    "resolve_device",
    "start_cluster",
    "stop_work",
]
