#!/usr/bin/env bash
# Prints what this machine is and has as one JSON object. It needs bash and coreutils only, changes nothing (but for a
# token in a prefix on a network file system), and bounds every wait.
#
# It stands alone, since it is sent over standard input: `ssh host bash -s -- --prefix=DIR < probe.sh`.
# A value that cannot be found out is null, and "unknown" says why under the value's dotted name; what is known to be
# absent is false or an empty list.
set -Eeuo pipefail

PREFIX=""

usage() {
    cat <<'EOT'
probe.sh: facts of this machine as one JSON object on standard output.

  --prefix=DIR        where Ringmaster's installation is or will be (default $HOME/local)

Exit status: 0 done, 64 usage, else failed.
EOT
}

fail() {
    printf 'probe: %s\n' "$2" >&2
    exit "$1"
}

# ---------------------------------------------------------------------------------------------- JSON

# text VALUE: as a JSON string. In the C locale every byte is a character, and bytes above 127 pass as they are.
text() {
    local s=$1 out="" c i bs=$'\\' dq='"'
    s=${s//"$bs"/"$bs$bs"}
    s=${s//"$dq"/"$bs$dq"}
    if [[ $s == *[[:cntrl:]]* ]]; then
        for ((i = 0; i < ${#s}; i++)); do
            c=${s:i:1}
            case $c in
                $'\n') c='\n' ;;
                $'\t') c='\t' ;;
                $'\r') c='\r' ;;
                [[:cntrl:]]) printf -v c '\\u%04x' "'$c" ;;
            esac
            out+=$c
        done
        s=$out
    fi
    printf '"%s"' "$s"
}

# text_or_unknown KEY VALUE WHY
text_or_unknown() {
    if [[ -n $2 ]]; then text "$2"; else null "$1" "$3"; fi
}

number_or_unknown() {
    if [[ $2 =~ ^-?[0-9]+$ ]]; then printf '%s' "$2"; else null "$1" "$3"; fi
}

# null KEY WHY: the reasons go to file descriptor 4, since values are made in subshells.
null() {
    printf '%s: %s\n' "$(text "$1")" "$(text "$2")" >&4
    printf 'null'
}

# list: the lines of standard input, JSON values, as a list.
list() {
    local line first=1
    printf '['
    while IFS= read -r line; do
        [[ -n $line ]] || continue
        ((first)) || printf ', '
        first=0
        printf '%s' "$line"
    done
    printf ']'
}

first_line() {
    local line=""
    IFS= read -r line || true
    printf '%s' "$line"
}

has() { command -v "$1" >/dev/null 2>&1; }

# ---------------------------------------------------------------------------------------------- the machine

os_json() {
    local release
    for release in /etc/os-release /usr/lib/os-release; do
        [[ -r $release ]] || continue
        (
            ID="" VERSION_ID="" PRETTY_NAME=""
            # shellcheck source=/dev/null
            . "$release"
            printf '{"id": %s, "version": %s, "pretty": %s}' "$(text "$ID")" "$(text "$VERSION_ID")" "$(text "$PRETTY_NAME")"
        )
        return 0
    done
    printf '{"id": %s, "version": null, "pretty": null}' "$(null os.id "no /etc/os-release here")"
}

cpu_json() {
    local key value model="" flags="" count flag out=""
    count=$(getconf _NPROCESSORS_ONLN 2>/dev/null) || count=""
    if [[ -r /proc/cpuinfo ]]; then
        while IFS=: read -r key value; do
            case $key in
                "model name"*) model=${value# } ;;
                flags* | Features*)
                    flags=$value
                    break
                    ;;
            esac
        done </proc/cpuinfo
    fi
    for flag in $flags; do out+="\"$flag\""$'\n'; done
    printf '{"count": %s, "model": %s, "flags": ' "$(number_or_unknown cpu.count "$count" "getconf says '$count'")" \
        "$(text_or_unknown cpu.model "$model" "/proc/cpuinfo names no model")"
    if [[ -n $out ]]; then list <<<"$out"; else null cpu.flags "/proc/cpuinfo names no flags"; fi
    printf '}'
}

memory_json() {
    local key value rest
    while read -r key value rest; do
        if [[ $key == MemTotal: && $rest == kB ]]; then
            printf '%s' $((value * 1024))
            return 0
        fi
    done </proc/meminfo
    null memory_bytes "/proc/meminfo has no MemTotal"
}

# existing DIR: the nearest folder that exists.
existing() {
    local dir=$1
    while [[ ! -d $dir ]]; do dir=$(dirname "$dir"); done
    printf '%s' "$dir"
}

# df_field DIR N: N=4 available KiB, N=6 mount point.
df_field() {
    local line fields
    line=$(timeout 10 df -Pk -- "$1" 2>/dev/null | tail -n 1) || return 1
    read -r -a fields <<<"$line"
    printf '%s' "${fields[$(($2 - 1))]:-}"
}

free_bytes() {
    local key=$1 free
    if free=$(df_field "$2" 4) && [[ $free =~ ^[0-9]+$ ]]; then
        printf '%s' $((free * 1024))
    else
        null "$key" "df did not answer for $2"
    fi
}

disk_json() {
    local tmp=${TMPDIR:-/tmp} mount point options noexec=false found=0
    printf '{"prefix_free_bytes": %s, "tmp_free_bytes": %s, "tmp_noexec": ' \
        "$(free_bytes disk.prefix_free_bytes "$(existing "$PREFIX")")" "$(free_bytes disk.tmp_free_bytes "$(existing "$tmp")")"
    if mount=$(df_field "$(existing "$tmp")" 6) && [[ -r /proc/self/mounts ]]; then
        while read -r _ point _ options _; do
            [[ $point == "$mount" ]] || continue
            found=1
            noexec=false
            [[ ,$options, != *,noexec,* ]] || noexec=true
        done </proc/self/mounts
    fi
    if ((found)); then printf '%s}' "$noexec"; else printf '%s}' "$(null disk.tmp_noexec "$tmp is on no known mount")"; fi
}

gpus_json() {
    local out index name memory driver
    if ! has nvidia-smi; then
        printf '[]'
        return 0
    fi
    if ! out=$(timeout 15 nvidia-smi --query-gpu=index,name,memory.total,driver_version --format=csv,noheader,nounits 2>&1); then
        # A driver without a device is an answer; anything else is a fault that must not pass for "no GPU".
        if [[ $out == *"No devices were found"* ]]; then
            printf '[]'
        else
            null gpus "nvidia-smi failed or did not answer in 15 s: $(first_line <<<"$out")"
        fi
        return 0
    fi
    while IFS=, read -r index name memory driver; do
        memory=${memory// /}
        [[ $index =~ ^[0-9]+$ ]] || continue
        [[ $memory =~ ^[0-9]+$ ]] || memory=null
        printf '{"index": %s, "name": %s, "memory_mib": %s, "driver": %s}\n' "$index" "$(text "${name# }")" "$memory" \
            "$(text "${driver# }")"
    done <<<"$out" | list
}

cuda_json() {
    local dir out
    for dir in "${CUDA_HOME:-}" /usr/local/cuda /usr/local/cuda-*; do
        [[ -n $dir && -x $dir/bin/nvcc ]] || continue
        out=$(timeout 10 "$dir/bin/nvcc" --version 2>/dev/null) || out=""
        printf '{"home": %s, "version": ' "$(text "$dir")"
        if [[ $out =~ release\ ([0-9.]+) ]]; then text "${BASH_REMATCH[1]}"; else null cuda.version "$dir/bin/nvcc does not say"; fi
        printf '}'
        return 0
    done
    printf 'false'
}

interfaces_json() {
    local path name flags mtu up loopback out cidrs line addresses="" known=1
    if ! has ip || ! addresses=$(timeout 10 ip -o addr show 2>/dev/null); then
        known=0
    fi
    if [[ ! -d /sys/class/net ]] || ((!known)); then
        null interfaces "the addresses cannot be read without the command ip (package iproute2 or iproute)"
        return 0
    fi
    for path in /sys/class/net/*; do
        name=${path##*/}
        [[ -r $path/flags ]] || continue
        flags=$(<"$path/flags")
        mtu=$(cat "$path/mtu" 2>/dev/null) || mtu=null
        up=false loopback=false
        (((flags & 1) == 0)) || up=true
        (((flags & 8) == 0)) || loopback=true
        cidrs=""
        while read -r -a line; do
            if [[ ${line[1]:-} == "$name" && ${line[2]:-} == inet* ]]; then
                # With a peer the second address carries the mask.
                out=${line[3]}
                [[ ${line[4]:-} != peer || $out == */* ]] || out+=/32
                cidrs+="$(text "$out")"$'\n'
            fi
        done <<<"$addresses"
        printf '{"name": %s, "up": %s, "loopback": %s, "mtu": %s, "cidrs": %s}\n' "$(text "$name")" "$up" "$loopback" \
            "${mtu:-null}" "$(list <<<"$cidrs")"
    done | list
}

ssh_server_json() {
    local address port
    read -r _ _ address port <<<"${SSH_CONNECTION:-}" || true
    if [[ ${port:-} =~ ^[0-9]+$ ]]; then
        printf '{"address": %s, "port": %s}' "$(text "$address")" "$port"
    else
        printf 'false'
    fi
}

# host_keys: of the key files that sshd's settings name, else of the usual ones.
host_keys_json() {
    local file word value files=() line out=""
    for file in /etc/ssh/sshd_config /etc/ssh/sshd_config.d/*.conf; do
        [[ -r $file ]] || continue
        while read -r word value _; do
            [[ ${word,,} != hostkey || -z $value ]] || files+=("$value.pub")
        done <"$file"
    done
    ((${#files[@]})) || files=(/etc/ssh/ssh_host_*_key.pub)
    for file in "${files[@]}"; do
        [[ -r $file ]] || continue
        line=$(first_line <"$file")
        [[ -z $line ]] || out+="$(text "$line")"$'\n'
    done
    list <<<"$out"
}

# ---------------------------------------------------------------------------------------------- programs

# tool_json NAME COMMAND...: the first line of what the command says, or false without it.
tool_json() {
    local name=$1 out
    shift
    if ! has "$1"; then
        printf '%s: false' "$(text "$name")"
        return 0
    fi
    out=$(timeout 5 "$@" 2>&1 | grep -m1 . || true)
    printf '%s: %s' "$(text "$name")" "$(text_or_unknown "tools.$name" "$out" "\`$*\` said nothing")"
}

tools_json() {
    local cc=cc cxx=c++
    has cc || cc=gcc
    has c++ || cxx=g++
    {
        tool_json cc "$cc" --version && echo
        tool_json cxx "$cxx" --version && echo
        tool_json make make --version && echo
        tool_json cmake cmake --version && echo
        # shellcheck disable=SC2016  # Perl's variable
        tool_json perl perl -e 'print $^V' && echo
        tool_json tar tar --version && echo
        tool_json gzip gzip --version && echo
        tool_json bzip2 bzip2 --help && echo
        tool_json xz xz --version && echo
        tool_json ssh ssh -V && echo
        tool_json curl curl --version && echo
    } | list | sed 's/^\[/{/; s/\]$/}/'
}

# The same judge as in lib/common.sh (a test compares them).
# shellcheck disable=SC2016
readonly PYTHON_JUDGE='
import os, platform, sys
version = ".".join(map(str, sys.version_info[:3]))
problem = "ok"
executable = sys.executable
base = getattr(sys, "base_prefix", sys.prefix)
if base != sys.prefix:
    executable = os.path.join(base, "bin", "python%d.%d" % sys.version_info[:2])
if "%d.%d" % sys.version_info[:2] not in sys.argv[1:]:
    problem = "version %s, expected %s" % (version, " or ".join(sys.argv[1:]))
elif platform.machine() != "x86_64" or sys.maxsize < 2 ** 32:
    problem = "%s %s-bit, expected x86_64 64-bit" % (platform.machine(), 64 if sys.maxsize > 2 ** 32 else 32)
else:
    try:
        import ctypes, hashlib, ssl, zlib
    except ImportError as error:
        problem = "built without a module: %s" % error
    else:
        import sysconfig
        header = os.path.join(sysconfig.get_path("include"), "Python.h")
        if not os.path.isfile(header):
            problem = "no %s (its development package is missing)" % header
        elif not os.path.isfile(executable):
            problem = "%s is missing" % executable
print("%s\n%s\n%s" % (version, executable, problem))
'

# The Pythons of the stacks in artifacts.lock.json, which is not here (a test compares them).
readonly PYTHON_SERIES=(3.7 3.11)

python_candidates() {
    local path dir seen=: version
    for version in "${PYTHON_SERIES[@]}"; do
        printf '%s\n' "$PREFIX"/python*/bin/"python$version"
        local IFS=:
        for dir in $PATH; do
            printf '%s\n' "$dir/python$version" "$dir/python3"
            # pyenv's shims work only with pyenv's own settings; the interpreters behind them work always.
            [[ $dir != */shims ]] || printf '%s\n' "${dir%/shims}/versions/$version".*/bin/"python$version"
        done
        printf '%s\n' "$HOME/.pyenv/versions/$version".*/bin/"python$version" "/usr/local/bin/python$version" \
            "/usr/bin/python$version" /opt/*/bin/"python$version" "/opt/python/cp${version/./}"-*/bin/"python$version"
    done | while IFS= read -r path; do
        [[ -x $path && ! -d $path && $seen != *":$path:"* ]] || continue
        seen+=$path:
        printf '%s\n' "$path"
    done
}

pythons_json() {
    local candidate out version path problem seen=:
    while IFS= read -r candidate; do
        [[ -n $candidate ]] || continue
        version="" path=$candidate problem="does not run"
        if out=$(cd / && timeout 10 "$candidate" -I -c "$PYTHON_JUDGE" "${PYTHON_SERIES[@]}" 2>/dev/null); then
            { IFS= read -r version && IFS= read -r path && IFS= read -r problem; } <<<"$out" || true
        fi
        # Several names of one interpreter are one.
        [[ $seen != *":$path:"* ]] || continue
        seen+=$path:
        printf '{"path": %s, "version": %s, ' "$(text "$path")" "$(if [[ -n $version ]]; then text "$version"; else printf null; fi)"
        if [[ $problem == ok ]]; then
            printf '"usable": true, "problem": null}\n'
        else
            printf '"usable": false, "problem": %s}\n' "$(text "$problem")"
        fi
    done < <(python_candidates) | list
}

sudo_json() {
    if (($(id -u) == 0)); then
        printf '"root"'
    elif ! has sudo; then
        printf '"none"'
    elif timeout 5 sudo -n true >/dev/null 2>&1; then
        printf '"passwordless"'
    else
        printf '"password"'
    fi
}

ptrace_json() {
    local file=/proc/sys/kernel/yama/ptrace_scope
    if [[ -r $file ]]; then number_or_unknown ptrace_scope "$(<"$file")" "$file is no number"; else printf 'false'; fi
}

# home_token: equal on nodes whose prefix is one folder. On a local file system (a bind mount too) the kernel's own
# boot, device and inode tell; on a network file system the nodes' device numbers differ, so a token file tells.
home_token_json() {
    local dir kind token file
    dir=$(existing "$PREFIX")
    kind=$(stat -f -c %T -- "$dir" 2>/dev/null) || kind=unknown
    case $kind in
        nfs* | smb* | cifs | lustre | gpfs | ceph | afs | panfs | beegfs | ocfs2 | gfs* | fuseblk | v9fs | UNKNOWN* | unknown)
            file=$PREFIX/.ringmaster/home_token
            if [[ ! -s $file ]]; then
                # A link to a finished file: of several nodes that do this at once, one wins and all read the same.
                if ! { mkdir -p "$PREFIX/.ringmaster" && cat /proc/sys/kernel/random/uuid >"$file.$$.$RANDOM" &&
                    { ln "$file.$$."* "$file" 2>/dev/null || true; } && rm -f "$file.$$."*; } 2>/dev/null; then
                    null home_token "cannot write $file"
                    return 0
                fi
            fi
            token=$(first_line <"$file")
            ;;
        *) token=$(first_line </proc/sys/kernel/random/boot_id)-$(stat -c '%d-%i' -- "$dir") ;;
    esac
    text_or_unknown home_token "$token" "no token"
}

# ---------------------------------------------------------------------------------------------- what is installed

# marker_field FILE KEY: a text of one of the installers' markers, which have one key a line.
marker_field() {
    local line
    while IFS= read -r line; do
        if [[ $line =~ ^\ *\"$2\":\ (\"([^\"\\]|\\.)*\"|\{.*\}),?$ ]]; then
            printf '%s' "${BASH_REMATCH[1]}"
            return 0
        fi
    done <"$1"
    printf 'null'
}

openmpi_json() {
    local dir=$PREFIX/openmpi out marker=$PREFIX/openmpi/.ringmaster.json
    if [[ ! -e $dir/bin/mpirun ]]; then
        printf 'false'
        return 0
    fi
    out=$(OPAL_PREFIX=$dir LD_LIBRARY_PATH=$dir/lib timeout 15 "$dir/bin/mpirun" --version 2>&1) || true
    printf '{"version": '
    if [[ $out =~ \(Open\ MPI\)\ ([0-9][^[:space:]]*) ]]; then
        text "${BASH_REMATCH[1]}"
    else
        null openmpi.version "$dir/bin/mpirun --version says: $(first_line <<<"$out")"
    fi
    if [[ -r $marker ]]; then
        printf ', "from": %s, "digest": %s' "$(marker_field "$marker" from)" "$(marker_field "$marker" digest)"
    else
        printf ', "from": null, "digest": null'
    fi
    printf ', "path": %s}' "$(text "$dir")"
}

# stacks: the packages are those that are there, not those the marker remembers.
stacks_json() {
    local dir marker path name out first=1
    printf '{'
    for dir in "$PREFIX"/stacks/*/; do
        dir=${dir%/}
        marker=$dir/.ringmaster.json
        [[ -r $marker ]] || continue
        out=""
        for path in "$dir"/lib/python3*/site-packages/*.dist-info; do
            [[ -d $path ]] || continue
            path=${path##*/}
            path=${path%.dist-info}
            name=${path%-*}
            name=${name,,}
            out+="$(text "${name//[-.]/_}"): $(text "${path##*-}")"$'\n'
        done
        ((first)) || printf ', '
        first=0
        printf '%s: {"python": %s, "digest": %s, "horovod_build": %s, "packages": {%s}}' "$(text "${dir##*/}")" \
            "$(marker_field "$marker" python)" "$(marker_field "$marker" digest)" "$(marker_field "$marker" horovod_build)" \
            "$(list <<<"$out" | sed 's/^\[//; s/\]$//')"
    done
    printf '}'
}

manifest_json() {
    local content
    if [[ ! -r $PREFIX/manifest.json ]]; then
        printf 'false'
        return 0
    fi
    content=$(<"$PREFIX/manifest.json")
    if [[ $content == "{"*"}" ]]; then
        printf '%s' "$content"
    else
        null manifest "$PREFIX/manifest.json is no JSON object"
    fi
}

# ---------------------------------------------------------------------------------------------- all of it

facts() {
    local host user
    host=$(uname -n)
    user=$(id -un 2>/dev/null) || user=$(id -u)
    printf '{"schema": 1,\n"hostname": %s,\n' "$(text "$host")"
    printf '"fqdn": %s,\n' "$(text_or_unknown fqdn "$(timeout 5 hostname -f 2>/dev/null || true)" "hostname -f did not answer")"
    printf '"user": %s,\n"uid": %s,\n"home": %s,\n"shell": %s,\n' "$(text "$user")" "$(id -u)" "$(text "$HOME")" \
        "$(text_or_unknown shell "${SHELL:-}" "SHELL is not set")"
    printf '"kernel": %s,\n"arch": %s,\n' "$(text "$(uname -r)")" "$(text "$(uname -m)")"
    local glibc
    glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null) || glibc=""
    printf '"glibc": %s,\n' "$(text_or_unknown glibc "${glibc##* }" "getconf knows no GNU_LIBC_VERSION")"
    printf '"clock_epoch_s": %s,\n' "$(date +%s.%N)"
    printf '"os": %s,\n' "$(os_json)"
    printf '"cpu": %s,\n' "$(cpu_json)"
    printf '"memory_bytes": %s,\n' "$(memory_json)"
    printf '"disk": %s,\n' "$(disk_json)"
    printf '"gpus": %s,\n' "$(gpus_json)"
    printf '"cuda": %s,\n' "$(cuda_json)"
    printf '"interfaces": %s,\n' "$(interfaces_json)"
    printf '"ssh_server": %s,\n' "$(ssh_server_json)"
    printf '"host_keys": %s,\n' "$(host_keys_json)"
    printf '"tools": %s,\n' "$(tools_json)"
    printf '"pythons": %s,\n' "$(pythons_json)"
    printf '"sudo": %s,\n' "$(sudo_json)"
    printf '"ptrace_scope": %s,\n' "$(ptrace_json)"
    printf '"prefix": %s,\n' "$(text "$PREFIX")"
    printf '"home_token": %s,\n' "$(home_token_json)"
    printf '"openmpi": %s,\n' "$(openmpi_json)"
    printf '"stacks": %s,\n' "$(stacks_json)"
    printf '"manifest": %s,\n' "$(manifest_json)"
}

main() {
    export LC_ALL=C
    [[ -n ${HOME:-} ]] || HOME=$(cd ~ && pwd)
    export HOME
    PREFIX=$HOME/local
    while (($#)); do
        case $1 in
            --prefix=*) PREFIX=${1#*=} ;;
            --prefix)
                (($# > 1)) || fail 64 "--prefix wants a value"
                PREFIX=$2
                shift
                ;;
            -h | --help)
                usage
                return 0
                ;;
            *) fail 64 "unexpected '$1'; see --help" ;;
        esac
        shift
    done
    # shellcheck disable=SC2016  # compared as text
    case $PREFIX in
        '$HOME' | '$HOME/'*) PREFIX=$HOME${PREFIX#'$HOME'} ;;
        /*) ;;
        *) fail 64 "--prefix is '$PREFIX', expected an absolute path" ;;
    esac
    local out
    # The facts come first on descriptor 5, the reasons for nulls on 4; both are small enough for one variable.
    out=$({ { facts 4>&5; } 5>&1 >&6 | sort -u | list | sed 's/^\[/{/; s/\]$/}/; s/^/"unknown": /'; } 6>&1)
    out+="}"
    # A name in another encoding than UTF-8 must not make the whole answer unreadable.
    if has iconv; then
        out=$(iconv -c -f UTF-8 -t UTF-8 <<<"$out") || true
    fi
    printf '%s\n' "$out"
}

main "$@" </dev/null
