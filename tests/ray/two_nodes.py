"""Two Ray nodes on this machine under two addresses: `two_nodes.py [GPUS]`; prints the cluster's address, and ends with its standard input.

The first has the resource `trainers` and is said to have GPUS GPUs (0), which Ray then gives out whether they exist or not; the second is
127.0.0.2 and has 2 of the resource `engines`. A line `hold` on standard input takes those away from others.
"""

import sys

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group

STORE = 80_000_000


def main() -> None:
    gpus = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    head = {"num_cpus": 4, "num_gpus": gpus, "resources": {"trainers": 1}, "include_dashboard": False, "object_store_memory": STORE}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=4, num_gpus=0, resources={"engines": 2}, object_store_memory=STORE, node_ip_address="127.0.0.2")
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line.strip() == "hold":
            ray.init(address=cluster.address, log_to_driver=False, namespace="other")
            assert placement_group([{"engines": 2}]).wait(30)
            print("held", flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
