#!/usr/bin/env bash
# Runs a reduced matrix under compute-sanitizer and prints one summary line a run.
# usage: tests-gpu/sanitize.sh SECONDS_A_RUN [TOOL ...]   (default tools: memcheck racecheck initcheck)
# Racecheck runs each tensor-core path by itself, as its report does not name the kernel of an inlined access.
set -uo pipefail
limit=$1
shift
tools=("$@")
[ ${#tools[@]} -gt 0 ] || tools=(memcheck racecheck initcheck)
matrix=(tests-gpu/test_gpu_golden.py tests-gpu/test_gpu_contract.py tests-gpu/test_gpu_hopper.py
  -k "golden or contract and (ids_outside or slots or tokens or past or rotary) or pipeline")
status=0
run() {  # TOOL PATHS; no paths: all
  log=$(PAGED_TEST_PATHS=$2 timeout "$limit" compute-sanitizer --tool "$1" --error-exitcode 9 python3 -m pytest -q -x "${matrix[@]}" 2>&1)
  code=$?
  [ $code -eq 0 ] || status=1
  tests=$(grep -aoE '[0-9]+ passed.*' <<<"$log" | tail -1)
  echo "$1${2:+ of $2}: exit $code; ${tests:-no pytest summary}; $(grep -aE 'ERROR SUMMARY|RACECHECK SUMMARY' <<<"$log" | tail -1)"
  [ $code -eq 0 ] || tail -c 1500 <<<"$log" >&2
}
for tool in "${tools[@]}"; do
  if [ "$tool" = racecheck ]; then
    for path in sm80 sm90 baseline; do run racecheck $path; done
  else
    run "$tool" ""
  fi
done
exit $status
