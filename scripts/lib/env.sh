# Virtual environments for the scripts beside this folder. Source it, then call
#
#   ensure_env NAME EXTRAS [BARE...]
#
# which makes .venv-NAME hold this project (editable) with EXTRAS, a CPU build of torch, and each
# requirement in BARE without its dependencies; it leaves the interpreter's path in $PY. A stamp of
# everything that decides the content makes the second call free.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
TORCH=2.13.0

export PIP_DISABLE_PIP_VERSION_CHECK=1
# A laptop must not open ports to the world or phone home for a demo.
export RAY_AUTH_MODE=disabled RAY_USAGE_STATS_ENABLED=0
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$([ "$(uname)" = Darwin ] && echo lo0 || echo lo)}"
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}" TOKENIZERS_PARALLELISM=false

die() { echo "error: $*" >&2; exit 1; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3.11 python3; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  die "Python 3.11 or newer not found; install it, or name it: PYTHON=/path/to/python3.11"
}

stamp_of() {  # everything that decides what the environment holds
  "$1" - "$ROOT/pyproject.toml" "$ROOT/scripts/lib/env.sh" "${@:2}" <<'PYTHON'
import hashlib, pathlib, sys
parts = [sys.version.encode(), *(pathlib.Path(p).read_bytes() for p in sys.argv[1:3])]
parts += [argument.encode() for argument in sys.argv[3:]]
print(hashlib.sha256(b"\0".join(parts)).hexdigest())
PYTHON
}

install_torch() {
  # The index of the machine may hold the CPU build itself; PyTorch's own index surely does; the
  # last resort is the default build, which on Linux drags in CUDA but works the same.
  local pip=("$PY" -m pip install -qq)
  "${pip[@]}" "torch==$TORCH+cpu" 2>/dev/null ||
    "${pip[@]}" --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu "torch==$TORCH" ||
    "${pip[@]}" "torch==$TORCH"
}

ensure_env() {
  local name=$1 extras=$2 env=$ROOT/.venv-$1 python stamp
  shift 2
  python=$(find_python) || exit 1
  PY=$env/bin/python
  stamp=$(stamp_of "$python" "$extras" "$@")
  if [ "$(cat "$env/stamp" 2>/dev/null)" = "$stamp" ]; then
    return
  fi
  echo "setting up ${env#"$ROOT/"} (once; a few minutes) ..." >&2
  # Kept when only requirements changed: pip then fetches the difference.
  [ "$("$PY" -V 2>&1)" = "$("$python" -V)" ] || "$python" -m venv --clear "$env" || die "python cannot make virtual environments (python3-venv?)"
  install_torch || die "torch $TORCH could not be installed"
  "$PY" -m pip install -qq --editable "$ROOT[$extras]" || die "installation failed"
  if [ $# -gt 0 ]; then
    "$PY" -m pip install -qq --no-deps "$@" || die "installation failed: $*"
  fi
  echo "$stamp" > "$env/stamp"
}
