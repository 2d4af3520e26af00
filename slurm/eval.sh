#!/usr/bin/env bash
#SBATCH --job-name=btx-eval
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --mem=64G
#SBATCH --time=01:00:00
#SBATCH --signal=B:USR1@60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x_%j.out
# eval.sh [joint|router]: compares the logits of $BTX_RUNS/export with those of the training it was made from, and leaves
# the validation losses that all runs measured, per domain, in $BTX_RUNS/eval/losses.json. It fails where the logits differ.
#   bash slurm/eval.sh
# It runs no benchmark: there is no btx-nemo command for that yet.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ ! -f $here/common.sh && -n ${SLURM_JOB_ID:-} ]]; then # sbatch runs a copy in slurmd's spool; Slurm knows the submitted path
  for ((try = 0; try < 12; try++)); do # a controller that is being restarted is back in a minute
    here=$(scontrol show job "$SLURM_JOB_ID") && break
    sleep 5
  done
  here=${here#*Command=} here=${here%%/eval.sh*}
fi
if [[ -z $here || ! -f $here/common.sh ]]; then
  printf '%s: common.sh is not beside this script; run or submit it from the folder slurm/\n' "${0##*/}" >&2
  exit 2
fi
# shellcheck source=slurm/common.sh
source "$here/common.sh"

btx_arguments "" "$@"
btx_one_of "training" "${WORDS[0]-joint}" joint router
((${#CONFIG[@]} + ${#OVERRIDES[@]} == 0)) || btx_die 2 "eval.sh takes no settings; usage: eval.sh [joint|router]"
btx_setup "$here" eval

run=${WORDS[0]-joint} out=$RUNS/eval
[[ -e $RUNS/$run/DONE ]] || btx_die 2 "$RUNS/$run/DONE is missing: the mixture is not trained; run train_mix.sh first"
[[ -e $RUNS/export ]] || btx_die 2 "$RUNS/export is missing: the mixture is not exported; run export.sh first"
btx_begin "$out" "$out/DONE" "$run=$RUNS/$run" "export=$RUNS/export"
rc=0
btx_one verify "$RUNS/$run" "$RUNS/export" || rc=$?
if ((rc == 0)); then btx_helper losses "$RUNS" "$out" || rc=$?; fi
btx_finish "$rc" "$out/DONE"
