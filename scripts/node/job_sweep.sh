#!/usr/bin/env bash
# Finds what a job has left running on this node, by the job's mark in each process's environment, and ends it.
# usage: job_sweep.sh JOB [--wait=S] [--end] [--grace=S]
# Waits up to S seconds for the job's own end, prints `PID COMMAND` for each process still there, and with --end sends
# it TERM, then KILL. Exits 0 when none is left.
set -Eeuo pipefail

found() {
    local file pid
    # Other users' processes cannot be read, nor can they be of this job.
    for file in $(grep -lzxF -- "RINGMASTER_JOB=$1" /proc/[0-9]*/environ 2>/dev/null || true); do
        pid=${file#/proc/}
        pid=${pid%/environ}
        # A zombie holds nothing; its parent has yet to take note.
        [[ $pid == "$$" || $(sed -n 's/^State:\t\(.\).*/\1/p' "/proc/$pid/status" 2>/dev/null) == [ZX] ]] ||
            echo "$pid"
    done
}

main() {
    local job=$1 end=0 grace_s=3 wait_s=0 waited word pid pids shown
    shift
    for word in "$@"; do
        case $word in
            --end) end=1 ;;
            --grace=*) grace_s=${word#*=} ;;
            --wait=*) wait_s=${word#*=} ;;
            *) exit 64 ;;
        esac
    done
    unset RINGMASTER_JOB
    for ((waited = 0; ; waited++)); do
        pids=$(found "$job")
        [[ -n $pids ]] || exit 0
        ((waited < wait_s * 10)) || break
        sleep 0.1
    done
    for pid in $pids; do
        shown=$(tr '\0' ' ' < "/proc/$pid/cmdline" 2>/dev/null || true)
        printf '%s %.200s\n' "$pid" "${shown:-?}"
    done
    ((end)) || exit 1
    local signal
    for signal in TERM KILL; do
        for pid in $pids; do
            kill -s "$signal" "$pid" 2>/dev/null || true
        done
        for ((waited = 0; waited < grace_s * 10; waited++)); do
            pids=$(found "$job")
            [[ -n $pids ]] || exit 0
            sleep 0.1
        done
    done
    exit 1
}

main "$@"
