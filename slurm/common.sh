# shellcheck shell=bash
# Sourced by the job scripts after `set -euo pipefail`. Runs a command as a Slurm step inside a job and as a plain
# process elsewhere, asks it to save before the time limit, and requeues the job a bounded number of times.
#
# Environment (all optional; nothing in it is ever evaluated):
#   BTX_RUNS         folder of all runs                        (runs/ in the current directory)
#   BTX_SEED         the seed: a HF folder, or a run with hf/  ($BTX_RUNS/seed)
#   BTX_DATA         prepared data                             ($BTX_RUNS/data)
#   BTX_PYTHON       interpreter        (.venv/bin/python beside slurm/ if it is there, else python3)
#   BTX_NPROC        ranks per node     (the GPUs of the node, 1 where there are none)
#   BTX_CLI          one executable in place of `python -m btx_nemo`, started once per node; it starts its own ranks
#   BTX_LOCAL=1      no Slurm step even inside a job
#   BTX_MAX_RESTARTS requeues before a job gives up            (10)
#   BTX_REQUEUE_ON_FAILURE=1  requeue after a crash too, not only before the time limit

STOP=""        # why the ranks were asked to stop: "" | limit | cancel
STOP_SIGNAL="" # what the running step understands as that request
STEP_PID=""    # the running step or process
NAGGER=""      # repeats the request
# Without a trap USR1 would kill this shell. A trap only runs while bash waits: see btx_wait.
trap 'btx_stop limit' USR1
trap 'btx_stop cancel' TERM INT

btx_log() { printf '[btx] %s %s\n' "$(date +%FT%T)" "$*"; }
btx_die() { # code message
  printf '%s: %s\n' "${0##*/}" "$2" >&2
  exit "$1"
}

btx_integer() { # name value: arithmetic on an unchecked string would run what it contains
  [[ $2 =~ ^[0-9]{1,9}$ ]] || btx_die 2 "$1='$2' is not a whole number; set it to one, or unset it"
  printf '%d' "$((10#$2))"
}
btx_check_domain() {
  local LC_ALL=C # elsewhere a-z may hold capitals and accents
  [[ $1 =~ ^[a-z][a-z0-9_-]*$ ]] ||
    btx_die 2 "domain ${1@Q}: only a-z, 0-9, _ and - are allowed, a letter first; rename the domain"
  [[ ! $1 =~ ^(seed|generalist|tokenizer|text)$ ]] || btx_die 2 "domain '$1': has another meaning; rename the domain"
}
btx_check_overrides() { # reserved-keys override...: the script decides these, and looks for DONE there
  local key reserved=$1 override
  shift
  for override in "$@"; do
    key=${override%%=*}
    key=${key#"${key%%[!+~]*}"}
    [[ " $reserved " != *" $key "* ]] ||
      btx_die 2 "override ${override@Q}: this script sets $key itself; choose the folder with BTX_RUNS, or use btx-nemo directly"
  done
}
btx_setting() { # key value: one override, spelled so that Hydra reads back exactly this string
  local LC_ALL=C
  if [[ $2 =~ ^[A-Za-z/.][A-Za-z0-9_/.-]*$ && ! ${2,,} =~ ^(null|true|false|nan|inf)$ ]]; then
    printf '%s=%s' "$1" "$2"
  else
    printf "%s='%s'" "$1" "$2"
  fi
}
btx_check_path() { # name path: what btx_setting cannot spell
  [[ $2 != *[\'\\\$]* && $2 != *$'\n'* ]] ||
    btx_die 2 "$1: the path ${2@Q} has a quote, a backslash, a dollar or a line break in it; use another folder"
}

btx_setup() { # slurm-dir
  local home
  home=$(cd "$1/.." && pwd)
  NODE_SCRIPT=$1/node.sh
  RUNS=${BTX_RUNS:-runs}
  { mkdir -p -- "$RUNS" && RUNS=$(cd -- "$RUNS" && pwd); } 2>/dev/null ||
    btx_die 2 "BTX_RUNS: ${RUNS@Q} cannot be made or entered; set BTX_RUNS to a folder where you may write"
  export BTX_RUNS=$RUNS BTX_DATA=${BTX_DATA:-$RUNS/data} BTX_SEED=${BTX_SEED:-$RUNS/seed} PYTHONUNBUFFERED=1
  if [[ ! -f $BTX_SEED/config.json && -f $BTX_SEED/hf/config.json ]]; then BTX_SEED=$BTX_SEED/hf; fi
  btx_check_path BTX_RUNS "$RUNS"
  btx_check_path BTX_SEED "$BTX_SEED"
  # A checkout runs its own code, whichever version is installed.
  if [[ -f $home/btx_nemo/__main__.py ]]; then export PYTHONPATH=$home${PYTHONPATH:+:$PYTHONPATH}; fi
  PYTHON=${BTX_PYTHON:-}
  if [[ -z $PYTHON && -x $home/.venv/bin/python ]]; then PYTHON=$home/.venv/bin/python; fi
  PYTHON=${PYTHON:-python3}
  CLI=("$PYTHON" -m btx_nemo)
  if [[ -n ${BTX_CLI:-} ]]; then CLI=("$BTX_CLI"); fi
  command -v -- "${CLI[0]}" >/dev/null ||
    btx_die 3 "'${CLI[0]}' is not an executable; set BTX_PYTHON to the Python that has btx-nemo installed"
  MAX_RESTARTS=$(btx_integer BTX_MAX_RESTARTS "${BTX_MAX_RESTARTS:-10}")
  RESTARTS=$(btx_integer SLURM_RESTART_COUNT "${SLURM_RESTART_COUNT:-0}")
  IN_SLURM=0
  if [[ -n ${SLURM_JOB_ID:-} && ${BTX_LOCAL:-0} != 1 ]]; then IN_SLURM=1; fi
  btx_launcher
}

btx_launcher() { # sets RANKS, the command that starts the ranks of one node, and STEP, what places it on the nodes
  local nproc job nodes host
  LOCAL_AGENT=0 # 1: the local process is torchrun, the ranks are its children
  nproc=$(btx_integer BTX_NPROC "${BTX_NPROC:-$(btx_count_gpus)}")
  if ((nproc == 0)); then nproc=1; fi
  STEP=() RANKS=("${CLI[@]}")
  if ((!IN_SLURM)); then
    btx_log "on this machine, $nproc rank(s)"
    if ((nproc > 1)) && [[ -z ${BTX_CLI:-} ]]; then
      LOCAL_AGENT=1
      RANKS=("$PYTHON" -m torch.distributed.run --standalone "--nproc-per-node=$nproc" -m btx_nemo)
    fi
    return 0
  fi
  job=$(btx_integer SLURM_JOB_ID "$SLURM_JOB_ID")
  nodes=$(btx_integer SLURM_JOB_NUM_NODES "${SLURM_JOB_NUM_NODES:-1}")
  host=localhost # one node needs no name that others can resolve
  if ((nodes > 1)); then host=$(scontrol show hostnames "$SLURM_JOB_NODELIST"); fi
  # Two jobs may share a node: each gets its own port, below the range the kernel hands out.
  MASTER_ADDR=${host%%$'\n'*} MASTER_PORT=$((20000 + job % 10000))
  export MASTER_ADDR MASTER_PORT
  if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
  STEP=(srun --kill-on-bad-exit=1)
  EVERY_NODE=("--nodes=$nodes" "--ntasks=$nodes" --ntasks-per-node=1)
  if [[ -z ${BTX_CLI:-} ]]; then
    RANKS=("$PYTHON" -m torch.distributed.run "--nnodes=$nodes" "--nproc-per-node=$nproc" --rdzv-backend=c10d
      "--rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT" "--rdzv-id=$job.$RESTARTS" -m btx_nemo)
  fi
  btx_log "job $job, restart $RESTARTS of $MAX_RESTARTS, $nodes node(s) x $nproc rank(s), meeting at $MASTER_ADDR:$MASTER_PORT"
}

btx_count_gpus() {
  local devices
  # SLURM_GPUS_PER_NODE is unset when GPUs were asked for with --gres.
  if [[ -n ${SLURM_JOB_ID:-} && ${BTX_LOCAL:-0} != 1 ]]; then
    printf '%s' "${SLURM_GPUS_ON_NODE:-0}"
  elif [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    devices=${CUDA_VISIBLE_DEVICES//[^,]/}
    if [[ $CUDA_VISIBLE_DEVICES =~ ^[0-9GM] ]]; then printf '%d' "$((${#devices} + 1))"; else printf 0; fi
  elif command -v nvidia-smi >/dev/null && devices=$(nvidia-smi --list-gpus 2>/dev/null); then
    grep -c '^GPU ' <<<"$devices" || true
  else
    printf 0
  fi
}

btx_ranks() { # arguments of the command...: on every node, stopped by USR1
  STOP_SIGNAL=USR1
  if ((IN_SLURM)); then
    btx_wait "${STEP[@]}" "${EVERY_NODE[@]}" bash "$NODE_SCRIPT" "${RANKS[@]}" "$@"
  else
    STOP_SIGNAL=TERM
    btx_wait "${RANKS[@]}" "$@"
  fi
}
btx_one() { # arguments of the command...: one process; it cannot save half of its work, so a stop ends it
  STOP_SIGNAL=TERM
  if ((IN_SLURM)); then
    btx_wait "${STEP[@]}" --nodes=1 --ntasks=1 "${CLI[@]}" "$@"
  else
    btx_wait "${CLI[@]}" "$@"
  fi
}
btx_wait() { # command...: in the background, because bash runs no trap while a foreground command runs
  local rc=0
  [[ -z $STOP ]] || return 75
  "$@" &
  STEP_PID=$!
  if [[ -n $STOP ]]; then btx_forward; fi # the request came while the step was being started
  while :; do # a trap interrupts `wait`
    rc=0
    wait "$STEP_PID" || rc=$?
    kill -0 "$STEP_PID" 2>/dev/null || break
  done
  STEP_PID=""
  if [[ -n $NAGGER ]]; then kill "$NAGGER" 2>/dev/null || true; fi
  NAGGER=""
  return "$rc"
}

btx_stop() { # limit|cancel
  STOP=$1
  btx_log "asked to stop ($1)"
  if [[ -n $STEP_PID ]]; then btx_forward; fi
}
btx_forward() { # passes the request on to the running step
  if ((!IN_SLURM)); then
    if ((LOCAL_AGENT)); then
      # torchrun itself would SIGKILL its ranks 30 s after a TERM, saved or not.
      pkill -TERM -P "$STEP_PID" || kill -TERM "$STEP_PID" 2>/dev/null || true
    else
      kill -TERM "$STEP_PID" 2>/dev/null || true
    fi
  elif [[ $STOP == limit && -z $NAGGER ]]; then # on a cancel Slurm signals the ranks itself
    # Signalling srun instead would have it SIGKILL its tasks. A rank that is still importing misses the signal: repeat.
    (while scancel --signal="$STOP_SIGNAL" "$SLURM_JOB_ID"; do sleep 20; done) >/dev/null 2>&1 &
    NAGGER=$!
  fi
}

btx_finish() { # rc done-path: what is on disk decides, never the exit status (torchrun's is 1 after a good save)
  local rc=$1
  if [[ -e $2 ]]; then
    btx_log "done: $2"
    exit 0
  fi
  if [[ $rc == 0 && -z $STOP ]]; then
    btx_die 1 "the command ended without an error, but $2 is missing; look at the log above"
  fi
  if ((IN_SLURM)) && [[ $STOP == limit || (-z $STOP && ${BTX_REQUEUE_ON_FAILURE:-0} == 1) ]]; then
    btx_requeue
  fi
  if [[ -n $STOP ]]; then
    btx_log "stopped before the end: the same command goes on from the last checkpoint"
    exit 75
  fi
  btx_log "failed with status $rc: $2 was not written" >&2
  exit "$((rc > 0 ? rc : 1))"
}
btx_requeue() { # before the job ends: a dependency that has failed is not revived by a later requeue
  if ((RESTARTS >= MAX_RESTARTS)); then
    btx_log "not requeued: $RESTARTS restarts, BTX_MAX_RESTARTS=$MAX_RESTARTS" >&2
    return 0
  fi
  btx_log "requeue $((RESTARTS + 1)) of $MAX_RESTARTS"
  trap 'exit 75' TERM
  if scontrol requeue "$SLURM_JOB_ID"; then
    sleep 120 & # Slurm ends the job meanwhile
    wait $! || true
  fi
  btx_log "the requeue was refused" >&2
}
