#!/usr/bin/env bash
#SBATCH --job-name=btx-expert
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8
#SBATCH --cpus-per-task=16
#SBATCH --mem=0
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x_%j.out
# train_expert.sh <domain> [overrides...]: trains the specialist of one domain into $BTX_RUNS/expert-<domain>.
#   sbatch slurm/train_expert.sh math layout.tp=2      on a cluster; sbatch options go before the script
#   bash slurm/train_expert.sh math                    on this machine
# The same command again resumes; it does nothing once DONE is there. BTX_CONFIG names the configuration (expert).
# Site settings: SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT, and SBATCH_GRES: "gpu:4", or
# "none" on nodes without GPUs and where GPUs are asked for in another way (--gpus-per-node adds to --gres).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ ! -f $here/common.sh ]]; then # sbatch runs a copy in slurmd's spool; Slurm knows the submitted path
  here=$(scontrol show job "${SLURM_JOB_ID:?}" | sed -n 's|^ *Command=\(/.*\)/train_expert\.sh\( .*\)*$|\1|p')
  here=${here%%$'\n'*}
fi
# shellcheck source=slurm/common.sh
source "$here/common.sh"

(($#)) || btx_die 2 "no domain; usage: train_expert.sh <domain> [overrides...]"
domain=$1
shift
btx_check_domain "$domain"
btx_check_overrides "domain out" "$@"
btx_setup "$here"

out=$RUNS/expert-$domain
if [[ ! -e $out/DONE ]]; then
  btx_log "expert $domain into $out"
  rc=0
  settings=("$(btx_setting domain "$domain")" "$(btx_setting out "$out")" export=true)
  btx_ranks train --config-name "${BTX_CONFIG:-expert}" "${settings[@]}" "$@" || rc=$?
fi
btx_finish "${rc:-0}" "$out/DONE"
