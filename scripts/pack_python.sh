#!/usr/bin/env bash
# Packs an installed Python into an archive for machines without one; install_python.sh --archive unpacks it.
#
# CPython finds its library from the place of its executable, so the tree works wherever it is put. Left out: tests,
# the editor, compiled files and static libraries.
set -Eeuo pipefail
# shellcheck source=lib/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

usage() {
    cat <<'EOT'
pack_python.sh PYTHON OUT.tar.gz: pack the installation of the interpreter PYTHON (x86-64, 3.7).

  --version=V         the version it must have (default 3.7)

Standard output: changed. Exit status: 0 done, 64 usage, 69 something is missing or will not do, else failed.
EOT
}

main() {
    parse_options "version" "$@"
    if [[ -n ${OPT[help]:-} ]]; then
        usage
        return 0
    fi
    rm_start
    ((${#OPT_REST[@]} == 2)) || usage_error "expected two arguments: PYTHON and OUT.tar.gz"
    local python=${OPT_REST[0]} out=${OPT_REST[1]} version=${OPT[version]:-3.7} base members=() programs=() member linked
    [[ -x $python ]] || usage_error "'$python' is not an executable file"
    need tar gzip ldd
    judge_python "$python" "$version"
    [[ $PY_PROBLEM == ok ]] || die "$EX_UNAVAILABLE" "$python: $PY_PROBLEM"
    base=$(cd "$(dirname "$PY_PATH")/.." && pwd -P)
    [[ $base != /usr && $base != / ]] ||
        die "$EX_UNAVAILABLE" "$PY_PATH is part of the operating system under $base; pack one that has a folder of its own"
    # Modules like ssl use libraries of the machine that built them; another machine may not have those.
    linked=$(find "$base/lib/python$version/lib-dynload" -name '*.so' -exec ldd {} + 2>/dev/null |
        awk -v base="$base/" '$2 == "=>" && index($3, base) != 1 && $1 !~ /^lib(c|m|dl|pthread|util|rt|gcc_s|stdc\+\+|crypt)\.so/ { print $1 }' |
        sort -u | tr '\n' ' ')
    log "$PY_PATH uses these libraries of this machine: ${linked:-none}"
    mkdir -p "$(dirname "$out")"
    [[ $out == /* ]] || out=$PWD/$out
    cd "$base"
    for member in bin/python3 include/"python$version"* lib/"python$version" lib/"libpython$version"*.so*; do
        [[ ! -e $member ]] || members+=("$member")
    done
    for member in bin/"python$version" bin/"python${version}m"; do
        [[ ! -e $member ]] || programs+=("$member")
    done
    PATCHED=$(mktemp -d "$out.XXXXXXXX")
    trap 'rm -rf -- "$PATCHED"; _on_exit' EXIT
    cp -L --parents "${programs[@]}" "$PATCHED"
    if [[ -n $(find lib -maxdepth 1 -name "libpython$version*.so*" -print -quit) ]]; then
        # Built with --enable-shared: the program looks for its library where it was installed, by absolute path.
        need patchelf
        for member in "${programs[@]}"; do
            # shellcheck disable=SC2016  # the dynamic linker's own word
            patchelf --set-rpath '$ORIGIN/../lib' "$PATCHED/$member"
        done
    fi
    tar -cf - --owner=0 --group=0 --transform 's,^,python/,S' \
        --exclude=__pycache__ --exclude='*.a' --exclude="lib/python$version/test" --exclude="lib/python$version/idlelib" \
        --exclude="lib/python$version/site-packages" --exclude="lib/python$version/lib2to3/tests" \
        --exclude="lib/python$version/*/test" --exclude="lib/python$version/turtledemo" --exclude="lib/python$version/ensurepip" \
        "${members[@]}" -C "$PATCHED" "${programs[@]}" | gzip -c >"$PATCHED/out"
    mv -T "$PATCHED/out" "$out"
    log "packed Python $PY_VERSION from $base into $out ($(($(stat -c %s "$out") / 1048576)) MiB)"
    emit changed
}

main "$@"
