#!/usr/bin/env bash
# Send a folder to another node of the cluster: push_tree.sh FOLDER NODE REMOTE_FOLDER
# Part of the distribution tree: a node that has the files serves the next one over the cluster's own SSH.
set -Eeuo pipefail

main() {
    (($# == 3)) || {
        printf 'usage: push_tree.sh FOLDER NODE REMOTE_FOLDER\n' >&2
        exit 64
    }
    local folder=$1 node=$2 remote=$3 prefix quoted
    prefix=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
    printf -v quoted '%q' "$remote"
    # The far side writes beside the target and renames, so that half a transfer is never taken for the whole.
    tar -C "$folder" -cf - . | ssh -F "$prefix/ssh/config" "$node" \
        "rm -rf -- $quoted.part && mkdir -p -- $quoted.part && tar -C $quoted.part -xf - &&
         rm -rf -- $quoted && mv -- $quoted.part $quoted"
}

main "$@"
