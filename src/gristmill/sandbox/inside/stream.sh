# What a program of ours inside begins with where all is said by its own stdin and stdout. Reports lie in its output, each
# begun by NUL, SOH and $token. The host puts these in front: io token mark workspace cwd enter (text of enter.sh) and shell
# (an array: the command that is bash here); and processes.sh. Bash 4.2 or later, and cat, dd, head, mkdir and rm of any make.

exec 2>/dev/null
set --
unset script
set -m # each call is a process group of its own
ulimit -c 0
umask 022
home=${HOME:-/} start=$cwd environment=''
variables=$(export -p)
# What a command gets is in its file of variables and nowhere else, or it could not be unset.
while IFS= read -r line; do
    line=${line#declare -x }
    export -n "${line%%=*}"
done <<<"$variables"
LC_ALL=C # counts bytes
printf -v body '. %q "$@"; set --; eval "$SBX_TEXT"; { sbx_leave "$?"; } 2>/dev/null' "$io/enter"

report() { printf '\0\1%s%s\n' "$token" "$*"; }

# Sets `text` to the next bytes of the stream, which hold no NUL.
take() { # bytes
    text=''
    (($1 == 0)) || IFS= read -rN "$1" text
}

# A command may have removed them.
lay_out() {
    [[ -d $io ]] || mkdir -m 700 -- "$io"
    printf %s "$enter" >"$io/enter" && printf '%s\n' "$variables" >"$io/env"
}

# Sets `cwd` and `environment` to what a stateful call left.
take_over() { # its number
    cwd='' environment=$io/$(($1 % 16))
    if (($1)); then IFS= read -rd '' cwd <"$environment.cwd"; fi
    [[ $cwd ]] || cwd=$start environment=$io/env
    [[ -e $io/env && -e $io/enter ]] || lay_out
}

enter_directory() { # id
    [[ -d $cwd && -x $cwd ]] && return
    report n "$1" "$cwd"
    cwd=$workspace
    [[ -d $cwd ]] || mkdir -p -- "$cwd" || cwd=/
}

# Runs the command in $io/$$.sh; where memory runs out, it goes before we do.
run() { # id save
    printf 500 >"/proc/$BASHPID/oom_score_adj"
    SBX_CALL=$mark$1 exec "${shell[@]}" --norc -c "$body" bash "$io" "$$" "$cwd" "$environment" "$2"
}
