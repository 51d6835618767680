#!/usr/bin/env bash
# Writes requirements-{tf1,tf2}*.lock and requirements-tensorlayer.lock from the .in files: exact versions with every
# file's sha256. Needs uv and a package index; run it when an .in file changes, and commit the result.
set -Eeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# compile NAME PYTHON [OPTION...]
compile() {
    local name=$1 python=$2
    shift 2
    uv pip compile --quiet --generate-hashes --no-emit-index-url --no-emit-find-links --no-annotate \
        --python-version "$python" --python-platform x86_64-manylinux2014 \
        --custom-compile-command scripts/lock_requirements.sh --output-file "$name.lock" "$@" "$name.in"
    if grep -n '://' "$name.lock"; then
        echo "$name.lock names a place to download from; it must hold names, versions and checksums only" >&2
        return 1
    fi
}

main() {
    local stack part python name
    local -a beside=()
    for stack in tf1 tf2; do
        python=$(sed -n 's/.*"stack": "'"$stack"'", "python": "\([0-9.]*\)".*/\1/p' artifacts.lock.json)
        for part in "" -build -test; do
            compile "requirements-$stack$part" "$python"
        done
    done
    # TensorLayer asks for older versions of some packages than the stack has; the stack's count, and are not repeated.
    while IFS= read -r name; do
        beside+=(--no-emit-package "$name")
    done < <(sed -n 's/^\([A-Za-z0-9._-]*\)==.*/\1/p' requirements-tf1.lock)
    compile requirements-tensorlayer 3.7 --override requirements-tf1.lock "${beside[@]}"
}

main "$@"
