#!/usr/bin/env bash
# Writes requirements-tf1*.lock from requirements-tf1*.in: exact versions with every file's sha256. Needs uv and a
# package index; run it when an .in file changes, and commit the result.
set -Eeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

main() {
    local name
    for name in requirements-tf1 requirements-tf1-build requirements-tf1-test; do
        uv pip compile --quiet --generate-hashes --no-emit-index-url --no-emit-find-links --no-annotate \
            --python-version 3.7 --python-platform x86_64-manylinux2014 \
            --custom-compile-command scripts/lock_requirements.sh --output-file "$name.lock" "$name.in"
        if grep -n '://' "$name.lock"; then
            echo "$name.lock names a place to download from; it must hold names, versions and checksums only" >&2
            return 1
        fi
    done
}

main "$@"
