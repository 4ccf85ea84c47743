"""Run a sweep in pods; start this in a pod that mounts the shared volume too."""

import subprocess
import sys

from dask_kubernetes.operator import KubeCluster, make_cluster_spec

if __name__ == "__main__":
    spec = make_cluster_spec(
        name="moesim",
        image="registry.example.org/moesim:0.2.0",
        n_workers=20,
        worker_command=["dask", "worker", "--nthreads", "1"],  # one process a pod
        resources={kind: {"cpu": "1", "memory": "2Gi"} for kind in ("requests", "limits")},
        env={"OMP_NUM_THREADS": "1"},
    )
    for part in ("scheduler", "worker"):
        pod = spec["spec"][part]["spec"]
        claim = {"claimName": "moesim-shared"}
        pod["volumes"] = [{"name": "shared", "persistentVolumeClaim": claim}]
        pod["containers"][0] |= {
            "volumeMounts": [{"name": "shared", "mountPath": "/shared"}],
            "workingDir": "/shared/sweep",
        }
    cluster = KubeCluster(custom_cluster_spec=spec, quiet=True)
    # cluster.adapt(minimum=1, maximum=100)
    command = ["moesim", "run", "sweep.yaml", "--out", "results/sweep"]
    command += ["--scheduler", cluster.scheduler_address]
    code = subprocess.call(command, cwd="/shared/sweep")
    cluster.close()
    sys.exit(code)
