#!/usr/bin/env bash
# Node-to-node SSH for mpirun: the cluster's own key, strict known hosts, one `Host` block per peer, and the helpers
# that mpirun calls. The user's own keys and ~/.ssh/config are not touched; one line is added to authorized_keys.
set -Eeuo pipefail
# shellcheck source=lib/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

usage() {
    cat <<'EOT'
setup_ssh_mesh.sh: PREFIX/ssh and PREFIX/libexec, for SSH between the nodes of a cluster.

  --prefix=DIR        root of the installation (default $HOME/local)
  --private-key=F     the cluster's private key (never the user's own)
  --public-key=F      its public key
  --peers=FILE        one node a line, tab-separated: name, address, port, user, prefix, host key lines joined by |
  --cluster-id=ID     marks this cluster's line in ~/.ssh/authorized_keys
  --no-authorize      leave authorized_keys alone (a cluster of one machine)
  --check             change nothing; say what would happen
  --lock-timeout=S    seconds to wait for another run (default 1800)

Standard output: changed, unchanged, or (--check) would-change.
Exit status: 0 done, 64 usage, 65 bad data, 69 something is missing, 75 locked, else failed.
EOT
}

main() {
    parse_options "private-key public-key peers cluster-id no-authorize!" "$@"
    if [[ -n ${OPT[help]:-} ]]; then
        usage
        return 0
    fi
    rm_start
    no_arguments
    set_prefix
    local name
    for name in private-key public-key peers cluster-id; do
        [[ -n ${OPT[$name]:-} ]] || usage_error "--$name is missing"
    done
    for name in private-key public-key peers; do
        [[ -r ${OPT[$name]} ]] || usage_error "--$name is '${OPT[$name]}', expected a readable file"
    done
    [[ ${OPT[cluster-id]} =~ ^[A-Za-z0-9._-]{1,64}$ ]] ||
        usage_error "--cluster-id is '${OPT[cluster-id]}', expected up to 64 letters, digits and ._-"
    SSH_DIR=$PREFIX/ssh
    COMMENT=ringmaster-${OPT[cluster-id]}
    AUTHORIZED=${HOME:?}/.ssh/authorized_keys
    read_key
    read_peers
    converge ssh
    emit "$WORD"
}

# read_key: KEY_LINE, the public key as it stands in authorized_keys.
read_key() {
    local type key rest
    read -r type key rest <"${OPT[public-key]}" || true
    [[ $type =~ ^(ssh-|ecdsa-|sk-)[A-Za-z0-9@.-]+$ && ${key:-} =~ ^[A-Za-z0-9+/]+=*$ ]] ||
        die "$EX_DATAERR" "${OPT[public-key]} holds no public key; make a pair with ssh-keygen"
    [[ $(head -c 64 "${OPT[private-key]}") == *"PRIVATE KEY"* ]] ||
        die "$EX_DATAERR" "${OPT[private-key]} holds no private key"
    KEY_WORDS="$type $key"
    KEY_LINE="$KEY_WORDS $COMMENT"
}

# read_peers: check every line of the table before anything is written. Commas of read would swallow empty fields, so
# tabs become a character that is no white space.
read_peers() {
    local line n=0 name address port user prefix keys extra
    PEERS=()
    while IFS= read -r line || [[ -n $line ]]; do
        n=$((n + 1))
        [[ -n $line && $line != \#* ]] || continue
        IFS=$'\x1f' read -r name address port user prefix keys extra <<<"${line//$'\t'/$'\x1f'}"
        _peer_field "$n" name "$name" '^[A-Za-z0-9][A-Za-z0-9._-]*$'
        _peer_field "$n" address "$address" '^[A-Za-z0-9][A-Za-z0-9._:%-]*$'
        _peer_field "$n" port "$port" '^[0-9]{1,5}$'
        _peer_field "$n" user "$user" '^[A-Za-z0-9_][A-Za-z0-9._@\\-]*\$?$'
        _peer_field "$n" prefix "$prefix" '^(/[A-Za-z0-9._+@-]+)+$'
        _peer_field "$n" "host keys" "$keys" '^[A-Za-z0-9@.-]+ [A-Za-z0-9+/]+=*[^|]*([|][A-Za-z0-9@.-]+ [A-Za-z0-9+/]+=*[^|]*)*$'
        [[ -z ${extra:-} ]] || die "$EX_DATAERR" "${OPT[peers]}:$n: more than 6 fields"
        PEERS+=("${line//$'\t'/$'\x1f'}")
    done <"${OPT[peers]}"
    ((${#PEERS[@]})) || die "$EX_DATAERR" "${OPT[peers]} names no node"
}

_peer_field() {
    [[ ${3:-} =~ $4 ]] || die "$EX_DATAERR" "${OPT[peers]}:$1: $2 is '${3:-}', expected something that fits $4"
}

config_text() {
    local line name address port user names
    printf '# Written by Ringmaster for mpirun; read through ssh -F only.\n'
    for line in "${PEERS[@]}"; do
        IFS=$'\x1f' read -r name address port user _ <<<"$line"
        names=$name
        [[ $address == "$name" ]] || names+=" $address"
        printf '\nHost %s\n    HostName %s\n    Port %s\n    User %s\n    HostKeyAlias %s\n' \
            "$names" "$address" "$port" "$user" "ringmaster-$name"
    done
    # ssh takes the first value it finds, and these are the same for all.
    printf '\nHost *\n'
    printf '    %s\n' "IdentityFile $SSH_DIR/id_ed25519" "IdentitiesOnly yes" "IdentityAgent none" \
        "UserKnownHostsFile $SSH_DIR/known_hosts" "GlobalKnownHostsFile /dev/null" "StrictHostKeyChecking yes" \
        "UpdateHostKeys no" "PreferredAuthentications publickey" "BatchMode yes" "ConnectTimeout 10" \
        "ServerAliveInterval 15" "ServerAliveCountMax 4" "ControlMaster no" "ControlPath none" "ForwardAgent no" \
        "ForwardX11 no" "PermitLocalCommand no" "LogLevel ERROR"
}

known_hosts_text() {
    local line name keys key list words
    for line in "${PEERS[@]}"; do
        IFS=$'\x1f' read -r name _ _ _ _ keys <<<"$line"
        IFS='|' read -r -a list <<<"$keys"
        for key in "${list[@]}"; do
            # Type and key; a comment would be the host's own and says nothing.
            read -r -a words <<<"$key"
            printf 'ringmaster-%s %s %s\n' "$name" "${words[0]}" "${words[1]}"
        done
    done
}

peers_text() {
    local line
    for line in "${PEERS[@]}"; do
        printf '%s\n' "${line//$'\x1f'/$'\t'}"
    done
}

marker_text() {
    printf '{\n "cluster_id": %s,\n "undo": %s,\n "digest": %s\n}\n' "$(json_text "${OPT[cluster-id]}")" \
        "$(json_text "$([[ -n ${OPT[no-authorize]:-} ]] || printf '%s' "$COMMENT")")" "$(json_text "$(digest)")"
}

digest() {
    {
        sha256_of "${OPT[private-key]}"
        printf '%s\n' "$KEY_LINE"
        config_text
        known_hosts_text
        peers_text
    } | sha256_text
}

# is_current: each file is what it would be written as, with the right permissions.
is_current() {
    [[ -d $SSH_DIR && $(stat -c %a "$SSH_DIR") == 700 ]] &&
        same_file "$SSH_DIR/id_ed25519" 600 <"${OPT[private-key]}" &&
        same_file "$SSH_DIR/id_ed25519.pub" 644 < <(printf '%s\n' "$KEY_LINE") &&
        same_file "$SSH_DIR/config" 600 < <(config_text) &&
        same_file "$SSH_DIR/known_hosts" 644 < <(known_hosts_text) &&
        same_file "$SSH_DIR/peers.tsv" 644 < <(peers_text) &&
        same_file "$SSH_DIR/.ringmaster.json" 644 < <(marker_text) &&
        helpers_current && is_authorized
}

same_file() { [[ -f $1 && $(stat -c %a "$1") == "$2" ]] && cmp -s - "$1"; }

# helper_mode FILE: as in a checkout, because a job that is launched brings them in those modes.
helper_mode() { if [[ $1 == *.py ]]; then printf 644; else printf 755; fi; }

helpers_current() {
    local helper mode
    for helper in "$RM_SCRIPTS_DIR/node/"*.sh "$RM_SCRIPTS_DIR/node/"*.py; do
        mode=$(helper_mode "$helper")
        [[ ! -f $helper ]] || same_file "$PREFIX/libexec/${helper##*/}" "$mode" <"$helper" || return 1
    done
}

is_authorized() {
    [[ -z ${OPT[no-authorize]:-} ]] || return 0
    local line found=0 mode
    [[ -r $AUTHORIZED ]] || return 1
    # sshd refuses a file that others may write.
    mode=$(stat -c %a "$AUTHORIZED")
    (((8#$mode & 8#022) == 0)) || return 1
    while IFS= read -r line || [[ -n $line ]]; do
        if [[ $line == "$KEY_LINE" ]]; then
            found=$((found + 1))
        elif [[ $line == *" $COMMENT" ]]; then
            return 1
        fi
    done <"$AUTHORIZED"
    ((found == 1))
}

preconditions() { need flock mktemp sha256sum cmp stat; }

install() {
    local new=$STAGE/new/ssh helper mode
    mkdir -p "$STAGE/new"
    mkdir -m 0700 "$new"
    # Closed to others from the moment it exists, whatever the umask.
    (umask 077 && cat "${OPT[private-key]}" >"$new/id_ed25519")
    printf '%s\n' "$KEY_LINE" >"$new/id_ed25519.pub"
    (umask 077 && config_text >"$new/config")
    known_hosts_text >"$new/known_hosts"
    peers_text >"$new/peers.tsv"
    for helper in "$RM_SCRIPTS_DIR/node/"*.sh "$RM_SCRIPTS_DIR/node/"*.py; do
        mode=$(helper_mode "$helper")
        [[ ! -f $helper ]] || write_file "$PREFIX/libexec/${helper##*/}" "0$mode" <"$helper"
    done
    [[ -n ${OPT[no-authorize]:-} ]] || authorize
    marker_text >"$new/.ringmaster.json"
    place "$new"
}

# authorize: this cluster's line once, every other line as it was, by rename within ~/.ssh.
authorize() {
    local dir line temp target
    dir=$(dirname "$AUTHORIZED")
    if [[ ! -d $dir ]]; then
        mkdir -m 0700 "$dir"
    fi
    # A link is followed: the user may keep the file elsewhere.
    target=$AUTHORIZED
    [[ ! -L $target ]] || target=$(readlink -f "$target")
    exec 7>>"$PREFIX/.ringmaster/locks/authorized_keys.lock"
    flock -w 60 7 || die "$EX_TEMPFAIL" "another run changes $target; try again"
    # With the lock held, an earlier one is left from a run that was killed.
    rm -f "$(dirname "$target")"/.authorized_keys.????????
    temp=$(umask 077 && mktemp "$(dirname "$target")/.authorized_keys.XXXXXXXX")
    if [[ -e $target ]]; then
        while IFS= read -r line || [[ -n $line ]]; do
            [[ $line == *" $COMMENT" ]] || printf '%s\n' "$line"
        done <"$target" >"$temp"
    fi
    printf '%s\n' "$KEY_LINE" >>"$temp"
    if [[ -e $target ]] && (($(id -u) == 0)); then
        chown --reference="$target" "$temp"
    fi
    chmod 0600 "$temp"
    mv -T "$temp" "$target"
    exec 7>&-
}

main "$@"
