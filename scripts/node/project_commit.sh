#!/usr/bin/env bash
# Ends the shipping of a project: removes what an earlier version of it brought and this one lacks, then lets the new
# list of digests stand. What jobs wrote themselves stays. usage: project_commit.sh PROJECT TOKEN
# The new list is PROJECT.sha256.TOKEN, of one shipment alone. Exits 65 when the files are not those of the list.
set -Eeuo pipefail

readonly EXIT_OTHER_CONTENT=65 LOCK_WAIT_S=60

paths_of() {
    cut -c 67- -- "$1" | LC_ALL=C sort
}

main() {
    local prefix project=$1 sums path
    prefix=$(CDPATH="" cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
    sums=$prefix/projects/$project.sha256
    new=$sums.$2 # seen by the trap, after this function
    trap 'rm -f -- "$new"' EXIT
    # Two shipments of the project may end at once. The lock goes with this process; its file stays.
    exec 9> "$prefix/projects/$project.lock"
    flock -w "$LOCK_WAIT_S" 9 || {
        echo "$project: another shipment of it did not end within $LOCK_WAIT_S s" >&2
        exit 75
    }
    cd -- "$prefix/projects/$project"
    sha256sum -c --quiet --strict -- "$new" >&2 || exit "$EXIT_OTHER_CONTENT"
    if [[ -f $sums ]]; then
        LC_ALL=C comm -23 <(paths_of "$sums") <(paths_of "$new") | while IFS= read -r path; do
            rm -f -- "./$path"
        done
    fi
    mv -f -- "$new" "$sums"
}

main "$@"
