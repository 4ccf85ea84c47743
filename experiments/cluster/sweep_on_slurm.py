"""python sweep_on_slurm.py EXPERIMENT.yaml OUT: run a sweep in Slurm jobs."""

import os
import subprocess
import sys

from dask_jobqueue import SLURMCluster

if __name__ == "__main__":
    experiment, out = sys.argv[1:]
    cluster = SLURMCluster(
        queue="cpu",  # the partition; account="..." if yours wants one
        cores=16,
        processes=16,  # as many as cores: one thread a process
        memory="32GB",  # of the job
        walltime="04:00:00",
        interface="ib0",  # the network that login and compute nodes share
        # workers leave before Slurm kills them
        worker_extra_args=["--lifetime", "225m", "--lifetime-stagger", "10m"],
        local_directory="/tmp",  # of the node
        log_directory="slurm-logs",
        job_script_prologue=["export OMP_NUM_THREADS=1", f"cd {os.getcwd()}"],
    )
    cluster.adapt(minimum_jobs=0, maximum_jobs=20)
    command = [sys.executable, "-m", "moesim", "run", experiment, "--out", out]
    command += ["--scheduler", cluster.scheduler_address]
    code = subprocess.call(command)
    cluster.close()
    sys.exit(code)
