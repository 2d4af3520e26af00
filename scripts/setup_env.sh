# shellcheck shell=bash
# Sourced by the scripts beside it: makes the virtual environment if it is missing, installs what changed,
# and sets VENV and PY. PYTHON=python3.12 chooses the interpreter (and an environment of its own, .venv-3.12).

btx_python() { # the interpreter named by $1, also where pyenv has it but does not expose it
  if "$1" -c '' 2>/dev/null; then command -v "$1"; return; fi
  local version=${1#python} root
  root=$(pyenv root 2>/dev/null) || return 1
  find "$root/versions" -maxdepth 1 -name "$version.*" 2>/dev/null | sort -V | tail -n 1 | sed 's,$,/bin/python,'
}

btx_setup_env() {
  local python name
  if [[ -n ${PYTHON:-} ]]; then
    python=$(btx_python "$PYTHON") || true
    [[ -n $python && -x $python ]] || { echo "PYTHON=$PYTHON: no such interpreter; install it or choose another" >&2; exit 3; }
    name=.venv-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  else
    for name in python3.11 python3.12 python3.10; do python=$(btx_python "$name") && [[ -n $python && -x $python ]] && break; done
    [[ -n $python && -x $python ]] || { echo "needs Python 3.10, 3.11 or 3.12; set PYTHON=/path/to/python" >&2; exit 3; }
    name=.venv
  fi
  VENV=$PWD/$name PY=$PWD/$name/bin/python
  local want; want=$(cat pyproject.toml constraints.txt | cksum)
  if [[ ! -f $VENV/.complete || $(<"$VENV/.complete") != "$want" ]]; then
    echo "installing into $name with $("$python" --version) (a few minutes the first time)" >&2
    [[ -x $PY ]] || "$python" -m venv "$VENV"
    "$PY" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
    echo "$want" >"$VENV/.complete"
  fi
  export VENV PY OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1
}
