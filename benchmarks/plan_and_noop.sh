#!/usr/bin/env bash
# Seconds that `snakemake -n` and a run with nothing to do take on a finished study, five times each.
# Run after `make demo`. Wanted: under 4 and under 6 seconds.
set -euo pipefail
cd "$(dirname "$0")/.."
study=${1:-config/config.yaml}
options=(--profile profiles/laptop --configfile "$study")
TIMEFORMAT=%R
if ! .venv/bin/snakemake "${options[@]}" -n 2>&1 | grep -q "Nothing to be done"; then
  echo "this study is not finished: run make demo STUDY=$study first" >&2
  exit 2
fi
for what in "snakemake -n" "snakemake"; do
  flags=()
  [ "$what" = "snakemake -n" ] && flags=(-n)
  echo "$what, seconds:"
  for _ in 1 2 3 4 5; do
    time .venv/bin/snakemake "${options[@]}" "${flags[@]}" >/dev/null 2>&1
  done
done
