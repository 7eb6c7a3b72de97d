#!/usr/bin/env bash
# Checks the exchange between GPUs on a machine with at least one, in under six minutes. Several processes share the
# device over CUDA IPC where there are fewer GPUs than ranks.
#
# usage: tests/gpu/check.sh            (PYTHON=... to choose an interpreter)
set -uo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON:-python}"
failed=0

check() { # seconds, then arguments
  local limit="$1"
  shift
  timeout -k 5 "$limit" "$python" tests/gpu/check_exchange.py "$@" || {
    echo "FAIL  $* (exit status $?)"
    failed=1
  }
}

check 60 build
[ "$failed" = 0 ] || exit 1
check 40 exact --ranks 2 --method kernel
check 40 exact --ranks 2 --method copy
check 50 exact --ranks 4 --method kernel
check 30 late --ranks 2
check 75 race --ranks 2 --exchanges 10000
check 25 bandwidth
timeout -k 5 60 "$python" tests/gpu/check_overlap.py || {
  echo "FAIL  overlap (exit status $?)"
  failed=1
}
sanitizer="$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)"
if [ -n "$sanitizer" ]; then
  timeout -k 5 40 "$sanitizer" --tool memcheck --error-exitcode 7 "$python" tests/gpu/check_exchange.py sanitize >/tmp/sanitize.$$ 2>&1
  status=$?
  tail -3 /tmp/sanitize.$$
  rm -f /tmp/sanitize.$$
  [ "$status" = 0 ] && echo "PASS  compute-sanitizer memcheck" || { echo "FAIL  compute-sanitizer memcheck ($status)"; failed=1; }
else
  echo "SKIP  compute-sanitizer is not installed"
fi
exit "$failed"
