# shellcheck shell=bash
# Sourced by common.sh: reading the scripts' arguments and environment. Nothing of either is ever evaluated.

btx_integer() { # name value: arithmetic on an unchecked string would run what it contains
  [[ $2 =~ ^[0-9]{1,9}$ ]] || btx_die 2 "$1='$2' is not a whole number; set it to one, or unset it"
  printf '%d' "$((10#$2))"
}
# shellcheck disable=SC2034 # the scripts read what it sets
btx_arguments() { # reserved-keys argument...: sets WORDS, CONFIG, OVERRIDES and ALLOW_MISSING
  local reserved=" $1 " argument key
  shift
  WORDS=() CONFIG=() OVERRIDES=() ALLOW_MISSING=0
  for argument in "$@"; do
    case $argument in
      --config-name=?* | --config-path=?*) CONFIG+=("$argument") ;;
      --allow-missing) ALLOW_MISSING=1 ;;
      [a-zA-Z_+~]*=* | '~'*)
        key=${argument%%=*}
        key=${key#"${key%%[!+~]*}"}
        # This script decides these, and looks for the result there.
        [[ $reserved != *" $key "* && $reserved != *" ${key%%.*} "* ]] ||
          btx_die 2 "override ${argument@Q}: this script sets $key itself; choose the folder with BTX_RUNS, or use btx-nemo directly"
        OVERRIDES+=("$argument")
        ;;
      *)
        ((${#CONFIG[@]} + ${#OVERRIDES[@]} == 0)) ||
          btx_die 2 "${argument@Q}: expected KEY=VALUE or --config-name=NAME; names come first"
        WORDS+=("$argument")
        ;;
    esac
  done
}
btx_one_of() { # what chosen known...
  local what=$1 chosen=$2
  shift 2
  [[ " $* " == *" $chosen "* && $chosen != *' '* ]] || btx_die 2 "$what ${chosen@Q}: unknown; known: $*"
  ((${#WORDS[@]} < 2)) || btx_die 2 "${WORDS[1]@Q}: expected KEY=VALUE; name one $what"
}
btx_no_words() {
  ((${#WORDS[@]} == 0)) || btx_die 2 "${WORDS[0]@Q}: expected KEY=VALUE or --config-name=NAME"
}
btx_config() { # default: the configuration's flags, with this name where the caller gave none
  [[ " ${CONFIG[*]-} " == *" --config-name="* ]] || CONFIG+=("--config-name=$1")
}
btx_override() { # key: the last value given to it
  local override value=""
  for override in "${OVERRIDES[@]}"; do
    if [[ $override =~ ^[+]*"$1"= ]]; then value=${override#*=}; fi
  done
  if [[ $value =~ ^\'.*\'$ || $value =~ ^\".*\"$ ]]; then value=${value:1:-1}; fi
  printf '%s' "$value"
}
btx_check_domain() {
  local LC_ALL=C # elsewhere a-z may hold capitals and accents
  [[ $1 =~ ^[a-z][a-z0-9_-]*$ ]] ||
    btx_die 2 "domain ${1@Q}: only a-z, 0-9, _ and - are allowed, a letter first; rename the domain"
  [[ ! $1 =~ ^(seed|generalist|tokenizer|text)$ ]] || btx_die 2 "domain '$1': has another meaning; rename the domain"
}
btx_check_expert() { # <domain>, or <domain>.<stage> for what is trained before the expert itself
  local LC_ALL=C
  btx_check_domain "${1%%.*}"
  [[ $1 != *.* || ${1#*.} =~ ^[a-z][a-z0-9_-]*$ ]] ||
    btx_die 2 "stage ${1@Q}: only a-z, 0-9, _ and - are allowed after the dot, a letter first; rename the stage"
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
