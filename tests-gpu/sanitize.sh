#!/usr/bin/env bash
# Runs a reduced matrix under compute-sanitizer and prints one summary line a tool.
# usage: tests-gpu/sanitize.sh SECONDS_A_TOOL [TOOL ...]   (default tools: memcheck racecheck initcheck)
set -uo pipefail
limit=$1
shift
tools=("$@")
[ ${#tools[@]} -gt 0 ] || tools=(memcheck racecheck initcheck)
matrix=(tests-gpu/test_gpu_golden.py tests-gpu/test_gpu_contract.py -k "golden or ids_outside or slots or tokens or past or rotary")
status=0
for tool in "${tools[@]}"; do
  # racecheck knows neither copies by the engine nor an arrival by one lane for its warp (racecheck_patterns.py), on which
  # the Hopper kernel stands; that one has the stress test instead.
  [ "$tool" = racecheck ] && export PAGED_TEST_PATHS=sm80,baseline || unset PAGED_TEST_PATHS
  log=$(timeout "$limit" compute-sanitizer --tool "$tool" --error-exitcode 9 python3 -m pytest -q -x "${matrix[@]}" 2>&1)
  code=$?
  [ $code -eq 0 ] || status=1
  tests=$(grep -aoE '[0-9]+ passed.*' <<<"$log" | tail -1)
  echo "$tool: exit $code; ${tests:-no pytest summary}; $(grep -aE 'ERROR SUMMARY|RACECHECK SUMMARY' <<<"$log" | tail -1)"
  [ $code -eq 0 ] || tail -c 1500 <<<"$log" >&2
done
exit $status
