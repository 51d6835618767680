# Runs one command for a controller and ends the command's process group when the controller is gone.
#
# Sent by provision/transport/supervisor.py and started as `bash -c <this> ringmaster`. Standard input carries
# NUL-ended words: silence_s grace_s cwd input_bytes n_env NAME=value... n_argv argv...
# then `input_bytes` of the command's standard input (-1: the command gets /dev/null), then one byte to say
# that the input is complete, then a byte every few seconds for as long as the controller lives. End of file,
# or `silence_s` without a byte, means that the controller is gone. Exits as the command did; 128+n for signal n.
set -u
exec 3<&0 4>&2 </dev/null 2>/dev/null

word() { IFS= read -r -d '' "$1" <&3 || exit 125; }
words() { # array-name: reads a count, then that many words into the array
  local n i
  word n
  for ((i = 0; i < n; i++)); do word "$1[$i]"; done
}
silence_s='' grace_s='' cwd='' input_bytes='' environment=() argv=()
word silence_s
word grace_s
word cwd
word input_bytes
words environment
words argv

# The command's input goes through an unnamed pipe, so that this shell can go on watching its own input.
((input_bytes < 0)) || exec 6<> <(:)

set -m # gives the command a process group of its own, numbered by its process id
(
  set +m
  exec 3<&-
  if ((input_bytes >= 0)); then exec </proc/self/fd/6 6<&-; fi
  exec 2>&4 4>&-
  for pair in ${environment[@]+"${environment[@]}"}; do export "${pair?}"; done
  # A leading $HOME or ~ is this node's home. At SHLVL 1 and below bash would read ~/.bashrc again.
  SHLVL=2
  cd -- "${HOME:-/}" 2>/dev/null || cd /
  # shellcheck disable=SC2016,SC2088
  case $cwd in
    '') ;;
    '$HOME' | '~') cd -- "$HOME" || exit 1 ;;
    '$HOME/'*) cd -- "$HOME/${cwd#'$HOME/'}" || exit 1 ;;
    '~/'*) cd -- "$HOME/${cwd#'~/'}" || exit 1 ;;
    *) cd -- "$cwd" || exit 1 ;;
  esac
  exec -- "${argv[@]}"
) &
child=$!
set +m

end_group() { # grace_s
  local i
  kill -TERM -- "-$child" || return 0
  kill -CONT -- "-$child"
  for ((i = 0; i < $1 * 10; i++)); do
    kill -0 -- "-$child" || return 0
    sleep 0.1
  done
  kill -KILL -- "-$child"
}

feed() { # 1 once the controller is silent or gone
  local left=$input_bytes chunk status
  exec 7>/proc/self/fd/6 6<&-
  while ((left > 0)); do
    chunk=$((left < 1048576 ? left : 1048576))
    timeout "$silence_s" head -c "$chunk" <&3 >&7
    status=$?
    if ((status == 124)); then return 1; fi
    if ((status != 0)); then # the command reads no more: only watch for the end of file
      exec 7>&-
      cat <&3 >/dev/null
      return 1
    fi
    left=$((left - chunk))
  done
  # Only a complete input is ended: a command must not act on half of it.
  IFS= read -r -t "$silence_s" -n 1 _ <&3 || return 1
  exec 7>&-
}

(
  exec >/dev/null 4>&-
  if ((input_bytes < 0)) || feed; then
    while IFS= read -r -t "$silence_s" -n 1 _ <&3; do :; done
  fi
  end_group "$grace_s"
) &
watcher=$!
exec 3<&- 4>&-
((input_bytes < 0)) || exec 6<&-

trap 'end_group "$grace_s"' TERM INT HUP
while :; do
  wait "$child"
  status=$?
  kill -0 "$child" || break
done
# What the command left running in its group goes with it; a process that must stay calls setsid.
if kill -0 -- "-$child"; then end_group 1; fi
kill "$watcher"
exit "$status"
