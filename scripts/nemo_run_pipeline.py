"""The pipeline through NeMo-Run instead of `btx-nemo submit`: the same scripts, submitted by its SlurmExecutor.

    pip install "nemo-run==0.11.1" "leptonai<0.47"
    python scripts/nemo_run_pipeline.py --runs /runs/btx --account me --partition gpu math code prose          # prints
    python scripts/nemo_run_pipeline.py --runs /runs/btx --account me --partition gpu math code prose --submit

NeMo-Run wraps each script in an srun of its own, on one task of the first node. The scripts then start their steps from
there, inside the same allocation; they look at the experts' own files, so a job that starts too early refuses.
What `btx-nemo submit` does beyond that (leaving out what is done, status, cancel, arrays) is not in this example, and
NeMo-Run's batch script, not ours, receives the signal before the time limit: a run that is stopped goes on when this is
called again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import nemo_run as run

SLURM = Path(__file__).resolve().parent.parent / "slurm"


def executor(arguments: argparse.Namespace, *, nodes: int, gpus: int) -> run.SlurmExecutor:
    """What one job asks of the cluster."""
    chosen = run.SlurmExecutor(
        account=arguments.account,
        partition=arguments.partition,
        nodes=nodes,
        ntasks_per_node=1,
        gres=f"gpu:{gpus}" if gpus else None,
        time="04:00:00",
        mem="0",
        exclusive=True,
        packager=run.Packager(),  # the scripts are where they are: nothing is copied
        tunnel=run.LocalTunnel(job_dir=""),  # its own, under $NEMORUN_HOME; an experiment changes it, so one a job
        env_vars={"BTX_RUNS": str(arguments.runs)},
        additional_parameters={"requeue": True, "open_mode": "append"},
    )
    chosen.srun_args = ["--mpi=none", "--overlap", "--nodes=1", "--ntasks=1"]  # its default is --mpi=pmix
    return chosen


def main() -> None:
    """Builds the experiment, and prints or submits it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("domains", nargs="+")
    parser.add_argument("--runs", type=lambda path: Path(path).absolute(), required=True)
    parser.add_argument("--account", required=True)
    parser.add_argument("--partition", required=True)
    parser.add_argument("--nodes", type=int, default=1, help="of each training")
    parser.add_argument("--gpus", type=int, default=8, help="of each node")
    parser.add_argument("--submit", action="store_true")
    arguments = parser.parse_args()

    def add(name: str, script: str, *words: str, after: Sequence[str] = (), trains: bool = True) -> str:
        size = {"nodes": arguments.nodes, "gpus": arguments.gpus} if trains else {"nodes": 1, "gpus": 0}
        task = run.Script(str(SLURM / script), args=list(words), entrypoint="bash")
        return experiment.add(task, executor=executor(arguments, **size), name=name, dependencies=list(after))

    with run.Experiment("btx") as experiment:
        experts = [add(f"expert-{domain}", "train_expert.sh", domain) for domain in arguments.domains]
        add("mix", "mix.sh", *arguments.domains, after=experts, trains=False)
        add("joint", "train_mix.sh", after=["mix"])
        add("export", "export.sh", after=["joint"], trains=False)
        if arguments.submit:
            experiment.run(detach=True)
        else:
            experiment.dryrun()


if __name__ == "__main__":
    main()
