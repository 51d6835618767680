#!/usr/bin/env bash
# Ends the shipping of a project: removes what an earlier version of it brought and this one lacks, then lets the new
# list of digests stand. What jobs wrote themselves stays. usage: project_commit.sh PROJECT
set -Eeuo pipefail

paths_of() {
    cut -c 67- -- "$1" | LC_ALL=C sort
}

main() {
    local prefix project=$1 sums path
    prefix=$(CDPATH="" cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
    sums=$prefix/projects/$project.sha256
    cd -- "$prefix/projects/$project"
    if [[ -f $sums ]]; then
        LC_ALL=C comm -23 <(paths_of "$sums") <(paths_of "$sums.new") | while IFS= read -r path; do
            rm -f -- "./$path"
        done
    fi
    sha256sum -c --quiet --strict -- "$sums.new" >&2
    mv -f -- "$sums.new" "$sums"
}

main "$@"
