#!/usr/bin/env bash
# A run on a borrowed GPU box without a network, in stages that can each be run again.
#
#   visit.sh parts FOLDER    takes the parts of prepare.py that FOLDER holds (a few MiB at a time if need be)
#   visit.sh setup           joins and unpacks them, installs the wheels, says what the box is
#   visit.sh build STUDY     starts the study's builds in the background, where they outlive this call; later: how far
#   visit.sh measure STUDY SECONDS   runs the study; after SECONDS it ends cleanly, and another call goes on
#   visit.sh pack STUDY FOLDER       Parquet, receipts and figures, and logs, into files of less than 16 MiB
set -euo pipefail
cd "$(dirname "$0")/../.."
HERE=results/visit
export PATH="$PWD/$HERE/bin:$PATH" PYTHONPATH="$PWD/$HERE/site:$PWD/workflow/scripts" PYTHONUNBUFFERED=1

stop() { echo "visit.sh: $*" >&2; exit 2; }
running() { [[ -f $HERE/build.pid ]] && kill -0 "$(cat $HERE/build.pid)" 2>/dev/null; }
study_of() { [[ -f ${1:-} ]] || stop "no such study: ${1:-(none named)}"; }

case "${1:-}" in
parts)
  [[ -d ${2:-} ]] || stop "no such folder: ${2:-(none named)}"
  mkdir -p $HERE
  for part in "$2"/*.tar.*.[0-9][0-9] "$2"/SHA256SUMS; do
    [[ -f $part ]] && cp "$part" $HERE/
  done
  ls -l $HERE
  ;;
setup)
  [[ -f $HERE/SHA256SUMS ]] || stop "no parts yet: visit.sh parts FOLDER"
  while read -r digest name; do
    [[ -f $HERE/.$name.done ]] && continue
    cat $HERE/"$name".[0-9][0-9] >$HERE/"$name" || stop "no part of $name is here"
    echo "$digest  $HERE/$name" | sha256sum --check --quiet || stop "parts of $name are missing or damaged"
    tar -xf $HERE/"$name"
    rm $HERE/"$name" $HERE/"$name".[0-9][0-9]
    touch $HERE/."$name".done
  done <$HERE/SHA256SUMS
  if [[ ! -f $HERE/.site.done ]]; then
    mkdir -p $HERE/bin
    ln -sf "$(command -v python3)" $HERE/bin/python
    python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target $HERE/site $HERE/wheels/*.whl
    touch $HERE/.site.done
  fi
  python -m snakemake --version
  for program in nvcc cmake ninja g++ nvidia-smi; do
    printf '%-10s %s\n' $program "$(command -v $program || echo 'not found')"
  done
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem,power.limit --format=csv 2>/dev/null || true
  ;;
build)
  study_of "${2:-}"
  if running; then
    echo "the builds go on:"
  elif [[ -f $HERE/build.rc && $(cat $HERE/build.rc) == 0 ]]; then
    echo "built"
  else
    rm -f $HERE/build.rc
    # a session of its own: whoever called may go
    setsid bash -c 'python -m snakemake --profile profiles/gpu-box --configfile "$1" \
      --until build_engine build_server build_tools >"$2/build.log" 2>&1; echo $? >"$2/build.rc"' \
      build "$2" $HERE </dev/null >/dev/null 2>&1 &
    echo $! >$HERE/build.pid
    sleep 2
  fi
  tail -n 5 $HERE/build.log
  ;;
measure)
  study_of "${2:-}"
  limit=${3:-480}
  end=$((SECONDS + limit))
  while running; do
    ((SECONDS < end)) || { echo "the builds are not done: run this again"; exit 0; }
    sleep 2
  done
  if [[ -f $HERE/build.rc && $(cat $HERE/build.rc) != 0 ]]; then
    tail -n 40 $HERE/build.log >&2
    stop "the builds failed"
  fi
  rc=0
  timeout --signal=INT --kill-after=30 $((end - SECONDS)) \
    python -m snakemake --profile profiles/gpu-box --configfile "$2" || rc=$?
  case $rc in
  0) echo "all is measured" ;;
  124 | 137) echo "time is up; what was measured is kept: run this again" ;;
  *) exit $rc ;;
  esac
  ;;
pack)
  study_of "${2:-}"
  [[ -d ${3:-} ]] || stop "no such folder: ${3:-(none named)}"
  python benchmarks/h200/pack.py --study "$2" --into "$3"
  ;;
*)
  sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
  exit 2
  ;;
esac
