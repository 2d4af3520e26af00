# shellcheck shell=bash
# Sourced by the job scripts after `set -euo pipefail`. Runs a command as a Slurm step inside a job and as a plain
# process elsewhere, asks it to save before the time limit, and requeues the job a bounded number of times.
#
# Environment (all optional; nothing in it is ever evaluated):
#   BTX_RUNS         folder of all runs                        (runs/ in the current directory)
#   BTX_SEED         the seed: a HF folder, or a run with hf/  ($BTX_RUNS/seed)
#   BTX_ANCHOR       the seed of mixes, and of pairs           ($BTX_SEED)
#   BTX_DATA         prepared text                             ($BTX_RUNS/data)
#   BTX_CHATS        prepared conversations                    ($BTX_RUNS/chats)
#   BTX_PYTHON       interpreter        (.venv/bin/python beside slurm/ if it is there, else python3; in a container python3)
#   BTX_NPROC        ranks per node     (the GPUs of the node, 1 where there are none)
#   BTX_CLI          one executable in place of `python -m btx_nemo`, started once per node; it starts its own ranks
#   BTX_LOCAL=1      no Slurm step even inside a job
#   BTX_MAX_RESTARTS requeues before a job gives up            (10)
#   BTX_REQUEUE_ON_FAILURE=1  requeue after a crash too, not only before the time limit
#   BTX_CONTAINER    image that the work runs in: what pyxis takes (docker://..., .sqsh), or a .sif for Apptainer
#   BTX_CONTAINER_RUNTIME     pyxis or apptainer               (by the image's name)
#   BTX_CONTAINER_MOUNTS      further mounts, SRC:DST,...      (runs, data, models and these scripts are mounted always)
#
# Every script takes words (domains, a run), then --config-name=NAME, --config-path=DIR and KEY=VALUE for the command.

STOP=""        # why the ranks were asked to stop: "" | limit | cancel
STOP_SIGNAL="" # what the running step understands as that request
STEP_PID=""    # the running step or process
STAGE=""       # name of what this job makes: $RUNS/state/$STAGE.events tells its story
JOB=""         # this job as scontrol and scancel know it
NAGGER=""      # repeats the request
# Without a trap USR1 would kill this shell. A trap only runs while bash waits: see btx_wait.
trap 'btx_stop limit' USR1
trap 'btx_stop cancel' TERM INT
# shellcheck source=slurm/arguments.sh
source "$(dirname "${BASH_SOURCE[0]}")/arguments.sh"
# shellcheck source=slurm/devices.sh
source "$(dirname "${BASH_SOURCE[0]}")/devices.sh"

btx_log() { printf '[btx] %s %s\n' "$(date +%FT%T)" "$*"; }
btx_die() { # code message
  printf '%s: %s\n' "${0##*/}" "$2" >&2
  btx_event failed
  exit "$1"
}

btx_event() { # what: one line in the story of this stage; a full disk does not end the job
  [[ -z $STAGE ]] ||
    printf '%(%s)T\t%s\t%s\t%s\t%s\n' -1 "$1" "${JOB:-local}" "$RESTARTS" "${SLURM_JOB_NODELIST:-$HOSTNAME}" \
      2>/dev/null >>"$RUNS/state/$STAGE.events" || true
}

btx_setup() { # slurm-dir stage
  local home task
  home=$(cd "$1/.." && pwd)
  NODE_SCRIPT=$1/node.sh
  RUNS=${BTX_RUNS:-runs}
  { mkdir -p -- "$RUNS/state" && RUNS=$(cd -- "$RUNS" && pwd); } 2>/dev/null ||
    btx_die 2 "BTX_RUNS: ${RUNS@Q} cannot be made or entered; set BTX_RUNS to a folder where you may write"
  BTX_DATA=$(realpath -sm -- "${BTX_DATA:-$RUNS/data}") BTX_CHATS=$(realpath -sm -- "${BTX_CHATS:-$RUNS/chats}")
  BTX_SEED=$(btx_exported "$(realpath -sm -- "${BTX_SEED:-$RUNS/seed}")")
  BTX_ANCHOR=$(btx_exported "$(realpath -sm -- "${BTX_ANCHOR:-$BTX_SEED}")")
  export BTX_RUNS=$RUNS BTX_DATA BTX_CHATS BTX_SEED BTX_ANCHOR PYTHONUNBUFFERED=1
  btx_check_path BTX_RUNS "$RUNS"
  btx_check_path BTX_SEED "$BTX_SEED"
  btx_check_path BTX_ANCHOR "$BTX_ANCHOR"
  MAX_RESTARTS=$(btx_integer BTX_MAX_RESTARTS "${BTX_MAX_RESTARTS:-10}")
  RESTARTS=$(btx_integer SLURM_RESTART_COUNT "${SLURM_RESTART_COUNT:-0}")
  IN_SLURM=0
  if [[ -n ${SLURM_JOB_ID:-} && ${BTX_LOCAL:-0} != 1 ]]; then
    IN_SLURM=1
    JOB=$(btx_integer SLURM_JOB_ID "$SLURM_JOB_ID")
    # The id of one task of an array is, for one of them, that of the array: a signal to it would reach them all.
    if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then
      JOB=$(btx_integer SLURM_ARRAY_JOB_ID "${SLURM_ARRAY_JOB_ID:-}")
      task=$(btx_integer SLURM_ARRAY_TASK_ID "$SLURM_ARRAY_TASK_ID")
      JOB+=_$task
    fi
  fi
  STAGE=$2
  # Where a rank says that its code is 2 or 3: torchrun makes 1 of it. What an earlier start said does not count.
  export _BTX_REFUSED=$RUNS/state/$STAGE.refused
  rm -f -- "$_BTX_REFUSED" 2>/dev/null || true
  btx_event start
  # A checkout runs its own code, whichever version is installed.
  if [[ -f $home/btx_nemo/__main__.py ]]; then export PYTHONPATH=$home${PYTHONPATH:+:$PYTHONPATH}; fi
  PYTHON=${BTX_PYTHON:-}
  if [[ -z $PYTHON && -z ${BTX_CONTAINER:-} && -x $home/.venv/bin/python ]]; then PYTHON=$home/.venv/bin/python; fi
  PYTHON=${PYTHON:-python3}
  CLI=("$PYTHON" -m btx_nemo)
  if [[ -n ${BTX_CLI:-} ]]; then CLI=("$BTX_CLI"); fi
  [[ -n ${BTX_CONTAINER:-} ]] || command -v -- "${CLI[0]}" >/dev/null ||
    btx_die 3 "'${CLI[0]}' is not an executable; set BTX_PYTHON to the Python that has btx-nemo installed"
  btx_container "$home"
  btx_launcher
}

btx_exported() { # folder: the Hugging Face folder of a run, where it has one
  if [[ ! -f $1/config.json && -f $1/hf/config.json ]]; then printf '%s/hf' "$1"; else printf '%s' "$1"; fi
}
btx_finished() { # model: a run that is not finished has checkpoints, too
  [[ ! -e $1/resolved.yaml || -e $1/DONE ]] ||
    btx_die 2 "$1/DONE is missing: that training is not finished; let it end first, or name a checkpoint of it"
}

btx_container() { # home: sets IMAGE, options of srun for pyxis, and INSIDE, a command before the command for Apptainer
  local image=${BTX_CONTAINER:-} folder mounts="" runtime=pyxis program
  IMAGE=() INSIDE=()
  [[ -n $image ]] || return 0
  if [[ $image == *.sif ]]; then runtime=apptainer; fi
  runtime=${BTX_CONTAINER_RUNTIME:-$runtime}
  for folder in "$1" "$RUNS" "$BTX_DATA" "$BTX_CHATS" "$BTX_SEED" "$BTX_ANCHOR"; do
    [[ -e $folder && ",$mounts," != *",$folder:$folder,"* ]] || continue
    [[ $folder != *[,:]* ]] || btx_die 2 "${folder@Q}: has a comma or a colon in it, and so cannot be mounted; use another folder"
    mounts+=${mounts:+,}$folder:$folder
  done
  mounts+=${BTX_CONTAINER_MOUNTS:+,$BTX_CONTAINER_MOUNTS}
  case $runtime in
    pyxis)
      ((IN_SLURM)) || btx_die 2 "BTX_CONTAINER: pyxis is a part of Slurm; without Slurm use a .sif image with Apptainer"
      IMAGE=("--container-image=$image" "--container-mounts=$mounts" "--container-workdir=$RUNS" --no-container-mount-home)
      ;;
    apptainer)
      program=$(command -v apptainer || command -v singularity) ||
        btx_die 3 "BTX_CONTAINER: neither apptainer nor singularity is on PATH; load its module, or use pyxis"
      INSIDE=("$program" exec --bind "$mounts" --pwd "$RUNS")
      if [[ $(btx_count_gpus) != 0 ]]; then INSIDE+=(--nv); fi
      INSIDE+=("$image")
      ;;
    *) btx_die 2 "BTX_CONTAINER_RUNTIME='$runtime': unknown; known: pyxis, apptainer" ;;
  esac
}

btx_launcher() { # sets RANKS, the command that starts the ranks of one node, and STEP, what places it on the nodes
  local nproc job nodes host
  LOCAL_AGENT=0 # 1: the local process is torchrun, the ranks are its children
  nproc=$(btx_integer BTX_NPROC "${BTX_NPROC:-$(btx_count_gpus)}")
  if ((nproc == 0)); then nproc=1; fi
  STEP=() RANKS=("${CLI[@]}")
  if ((!IN_SLURM)); then
    btx_log "on this machine, $nproc rank(s)"
    # What runs here ends with this script, however that ends. In a job Slurm sees to it.
    if setpriv --help 2>/dev/null | grep -q -e --pdeathsig; then STEP=(setpriv --pdeathsig TERM --); fi
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
  STEP=(srun --kill-on-bad-exit=1 "${IMAGE[@]}")
  EVERY_NODE=("--nodes=$nodes" "--ntasks=$nodes" --ntasks-per-node=1)
  if [[ -z ${BTX_CLI:-} ]]; then
    RANKS=("$PYTHON" -m torch.distributed.run "--nnodes=$nodes" "--nproc-per-node=$nproc" --rdzv-backend=c10d
      "--rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT" "--rdzv-id=$job.$RESTARTS" -m btx_nemo)
  fi
  btx_log "job $JOB, restart $RESTARTS of $MAX_RESTARTS, $nodes node(s) x $nproc rank(s), meeting at $MASTER_ADDR:$MASTER_PORT"
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

btx_helper() { # arguments...: our own command on this node, and in a step only where a container asks for one
  local -a place=("${STEP[@]}")
  if ((IN_SLURM)); then
    if ((${#IMAGE[@]} + ${#INSIDE[@]})); then place+=(--nodes=1 --ntasks=1); else place=(); fi
  fi
  STOP_SIGNAL=TERM
  btx_wait "${place[@]}" "${INSIDE[@]}" "$PYTHON" -m btx_nemo "$@"
}
btx_begin() { # out done name=folder...: records what `out` is made of; one made of something else is put aside
  local rc=0 out=$1 done_path=$2
  shift 2
  btx_helper stage "$RUNS" "$STAGE" "$out" "$@" -- "${CONFIG[@]}" "${OVERRIDES[@]}" || rc=$?
  if ((rc)); then btx_finish "$rc" ""; fi
  if [[ -e $done_path ]]; then btx_finish 0 "$done_path"; fi
}
btx_begin_from() { # out: of a training that starts from $BTX_SEED, or from an init_from of its own
  local from
  from=$(btx_override init_from)
  from=${from:-$BTX_SEED}
  btx_finished "$from"
  btx_begin "$1" "$1/DONE" "from=$from"
}
btx_train() { # out KEY=VALUE...: trains into `out` with these settings and those of the user, and ends the script
  local rc=0 out=$1
  shift
  btx_ranks train "${CONFIG[@]}" "$@" "${OVERRIDES[@]}" || rc=$?
  btx_finish "$rc" "$out/DONE"
}
btx_ranks() { # arguments of the command...: on every node, stopped by USR1
  STOP_SIGNAL=USR1
  if ((IN_SLURM)); then
    btx_wait "${STEP[@]}" "${EVERY_NODE[@]}" "${INSIDE[@]}" bash "$NODE_SCRIPT" "${RANKS[@]}" "$@"
  else
    STOP_SIGNAL=TERM
    btx_tune "$PYTHON" "$@"
    btx_wait "${STEP[@]}" "${INSIDE[@]}" "${RANKS[@]}" "$@"
  fi
}
btx_one() { # arguments of the command...: one process; it cannot save half of its work, so a stop ends it
  STOP_SIGNAL=TERM
  if ((IN_SLURM)); then
    btx_wait "${STEP[@]}" --nodes=1 --ntasks=1 "${INSIDE[@]}" "${CLI[@]}" "$@"
  else
    btx_wait "${STEP[@]}" "${INSIDE[@]}" "${CLI[@]}" "$@"
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
    # So does a controller that is away for a while.
    (while kill -0 "$STEP_PID"; do scancel --signal="$STOP_SIGNAL" "$JOB" && sleep 15; sleep 5; done) >/dev/null 2>&1 &
    NAGGER=$!
  fi
}

btx_finish() { # rc done-path: what is on disk decides, never the exit status (torchrun's is 1 after a good save)
  local rc=$1
  if [[ -n $2 && -e $2 ]]; then
    btx_log "done: $2"
    btx_event 'done'
    exit 0
  fi
  if [[ $rc == 0 && -z $STOP ]]; then
    btx_die 1 "the command ended without an error, but $2 is missing; look at the log above"
  fi
  # 2 and 3 say that the input or the installation is wrong, or a disk full: that is so the next time too.
  if [[ $rc != [23] && -e $_BTX_REFUSED ]]; then rc=2; fi
  if ((IN_SLURM)) && [[ $STOP == limit || (-z $STOP && $rc != [23] && ${BTX_REQUEUE_ON_FAILURE:-0} == 1) ]]; then
    btx_requeue
  fi
  if [[ -n $STOP ]]; then
    btx_log "stopped before the end: the same command goes on from the last checkpoint"
    btx_event stopped
    exit 75
  fi
  btx_log "failed with status $rc${2:+: $2 was not written}" >&2
  btx_event failed
  exit "$((rc > 0 ? rc : 1))"
}
btx_requeue() { # before the job ends: a dependency that has failed is not revived by a later requeue
  local try
  if ((RESTARTS >= MAX_RESTARTS)); then
    btx_log "not requeued: $RESTARTS restarts, BTX_MAX_RESTARTS=$MAX_RESTARTS" >&2
    return 0
  fi
  btx_log "requeue $((RESTARTS + 1)) of $MAX_RESTARTS"
  btx_event requeue
  trap 'exit 75' TERM
  for ((try = 0; try < 12; try++)); do # a controller that is being restarted is back in a minute
    if scontrol requeue "$JOB"; then
      sleep 120 & # Slurm ends the job meanwhile
      wait $! || true
      break
    fi
    sleep 5 &
    wait $! || true
  done
  btx_log "the requeue was refused" >&2
}
