"""Starting training jobs: placement, the mpirun command line, shipping, the job's life, its output."""

from provision.launch.run import JobResult, run_job, start_job

__all__ = ["JobResult", "run_job", "start_job"]
