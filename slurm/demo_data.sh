#!/usr/bin/env bash
#SBATCH --job-name=btx-data
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --mem=8G
#SBATCH --time=01:00:00
#SBATCH --signal=B:USR1@60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x_%j.out
# demo_data.sh: three small domains of real text and their tokenizer, into $BTX_DATA. Nothing is downloaded.
# demo_data.sh chats: conversations made of that text, into $BTX_CHATS.
#   bash slurm/demo_data.sh
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ ! -f $here/common.sh && -n ${SLURM_JOB_ID:-} ]]; then # sbatch runs a copy in slurmd's spool; Slurm knows the submitted path
  for ((try = 0; try < 12; try++)); do # a controller that is being restarted is back in a minute
    here=$(scontrol show job "$SLURM_JOB_ID") && break
    sleep 5
  done
  here=${here#*Command=} here=${here%%/demo_data.sh*}
fi
if [[ -z $here || ! -f $here/common.sh ]]; then
  printf '%s: common.sh is not beside this script; run or submit it from the folder slurm/\n' "${0##*/}" >&2
  exit 2
fi
# shellcheck source=slurm/common.sh
source "$here/common.sh"

btx_arguments "" "$@"
(($# == 0)) || [[ $* == chats ]] || btx_die 2 "${1@Q}: this script takes nothing but chats; the folders are BTX_DATA and BTX_CHATS"
btx_setup "$here" "${1-data}"

out=$BTX_DATA
if (($#)); then out=$BTX_CHATS; fi
btx_begin "$out" "$out"
rc=0
if (($#)); then
  btx_one prepare-data "$BTX_DATA" --demo --chat --out "$out" || rc=$?
else
  btx_one prepare-data --demo --out "$out" || rc=$?
fi
btx_finish "$rc" "$out"
