#!/usr/bin/env bash
#SBATCH --job-name=btx-mix
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
# mix.sh <domain>... [-- overrides...]: assembles the finished experts and the seed into $BTX_RUNS/mix, a Hugging Face
# folder, then trains the mixture into $BTX_RUNS/joint. The overrides are for the training.
#   sbatch slurm/mix.sh math code prose -- layout.ep=4
#   bash slurm/mix.sh math code prose
# It waits for nothing: an expert without its DONE is an error. BTX_RECIPE names the mix (btx), BTX_MIX_CONFIG the
# training (mix). Site settings as in train_expert.sh.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ ! -f $here/common.sh ]]; then # sbatch runs a copy in slurmd's spool; Slurm knows the submitted path
  here=$(scontrol show job "${SLURM_JOB_ID:?}" | sed -n 's|^ *Command=\(/.*\)/mix\.sh\( .*\)*$|\1|p')
  here=${here%%$'\n'*}
fi
# shellcheck source=slurm/common.sh
source "$here/common.sh"

domains=()
while (($#)) && [[ $1 != -- ]]; do
  btx_check_domain "$1"
  [[ " ${domains[*]-} " != *" $1 "* ]] || btx_die 2 "domain '$1' is named twice; name it once"
  domains+=("$1")
  shift
done
if (($#)); then shift; fi
((${#domains[@]})) || btx_die 2 "no domain; usage: mix.sh <domain>... [-- overrides...]"
btx_check_overrides "out init_from" "$@"
btx_setup "$here"

mix=$RUNS/mix joint=$RUNS/joint record=$RUNS/mix.domains
if [[ -e $record && (-e $mix || -e $joint) && $(<"$record") != "${domains[*]}" ]]; then
  btx_die 2 "$RUNS holds a mix of '$(<"$record")', not of '${domains[*]}'; remove its mix/, joint/ and export/, or use another BTX_RUNS"
fi
if [[ -e $joint/DONE ]]; then btx_finish 0 "$joint/DONE"; fi

# Slurm takes `afterok` on a job it no longer knows as satisfied: only the experts' own files count.
sources=()
for domain in "${domains[@]}"; do
  run=$RUNS/expert-$domain
  [[ -e $run/DONE ]] || btx_die 2 "$run/DONE is missing: expert $domain is not finished; run train_expert.sh $domain first"
  [[ -d $run/hf ]] || btx_die 2 "$run/hf is missing: expert $domain was not exported; run btx-nemo export in=$run out=$run/hf"
  sources+=("$(btx_setting "experts.$domain" "$run/hf")")
done

if [[ ! -e $mix ]]; then # `mix` renames the folder into place when it is whole
  [[ -d $BTX_SEED ]] || btx_die 2 "the seed $BTX_SEED is not a folder; set BTX_SEED to the seed's Hugging Face folder"
  btx_log "mix of ${domains[*]} into $mix"
  printf '%s\n' "${domains[*]}" >"$record"
  rc=0
  settings=("$(btx_setting seed "$BTX_SEED")" "${sources[@]}" "$(btx_setting out "$mix")")
  btx_one mix --config-name "${BTX_RECIPE:-btx}" "${settings[@]}" || rc=$?
  [[ -e $mix ]] || btx_finish "$rc" "$mix"
fi

btx_log "joint training into $joint"
rc=0
settings=("$(btx_setting init_from "$mix")" "$(btx_setting out "$joint")")
btx_ranks train --config-name "${BTX_MIX_CONFIG:-mix}" "${settings[@]}" "$@" || rc=$?
btx_finish "$rc" "$joint/DONE"
